"""Each way alone: what it needs, what it says when it has it not, and its parts that need no GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from bench.syncs.ways.lint import collector_sources, lint_file, lint_text
from bench.syncs.ways.registry import make_ways
from dflash.device import Device
from dflash.observe.syncs import allowed_sync
from steptime.counting.cuda import CudaScopes, category, is_sync
from steptime.counting.ways import allocator, gpu_trace
from steptime.counting.ways.allocator import DEVICE_KEYS, HOST_KEYS, AllocatorWay, rises
from steptime.counting.ways.copies import hidden_wait
from steptime.counting.ways.cupti import CuptiWay
from steptime.counting.ways.gpu_trace import GpuTraceWay
from steptime.counting.ways.way import Notes, Unavailable, carried
from tests.waiting import HANG_S

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_every_way_says_what_it_sees_and_what_not() -> None:
    names = [way.name for way in make_ways()]
    assert len(set(names)) == 7
    for way in make_ways():
        assert way.sees
        assert way.does_not_see
        assert way.claims


@no_cuda
@pytest.mark.parametrize(
    "way", [way for way in make_ways() if way.device == "cuda"], ids=lambda way: way.name
)
def test_unavailable_is_not_zero(way) -> None:  # type: ignore[no-untyped-def]
    assert way.available()
    with pytest.raises(Unavailable, match="unavailable"), way.arm("drafter/0"):
        pytest.fail("armed without a device")


@no_cuda
def test_a_trainers_cuda_scopes_are_unavailable_without_a_gpu() -> None:
    scopes = CudaScopes()
    assert len(scopes.unavailable) == 3
    assert scopes.ways == ()


def test_gpu_trace_misses_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.cuda import _gpu_trace

    assert gpu_trace.missing_hooks() is None or not hasattr(torch._C, "_activate_gpu_trace")
    monkeypatch.delattr(_gpu_trace, "register_callback_for_event_synchronization")
    assert "register_callback_for_event_synchronization" in (gpu_trace.missing_hooks() or "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(Unavailable, match="register_callback_for_event_synchronization"):
        GpuTraceWay().attach()


def test_gpu_trace_callbacks_are_charged_to_role_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._utils import CallbackRegistry
    from torch.cuda import _gpu_trace

    for name in [name for name in vars(_gpu_trace) if name.endswith("Callbacks")]:
        monkeypatch.setattr(_gpu_trace, name, CallbackRegistry(name))
    way = GpuTraceWay()
    way.register()
    fire = _gpu_trace.StreamSynchronizationCallbacks.fire_callbacks
    fire(0)  # outside any scope: nobody's
    weight = torch.nn.Parameter(torch.ones(2))
    weight.register_hook(lambda gradient: fire(1))
    with carried("drafter/0"):
        fire(1)
        with allowed_sync("end"):
            fire(1)
        (weight * 2).sum().backward()
        _gpu_trace.EventSynchronizationCallbacks.fire_callbacks(7)
        _gpu_trace.DeviceSynchronizationCallbacks.fire_callbacks()
    assert {role for role, *_ in way.counts()} == {"drafter/0"}
    assert sorted(kind for _, kind, _ in way.counts()) == [
        "device sync",
        "event sync",
        "stream sync",
        "stream sync",
    ]
    lines = {place.line for _, kind, place in way.counts() if kind == "stream sync"}
    assert len(lines) == 2, "the call and the hook in backward are two places"
    assert {place.file for *_, place in way.counts()} == {__file__}
    assert [reason for _, reason in way.notes.declared] == ["end"]


def test_notes_belong_to_armed_scopes_only() -> None:
    notes = Notes()
    notes.note("x")
    with carried("drafter/0") as scope:
        scope.ledger.armed = False
        notes.note("x")
        scope.ledger.armed = True
        notes.note("x", 3)
    assert list(notes.summed().values()) == [3]


def test_hidden_waits_of_asynchronous_copies() -> None:
    dense, empty = torch.ones(4, 2), torch.ones(0)

    def kind(
        host: torch.Tensor, *, pinned: bool, to_device: bool = True, converts: bool = False
    ) -> str | None:
        return hidden_wait(host, to_device=to_device, converts=converts, pinned=lambda tensor: pinned)

    assert kind(dense, pinned=True) is None
    assert kind(dense.t(), pinned=True) is None, "permuted but dense"
    assert kind(dense[:, 0], pinned=True) == "gapped copy"
    assert kind(dense, pinned=False) == "pageable copy"
    assert kind(dense, pinned=False, to_device=False) == "pageable copy"
    assert kind(dense, pinned=True, converts=True) == "pageable copy", "the host converts first"
    assert kind(dense, pinned=True, converts=True, to_device=False) is None, "the device converts first"
    assert kind(empty, pinned=False) is None


def test_allocator_counters_that_rose() -> None:
    before = {"num_device_alloc": 3, "num_device_free": 1, "num_host_alloc": 2}
    after = {"num_device_alloc": 5, "num_device_free": 1, "num_host_alloc": 3, "num_sync_all_streams": 1}
    assert rises(before, after) == {
        "device malloc": 2,
        "pinned malloc": 1,
        "allocator waits for all streams": 1,
    }


def test_what_is_a_sync() -> None:
    assert is_sync("item()")
    assert is_sync("stream sync [GPU trace]")
    assert is_sync("pageable copy [copy wrappers]")
    assert not is_sync("device malloc [allocator counters]"), "it depends on what other threads have freed"
    assert not is_sync("event record [GPU trace]")
    assert not is_sync("allocator block [GPU trace]")
    assert not is_sync("operation")


def test_every_kind_that_a_way_tells_has_a_category_and_no_other_has() -> None:
    from steptime.counting.ways.gpu_trace import _HOOKS

    told = {f"{kind} [GPU trace]": kind in gpu_trace.SYNCS for kind in _HOOKS.values()}
    told |= {f"{kind} [allocator counters]": False for kind in (*DEVICE_KEYS.values(), *HOST_KEYS.values())}
    assert {kind: is_sync(kind) for kind in told} == told
    assert category("allocator block [GPU trace]") == "allocation"
    with pytest.raises(ValueError, match="graph launch"):
        is_sync("graph launch [GPU trace]")


class FakeAllocator:
    """Counters of two devices and of the host; `allocate` is the driver's call, in the calling thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices = [dict.fromkeys(DEVICE_KEYS, 0) for _ in range(2)]
        self.host = dict.fromkeys(HOST_KEYS, 0)
        self.reads: list[int] = []
        self.here = threading.local()
        for name, fake in {
            "is_available": lambda: True,
            "current_device": lambda: getattr(self.here, "device", 0),
            "memory_stats_as_nested_dict": self.statistics,
            "host_memory_stats": lambda: dict(self.host),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def statistics(self, device: int) -> dict[str, int]:
        self.reads.append(device)
        return dict(self.devices[device])

    def allocate(self, device: int, key: str = "num_device_alloc") -> None:
        self.devices[device][key] += 1


@pytest.mark.fault
def test_what_another_thread_allocates_meanwhile_is_charged_to_that_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two workers on one device: the second wants to allocate while the first one's operation runs."""
    fake, way = FakeAllocator(monkeypatch), AllocatorWay()
    inside, wants = threading.Event(), threading.Event()

    def first() -> None:
        def operation() -> None:
            inside.set()
            assert wants.wait(HANG_S)

        with carried("target/0"):
            way.during(operation)

    def second() -> None:
        assert inside.wait(HANG_S)
        with carried("drafter/0"):
            wants.set()
            way.during(lambda: fake.allocate(0))

    threads = [threading.Thread(target=body) for body in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert [(role, kind, n) for (role, kind, _), n in way.counts().items()] == [
        ("drafter/0", "device malloc", 1)
    ]


def test_only_the_threads_own_device_is_read_twice_an_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, way = FakeAllocator(monkeypatch), AllocatorWay()
    fake.here.device = 1
    with way.arm("drafter/0"):
        (torch.ones(2) + 1).sum()
        fake.reads, made = [], len(fake.reads)
        way.during(lambda: fake.allocate(1, "num_alloc_retries"))
    assert made == 2 * 3
    assert fake.reads == [1, 1]
    assert [kind for _, kind, _ in way.counts()] == ["allocator retry"]


@pytest.mark.fault
def test_two_operations_that_wait_for_each_other_end_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeAllocator(monkeypatch)
    monkeypatch.setattr(allocator, "TURN_S", 0.01)
    way, errors = AllocatorWay(), list[RuntimeError]()

    def other() -> None:
        with pytest.raises(RuntimeError, match="wait for each other") as caught:
            way.during(lambda: None)
        errors.append(caught.value)

    def operation() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(HANG_S)

    way.during(operation)
    assert errors


def test_cupti_names_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "cupti-python is not installed" in (CuptiWay().available() or "")


def test_collectors_are_clean() -> None:
    assert [str(finding) for path in collector_sources() for finding in lint_file(path)] == []


SOURCE = """
import torch

class Bad:
    def sample(self, values):
        total = values.sum().item()
        free, _ = torch.cuda.mem_get_info()
        used = torch.cuda.memory_allocated()
        mine = self.pool.unique(values)
        torch.cuda.synchronize()
        host = values.cpu()  # sync: ok, made at the start
        return total
"""


def test_lint_names_function_and_line() -> None:
    findings = [(finding.line, finding.function, finding.kind) for finding in lint_text(SOURCE, "bad.py")]
    assert findings == [
        (6, "Bad.sample", "item()"),
        (7, "Bad.sample", "device memory query"),
        (8, "Bad.sample", "device memory query"),
        (10, "Bad.sample", "synchronize"),
    ]


def test_lint_refuses_what_is_not_there(tmp_path: Path) -> None:
    from bench.syncs.ways.lint import LintWay

    assert "no such source" in (LintWay([tmp_path / "gone.py"]).available() or "")
    assert LintWay([]).available()


@pytest.mark.gpu
def test_allocator_way_on_cuda() -> None:
    way = AllocatorWay()
    with way.arm("drafter/0"):
        kept = torch.empty(64 * 2**20, dtype=torch.uint8, device=Device("cuda").torch)
    assert any(kind == "device malloc" and place.file == __file__ for _, kind, place in way.counts())
    del kept
