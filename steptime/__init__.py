"""What measuring a training step needs, of any trainer.

Beside a trainer's step runs what needs torch alone:

- `errors`: the exception for a user's mistake;
- `commandline`: typer command lines that make every mistake such an exception (needs typer, and no torch);
- `cuda_settings`: how CUDA's allocator is asked to start, and determinism where bits are compared;
- `host_memory`: which CPU tensors stand for host memory where the "GPUs" are the CPU;
- `nvml`: the driver's library, and which of its GPUs are those that CUDA calls 0, 1, ... (needs nvidia-ml-py
  where it is asked);
- `syncs`: CUDA's rules (what waits, what copies), the scopes of the workers, and what counts in them;
- `simulate`: devices that keep CUDA's rules on a CPU, and a race check.

What judges it needs numpy, scipy and pydantic too: `counting`, `subjects` (what is measured), `measure`,
`statistics`, `gate`, `baselines`, `records`, `report`, `machine`. `dflash` imports none of these.

`dflash` (the trainer) and `bench` (what measures that trainer) import this package; it imports neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steptime.subjects.steps.steps import Periodic, Steps

__all__ = ["Periodic", "Steps"]


def __getattr__(name: str) -> Any:
    """What a user's file imports; loaded when asked for, since all else here needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'steptime' has no attribute {name!r}")
    from steptime.subjects.steps import steps

    return getattr(steps, name)
