"""What one operator does on simulated devices: which stream, which memory, what waits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from steptime.host_memory import PAGEABLE, PINNED, host_kind, mark_host
from steptime.simulate.clocks import Clock
from steptime.simulate.hosts import UNPLACED, Host
from steptime.simulate.races import Actor, Misuse
from steptime.simulate.simulation import Simulation
from steptime.simulate.streams import Stream
from steptime.syncs.rules import INDEX, INDEX_PUT, operation, sync_kind, tensors_in
from steptime.syncs.rules import is_gapped as gapped

PEER, TO_DEVICE, TO_HOST = "device to device", "host to device", "device to host"


class Written(NamedTuple):
    """Which arguments an operator writes: places and names."""

    places: frozenset[int]
    names: frozenset[str]


_written: dict[Any, Written] = {}


def written(func: Any) -> Written:
    """From the operator's schema, looked up once."""
    found = _written.get(func)
    if found is None:
        arguments = [
            (place, argument)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        found = _written[func] = Written(
            frozenset(place for place, _ in arguments), frozenset(argument.name for _, argument in arguments)
        )
    return found


class Launch(NamedTuple):
    """An action of a stream or of a host thread, under way."""

    clock: Clock
    number: int
    actor: Actor


class Operations:
    """The rules over one operator at a time, in the calling thread."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._memory = simulation, simulation.memory

    def is_composite(self, func: Any) -> bool:
        return operation(func).composite and torch.is_inference_mode_enabled()

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Check it, compute it, and write down where its results live.

        Raises:
            Misuse: operands of two devices.
            Race: it has no order with an earlier access.
        """
        host = self._simulation.host()
        facts = operation(func)
        if facts.view or host.quiet:
            return func(*args, **kwargs)
        name = facts.name
        if name == "aten::copy_":
            blocking = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if self._copies(host, args[0], args[1], blocking):
                return args[0]
        elif name == "aten::_to_copy":
            return self._to_copy(host, func, args, kwargs)
        inputs = [*tensors_in(args), *tensors_in(kwargs.values())]
        device = self._device(host, name, inputs, kwargs)
        stream = None if device is None else self._simulation.current_stream(host, device)
        launch = self._begin(host, stream, name) if facts.launches else None
        if launch is not None:
            self._touch_arguments(launch, func, args, kwargs)
        waits = self._waits(host, name, args, kwargs, stream)
        result = func(*args, **kwargs)
        self._place_results(host, launch, inputs, result, device, stream)
        if waits is not None and stream is not None:
            self._simulation.host_waits(waits, stream.clock)
        return result

    def read_on_host(self, host: Host, tensor: torch.Tensor, what: str) -> None:
        """The whole tensor is read by the host: from a device it is copied first, and waited for."""
        device = self._memory.device_of(tensor)
        stream = None if device is None else self._simulation.current_stream(host, device)
        launch = self._begin(host, stream, what)
        self._touch(launch, tensor, write=False)
        if stream is not None:
            self._simulation.host_waits(what, stream.clock)

    # -- one operation on one device -------------------------------------------------------------------------

    def _begin(self, host: Host, stream: Stream | None, name: str) -> Launch:
        simulation = self._simulation
        lane = "host" if stream is None else stream.name
        actor = simulation.actor(host, lane, name)
        with simulation.lock:
            simulation.settle()
            if stream is None:
                host.clock.tick(host.number)
                return Launch(host.clock, host.number, actor)
            simulation.counts.operations += 1
            if stream.default:
                used = simulation.counts.default_stream
                key = (host.role, actor.place)
                used[key] = used.get(key, 0) + 1
            simulation.launch(host, stream, name)
            host.clock.tick(host.number)
            # A copy: others may enqueue on this stream before the results are written down.
            return Launch(stream.clock.copy(), stream.number, actor)

    def _touch(self, launch: Launch, tensor: torch.Tensor, *, write: bool) -> None:
        block = self._memory.block(tensor)
        if block is not None:
            with self._simulation.lock:
                self._simulation.touch(block, tensor, *launch, write=write)

    def _touch_arguments(self, launch: Launch, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        places, names = written(func)
        for place, value in enumerate(args):
            for tensor in tensors_in((value,)):
                self._touch(launch, tensor, write=place in places)
        for name, value in kwargs.items():
            for tensor in tensors_in((value,)):
                self._touch(launch, tensor, write=name in names)

    def _device(
        self, host: Host, name: str, inputs: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> int | None:
        """Where it runs, and where its results live."""
        devices = {self._memory.device_of(tensor) for tensor in inputs if tensor.dim() > 0}
        on = devices - {None}
        if not on:
            on = {self._memory.device_of(tensor) for tensor in inputs} - {None}
        if len(on) > 1 or (on and None in devices and name not in INDEX and name not in INDEX_PUT):
            found = " and ".join(
                "the host" if one is None else f"sim:{one}"
                for one in sorted(devices, key=lambda one: -1 if one is None else one)
            )
            self._simulation.fail(
                Misuse(
                    f"Expected all tensors to be on the same device, but found {found}: "
                    f"{self._simulation.actor(host, 'host', name)}"
                )
            )
        if host.placing is not UNPLACED:
            placing: int | None = host.placing
            return placing
        if on:
            return next(iter(on))
        named = kwargs.get("device")
        if named is not None and named.index is not None:
            return int(named.index)
        if inputs:
            return None
        return self._device_of_caller(host)

    def _device_of_caller(self, host: Host) -> int | None:
        """A factory inside an operator of C++: where that operator's operands are."""
        if host.call is not None:
            args, kwargs = host.call
            for tensor in (*tensors_in(args), *tensors_in((kwargs or {}).values())):
                return self._memory.device_of(tensor)
        return host.last_device if torch._C._current_autograd_node() is not None else None

    def _waits(
        self, host: Host, name: str, args: Any, kwargs: dict[str, Any], stream: Stream | None
    ) -> str | None:
        if stream is None:
            return None
        host.last_device = stream.device
        kind = sync_kind(name, args, kwargs, self._is_on_device, host.free_value)
        return None if kind is None else host.label or kind

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return self._memory.device_of(tensor) is not None

    def _place_results(
        self,
        host: Host,
        launch: Launch | None,
        inputs: list[torch.Tensor],
        result: Any,
        device: int | None,
        stream: Stream | None,
    ) -> None:
        known = {_address(tensor) for tensor in inputs}
        for tensor in tensors_in(result if isinstance(result, (list, tuple)) else (result,)):
            if _address(tensor) in known:
                continue
            self._memory.place(tensor, device, stream)
            if device is None and host_kind(tensor) is None:
                mark_host(tensor, PAGEABLE)
            if launch is not None:
                self._touch(launch, tensor, write=True)

    # -- copies ----------------------------------------------------------------------------------------------

    def _to_copy(self, host: Host, func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """A copy into fresh memory, of another type or on another device."""
        source = args[0]
        here = self._memory.device_of(source)
        pinned = False
        device = kwargs.get("device")
        if isinstance(host.placing, tuple):
            wanted, pinned = host.placing
        elif device is not None and device.index is not None:
            wanted = device.index
        else:
            wanted = here
        blocking = not kwargs.get("non_blocking", False)
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        result: torch.Tensor = func(source, **kwargs)
        stream = None if wanted is None else self._simulation.current_stream(host, wanted)
        self._memory.place(result, wanted, stream)
        if wanted is None:
            mark_host(result, PINNED if pinned else PAGEABLE)
        if not self._crosses(host, result, source, blocking):
            launch = self._begin(host, stream, "aten::_to_copy")
            self._touch(launch, source, write=False)
            self._touch(launch, result, write=True)
        return result

    def _copies(self, host: Host, target: torch.Tensor, source: torch.Tensor, blocking: bool) -> bool:
        """Whether `copy_` went from one device to another, or between a device and the host."""
        if not self._crosses(host, target, source, blocking):
            return False
        target.copy_(source)
        return True

    def _crosses(self, host: Host, target: torch.Tensor, source: torch.Tensor, blocking: bool) -> bool:
        to, origin = self._memory.device_of(target), self._memory.device_of(source)
        if to == origin:
            return False
        simulation = self._simulation
        if origin is None and source.dim() == 0 and host.free_value:
            launch = self._begin(host, simulation.current_stream(host, to or 0), "aten::fill_")
            self._touch(launch, target, write=True)
            return True
        if to is not None and origin is not None:
            self._between_devices(host, target, source, to, origin)
            return True
        index = to if origin is None else origin
        assert index is not None
        stream = simulation.current_stream(host, index)
        kind, memory = (TO_DEVICE, source) if origin is None else (TO_HOST, target)
        launch = self._begin(host, stream, f"copy {kind}")
        self._touch(launch, source, write=False)
        self._touch(launch, target, write=True)
        self._count(launch, kind, target)
        if target.numel() == 0:
            return True
        if blocking:
            simulation.host_waits(
                "blocking copy to host" if kind == TO_HOST else "blocking copy to device", stream.clock
            )
        elif not self._memory.is_pinned(memory) or gapped(memory):
            simulation.host_waits("pageable copy", stream.clock)
        return True

    def _between_devices(
        self, host: Host, target: torch.Tensor, source: torch.Tensor, to: int, origin: int
    ) -> None:
        """On the source's current stream of the calling thread, behind the target's, which then waits for
        it."""
        simulation = self._simulation
        runs, waits = simulation.current_stream(host, origin), simulation.current_stream(host, to)
        with simulation.lock:
            simulation.launch(host, waits)
            simulation.order(waits.clock, waits, runs)
        launch = self._begin(host, runs, f"copy {PEER}")
        self._touch(launch, source, write=False)
        self._touch(launch, target, write=True)
        with simulation.lock:
            simulation.order(launch.clock, runs, waits)
            waits.clock.tick(waits.number)
        self._count(launch, PEER, target)

    def _count(self, launch: Launch, kind: str, target: torch.Tensor) -> None:
        counts, size = self._simulation.counts, target.numel() * target.element_size()
        with self._simulation.lock:
            total = counts.copies.setdefault(kind, [0, 0])
            at = counts.copied_at.setdefault((launch.actor.role, kind, launch.actor.place), [0, 0])
            for pair in (total, at):
                pair[0] += 1
                pair[1] += size


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
