"""The audit on a device that has no data: whatever wants to read from it must say so.

Tensors of the `meta` device have shapes and types but no memory, so PyTorch itself cannot give the host a
value, a shape that depends on values, or a copy. The audit notes each such wish with its place and answers
with zeros, so that the program goes on. (FakeTensorMode with `cuda` tensors would be nearer to the real
thing, but on a CPU-only build of torch it ends the process at the first gradient and fails at Python
indexing: "not linked with support for cuda devices".)"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch._ops import HigherOrderOperator

from dflash.device import Device
from steptime.counting.difference import Counts
from steptime.counting.ways.way import Notes
from steptime.syncs.dispatch import WatchingMode
from steptime.syncs.scopes import Ledger, Scope, entered

if TYPE_CHECKING:
    from dflash.config import Config
    from dflash.models.drafter import Drafter

META = torch.device("meta")


class FakeDeviceWay:
    """Runs a program on `meta` tensors."""

    name = "fake device"
    sees = (
        "value and shape reads, copies to the host that wait, host tensors in device operations; with real "
        "device types"
    )
    does_not_see = (
        "waits that read nothing (synchronize, empty_cache), copies to the device, pageable memory, what "
        "depends on values; answers are zeros, so the program may take another path"
    )
    every_step = True
    claims = frozenset({"item", "mask_read", "backward_sync", "monitor_sync", "flush_sync"})
    device = "meta"

    def __init__(self) -> None:
        self.notes = Notes()
        self.operations: dict[str, int] = {}
        """Operators seen, by role: an audit of nothing finds nothing."""

    def available(self) -> str | None:
        return None

    def arm(self, role: str) -> AbstractContextManager[object]:
        return self._armed(Scope(role, True, Ledger(armed=True)))

    def enter(self, role: str, device: Device | None = None) -> AbstractContextManager[object]:
        """As `Scopes` of a trainer."""
        return self.arm(role)

    def counts(self) -> Counts:
        return self.notes.summed()

    @contextlib.contextmanager
    def _armed(self, scope: Scope) -> Iterator[Scope]:
        with entered(scope), _Audit(scope, self):
            yield scope


class _Audit(WatchingMode):
    def __init__(self, scope: Scope, way: FakeDeviceWay) -> None:
        super().__init__()
        self.sync_scope, self._notes, self._operations = scope, way.notes, way.operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        name = func._schema.name
        self._operations[self.sync_scope.role] = self._operations.get(self.sync_scope.role, 0) + 1
        if (
            name in ("aten::_to_copy", "aten::copy_")
            and (copied := self._copied(name, args, kwargs)) is not None
        ):
            return copied
        try:
            return func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            answer = _ANSWERS.get(name)
            if answer is None and "expected device" not in str(error):
                raise
            if answer is None:
                self._notes.note("host tensor in a device operation")
                moved = [_on_meta(argument) for argument in args]
                return func(*moved, **{key: _on_meta(value) for key, value in kwargs.items()})
            self._notes.note(name.removeprefix("aten::").removeprefix("_"))
            return answer(*args, **kwargs)

    def _copied(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """A copy from the device to the host, answered with zeros; None for any other copy."""
        source = args[0] if name == "aten::_to_copy" else args[1]
        target = kwargs.get("device") if name == "aten::_to_copy" else args[0].device
        if not source.is_meta or target is None or target.type == "meta":
            return None
        waits = not kwargs.get("non_blocking", args[2] if name == "aten::copy_" and len(args) > 2 else False)
        if waits:
            self._notes.note("blocking copy to host")
        if name == "aten::copy_":
            return args[0].zero_()
        return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(META)
    return [_on_meta(part) for part in value] if isinstance(value, (list, tuple)) else value


def _no_rows(tensor: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty((0, tensor.dim()), dtype=torch.int64, device=META)


def _nothing(tensor: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    return torch.empty(0, dtype=tensor.dtype, device=META)


_ANSWERS: dict[str, Any] = {
    "aten::_local_scalar_dense": lambda tensor: torch.zeros((), dtype=tensor.dtype).item(),
    "aten::equal": lambda *tensors: False,
    "aten::nonzero": _no_rows,
    "aten::masked_select": _nothing,
    "aten::bincount": _nothing,
    "aten::repeat_interleave": _nothing,
    "aten::index": lambda tensor, indices: torch.empty(
        (0, *tensor.shape[len(indices) :]), dtype=tensor.dtype, device=META
    ),
    "aten::_unique2": lambda tensor, *rest, **options: (_nothing(tensor),) * 3,
}


class MetaDevice(Device):
    """A worker's device without memory."""

    def __init__(self, name: str) -> None:
        super().__init__("cpu")
        self.name, self.torch = name, META


def _meta_drafter(*arguments: Any) -> Drafter:
    from dflash.models.drafter import Drafter

    with META:  # a parameter cannot be moved to `meta` by its data
        return Drafter(*arguments)


def audit(config: Config, steps: int = 3, plant: str = "") -> FakeDeviceWay:
    """Run the real trainer for some steps on `meta` devices, all collectors on, every worker and the monitor
    audited.

    Left out: what happens outside the workers (warm-up, checkpoints), and values: losses are zeros.

    Args:
        config: with sinks off; devices are replaced.
        plant: a bad collector out of `bench.syncs.faults.planted.PLANTED` to switch on.
    """
    from bench.syncs.faults.planted import make_plant
    from dflash.observe.observer import Observer
    from dflash.observe.registry import COLLECTORS
    from dflash.observe.roles import RoleMap
    from dflash.pipeline.build import prepare_inputs
    from dflash.pipeline.trainer import Trainer

    names = tuple(collector.name for collector in COLLECTORS)
    config = config.model_copy(
        update={
            "train": config.train.model_copy(update={"steps": steps}),
            "observe": config.observe.model_copy(update={"tick_s": 0.02, "collectors": names}),
        }
    )
    way = FakeDeviceWay()
    planted = make_plant(plant) if plant else None
    inputs = prepare_inputs(config)
    parts = mock.patch.multiple("dflash.pipeline.build", Device=MetaDevice, Drafter=_meta_drafter)
    with tempfile.TemporaryDirectory(prefix="dflash-audit-") as folder, parts:
        observer = Observer(config.observe, Path(folder), RoleMap.from_config(config))
        try:
            # The warm-up is no part of the steady state; under the audit it may read whatever it likes.
            with FakeDeviceWay().arm("warm-up"):
                hooks = planted.hooks() if planted is not None else None
                trainer = Trainer(
                    inputs, Path(folder), observer, scopes=way, hooks=hooks, save_checkpoints=False
                )
            if planted is not None:
                planted.install(trainer)
                observer.switch(planted.name, True)
            trainer.run()
        finally:
            observer.close()
    return way


__all__ = ["FakeDeviceWay", "MetaDevice", "audit"]
