"""A function mode and a dispatch mode that see what a worker would wait for on a GPU, also when its device is
the CPU.

The device boundary. On CUDA a tensor says where it lives. On the CPU, inside a worker's scope,

* the worker's device is named `cpu:0` (`Device.torch` is set so on entering), and plain `cpu` means the host,
  as it would beside a GPU; a device tensor's `.device` says `cpu:0`, a host tensor's `cpu`;
* host memory is what `Device.pinned` and `host_memory.staging` made, what a factory made without `device=`
  (or on `cpu`), what a copy to the host left, and what came from numpy; everything else is on the device,
  weights included;
* a move across the boundary copies, as it does on a GPU, so that both sides have memory of their own. Values
  do not change.

For any PyTorch program whose device is simply "cpu" there is a looser boundary (`strict=False`): everything
is on the device but what came from numpy or Python values and what `.cpu()` returned.

Seen: every operator that PyTorch dispatches in the thread and in backward, and the Python methods that
dispatch nothing on the CPU (`.tolist()`, `.numpy()`, `.cpu()`, `.to`, printing, `torch.tensor(...)`); each
compiled graph as one operation (see `compiled`). Not seen: kernels of other libraries, kernels, copies and
allocations inside a compiled graph, `.numpy()` and the like inside compiled functions and torch's own Python
functions, the waits of the allocator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from steptime.syncs.boundary import Boundary
from steptime.syncs.dispatch import DispatchCounter
from steptime.syncs.functions import FunctionCounter
from steptime.syncs.scopes import Scope

__all__ = ["DispatchCounter", "FunctionCounter", "modes"]


@contextlib.contextmanager
def modes(scope: Scope, boundary: Boundary) -> Iterator[None]:
    """Both modes around a worker's loop."""
    functions, operators = boundary.modes() or (FunctionCounter, DispatchCounter)
    scope.function_mode = functions(scope, boundary)
    with scope.function_mode, operators(scope, boundary):
        yield
