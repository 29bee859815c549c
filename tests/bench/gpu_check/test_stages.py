"""What each stage makes of what it saw: pure readers, fed with what a GPU would give and with planted
faults."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench import cli
from bench.gpu_check import workload
from bench.gpu_check.stage import FOUND, Found, judge
from bench.gpu_check.stages import (
    attention,
    bits,
    counts,
    events,
    gate,
    mfu,
    nvml,
    overhead,
    planted,
    sanitizer,
    simulation,
    step,
    tests,
)
from bench.peers import speed
from bench.subjects.trainer.counts import Proof
from dflash.models.flops import drafter_flops, full_batch
from steptime.child_process import Ended, run_python
from steptime.records.types import Commit, ConfigRef, Machine
from steptime.syncs.scopes import Place
from tests.steptime.machine.test_machine import Nvml
from tests.steptime.make import made_receipt
from tests.waiting import HANG_S

fault = pytest.mark.fault
HERE = Place("dflash/x.py", 7, "step")


def ended(code: int | None = 0, out: str = "", err: str = "") -> Ended:
    return Ended(code, out, err, 1.0)


def clean(found: Found) -> bool:
    return found.looked_at > 0 and not found.problems


# -- counts --------------------------------------------------------------------------------------------------


def proof(**changes: Any) -> Proof:
    did = {
        ("drafter/0", "operation", HERE): 40,
        ("drafter/0", "allocator block [GPU trace]", HERE): 12,
        ("drafter/0", "device malloc [allocator counters]", HERE): 1,
    }
    counted = {name: did | changes.pop(name, {}) for name in ("off", "all")}
    losses = {"off": (5.0, 4.0), "all": (5.0, 4.0)}
    made = Proof(4, counted, {}, losses, ("modes", "GPU trace"))
    return dataclasses.replace(made, **changes)


def test_counts_that_are_as_claimed() -> None:
    found = counts.read(proof(), "bfloat16")
    assert clean(found)
    assert found.looked_at == 40
    # A block of the cache, or memory of the driver, that one arm happens to ask for is told and no problem.
    busy = {("drafter/0", "device malloc [allocator counters]", HERE): 3}
    assert clean(counts.read(proof(all=busy), "bfloat16"))


@fault
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"unavailable": ("GPU trace: no hook",)}, "not armed: GPU trace: no hook"),
        ({"off": {("drafter/0", "operation", HERE): 0}}, "the modes counted no operation"),
        (
            {"off": {("drafter/0", "allocator block [GPU trace]", HERE): 0}},
            "GPU trace counted no block of the allocator",
        ),
        ({"off": {("target/0", "stream sync [GPU trace]", HERE): 4}}, "target/0 waits for its device, 4 x"),
        ({"all": {("monitor", "float()", HERE): 2}}, "with all collectors on monitor does 2 instead of 0"),
        ({"all": {("drafter/0", "operation", HERE): 44}}, "does 44 instead of 40 x operation"),
        ({"losses": {"off": (5.0,), "all": (5.5,)}}, "different (first in step 0"),
    ],
)
def test_counts_that_are_not(changes: dict[str, Any], said: str) -> None:
    assert any(said in line for line in counts.read(proof(**changes), "bfloat16").problems)


# -- the simulation of `syncs` -------------------------------------------------------------------------------

READ = simulation.Where("main", "item()", "recipe.py:9 <module>")


def test_a_simulation_that_agrees_place_by_place() -> None:
    found = simulation.read({"recipe.py": ({READ: 4}, {READ: 4})}, [])
    assert clean(found)
    assert found.looked_at == 1


@fault
@pytest.mark.parametrize(
    ("real", "simulated"),
    [({READ: 4}, {}), ({}, {READ: 4}), ({READ: 4}, {READ: 3}), ({READ: 4}, {READ._replace(role="x"): 4})],
)
def test_a_simulation_that_misses_invents_or_miscounts(
    real: simulation.Counts, simulated: simulation.Counts
) -> None:
    found = simulation.read({"recipe.py": (real, simulated)}, [])
    assert any("on the GPU" in line for line in found.problems)
    assert not clean(simulation.read({}, [])), "nothing was looked at"


@fault
def test_a_run_counted_in_the_other_way_proves_nothing() -> None:
    tree = {"simulated": True, "counts": [{**READ._asdict(), "where": READ.place, "count": 4}]}
    assert simulation.counts_of(tree, simulated=True) == {READ: 4}
    with pytest.raises(ValueError, match="simulated is True"):
        simulation.counts_of(tree, simulated=False)


# -- planted faults and the truth table ----------------------------------------------------------------------

PREDICTED = {"item": True, "full": False, "asynchronous copy in from pageable memory": True}
TRUTH = {
    "GPU trace": {"item": {"stream sync": 1}, "full": {}},
    "CUPTI": {"item": {"stream synchronize": 1, "copy to host": 1}, "full": {"kernel": 1}},
    "copy wrappers": {"asynchronous copy in from pageable memory": {"pageable copy": 1}},
}
FAULTS = {"GPU trace": {"item": {"claimed": True, "hits": {"stream sync": 3}}}}


def test_ways_that_agree() -> None:
    found = planted.read(FAULTS, TRUTH, PREDICTED, [])
    assert clean(found)
    assert found.looked_at == 1 + 5


@fault
def test_ways_that_disagree_miss_or_are_not_there() -> None:
    blind = TRUTH | {"GPU trace": {"item": {}, "full": {"stream sync": 1}}}
    lines = planted.read(FAULTS, blind, PREDICTED, []).problems
    assert len(lines) == 4
    assert lines[0] == "item: the rules predict a wait, GPU trace counts {}"
    assert "CUPTI 1" in lines[1]
    missed = {"GPU trace": {"item": {"claimed": True, "hits": {}}}}
    assert planted.read(missed, TRUTH, PREDICTED, []).problems == ("GPU trace: planted item was not found",)
    assert "**missed**" in str(planted.read(missed, TRUTH, PREDICTED, []).tables)
    assert not clean(planted.read({}, {}, PREDICTED, []))


@fault
def test_a_way_that_is_unavailable_crashes_or_hangs_is_a_problem() -> None:
    ends = {
        "modes": ended(out=json.dumps({"item": {}})),
        "CUPTI": ended(4, err="error: CUPTI: unavailable: no package"),
        "GPU trace": ended(1, err="boom"),
        "copy wrappers": ended(None),
    }
    found, problems = planted.run_ways("module", list(ends), lambda words, limit_s: ends[words[-1]])
    assert found == {"modes": {"item": {}}}
    assert problems == [
        "CUPTI: exit code 4: error: CUPTI: unavailable: no package",
        "GPU trace: exit code 1: boom",
        "copy wrappers: not finished after 28 s",
    ]


def test_predictions_are_the_truth_table() -> None:
    from bench.syncs.faults.truth import CASES

    assert planted.predictions() == {case.name: case.waits for case in CASES}
    assert {way.device for way in planted.cuda_ways()} == {"cuda"}


# -- the race detector ---------------------------------------------------------------------------------------


def test_a_sanitized_run_that_is_clean() -> None:
    found = sanitizer.read(ended(out=f"x\n{sanitizer.MARK}drafter/0 120, target/0 80\n"))
    assert clean(found)
    assert found.looked_at == 200


@fault
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (ended(out=""), "no operation of a drafter"),
        (ended(out=f"{sanitizer.MARK}target/0 80"), "no operation of a drafter"),
        (ended(1, err="CSAN detected a possible data race on tensor\nCUDASanitizerErrors: 1"), "race: CSAN"),
        (ended(1, err="CUDASanitizerErrors: detected 1 errors"), "exit code 1: CUDASanitizerErrors"),
        (ended(None), "not finished"),
        (
            ended(out=f"{sanitizer.MARK}drafter/0 1, target/0 1", err="Exception in callback for CUDA event"),
            "the detector itself failed",
        ),
    ],
)
def test_a_sanitized_run_that_is_not(end: Ended, said: str) -> None:
    assert any(said in line for line in sanitizer.read(end).problems)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """CPU tensors taken for CUDA ones, on the stream that each thread says."""
    from torch.cuda import _sanitizer

    here = threading.local()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=here.stream))

    def handle(
        self: Any, value: Any, is_write: bool, metadata_only: bool, name: Any = None, is_output: bool = False
    ) -> None:
        if isinstance(value, torch.Tensor):
            pointer = value.data_ptr()
            if is_write:
                self.dataptrs_written.add(pointer)
            elif not metadata_only:
                self.dataptrs_read.add(pointer)
            self.tensor_aliases.setdefault(pointer, []).append(name or "")
            if is_output:
                self.outputs.add(pointer)

    monkeypatch.setattr(_sanitizer.ArgumentHandler, "_handle_argument", handle)
    return here


@fault
@pytest.mark.parametrize("ordered", [False, True])
def test_a_race_between_two_workers_threads_is_found(streams: threading.local, ordered: bool) -> None:
    """Entered in the main thread alone, as the variable does by itself, the detector would see neither."""
    from torch.cuda._sanitizer import CUDASanitizerErrors, EventHandler

    handler = EventHandler()
    scopes = sanitizer.SanitizerScopes(handler)
    hidden = torch.zeros(4)
    errors: list[BaseException] = []

    def worker(role: str, stream: int, act: Callable[[], object]) -> None:
        def run() -> None:
            streams.stream = stream
            try:
                with scopes.enter(role):
                    act()
            except CUDASanitizerErrors as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(HANG_S)

    for stream in (11, 12):
        handler._handle_stream_creation(stream)
    handler._handle_event_creation(1)
    worker("target/0", 11, lambda: hidden.fill_(1.0))
    if ordered:
        handler._handle_event_record(1, 11)
        handler._handle_event_wait(1, 12)
    worker("drafter/0", 12, lambda: hidden.add_(1.0))
    assert bool(errors) is not ordered
    assert scopes.operations == {"target/0": 1, "drafter/0": 1}


# -- bits ----------------------------------------------------------------------------------------------------


def launch(*losses: float) -> Ended:
    return ended(out=json.dumps([repr(loss) for loss in losses]))


def test_two_launches_with_equal_bits() -> None:
    found = bits.read([launch(5.1, 4.2), launch(5.1, 4.2)], "float32")
    assert clean(found)
    assert found.notes == ("equal bit for bit",)


@fault
@pytest.mark.parametrize(
    ("second", "said"),
    [
        (launch(5.1, 4.2000001), "apart by rounding alone"),
        (launch(5.1, 4.3), "different (first in step 1"),
        (launch(5.1), "different"),
        (ended(2, err="error: no data"), "launch 2: exit code 2: error: no data"),
        (ended(None), "launch 2: not finished"),
    ],
)
def test_two_launches_without(second: Ended, said: str) -> None:
    found = bits.read([launch(5.1, 4.2), second], "float32")
    assert said in found.problems[0]


def test_no_loss_is_no_equality() -> None:
    assert not clean(bits.read([launch(), launch()], "float32"))


# -- steps, MFU and attention --------------------------------------------------------------------------------

SMALL = speed.Shape(hidden=64, intermediate=128, layers=1, vocab=128, context=48, anchors=4, head_dim=16)


def test_the_same_drafter_through_a_compiler_trains_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the stage makes them, on the CPU and with a compiler that changes nothing: the written-out pass
    beside the modules."""
    monkeypatch.setattr(step, "WARMUP", 1)
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda module, backend: (compiled.append(backend), module)[1])
    made = {name: make for name, make in step.makers(SMALL, "cpu").items() if name != step.SPECFORGE}
    steps, problems, notes = step.make_steps(made)
    assert (list(steps), problems, len(notes)) == ([step.OURS, step.COMPILED], [], 2)
    assert compiled == ["inductor"]
    losses = [float(one()) for one in steps.values()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    found = step.read(speed.in_turns(steps, 4), 96, problems, notes)
    assert clean(found)
    assert found.looked_at == 8


@fault
def test_a_trainer_that_cannot_run_is_named_and_the_others_are_timed() -> None:
    def broken() -> Any:
        raise RuntimeError("no triton\nmore")

    _, problems, _ = step.make_steps({step.OURS: lambda: (lambda: None, 1), step.COMPILED: broken})
    assert problems == ["torch.compile: cannot run: RuntimeError: no triton"]
    found = step.read({step.OURS: [1.0, 1.0]}, 96, problems, [])
    assert found.problems == ("torch.compile: cannot run: RuntimeError: no triton",)
    assert step.read({}, 96, [], []).problems == ("ours: was not timed", "torch.compile: was not timed")


@fault
def test_no_trainer_that_runs_is_no_crash_of_the_stage() -> None:
    found = step.read({}, 96, ["ours: cannot run: x", "torch.compile: cannot run: y"], [])
    assert found.looked_at == 0
    assert len(found.problems) == 2


def test_the_ratio_is_taken_inside_rounds() -> None:
    seconds = {step.OURS: [1.0, 2.0, 4.0], step.COMPILED: [1.5, 3.0, 6.0]}
    (table,) = step.read(seconds, 100, [], []).tables
    assert table.rows[1] == ("torch.compile", "3000.00", "33", "1.50 (1.50 to 1.50)")


class Products(TorchDispatchMode):
    """Adds up the FLOPs of products of two matrices, those in place and into a buffer included."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm_, torch.ops.aten.addmm):
            left, right = [one for one in args if isinstance(one, torch.Tensor)][-2:]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


def test_the_flops_of_a_step_are_those_of_its_products() -> None:
    for shape in (SMALL, dataclasses.replace(SMALL, layers=2, taps=2, intermediate=192)):
        run, _ = speed.make_step(shape, attention="dense")
        with Products() as counted:
            run()
        # In its first layer our pass projects each distinct row once: anchors, and the mask token. What was
        # asked for is counted, not what was done.
        rows, distinct = shape.batch * shape.anchors * shape.block, shape.batch * shape.anchors + 1
        projected = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
        drafter = speed.drafter_shape(shape)
        pairs = full_batch(drafter, shape.batch, shape.context, shape.anchors).pairs
        attention = pairs * drafter_flops(drafter).pair
        assert mfu.step_flops(shape) - attention == counted.flops + 6 * (rows - distinct) * projected


def test_mfu() -> None:
    found = mfu.read({4096: 5e14, 8192: 6e14}, int(3e12), 0.01)
    assert clean(found)
    assert found.notes == ("MFU 50.0% (3.000 TFLOP in 10.00 ms)",)


@fault
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (({4096: 6e14}, 0, 0.01), "no FLOP"),
        (({}, 10**12, 0.01), "the matmul rate was not measured"),
        (({4096: 1e12}, 10**12, 0.01), "a share of 10000% cannot be"),
    ],
)
def test_an_mfu_that_cannot_be(arguments: tuple[Any, ...], said: str) -> None:
    assert any(said in line for line in mfu.read(*arguments).problems)


FLEX = {"triton_tem_fused_flex_attention_0": 100.0, "triton_tem_fused_flex_attention_backward_1": 220.0}


def test_flex_attention_both_ways() -> None:
    found = attention.read(FLEX | {"ampere_bf16_gemm": 900.0}, [])
    assert clean(found)
    assert found.tables[0].rows[0] == ("ampere_bf16_gemm", "-", "900")


@fault
@pytest.mark.parametrize(
    ("times", "warned", "said"),
    [
        ({}, [], "no forward kernel of flex attention ran"),
        ({"triton_tem_fused_flex_attention_0": 1.0}, [], "no backward kernel"),
        ({"fmha_cutlassF_bf16": 1.0}, [], "no forward kernel"),
        (FLEX, ["flex_attention called without torch.compile() - this will use an unfused"], "torch warned"),
    ],
)
def test_attention_that_was_another(times: dict[str, float], warned: list[str], said: str) -> None:
    assert any(said in line for line in attention.read(times, warned).problems)


def test_kernels_are_named() -> None:
    for kernel, kind in (
        ("void pytorch_flash::flash_fwd_kernel<...>", "flash"),
        ("fmha_cutlassB_bf16_aligned_64x64_k64_sm80", "memory-efficient"),
        ("cunn_SoftMaxForward", "softmax apart"),
        ("elementwise_kernel", ""),
    ):
        assert attention.kind_of(kernel) == kind


# -- overhead and gate ---------------------------------------------------------------------------------------


def receipt(**changes: Any) -> dict[str, Any]:
    cost = {"name": "profile", "estimate": None, "added": dict.fromkeys(overhead.ADDED, 0)}
    arm = {"armed": True, "operations": 40, "unavailable": []}
    tree: dict[str, Any] = {
        "verdict": "unresolved",
        "reasons": ["profile is open"],
        "counts": {"off": dict(arm), "all": dict(arm)},
        "collectors": [dict(cost)],
        "all": {**cost, "name": "all", "estimate": {"percent": 0.5, "low": -1.0, "high": 2.0}},
        "losses_equal": True,
        "pairs": [{}, {}, {}],
    }
    return tree | changes


@pytest.mark.parametrize("read", [overhead.read, gate.read])
def test_a_receipt_that_is_as_claimed(read: Callable[..., Found]) -> None:
    for code, verdict in ((0, "within"), (3, "unresolved")):
        found = read(ended(code), receipt(verdict=verdict))
        assert clean(found)
        assert found.looked_at == 3


def test_the_receipts_of_the_harness_are_read() -> None:
    """Written by the harness itself: names that change there are not silently missed here."""
    machine = Machine("cpu-x", "x", 2, (), {})
    armed = made_receipt(machine, ConfigRef("tiny", "d"), Commit("c"))
    uncounted = dataclasses.replace(armed, counts={})
    for read in (overhead.read, gate.read):
        assert clean(read(ended(0), json.loads(armed.to_json())))
        assert not clean(read(ended(0), json.loads(uncounted.to_json())))
    (table,) = overhead.read(ended(0), json.loads(armed.to_json())).tables
    assert table.rows[-1][0] == "all"


@pytest.mark.parametrize(
    ("module", "stage"),
    [(overhead, overhead.OverheadStage()), (gate, gate.GateStage())],
    ids=["overhead", "gate"],
)
def test_a_stage_calls_a_command_as_it_is_today(
    module: Any,
    stage: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(workload, "settings", lambda gpus: ['target.devices=["cuda:0"]'])
    monkeypatch.setattr(
        module, "run_python", lambda words, limit_s: (called.append(list(words)), ended(2, err="boom"))[1]
    )
    assert stage.look().problems == ("no receipt: exit code 2: boom",)
    assert called[0][:2] == ["-m", "bench"]
    assert called[0][2] == stage.name
    capsys.readouterr()
    assert cli.main([stage.name, "--help"]) == 0
    known = capsys.readouterr().out
    assert all(word in known for word in called[0] if word.startswith("--"))


UNARMED = {"off": {"armed": False, "operations": None, "unavailable": ["GPU trace: no hook"]}}


@fault
@pytest.mark.parametrize("read", [overhead.read, gate.read])
@pytest.mark.parametrize(
    ("code", "tree", "said"),
    [
        (2, None, "no receipt: exit code 2: boom"),
        (None, None, "no receipt: not finished"),
        (1, receipt(verdict="over"), "over (exit code 1): profile is open"),
        (4, receipt(verdict="invalid"), "invalid (exit code 4)"),
        (0, receipt(counts=UNARMED), "GPU trace: no hook"),
        (0, receipt(counts={}), "was counted"),
    ],
)
def test_a_receipt_that_is_not(
    read: Callable[..., Found], code: int | None, tree: dict[str, Any] | None, said: str
) -> None:
    assert any(said in line for line in read(ended(code, err="boom"), tree).problems)


@fault
def test_an_overhead_that_adds_or_does_not_know() -> None:
    for value, said in ((2, "profile adds 2 syncs"), (None, "profile: syncs were not counted")):
        added = dict.fromkeys(overhead.ADDED, 0) | {"syncs": value}
        cost = {"name": "profile", "estimate": None, "added": added}
        assert overhead.read(ended(), receipt(collectors=[cost])).problems == (said,)
    for equal in (False, None):
        assert overhead.read(ended(), receipt(losses_equal=equal)).problems


@fault
def test_a_gate_that_calls_its_own_commit_slower() -> None:
    assert "slower (exit code 3)" in gate.read(ended(3), receipt(verdict="slower")).problems[0]


# -- NVML, events, tests -------------------------------------------------------------------------------------

OURS = {
    "GPU-1": {
        "uuid": "GPU-1",
        "name": "NVIDIA H200",
        "driver_version": "580.1",
        "memory.used": "9536.7",
        "temperature.gpu": "55.0",
        "power.draw": "400.0",
        "clocks.sm": "1800",
    }
}
SMI = "GPU-1, NVIDIA H200, 580.1, 9537, 56, 420.12, 1785\nGPU-2, NVIDIA H200, 580.1, 3, 30, 70.0, 210\n"


def test_nvml_and_nvidia_smi_agree() -> None:
    found = nvml.read(OURS, ended(out=SMI), [])
    assert clean(found)
    assert found.looked_at == 6
    assert clean(nvml.read(OURS, ended(out=SMI.replace("420.12", "[N/A]")), []))


@fault
@pytest.mark.parametrize(
    ("smi", "said"),
    [
        (ended(out=SMI.replace("9537", "10.0")), "memory.used: NVML 9536.7, nvidia-smi 10.0"),
        (ended(out=SMI.replace("56,", "75,")), "temperature.gpu"),
        (ended(out=SMI.replace("580.1", "570")), "driver_version"),
        (ended(out=SMI.replace("GPU-1", "GPU-9")), "nvidia-smi does not show GPU-1"),
        (ended(9, err="failed to communicate with the driver"), "exit code 9: failed to communicate"),
    ],
)
def test_nvml_and_nvidia_smi_disagree(smi: Ended, said: str) -> None:
    assert any(said in line for line in nvml.read(OURS, smi, []).problems)
    assert not clean(nvml.read({}, smi, []))


def test_ours_by_uuid_asks_nvml_for_the_gpus_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    import steptime.nvml
    from dflash.observe import nvml as readers

    fake = Nvml(["GPU-1", "GPU-2"])
    monkeypatch.setitem(__import__("sys").modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(steptime.nvml, "cuda_uuid", lambda index: f"GPU-{2 - index}")
    readings = {
        "memory": lambda handle: {"mem_used_gb": 10.0},
        "power": lambda handle: {"power_w": 400.0},
        "temperature": lambda handle: {"temp_c": 55.0},
    }
    monkeypatch.setattr(readers, "READINGS", readings)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    found, problems = nvml.ours_by_uuid()
    assert problems == ["gpu 0: NVML's GPU-1 is CUDA's GPU-2", "gpu 1: NVML's GPU-2 is CUDA's GPU-1"]
    assert clean(nvml.read({"GPU-1": found["GPU-1"]}, ended(out=SMI), []))


def test_events() -> None:
    assert clean(events.read({"record pair": 3200.0}))
    assert not clean(events.read({"record pair": 0.0}))
    assert not clean(events.read({}))


@pytest.mark.gpu
def test_the_cost_of_an_event_pair_is_measured() -> None:
    assert events.event_cost()["record pair"] > 0


def report(*cases: str) -> str:
    """JUnit's form, as pytest writes it."""
    named = (
        f'<testcase classname="tests.x" name="test_{n}">{case}</testcase>' for n, case in enumerate(cases)
    )
    inner = "".join(named)
    return f'<?xml version="1.0"?><testsuites><testsuite name="pytest">{inner}</testsuite></testsuites>'


def test_gpu_tests() -> None:
    found = tests.read(ended(), report("", ""))
    assert clean(found)
    assert found.looked_at == 2


@fault
@pytest.mark.parametrize(
    ("end", "xml", "said"),
    [
        (ended(5), report(), "exit code 5"),
        (ended(), report(), "it looked at nothing"),
        (ended(1), report("", '<failure message="boom"/>'), "failure: tests.x.test_1"),
        (ended(1), report('<error message="boom"/>'), "error: tests.x.test_0"),
        (ended(), report("", '<skipped type="pytest.skip"/>'), "skipped: tests.x.test_1"),
        (ended(None), None, "not finished"),
        (ended(), None, "no report"),
    ],
)
def test_gpu_tests_that_show_less(end: Ended, xml: str | None, said: str) -> None:
    outcome = judge(tests.GpuTestsStage(), ended(), FOUND.dump_json(tests.read(end, xml)))
    assert outcome.red
    assert any(said in line for line in outcome.problems)


@pytest.mark.slow
def test_the_report_that_pytest_writes_is_read(tmp_path: Path) -> None:
    code = "import pytest\ndef test_one(): pass\n@pytest.mark.skip\ndef test_two(): pass\n"
    (tmp_path / "test_few.py").write_text(code)
    path = tmp_path / "few.xml"
    # The names in the report are those below the root, which pytest would look for from where this runs.
    where = [str(tmp_path), f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    end = run_python(["-m", "pytest", *where, f"--junitxml={path}"], limit_s=HANG_S)
    found = tests.read(end, path.read_text())
    assert (end.code, found.looked_at, found.problems) == (0, 1, ("skipped: test_few.test_two",))


@pytest.mark.parametrize(
    ("gpus", "drafters"), [(1, '["cuda:0"]'), (2, '["cuda:1"]'), (8, '["cuda:1", "cuda:2"]')]
)
def test_the_workload_spreads_over_the_gpus(gpus: int, drafters: str) -> None:
    assert workload.devices(gpus) == ['target.devices=["cuda:0"]', f"drafter.devices={drafters}"]


def test_the_workload_trains_without_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a launch of the `bits` stage does, on the CPU."""
    made = workload.data(tmp_path)
    cpu = ['target.devices=["cpu"]', 'drafter.devices=["cpu:1"]', "data.batch_size=1", "drafter.anchors=4"]
    monkeypatch.setattr(workload, "settings", lambda gpus: [*cpu, *made])
    monkeypatch.setattr(bits, "STEPS", 2)
    bits.main()
    end = ended(out=capsys.readouterr().out)
    assert clean(bits.read([end, end], "float32"))
    assert len(json.loads(end.out)) == 2


@pytest.mark.slow
def test_every_worker_is_under_the_detector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the `sanitizer` stage does, on the CPU, whose tensors the detector does not look at."""
    from torch.cuda import _sanitizer

    made = workload.data(tmp_path)
    cpu = ['target.devices=["cpu"]', 'drafter.devices=["cpu:1"]', "data.batch_size=1", "drafter.anchors=4"]
    monkeypatch.setattr(workload, "settings", lambda gpus: [*cpu, *made])
    monkeypatch.setattr(sanitizer, "STEPS", 2)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    off = SimpleNamespace(enabled=False, dispatch=None)
    monkeypatch.setattr(_sanitizer, "cuda_sanitizer", off)
    with pytest.raises(RuntimeError, match="nothing would be looked at"):
        sanitizer.main()
    on = SimpleNamespace(enabled=True, dispatch=SimpleNamespace(event_handler=_sanitizer.EventHandler()))
    monkeypatch.setattr(_sanitizer, "cuda_sanitizer", on)
    sanitizer.main()
    found = sanitizer.read(ended(out=capsys.readouterr().out))
    assert clean(found)
    assert {note.partition(":")[0] for note in found.notes} >= {"target/0", "drafter/0", "prefetcher"}
