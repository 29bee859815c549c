"""Stage: PyTorch's own race detector over the real trainer.

`TORCH_CUDA_SANITIZER` enters a dispatch mode in the main thread, and dispatch modes belong to threads (read
in torch 2.13, `torch/cuda/_sanitizer.py`): by itself it would look at nothing that a worker does. So each
worker enters the mode in its own thread. Under a dispatch mode flex attention does not run compiled, so the
drafter attends by SDPA (`drafter.attention = "dense"`); a compiled region would be one access to it anyway.

It knows tensors by their first byte, and takes a wait of one host thread as an order for all."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.gpu_check.stage import Found
from steptime.child_process import Ended, run_python

STEPS = 6
LIMIT_S = 40.0
BROKEN = "Exception in callback"
"""torch logs so when the detector raises in a callback; what it knows is wrong from then on."""
MARK = "sanitizer: operations by role: "
SETTINGS = ('drafter.attention="dense"', "drafter.compile=false")


class SanitizerStage:
    """The trainer in a process with `TORCH_CUDA_SANITIZER` set, the mode in every worker's thread."""

    name = "sanitizer"
    asks = "Does PyTorch's race detector find an access without an order? (SDPA in place of flex attention)"
    seconds = 45

    def look(self) -> Found:
        return read(run_python(["-m", __name__], limit_s=LIMIT_S, environment={"TORCH_CUDA_SANITIZER": "1"}))


def read(ended: Ended) -> Found:
    """What the process left. Pure."""
    lines = ended.out.splitlines()
    counted = next((line.removeprefix(MARK) for line in lines if line.startswith(MARK)), "")
    operations = {}
    for part in filter(None, counted.split(", ")):
        role, _, n = part.rpartition(" ")
        operations[role] = int(n)
    problems = [
        f"race: {line.strip()}"
        for line in ended.err.splitlines()
        if "data race" in line or "CSAN detected" in line
    ]
    problems += [f"the detector itself failed: {line}" for line in ended.err.splitlines() if BROKEN in line]
    if ended.code is None:
        problems.append(f"not finished after {LIMIT_S:g} s")
    elif ended.code != 0:
        problems.append(f"exit code {ended.code}: {ended.last_line}")
    for role in ("target", "drafter"):
        if not any(name.startswith(role) and n for name, n in operations.items()):
            problems.append(f"no operation of a {role} was looked at")
    notes = [f"{role}: {n} operations looked at" for role, n in operations.items()]
    return Found(sum(operations.values()), "operations", tuple(problems), tuple(notes))


class SanitizerScopes:
    """`Scopes` of the trainer that put every worker under the detector.

    Attributes:
        operations: by role.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self.operations: dict[str, int] = {}
        self._lock = threading.RLock()

    def enter(self, role: str, device: object = None) -> AbstractContextManager[object]:
        """Around a worker's loop, in its own thread."""
        return self._entered(role)

    @contextlib.contextmanager
    def _entered(self, role: str) -> Iterator[None]:
        with _worker_mode(self._handler, role, self.operations, self._lock):
            yield


def _worker_mode(handler: Any, role: str, operations: dict[str, int], lock: Any) -> Any:
    """The detector's own mode, on a handler that all threads share: one operation at a time reaches it."""
    from torch.cuda._sanitizer import CUDASanitizerDispatchMode

    class WorkerMode(CUDASanitizerDispatchMode):
        def __init__(self) -> None:
            # Without the base's own: it would make a second handler and hang all callbacks into it again.
            super(CUDASanitizerDispatchMode, self).__init__()
            self.event_handler = handler

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with lock:
                operations[role] = operations.get(role, 0) + 1
                return super().__torch_dispatch__(func, types, args, kwargs)

    return WorkerMode()


def main() -> int:
    """Train a few steps under the detector that the environment has turned on."""
    import torch
    from torch.cuda._sanitizer import cuda_sanitizer

    from bench.gpu_check.workload import trainer_config
    from bench.subjects.trainer.harness import harness_config
    from dflash.observe.observer import Observer
    from dflash.observe.roles import RoleMap
    from dflash.pipeline.build import prepare_inputs
    from dflash.pipeline.trainer import Trainer

    if not cuda_sanitizer.enabled:
        raise RuntimeError("TORCH_CUDA_SANITIZER is not set: nothing would be looked at")
    config = harness_config(trainer_config(*SETTINGS))
    train = config.train.model_copy(update={"steps": STEPS})
    config = config.model_copy(update={"train": train})
    scopes = SanitizerScopes(cuda_sanitizer.dispatch.event_handler)
    with tempfile.TemporaryDirectory(prefix="dflash-sanitizer-") as folder:
        observer = Observer(config.observe, Path(folder), RoleMap.from_config(config))
        inputs = prepare_inputs(config)
        try:
            Trainer(inputs, Path(folder), observer, scopes=scopes, save_checkpoints=False).run()
        finally:
            observer.close()
    torch.cuda.synchronize()
    print(MARK + ", ".join(f"{role} {n}" for role, n in sorted(scopes.operations.items())))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
