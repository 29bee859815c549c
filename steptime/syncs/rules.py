"""Which operations wait on a GPU: pure rules over an operation and where its tensors live.

The lists are those of PyTorch's operator tags (`data_dependent_output`, `dynamic_output_shape`) cut down to
what the CUDA kernels do, and of its own test of the sync debug mode. What a kernel decides from its values
(`multinomial`, `histc`) is left out: it differs between versions and is measured on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

IsDevice = Callable[[torch.Tensor], bool]

# One device tensor among the arguments, and the host waits for a value or a shape.
READS = {
    "aten::_local_scalar_dense": "scalar read",
    "aten::item": "scalar read",
    "aten::is_nonzero": "scalar read",
    "aten::equal": "equal",
    "aten::nonzero": "nonzero",
    "aten::argwhere": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique": "unique",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::unique_dim_consecutive": "unique",
    "aten::bincount": "bincount",
    "aten::linalg_lstsq": "linalg check",
    "aten::_linalg_check_errors": "linalg check",
    "aten::_ctc_loss": "ctc_loss",
}
INDEX = {"aten::index", "aten::_unsafe_index"}
INDEX_PUT = {"aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index_put"}

# Launch no kernel though they are no views.
_NO_KERNEL = {
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::set_",
    "aten::resize_",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::item",
    "aten::lift_fresh",
    "aten::lift",
    "aten::record_stream",
    "aten::_assert_tensor_metadata",
}
# May hold host and device tensors together.
_MIXES = {*INDEX, *INDEX_PUT, "aten::copy_", "aten::_to_copy", "aten::set_", "aten::_copy_from"}


@dataclass(frozen=True, slots=True)
class Operation:
    """What is known of an operator before it is called.

    Attributes:
        launches: runs a kernel when it works on a device.
        mixes: host tensors of one and more dimensions may stand beside device tensors.
        composite: made of other operators, which are what counts.
    """

    name: str
    launches: bool
    mixes: bool
    view: bool
    composite: bool


_known: dict[Any, Operation] = {}


def operation(func: Any) -> Operation:
    """Facts about an `OpOverload`, looked up once."""
    found = _known.get(func)
    if found is None:
        name = func._schema.name
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        found = Operation(
            name, not (func.is_view or name in _NO_KERNEL), name in _MIXES, bool(func.is_view), composite
        )
        _known[func] = found
    return found


def sync_kind(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], is_device: IsDevice, free_value: bool
) -> str | None:
    """The kind of wait that `name` would cost on a GPU, or None. Copies are judged by the caller.

    Args:
        free_value: the value of an indexed assignment is a Python number.
    """
    kind = READS.get(name)
    if kind is not None:
        return kind if any(is_device(tensor) for tensor in tensors_in(args)) else None
    if name == "aten::repeat_interleave" and isinstance(args[0], torch.Tensor):
        # Only the overload over `repeats` gets here undecomposed; without the output size it must be read.
        wanted = kwargs.get("output_size", args[1] if len(args) > 1 else None)
        return "repeat_interleave" if wanted is None and is_device(args[0]) else None
    if name in INDEX or name in INDEX_PUT:
        return _index_kind(name in INDEX_PUT, args, is_device, free_value)
    return None


def _index_kind(writes: bool, args: tuple[Any, ...], is_device: IsDevice, free_value: bool) -> str | None:
    if not is_device(args[0]):
        return None
    for index in args[1]:
        if index is None:
            continue
        if index.dtype in (torch.bool, torch.uint8):
            if is_device(index) and not (writes and (free_value or _is_host_scalar(args[2], is_device))):
                return "write by mask" if writes else "read by mask"
        elif not is_device(index):
            return "index on the host"
    return None


def _is_host_scalar(value: Any, is_device: IsDevice) -> bool:
    return not isinstance(value, torch.Tensor) or (value.dim() == 0 and not is_device(value))


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors among arguments or outputs, lists of them included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def is_gapped(tensor: torch.Tensor) -> bool:
    """Strided with holes: an asynchronous copy goes through a temporary. Permuted but dense memory is
    fine."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    dims = sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1
    )
    expected = 1
    for stride, size in dims:
        if stride != expected:
            return True
        expected *= size
    return False
