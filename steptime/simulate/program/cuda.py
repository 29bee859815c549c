"""What a program asks of `torch.cuda` and its like, answered for one simulated device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from steptime.errors import UserError
from steptime.host_memory import _has_cuda
from steptime.simulate.program.memory import NAME, ProgramBoundary
from steptime.syncs.calls import STREAM
from steptime.syncs.scopes import DEVICE, EVENT, current_scope, noting

DEVICE_NAME = "Simulated CUDA device"
_MEMORY_BYTES = 80 * 2**30
BARRIER = "barrier"


def note(kind: str) -> None:
    """Count a wait in the calling thread's scope, if it has one."""
    scope = current_scope()
    if scope is not None:
        scope.record(kind)


class Stream:
    """A stream of the simulated device: whatever is put on it has ended at once.

    Args:
        device: ignored; there is one device.
    """

    device = NAME
    device_index, device_type, stream_id, cuda_stream, priority = 0, 1, 0, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **other: Any) -> None:
        del device, priority, other

    def synchronize(self) -> None:
        note(STREAM)

    def wait_stream(self, stream: Any) -> None:
        del stream

    def wait_event(self, event: Any) -> None:
        del event

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __hash__(self) -> int:
        return 0


class Event:
    """An event of the simulated device; its time is that of the host."""

    device = NAME

    def __init__(self, *arguments: Any, **other: Any) -> None:
        del arguments, other
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        del stream
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        del stream

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None:
        note(EVENT)


class Current(contextlib.nullcontext[None]):
    """A current device or stream: there is one of each."""

    idx, prev_idx = 0, 0

    def __init__(self, chosen: Any = None) -> None:
        super().__init__(None)
        self.stream = chosen


class _OfBase(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch._C.Generator)


class Generator(torch._C.Generator, metaclass=_OfBase):
    """A generator that says `cuda` where the program asked for that; the CPU's engine draws its numbers."""

    _named: torch.device

    def __new__(cls, device: Any = "cpu") -> Generator:
        named = torch.device(device)
        made = super().__new__(cls, device="cpu" if named.type == "cuda" else named)  # type: ignore[call-arg]
        made._named = NAME if named.type == "cuda" else named
        return made

    def __init__(self, device: Any = "cpu") -> None:
        del device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._named


def cannot(what: str, instead: str) -> Callable[..., Any]:
    """A call that ends the program in one line."""

    def refuse(*arguments: Any, **named: Any) -> Any:
        raise UserError(f"the simulated CUDA device cannot {what}: {instead}")

    return refuse


def _properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=DEVICE_NAME, major=8, minor=0, total_memory=_MEMORY_BYTES, multi_processor_count=108,
        warp_size=32, is_integrated=0, is_multi_gpu_board=0, L2_cache_size=40 * 2**20, uuid="simulated",
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, gcnArchName="",
        shared_memory_per_block=49152, shared_memory_per_block_optin=166912,
    )  # fmt: skip


def _always(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: value


def _cuda_answers() -> dict[str, Any]:
    state = torch.get_rng_state
    zero = (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
        "memory_cached", "max_memory_cached", "utilization", "temperature", "power_draw",
    )  # fmt: skip
    nothing = (
        "init", "_lazy_init", "set_device", "ipc_collect", "reset_peak_memory_stats", "set_stream",
        "reset_max_memory_allocated", "reset_max_memory_cached", "reset_accumulated_memory_stats",
        "set_per_process_memory_fraction", "manual_seed", "manual_seed_all", "seed", "seed_all",
        "_sleep", "set_sync_debug_mode",
    )  # fmt: skip
    graphs = "capture a CUDA graph", "run the program without graphs"
    return {
        **dict.fromkeys(zero, _always(0)),
        **dict.fromkeys(nothing, _always(None)),
        "is_available": _always(True),
        "is_initialized": _always(True),
        "_is_in_bad_fork": _always(False),
        "_is_compiled": _always(True),
        "is_bf16_supported": _always(True),
        "is_current_stream_capturing": _always(False),
        "device_count": _always(1),
        "_device_count_nvml": _always(1),
        "current_device": _always(0),
        "get_device_name": _always(DEVICE_NAME),
        "get_device_capability": _always((8, 0)),
        "get_device_properties": _properties,
        "get_arch_list": _always(["sm_80"]),
        "memory_stats": _always({}),
        "memory_summary": _always(""),
        "memory_snapshot": _always([]),
        "get_rng_state": lambda device=None: state(),
        "get_rng_state_all": lambda: [state()],
        "set_rng_state": _always(None),
        "set_rng_state_all": _always(None),
        "initial_seed": torch.initial_seed,
        "can_device_access_peer": _always(False),
        "mem_get_info": _counted("device memory query", (_MEMORY_BYTES, _MEMORY_BYTES)),
        "get_sync_debug_mode": _always(0),
        "Stream": Stream,
        "ExternalStream": Stream,
        "Event": Event,
        "stream": Current,
        "StreamContext": Current,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "device": Current,
        "device_of": Current,
        "_DeviceGuard": Current,
        "_exchange_device": _always(0),
        "_maybe_exchange_device": _always(0),
        "graph": type("graph", (), {"__init__": cannot(*graphs)}),
        "CUDAGraph": type("CUDAGraph", (), {"__init__": cannot(*graphs)}),
        "make_graphed_callables": cannot(*graphs),
    }


def _counted(kind: str, value: Any) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        note(kind)
        return value

    return call


def _accelerator_answers() -> dict[str, Any]:
    return {
        "is_available": _always(True),
        "device_count": _always(1),
        "current_accelerator": _always(torch.device("cuda")),
        "current_device_index": _always(0),
        "set_device_index": _always(None),
        "current_stream": lambda device=None: Stream(),
        "set_stream": _always(None),
        "synchronize": _counted(DEVICE, None),
        "memory_allocated": _always(0),
        "max_memory_allocated": _always(0),
        "reset_peak_memory_stats": _always(None),
        "empty_cache": _counted("empty_cache", None),
    }


def _nccl_as_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(backend: Any = None, *arguments: Any, **named: Any) -> Any:
        """Collectives run on gloo. They wait on no host, as on NCCL; `barrier` does and counts."""
        wanted = str(named.pop("backend", backend) or "gloo")
        named.pop("device_id", None)
        return original("gloo" if "nccl" in wanted else wanted, *arguments, **named)

    return call


def barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Counted: the host waits for the other ranks."""

    def call(*arguments: Any, **named: Any) -> Any:
        note(BARRIER)
        named.pop("device_ids", None)
        return original(*arguments, **named)

    return call


def _buckets(boundary: ProgramBoundary) -> list[tuple[Any, str, Any]]:
    """C++ makes the buckets of `DistributedDataParallel`, where its parameters are."""
    from torch.nn.parallel import DistributedDataParallel

    init, rebuild = DistributedDataParallel._ddp_init_helper, dist.Reducer._rebuild_buckets
    reducers: set[int] = set()

    def placed(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        scope = current_scope()
        if scope is None:
            return call(*arguments, **named)
        with noting(scope, placing="device"):
            return call(*arguments, **named)

    def begin(self: Any, parameters: Any, *rest: Any, **named: Any) -> None:
        if not boundary.is_device(parameters[0]):
            init(self, parameters, *rest, **named)
            return
        placed(init, self, parameters, *rest, **named)
        reducers.add(id(self.reducer))

    def again(self: Any) -> Any:
        return placed(rebuild, self) if id(self) in reducers else rebuild(self)

    return [
        (DistributedDataParallel, "_ddp_init_helper", begin),
        (dist.Reducer, "_rebuild_buckets", again),
    ]


def _cpu_for_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function of autocast whose first argument may name the device type."""

    def call(*arguments: Any, **named: Any) -> Any:
        return original(*("cpu" if one == "cuda" else one for one in arguments), **named)

    return call


def _autocast(original: Callable[..., None]) -> Callable[..., None]:
    def begin(self: Any, device_type: str, dtype: Any = None, *rest: Any, **named: Any) -> None:
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        original(self, device_type, dtype, *rest, **named)

    return begin


@contextlib.contextmanager
def simulated_cuda(boundary: ProgramBoundary) -> Iterator[None]:
    """Let the process believe that it has one CUDA device. For a whole program: entered once, by the thread
    that runs it, inside the counting modes."""
    _has_cuda()  # As it was before: what is staged stays marked.
    answers: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in _cuda_answers().items()),
        *((torch.accelerator, name, value) for name, value in _accelerator_answers().items()),
        *((torch.cuda.memory, name, _cuda_answers()[name]) for name in ("mem_get_info", "memory_allocated")),
        (torch.cuda.random, "manual_seed_all", _always(None)),
        (torch.version, "cuda", "12.8"),
        (torch, "Generator", Generator),
        (torch.backends.cuda, "is_built", _always(True)),
        (torch.amp.autocast_mode.autocast, "__init__", _autocast(torch.amp.autocast_mode.autocast.__init__)),
        *(
            (torch, name, _cpu_for_cuda(getattr(torch, name)))
            for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled")
        ),
        (torch.UntypedStorage, "is_pinned", lambda self, device="cuda": False),
    ]
    if dist.is_available():
        answers += [
            (dist, "init_process_group", _nccl_as_gloo(dist.init_process_group)),
            (dist, "is_nccl_available", _always(True)),
            (dist, "barrier", barrier(dist.barrier)),
            *_buckets(boundary),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in answers:
            if name in vars(owner):
                stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(_saved_places(boundary))
        yield


@contextlib.contextmanager
def _saved_places(boundary: ProgramBoundary) -> Iterator[None]:
    """`torch.save` keeps which storages were on the device, `torch.load` puts them and those of
    `map_location="cuda"` back there, at the price of a copy each."""

    def tag(storage: Any) -> str | None:
        inner = getattr(storage, "_untyped_storage", storage)
        return "cuda:0" if boundary.holds(inner) else None

    def put(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        inner = getattr(storage, "_untyped_storage", storage)
        note("blocking copy to device")
        boundary.place_storage(inner)
        return storage

    registry = torch.serialization._package_registry
    entry = (0, tag, put)
    registry.insert(0, entry)
    try:
        yield
    finally:
        registry.remove(entry)
