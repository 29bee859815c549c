"""The gpu collector under the real `pynvml`, over a stub library that fails in every way NVML does."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from dflash.observe.collectors.gpu import SLOW_S, GpuCollector
from dflash.observe.nvml import GpuReader
from steptime.nvml import find_handles, mig_entry, visible_uuids
from tests.clock import Clock
from tests.observe import nvml_stub
from tests.observe.nvml_stub import DRIVER_NOT_LOADED, GPU_IS_LOST, NOT_SUPPORTED, UNKNOWN, Stub
from tests.observe.parts import sources
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.skipif(
    nvml_stub.COMPILER is None, reason="no C compiler for the stub of libnvidia-ml"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.compile_stub(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> Stub:
    """The stub in the place of the driver's library, for `pynvml` in this process."""
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    monkeypatch.setattr(pynvml, "CDLL", lambda name: loaded)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Stub(loaded)


class Watch:
    """A collector that is ticked by hand, and what it said."""

    def __init__(self, collector: GpuCollector, said: list[str]) -> None:
        self.collector, self.said = collector, said
        self.error: Exception | None = None

    def tick(self) -> dict[str, float]:
        try:
            return self.collector.sample(0)
        except Exception as error:
            self.error = error
            return {}

    def until(self, done: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """Tick until a sample is as wanted."""
        values: dict[str, float] = {}

        def seen() -> bool:
            nonlocal values
            values = self.tick()
            return done(values)

        wait_until(seen)
        return values

    def settled(self) -> dict[str, float]:
        """A full sample: every reader that still has a GPU has been round twice more."""
        self.until(bool)
        for _ in range(3):
            wait_until(lambda: all(one.lost or one._values is not None for one in self.collector._readers))
            values = self.tick()
        return values


@pytest.fixture
def watch(clock: Clock) -> Iterator[Callable[..., Watch]]:
    """On a clock that stands still: no call is slow but one that the test makes slow."""
    made: list[Watch] = []

    def make(
        targets: tuple[str, ...], drafters: tuple[str, ...] = (), uuids: dict[int, str] | None = None
    ) -> Watch:
        source = sources(targets, drafters, gpu_uuids=tuple((uuids or {}).items()))
        said: list[str] = []
        source.report = said.append
        collector = GpuCollector(source)
        made.append(Watch(collector, said))
        collector.switch(True)
        return made[-1]

    yield make
    for one in made:
        one.collector.close()


def test_reads_every_metric_of_the_gpu_with_the_uuid(stub: Stub, watch: Callable[..., Watch]) -> None:
    stub.add("GPU-other", utilisation=1)
    stub.add("GPU-mine", utilisation=97, memory_v2=61_200, power=540_000, temperature=64, throttle=0x4 | 0x20)
    values = watch(("cuda:0",), uuids={0: "GPU-mine"}).settled()
    assert values["gpu/0/util_pct"] == 97
    assert values["gpu/0/mem_used_gb"] == pytest.approx(61.2)
    assert values["gpu/0/power_w"] == 540
    assert values["gpu/0/temp_c"] == 64
    throttled = {key for key, value in values.items() if "throttle" in key and value}
    assert throttled == {"gpu/0/throttle_power", "gpu/0/throttle_thermal_sw"}


def test_means_over_the_gpus_of_a_role(stub: Stub, watch: Callable[..., Watch]) -> None:
    for index, utilisation in enumerate((90, 80, 30)):
        stub.add(f"GPU-{index}", utilisation=utilisation)
    values = watch(("cuda:0", "cuda:1"), ("cuda:2",), {0: "GPU-0", 1: "GPU-1", 2: "GPU-2"}).settled()
    assert values["gpu/target_mean/util_pct"] == 85
    assert values["gpu/drafter_mean/util_pct"] == 30


def test_handles_are_opened_once(
    stub: Stub,
    watch: Callable[..., Watch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub.add("GPU-0")
    one = watch(("cuda:0",), uuids={0: "GPU-0"})
    one.settled()
    one.settled()
    assert stub.open == 1
    (reader,) = one.collector._readers
    join = reader._thread.join
    monkeypatch.setattr(reader._thread, "join", lambda timeout: join(HANG_S))
    one.collector.close()
    assert stub.open == 0


def test_a_metric_that_is_not_supported_goes_away_alone_with_one_line(
    stub: Stub, watch: Callable[..., Watch]
) -> None:
    gpu = stub.add("GPU-0")
    stub.code(gpu, "utilisation", NOT_SUPPORTED)
    one = watch(("cuda:0",), uuids={0: "GPU-0"})
    values = one.settled()
    assert "gpu/0/util_pct" not in values
    assert "gpu/target_mean/util_pct" not in values
    assert values["gpu/0/power_w"] == 300
    one.settled()
    assert one.said == ["gpu 0: utilisation is off: Not Supported"]
    assert stub.calls(gpu, "utilisation") == 1


def test_memory_of_an_old_driver_has_another_name(stub: Stub, watch: Callable[..., Watch]) -> None:
    gpu = stub.add("GPU-0")
    stub.code(gpu, "memory_v2", NOT_SUPPORTED)
    values = watch(("cuda:0",), uuids={0: "GPU-0"}).settled()
    assert "gpu/0/mem_used_gb" not in values
    assert values["gpu/0/mem_used_with_reserve_gb"] == 9.0


def test_an_error_that_passes_is_forgiven(stub: Stub, watch: Callable[..., Watch]) -> None:
    gpu = stub.add("GPU-0")
    one = watch(("cuda:0",), uuids={0: "GPU-0"})
    one.settled()
    stub.code(gpu, "power", UNKNOWN)
    one.until(lambda values: bool(values) and "gpu/0/power_w" not in values)
    stub.code(gpu, "power", 0)
    one.until(lambda values: "gpu/0/power_w" in values)
    assert one.said == []


def test_an_error_that_stays_takes_the_metric_away(stub: Stub, watch: Callable[..., Watch]) -> None:
    gpu = stub.add("GPU-0")
    stub.code(gpu, "power", UNKNOWN)
    one = watch(("cuda:0",), uuids={0: "GPU-0"})
    one.until(lambda values: bool(one.said))
    assert one.said == ["gpu 0: power is off: Unknown Error"]
    assert "gpu/0/temp_c" in one.settled()


def test_a_lost_gpu_goes_away_with_one_line_and_the_other_stays(
    stub: Stub, watch: Callable[..., Watch]
) -> None:
    first, _ = stub.add("GPU-0"), stub.add("GPU-1")
    one = watch(("cuda:0",), ("cuda:1",), {0: "GPU-0", 1: "GPU-1"})
    one.settled()
    for function in ("utilisation", "memory_v2", "power", "temperature", "throttle"):
        stub.code(first, function, GPU_IS_LOST)
    one.until(lambda values: bool(one.said))
    values = one.settled()
    assert one.said == ["gpu 0: lost: the driver no longer reaches it"]
    assert not any(key.startswith("gpu/0/") for key in values)
    assert "gpu/1/util_pct" in values


def test_a_call_that_takes_seconds_loses_the_metric_and_delays_nobody(
    stub: Stub, watch: Callable[..., Watch], clock: Clock
) -> None:
    first, _ = stub.add("GPU-0"), stub.add("GPU-1")
    one = watch(("cuda:0", "cuda:1"), uuids={0: "GPU-0", 1: "GPU-1"})
    one.settled()
    # The last tick woke the readers: a round under way could make the call that is counted next.
    wait_until(lambda: all(reader._values is not None for reader in one.collector._readers))
    stub.hold(first, "power", True)
    calls = stub.calls(first, "power")
    one.until(lambda values: stub.calls(first, "power") > calls)
    # Each of these ticks comes back while the call does not, with the values of the other GPU.
    one.until(lambda values: "gpu/1/power_w" in values and "gpu/0/temp_c" not in values)
    clock.advance(SLOW_S)
    one.until(lambda values: "gpu/1/power_w" in values)
    assert one.said == []
    clock.advance(0.1)
    values = one.until(lambda values: "gpu/1/power_w" in values)
    assert one.said == [f"gpu 0: power is off: the call has taken over {SLOW_S:g} s"]
    assert "gpu/0/temp_c" not in values
    stub.hold(first, "power", False)
    one.until(lambda values: "gpu/0/temp_c" in values)
    values = one.settled()
    assert "gpu/0/power_w" not in values
    assert "gpu/0/temp_c" in values
    assert stub.calls(first, "power") == calls + 1


def test_a_call_that_took_seconds_loses_the_metric_though_no_tick_came_meanwhile(clock: Clock) -> None:
    said: list[str] = []

    def power(handle: object) -> dict[str, float]:
        clock.advance(SLOW_S + 0.5)
        return {"power_w": 1.0}

    readings = {"power": power, "temp": lambda handle: {"temp_c": 2.0}}
    reader = GpuReader(0, None, said.append, slow_s=SLOW_S, readings=readings)
    reader.take()
    wait_until(lambda: reader._values is not None)
    assert reader.take() == {"temp_c": 2.0}
    reader.close()
    assert said == [f"gpu 0: power is off: a call took {SLOW_S + 0.5:.1f} s"]


def test_a_driver_that_is_not_loaded_switches_the_collector_off(
    stub: Stub, watch: Callable[..., Watch]
) -> None:
    stub.init(code=DRIVER_NOT_LOADED)
    one = watch(("cuda:0",), uuids={0: "GPU-0"})
    one.until(lambda values: one.error is not None)
    assert str(one.error) == "Driver Not Loaded"


def test_an_initialisation_that_hangs_delays_no_tick(stub: Stub, watch: Callable[..., Watch]) -> None:
    stub.add("GPU-0")
    stub.init(held=True)
    one = watch(("cuda:0",), uuids={0: "GPU-0"})
    assert one.tick() == {}
    assert one.tick() == {}
    stub.init()
    one.until(bool)


def test_on_the_cpu_nvml_is_never_opened(stub: Stub, watch: Callable[..., Watch]) -> None:
    one = watch(("cpu",), ("cpu:1",))
    assert one.tick() == {}
    assert stub.open == 0


# -- which GPU is which --------------------------------------------------------------------------------------

PHYSICAL = ["GPU-aaaa-0", "GPU-aabb-1", "GPU-cccc-2"]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, PHYSICAL),
        ("", []),
        ("2,0", ["GPU-cccc-2", "GPU-aaaa-0"]),
        (" 1 , 2 ", ["GPU-aabb-1", "GPU-cccc-2"]),
        ("GPU-cccc-2,GPU-aaaa-0", ["GPU-cccc-2", "GPU-aaaa-0"]),
        ("GPU-cc", ["GPU-cccc-2"]),
        ("GPU-aa", []),  # two GPUs begin so
        ("0,7,1", ["GPU-aaaa-0"]),  # as in CUDA, a bad entry ends the list
        ("-1", []),
        ("MIG-77,MIG-GPU-cccc-2/1/0", ["MIG-77", "MIG-GPU-cccc-2/1/0"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible: str | None, expected: list[str]) -> None:
    assert visible_uuids(visible, PHYSICAL) == expected


def test_mig_entries() -> None:
    assert mig_entry("MIG-a,MIG-b", 1) == "MIG-b"
    assert mig_entry("0,1", 1) is None
    assert mig_entry(None, 0) is None
    assert mig_entry("MIG-a", 3) is None


@pytest.mark.parametrize(
    ("environment", "index", "utilisation"),
    [
        ({}, 1, 11),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 0, 12),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, 1, 10),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cccc-2"}, 0, 12),
        ({"CUDA_VISIBLE_DEVICES": "MIG-5555"}, 0, 99),
    ],
)
def test_without_uuids_from_cuda_the_environment_decides(
    stub: Stub, environment: dict[str, str], index: int, utilisation: int
) -> None:
    for number, uuid in enumerate(PHYSICAL):
        stub.add(uuid, utilisation=10 + number)
    stub.add("MIG-5555", utilisation=99)
    pynvml.nvmlInit()
    handles, problems = find_handles(pynvml, [index], {}, environment)
    assert problems == []
    assert pynvml.nvmlDeviceGetUtilizationRates(handles[index]).gpu == utilisation


def test_the_uuid_of_a_mig_instance_is_found_whether_or_not_cuda_says_that_it_is_one(stub: Stub) -> None:
    stub.add("GPU-parent", utilisation=1)
    stub.add("MIG-1234", utilisation=42)
    pynvml.nvmlInit()
    told_as_gpu, _ = find_handles(pynvml, [0], {0: "GPU-1234"}, {})
    told_as_parent, _ = find_handles(pynvml, [0], {0: "GPU-parent"}, {"CUDA_VISIBLE_DEVICES": "MIG-1234"})
    for handles in (told_as_gpu, told_as_parent):
        assert pynvml.nvmlDeviceGetUtilizationRates(handles[0]).gpu == 42


def test_unlike_gpus_without_uuids_are_not_guessed(stub: Stub) -> None:
    stub.add("GPU-a", name="Small")
    stub.add("GPU-b", name="Large")
    pynvml.nvmlInit()
    handles, problems = find_handles(pynvml, [0], {}, {})
    assert handles == {}
    assert problems == [
        "gpu 0: not observed: cannot tell which GPU it is (CUDA_VISIBLE_DEVICES=None); "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count as NVML does"
    ]
    handles, problems = find_handles(pynvml, [0], {}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert problems == []


def test_a_uuid_that_nvml_lacks_is_told(stub: Stub, watch: Callable[..., Watch]) -> None:
    stub.add("GPU-0")
    one = watch(("cuda:0", "cuda:1"), uuids={0: "GPU-0", 1: "GPU-gone"})
    values = one.settled()
    assert "gpu/0/util_pct" in values
    assert one.said == ["gpu 1: not observed: NVML has no GPU-gone: Not Found"]


# -- the library itself --------------------------------------------------------------------------------------

_FRESH = """
import os, dflash.observe.nvml as nvml
from dflash.observe.nvml import pynvml
try:
    pynvml.nvmlInit()
except pynvml.NVMLError as error:
    print(type(error).__name__)
else:
    print(pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlDeviceGetCount())
"""


@pytest.mark.parametrize(("present", "printed"), [(True, "999.1 0"), (False, "NVMLError_LibraryNotFound")])
def test_the_real_loader(library: Path, tmp_path: Path, present: bool, printed: str) -> None:
    """A process of its own, in which the loader finds the stub, or a file that is no library."""
    folder = library.parent
    if not present:
        folder = tmp_path
        (folder / "libnvidia-ml.so.1").write_bytes(b"not a library")
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _FRESH],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.stdout.strip() == printed, done.stderr


def test_a_missing_library_is_one_log_line_of_the_observer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dflash.config import ObserveConfig
    from dflash.observe.observer import Observer
    from dflash.observe.roles import RoleMap
    from tests.observe.parts import ListSink

    def missing(name: str) -> None:
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "CDLL", missing)
    config = ObserveConfig(tick_s=0.01, flush_s=0.05, collectors=("gpu", "workers"))
    roles = RoleMap(("cuda:0",), ("cuda:1",), ((0, "GPU-0"), (1, "GPU-1")))
    with caplog.at_level(logging.WARNING):
        observer = Observer(config, tmp_path, roles, sinks=[ListSink()])
        observer.start()
        wait_until(lambda: not observer.switches()["gpu"])
        summary = observer.close()
    assert [record.message for record in caplog.records] == [
        "collector gpu is off: NVMLError_LibraryNotFound: NVML Shared Library Not Found"
    ]
    assert observer.switches() == {**dict.fromkeys(observer.switches(), False), "workers": True}
    assert list(summary.failed) == ["gpu"]
