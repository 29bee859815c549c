"""One line for each kind of wait: what usually ends it."""

from __future__ import annotations

from steptime.syncs.scopes import Place

COPIES = frozenset({"blocking copy to device", "pageable copy", "blocking copy to host"})
"""Kinds in which the host waits for bytes; in all others it waits for a value, a shape or an order."""
READ = "keep the scalar on the device and read it every n steps, when it is logged"
BY_KIND = {
    "blocking copy to device": (
        "pin the batch (pin_memory=True), copy with non_blocking=True; make constants on the device"
    ),
    "pageable copy": "pin the memory (pin_memory=True): non_blocking has no effect on pageable memory",
    "blocking copy to host": "copy with non_blocking=True into pinned memory and read it a step later",
    "item()": READ,
    "float()": READ,
    "int()": READ,
    "scalar read": READ,
    "truth test": "decide on the device (torch.where), or test every n steps",
    "print": "print every n steps",
    "tolist()": "collect on the device and read every n steps",
    "numpy()": "collect on the device and read every n steps",
    "nonzero": "use a mask with torch.where: the size of the result is read by the host",
    "read by mask": "use torch.where or multiply by the mask: the size of the result is read by the host",
    "write by mask": "use torch.where or masked_fill",
    "masked_select": "use torch.where: the size of the result is read by the host",
    "bincount": "give the number of classes to a scatter_add on the device: bincount reads the largest value",
    "one_hot": "give num_classes: without it the largest value is read",
    "unique": "its size depends on the values: do it on the host or every n steps",
    "repeat_interleave": "give output_size",
    "index on the host": "keep the index on the device",
    "device synchronize": "drop it outside of timing; measure with events",
    "empty_cache": "drop it from the loop",
    "barrier": "drop it from the loop: the collectives order themselves",
    "compile": "warm up before timing",
    "recompile": "mark what changes as dynamic, or pad to fixed shapes",
    "host tensor in a device operation": "a GPU refuses this: move the tensor to the device first",
}
SWITCHES = (
    ("transformers/trainer.py", "truth test", "TrainingArguments(logging_nan_inf_filter=False)"),
    ("transformers/trainer.py", "item()", "a larger TrainingArguments(logging_steps=...)"),
    ("accelerate/utils/operations.py", "blocking copy to device",
     "DataLoaderConfiguration(non_blocking=True) and pin_memory=True"),
    ("accelerate/utils/operations.py", "pageable copy", "DataLoader(pin_memory=True)"),
    ("lightning_fabric/utilities/apply_func.py", "pageable copy", "DataLoader(pin_memory=True)"),
    ("lightning/fabric/utilities/apply_func.py", "pageable copy", "DataLoader(pin_memory=True)"),
)  # fmt: skip
"""Where a framework has a switch of its own: end of the file, kind, switch."""


def advice(kind: str, place: Place) -> str:
    """What to do about it; the framework's own switch where it has one."""
    for file, found, switch in SWITCHES:
        if kind == found and place.file.endswith(file):
            return switch
    return BY_KIND.get(kind, "move it out of the step, or do it every n steps")
