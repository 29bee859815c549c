"""Bad collectors, on purpose: what the counters and the timings must find. `python -m bench overhead --plant
NAME`.

Each one is a collector like any other, with a switch, and does its mischief only while it is on:

    plant = make_plant("item")
    trainer = Trainer(..., hooks=plant.hooks(own_hooks))
    plant.install(trainer)                  # before run
    observer.switch("item", True)

The faults of a worker run in drafter 0's thread right after backward; `backward_sync` runs inside backward,
in a hook of the drafter's output; those of the monitor run in its tick, or at its flush alone."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from dflash.device import Device
from dflash.observe.collectors.base import Collector, Sources
from dflash.observe.metric import Metric
from steptime.errors import UserError, nearest
from steptime.host_memory import staging
from steptime.regions import compiled

if TYPE_CHECKING:
    from dflash.pipeline.drafter_worker import StepHooks
    from dflash.pipeline.trainer import Trainer

BUSY_SHARE, HELD_SHARE = 0.5, 0.1
"""Of every tick: how long the busy loop runs, and how long the interpreter lock is held."""

IN_MONITOR = ("monitor", "flush")

Where = Literal["step", "backward", "monitor", "flush"]


@dataclass(frozen=True)
class PlantedFault:
    """One bad thing to do.

    Attributes:
        where: in the drafter's step, inside its backward, in the monitor's tick, or at its flush.
        kind: how the counters of the CPU ways call it; empty: it costs time only.
        act: gets a device tensor (the loss, a gradient, or the last loss seen) and the plant.
    """

    name: str
    text: str
    where: Where
    kind: str
    act: Callable[[torch.Tensor, Plant], object]

    @property
    def role(self) -> str:
        """Who is to blame."""
        return "monitor" if self.where in IN_MONITOR else "drafter/0"

    def lines(self) -> tuple[str, range]:
        """File and lines of the mischief itself; a report must name one of them."""
        source, first = inspect.getsourcelines(self.act)
        return inspect.getsourcefile(self.act) or "", range(first, first + len(source))


class Plant(Collector):
    """A planted fault as a collector. What it keeps between calls is made at the first one, in the thread
    that it runs in."""

    name: ClassVar[str] = "planted"
    metrics: ClassVar[tuple[Metric, ...]] = ()

    def __init__(self, fault: PlantedFault) -> None:
        super().__init__(Sources(None, None))  # type: ignore[arg-type]
        self.fault = fault
        self.name = fault.name  # type: ignore[misc]
        self.device = Device("cpu")
        self.tick_s = 1.0
        self.gil_length = 100_000
        self.kept: dict[str, Any] = {}
        self._loss: torch.Tensor | None = None

    def hooks(self, inner: StepHooks | None = None) -> StepHooks:
        """Hooks for the trainer, around the caller's own."""
        return _Hooks(self, inner)

    def install(self, trainer: Trainer) -> None:
        """Register with the trainer's observer, and in backward where the fault is there. Before `run`."""
        replica = trainer.replicas[0]
        self.device = replica.device
        trainer.observer.add(lambda sources: self)
        self.tick_s = trainer.config.observe.tick_s
        if self.fault.act is _held_gil:
            self.gil_length = held_length(HELD_SHARE * self.tick_s)
        if self.fault.where == "backward":
            replica.drafter.register_forward_hook(self._hang_into_backward)

    def after_backward(self, loss: torch.Tensor) -> None:
        """Called in drafter 0's thread."""
        if self.on:
            if self.fault.where == "step":
                self.fault.act(loss, self)
            self._loss = loss.detach()

    def _hang_into_backward(self, module: object, inputs: object, hidden: torch.Tensor) -> None:
        if self.on and hidden.requires_grad:
            hidden.register_hook(self.in_backward)

    def in_backward(self, gradient: torch.Tensor) -> None:
        """The hook of a tensor, called inside backward."""
        if self.on:
            self.fault.act(gradient, self)

    def sample(self, now_ns: int) -> dict[str, float]:
        """The monitor's tick, when the plant is on."""
        if self.fault.where == "monitor":
            self.mischief()
        return {}

    def flush(self) -> dict[str, float]:
        """The monitor's flush, when the plant is on."""
        if self.fault.where == "flush":
            self.mischief()
        return {}

    def mischief(self) -> None:
        """What a planted monitor does in each tick, or at each flush."""
        if self.on and self.fault.where in IN_MONITOR and self._loss is not None:
            self.fault.act(self._loss, self)


def spin(seconds: float) -> None:
    """Python code that fights the workers for the interpreter's lock."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def held_length(seconds: float, probe: int = 100_000) -> int:
    """The length for which `hold_lock` takes so long on this machine."""
    times = []
    for _ in range(3):
        started = time.perf_counter()
        hold_lock(probe)
        times.append(time.perf_counter() - started)
    return max(1, int(probe * seconds / min(times)))


def hold_lock(length: int) -> object:
    """One long call into C that never lets the interpreter's lock go: every worker stands still."""
    return sum(range(length))


class _Hooks:
    """`StepHooks` of the trainer: the plant's, then the caller's."""

    __slots__ = ("_inner", "_plant")

    def __init__(self, plant: Plant, inner: StepHooks | None) -> None:
        self._plant, self._inner = plant, inner

    def after_backward(self, loss: torch.Tensor, step: int) -> None:
        self._plant.after_backward(loss)
        if self._inner is not None:
            self._inner.after_backward(loss, step)

    def after_step(self, step: int, tokens: int) -> bool:
        return True if self._inner is None else self._inner.after_step(step, tokens)

    def after_step_of_others(self, step: int) -> None:
        if self._inner is not None:
            self._inner.after_step_of_others(step)


# -- the faults ----------------------------------------------------------------------------------------------


def _item(value: torch.Tensor, plant: Plant) -> object:
    return value.item()


def _device_sync(value: torch.Tensor, plant: Plant) -> None:
    if value.is_cuda:
        torch.cuda.synchronize(value.device)
    else:
        torch.cpu.synchronize()


def _event_sync(value: torch.Tensor, plant: Plant) -> object:
    event = plant.kept.get("event") or plant.kept.setdefault("event", plant.device.event())
    event.record()
    return event.synchronize()


def _pageable_copy(value: torch.Tensor, plant: Plant) -> object:
    if "host" not in plant.kept:
        plant.kept["host"] = staging(tuple(value.shape), value.dtype, pin=False)
    return plant.kept["host"].copy_(value.detach(), non_blocking=True)


def _mask_read(value: torch.Tensor, plant: Plant) -> object:
    values = value.detach().reshape(-1)
    return values[values > 0]


def _empty_cache(value: torch.Tensor, plant: Plant) -> None:
    torch.cuda.empty_cache()


def _extra_kernel(value: torch.Tensor, plant: Plant) -> object:
    if "sum" not in plant.kept:
        plant.kept["sum"] = torch.zeros(value.shape, device=value.device)
    return plant.kept["sum"].add_(value.detach())


def _device_alloc(value: torch.Tensor, plant: Plant) -> object:
    # Larger than anything freed before, so that the caching allocator must ask the device.
    calls = plant.kept["calls"] = (plant.kept.get("calls", 0) + 1) % 64
    size = (4 + 4 * calls) * 2**20 if value.is_cuda else 64
    plant.kept["buffer"] = torch.empty(size, dtype=torch.uint8, device=value.device)
    return plant.kept["buffer"]


def _doubled(value: torch.Tensor) -> torch.Tensor:
    return value * 2


def _compile(value: torch.Tensor, plant: Plant) -> object:
    anew = compiled(_doubled, "planted", dynamic=False, backend="eager")
    return anew(value.detach())


def _backward_sync(value: torch.Tensor, plant: Plant) -> None:
    plant.kept["norm"] = value.norm().tolist()


def _monitor_sync(value: torch.Tensor, plant: Plant) -> object:
    return float(value)


def _flush_sync(value: torch.Tensor, plant: Plant) -> object:
    return value.tolist()


def _busy_loop(value: torch.Tensor, plant: Plant) -> None:
    spin(BUSY_SHARE * plant.tick_s)  # half of every tick


def _held_gil(value: torch.Tensor, plant: Plant) -> object:
    # One long call into C that never lets the lock go: every worker stands still.
    return sum(range(plant.gil_length))


PLANTED: dict[str, PlantedFault] = {
    fault.name: fault
    for fault in (
        PlantedFault(
            "item",
            "reads the loss in each step, as grad-norm metrics do",
            "step",
            "item()",
            _item,
        ),
        PlantedFault(
            "device_sync",
            "waits for the whole device",
            "step",
            "device synchronize",
            _device_sync,
        ),
        PlantedFault("event_sync", "waits for an event", "step", "event synchronize", _event_sync),
        PlantedFault(
            "pageable_copy",
            "asynchronous copy to pageable memory",
            "step",
            "pageable copy",
            _pageable_copy,
        ),
        PlantedFault("mask_read", "reads through a boolean mask", "step", "read by mask", _mask_read),
        PlantedFault("empty_cache", "gives the allocator's cache back", "step", "empty_cache", _empty_cache),
        PlantedFault("extra_kernel", "one more kernel in each step", "step", "operation", _extra_kernel),
        PlantedFault("device_alloc", "device memory anew in each step", "step", "allocation", _device_alloc),
        PlantedFault("compile", "compiles a function in each step", "step", "compile", _compile),
        PlantedFault(
            "backward_sync",
            "reads a gradient inside backward",
            "backward",
            "tolist()",
            _backward_sync,
        ),
        PlantedFault(
            "monitor_sync",
            "reads the loss in the monitor",
            "monitor",
            "float()",
            _monitor_sync,
        ),
        PlantedFault(
            "flush_sync",
            "reads the loss when the monitor flushes, and at no other tick",
            "flush",
            "tolist()",
            _flush_sync,
        ),
        PlantedFault(
            "busy_loop", "a busy loop in the monitor for half of every tick", "monitor", "", _busy_loop
        ),
        PlantedFault(
            "held_gil", "holds the interpreter lock for a part of every tick", "monitor", "", _held_gil
        ),
    )
}
COUNTED = tuple(name for name, fault in PLANTED.items() if fault.kind)
"""Faults that a counter must find; the others only cost time."""


def make_plant(name: str) -> Plant:
    """A new plant, switched off.

    Raises:
        UserError: no such fault.
    """
    if name not in PLANTED:
        raise UserError(
            f"--plant {name}: no such planted fault{nearest(name, PLANTED)} (known: {', '.join(PLANTED)})"
        )
    return Plant(PLANTED[name])
