"""`pytest bench/` as pytest-benchmark's users type it, on the real conftest and tests, with receipts made up
for the purpose."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.pytest_benchmark import replay
from dflash.config import load_config
from steptime.baselines import recording
from steptime.baselines.store import Session
from steptime.machine import commit, identity
from steptime.records.receipt import Receipt
from steptime.records.types import Commit, ConfigRef
from tests.steptime.make import made_receipt

pytest_plugins = ["pytester"]
pytestmark = pytest.mark.filterwarnings("ignore::pytest_benchmark.logger.PytestBenchmarkWarning")

ROOT = Path(__file__).parents[3]
TINY = ROOT / "configs/cpu-tiny.toml"
REFERENCE = ROOT / "configs/pro6000x8-qwen3.6-27b.toml"
HERE = identity.describe([("NVIDIA H200", "aaaa")], "AMD EPYC", 16, {"python": "3.11.7", "torch": "2.13.0"})
ELSEWHERE = identity.describe(
    [("NVIDIA H200", "bbbb")], "AMD EPYC", 16, {"python": "3.11.7", "torch": "2.13.0"}
)
COMMIT = Commit("a" * 40)
FAILED, USAGE = 1, 4
QUIET = ("-pno:cacheprovider", "-pno:hypothesispytest", f"--rootdir={ROOT}")
"""Hypothesis's plugin would be imported anew in every run."""


def ref(path: Path = TINY) -> ConfigRef:
    config = load_config(path)
    return ConfigRef(config.name, config.digest())


class Bench:
    """Runs `pytest bench/` in an empty folder, on a machine and a commit of our choosing."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pytester, self.path, self.monkeypatch = pytester, pytester.path, monkeypatch
        monkeypatch.setattr(commit, "read_commit", lambda *_: COMMIT)
        monkeypatch.delenv("BENCH_REQUIRE_CUDA", raising=False)
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # of the tests themselves
        self.on(HERE)

    def on(self, where: identity.Machine) -> None:
        self.machine = where
        self.monkeypatch.setattr(identity, "identify", lambda *_: where)

    def receipt(self, name: str = "receipt.json", config: Path = TINY, **changes: Any) -> Path:
        path = self.path / name
        path.write_text(made_receipt(changes.pop("machine", HERE), ref(config), COMMIT, **changes).to_json())
        return path

    def store(self, *values: float, arms: bool = True) -> Path:
        """A measured baseline of three sessions for this machine."""
        made = [
            Session(v, "2026-11-29", dict.fromkeys(("off", "all", "profile", "pipeline"), v)) for v in values
        ]
        return recording.write(recording.build(HERE, ref(), made, "b" * 40), self.path / "baselines")

    def run(self, *arguments: str, receipt: Path | None = None, config: Path = TINY) -> pytest.RunResult:
        given = receipt if receipt is not None else self.path / "receipt.json"
        return self.pytester.runpytest_inprocess(
            str(ROOT / "bench/test_throughput.py"),
            *QUIET,
            f"--bench-config={config}",
            f"--bench-receipt={given}",
            f"--bench-baselines={self.path / 'baselines'}",
            *arguments,
        )

    def saved(self, name: str, **changes: Any) -> Path:
        """The --benchmark-json of a run."""
        path = self.path / name
        assert (
            self.run(f"--benchmark-json={path}", receipt=self.receipt("saved-receipt.json", **changes)).ret
            == 0
        )
        return path


@pytest.fixture
def bench(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(pytester, monkeypatch)
    made.receipt()
    return made


def text(result: pytest.RunResult) -> str:
    return "\n".join([*result.outlines, *result.errlines])


def usage_error(result: pytest.RunResult, message: str) -> None:
    """Exit 4 with the message, and no test ran."""
    assert result.ret == USAGE, text(result)
    assert message in text(result)
    assert "passed" not in text(result)


@pytest.mark.slow
def test_every_arm_is_a_benchmark_in_tokens_per_second(bench: Bench) -> None:
    result = bench.run("--benchmark-json=out.json")
    assert result.ret == 0
    result.assert_outcomes(passed=6)
    tree = json.loads((bench.path / "out.json").read_text())
    by_name = {entry["name"]: entry for entry in tree["benchmarks"]}
    assert set(by_name) == {f"test_tokens[{name}]" for name in ("off", "profile", "pipeline", "all")}
    receipt = Receipt.read(bench.path / "receipt.json")
    seconds = [s.seconds / s.tokens for s in replay.segments(receipt, "profile")]
    stats = by_name["test_tokens[profile]"]["stats"]
    assert stats["data"] == pytest.approx(seconds, rel=1e-12)
    assert stats["ops"] == pytest.approx(len(seconds) / sum(seconds))
    assert by_name["test_tokens[profile]"]["extra_info"]["verdict"] == "within"
    assert tree["machine_info"]["key"] == HERE.key
    assert tree["dflash_bench"]["config"]["name"] == "cpu-tiny"
    assert "replayed_seconds_per_token" in by_name["test_tokens[off]"]["options"]["timer"]
    assert "OPS is tokens per second" in text(result)


def test_missing_baseline_names_the_command_that_records_it(bench: Bench) -> None:
    usage_error(
        bench.run("--benchmark-compare"), "python -m bench baseline record --config configs/cpu-tiny.toml"
    )


def test_bare_compare_finds_the_stored_baseline(bench: Bench) -> None:
    speed = Receipt.read(bench.path / "receipt.json").throughput
    assert speed is not None
    bench.store(*(speed.tokens_per_second * f for f in (1.0, 1.01, 0.99)))
    result = bench.run("--benchmark-compare")
    assert result.ret == 0, text(result)
    result.assert_outcomes(passed=6)
    assert "baseline baselines/1x-h200" in text(result)
    assert "test_tokens[off] (NOW)" in text(result)


def test_a_regression_is_a_failing_test_with_the_table(bench: Bench) -> None:
    speed = Receipt.read(bench.path / "receipt.json").throughput
    assert speed is not None
    bench.store(*(1.2 * speed.tokens_per_second * f for f in (1.0, 1.01, 0.99)))
    result = bench.run("--benchmark-compare", "--junit-xml=junit.xml")
    assert result.ret == FAILED
    result.assert_outcomes(passed=5, failed=1)
    assert "baseline tok/s" in text(result)
    assert "-16." in text(result)
    failures = [
        case
        for case in ET.parse(bench.path / "junit.xml").iter("testcase")
        if case.find("failure") is not None
    ]
    assert [case.get("name") for case in failures] == ["test_tokens[off]"]
    assert "PerformanceRegression" not in text(result)


def test_another_machines_baseline_is_refused_before_any_test(bench: Bench) -> None:
    bench.store(1000.0, 1010.0, 990.0)
    bench.on(ELSEWHERE)
    bench.receipt(machine=ELSEWHERE)
    usage_error(bench.run("--benchmark-compare"), "belongs to another machine")


def test_newer_python_and_torch_keep_the_baseline_and_are_shown(bench: Bench) -> None:
    speed = Receipt.read(bench.path / "receipt.json").throughput
    assert speed is not None
    bench.store(*(speed.tokens_per_second * f for f in (1.0, 1.01, 0.99)))
    bench.on(identity.describe(HERE.gpus, HERE.cpu_model, HERE.cpus, {"python": "3.13.1", "torch": "2.13.0"}))
    result = bench.run("--benchmark-compare")
    assert result.ret == 0, text(result)
    assert "versions differ from the compared run: python 3.11.7 -> 3.13.1" in text(result)


@pytest.mark.slow
def test_the_stated_figure_is_a_floor_for_its_machine(bench: Bench) -> None:
    reference = identity.describe(
        [("NVIDIA RTX PRO 6000 Blackwell", f"{i}") for i in range(8)], "AMD EPYC", 96, {}
    )
    bench.on(reference)
    for speed, code_ in ((20.0, 0), (10.0, FAILED)):
        given = bench.receipt(machine=reference, config=REFERENCE, speed=speed)
        result = bench.run(
            f"--bench-baselines={ROOT / 'baselines'}", "--benchmark-compare", receipt=given, config=REFERENCE
        )
        assert result.ret == code_, text(result)
        assert "baseline.json" in text(result)
        assert "14,200 tokens/s, stated" in text(result)
    path = ROOT / "baselines/pro6000x8/qwen3.6-27b.json"
    result = bench.run(f"--benchmark-compare={path}", receipt=given, config=REFERENCE)
    assert result.ret == FAILED
    bench.on(HERE)
    usage_error(
        bench.run(f"--benchmark-compare={path}", receipt=bench.receipt()), "no baseline for config 'cpu-tiny'"
    )


@pytest.mark.slow
def test_compare_with_a_path_shows_and_says_that_it_does_not_judge(bench: Bench) -> None:
    saved = bench.saved("before.json", speed=2.0)
    result = bench.run(f"--benchmark-compare={saved}")
    assert result.ret == 0, text(result)
    assert "shown, not judged: add --benchmark-compare-fail=mean:5%" in text(result)
    assert "test_tokens[off] (NOW)" in text(result)


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "code_"), [(1.0, 0), (1.04, 0), (1.06, FAILED)])
def test_compare_fail_judges_in_the_tests(bench: Bench, speed: float, code_: int) -> None:
    saved = bench.saved("before.json", speed=speed)
    result = bench.run(f"--benchmark-compare={saved}", "--benchmark-compare-fail=mean:5%")
    assert result.ret == code_, text(result)
    if code_:
        result.assert_outcomes(passed=2, failed=4)
        assert "before tok/s" in text(result)
        assert "PerformanceRegression" not in text(result)


@pytest.mark.slow
def test_benchmarks_of_other_files_are_judged_too(bench: Bench) -> None:
    """The plugin's own judging is switched off, so ours must reach every benchmark under bench/."""
    other = ["bench/test_hot_path.py::test_one", "bench/test_throughput.py::test_tokens[off]"]
    saved = bench.saved("before.json")
    tree = json.loads(saved.read_text())
    tree["benchmarks"] = [
        entry | {"fullname": name} for entry, name in zip(tree["benchmarks"], other, strict=False)
    ]
    saved.write_text(json.dumps(tree))
    usage_error(
        bench.run(f"--benchmark-compare={saved}", str(ROOT / "bench/test_throughput.py")),
        "bench/test_hot_path.py::test_one",
    )
    result = bench.run(
        f"--benchmark-compare={saved}", "--benchmark-compare-fail=mean:5%", "-k", "off", "--allow-incomplete"
    )
    assert result.ret == 0, text(result)


@pytest.mark.slow
def test_every_repeated_expression_counts(bench: Bench) -> None:
    """pytest-benchmark keeps the last one alone."""
    saved = bench.saved("before.json", speed=1.1)
    arguments = [
        f"--benchmark-compare={saved}",
        "--benchmark-compare-fail=mean:5%",
        "--benchmark-compare-fail=max:100%",
    ]
    assert bench.run(*arguments).ret == FAILED
    assert bench.run(arguments[0], *arguments[2:]).ret == 0


def test_compare_fail_alone_is_refused(bench: Bench) -> None:
    usage_error(
        bench.run("--benchmark-compare-fail=mean:5%"), "--benchmark-compare-fail needs --benchmark-compare"
    )


def test_a_fraction_of_a_percent_is_refused_by_the_plugin(bench: Bench) -> None:
    assert bench.run("--benchmark-compare", "--benchmark-compare-fail=mean:2.5%").ret == USAGE


@pytest.mark.slow
@pytest.mark.parametrize("given", ["absent.json", "0007", "nothing/here"])
def test_nothing_to_compare_with_is_an_error(bench: Bench, given: str) -> None:
    usage_error(bench.run(f"--benchmark-compare={given}", "-W", "error"), f"{given}: no such run")


def test_a_folder_as_the_value_is_an_argument_swallowed(bench: Bench) -> None:
    (bench.path / "bench").mkdir()
    usage_error(bench.run("--benchmark-compare", "bench"), "put it last (pytest bench/ --benchmark-compare)")


def test_the_folder_swallowed_is_found_from_the_root_too(bench: Bench) -> None:
    """Then `bench/` is no argument any more, and its conftest is not loaded."""
    result = bench.pytester.runpytest_inprocess(
        *QUIET, f"--benchmark-compare={ROOT / 'bench'}", str(ROOT / "conftest.py")
    )
    assert result.ret == USAGE
    assert "put it last" in text(result)


@pytest.mark.parametrize("option", ["--benchmark-disable", "--benchmark-skip", "--collect-only"])
def test_comparing_nothing_is_refused(bench: Bench, option: str) -> None:
    bench.store(1000.0, 1010.0, 990.0)
    usage_error(bench.run("--benchmark-compare", option), "would compare nothing")


@pytest.mark.slow
def test_a_deselected_arm_is_refused(bench: Bench) -> None:
    saved = bench.saved("before.json")
    usage_error(
        bench.run(f"--benchmark-compare={saved}", "-k", "off or complete"),
        "incomplete: bench/test_throughput.py::test_tokens",
    )
    result = bench.run(f"--benchmark-compare={saved}", "-k", "off or complete", "--allow-incomplete")
    assert result.ret == 0, text(result)


@pytest.mark.slow
def test_a_collector_that_is_gone_is_refused(bench: Bench) -> None:
    saved = bench.saved("before.json", collectors=("profile", "pipeline", "gpu"))
    usage_error(bench.run(f"--benchmark-compare={saved}"), "test_tokens[gpu]")


@pytest.mark.slow
def test_a_new_collector_is_not_passed_in_silence(bench: Bench) -> None:
    saved = bench.saved("before.json", collectors=("profile",))
    result = bench.run(f"--benchmark-compare={saved}", "--benchmark-compare-fail=mean:5%")
    assert result.ret == FAILED
    assert "holds nothing to compare this test with" in text(result)


@pytest.mark.slow
def test_other_machines_runs_are_refused_or_shown_unjudged(bench: Bench) -> None:
    saved = bench.saved("before.json", speed=2.0)
    bench.on(ELSEWHERE)
    bench.receipt(machine=ELSEWHERE)
    check = "--benchmark-compare-fail=mean:5%"
    usage_error(bench.run(f"--benchmark-compare={saved}", check), "it belongs to another machine")
    shown = bench.run(f"--benchmark-compare={saved}", check, "--allow-machine-mismatch")
    assert shown.ret == 0, text(shown)
    assert "shown, not judged: it belongs to another machine" in text(shown)


@pytest.mark.slow
def test_a_file_of_another_config_or_tool_is_refused(bench: Bench) -> None:
    saved = bench.saved("before.json")
    tree = json.loads(saved.read_text())
    other = bench.path / "other.json"
    for change, message in (
        (lambda t: t["dflash_bench"]["config"].update(hash="f"), "recorded with config cpu-tiny f"),
        (lambda t: t.pop("dflash_bench"), "not recorded by this harness"),
        (lambda t: t["machine_info"].pop("key"), "not recorded by this harness"),
    ):
        damaged = json.loads(json.dumps(tree))
        change(damaged)
        other.write_text(json.dumps(damaged))
        usage_error(bench.run(f"--benchmark-compare={other}"), message)


@pytest.mark.slow
def test_autosaved_runs_are_found_from_another_python(bench: Bench) -> None:
    assert bench.run("--benchmark-autosave").ret == 0
    (folder,) = (bench.path / ".benchmarks" / HERE.key).iterdir()
    folder.rename(folder.with_name("Linux-CPython-3.99-64bit"))
    result = bench.run("--benchmark-compare=0001", "--benchmark-compare-fail=mean:5%")
    assert result.ret == 0, text(result)
    assert "test_tokens[off] (NOW)" in text(result)


@pytest.mark.slow
def test_a_saved_regression_does_not_become_the_baseline(bench: Bench) -> None:
    """With the plugin alone the second run compares with the first, and passes."""
    speed = Receipt.read(bench.path / "receipt.json").throughput
    assert speed is not None
    bench.store(*(1.2 * speed.tokens_per_second * f for f in (1.0, 1.01, 0.99)))
    for _ in range(2):
        assert bench.run("--benchmark-autosave", "--benchmark-compare").ret == FAILED


@pytest.mark.slow
@pytest.mark.parametrize("group_by", ["collector", "param:collector"])
def test_group_by_collector_lays_off_beside_each(bench: Bench, group_by: str) -> None:
    result = bench.run(f"--benchmark-group-by={group_by}")
    lines = text(result).splitlines()
    heads = [line for line in lines if "benchmark 'collector=" in line]
    assert [head.split("'")[1] for head in heads] == [
        "collector=profile",
        "collector=pipeline",
        "collector=all",
    ]
    assert sum(line.startswith("test_tokens[off]") for line in lines) == 3
    assert bench.run("--benchmark-group-by=func").ret == 0


@pytest.mark.slow
def test_a_collector_over_budget_fails_its_own_test(bench: Bench) -> None:
    result = bench.run(receipt=bench.receipt("slow.json", costs={"profile": 0.02}))
    assert result.ret == FAILED
    result.assert_outcomes(passed=4, failed=2)
    assert "profile: over: it costs" in text(result)
    assert "90% interval" in text(result)
    assert bench.run("--benchmark-only", receipt=bench.path / "slow.json").ret == FAILED


@pytest.mark.slow
def test_not_resolved_is_an_expected_failure_and_strict_makes_it_one(bench: Bench) -> None:
    noisy = bench.receipt("noisy.json", noise=0.05)
    result = bench.run("-rx", receipt=noisy)
    assert result.ret == 0, text(result)
    result.assert_outcomes(passed=5, xfailed=1)
    assert "not resolved" in text(result)
    assert bench.run("--bench-strict", receipt=noisy).ret == FAILED


@pytest.mark.slow
def test_an_invalid_run_fails_every_arm(bench: Bench) -> None:
    result = bench.run(receipt=bench.receipt("bad.json", faults=("trainer crashed after 3 segments",)))
    assert result.ret == FAILED
    result.assert_outcomes(passed=2, failed=4)
    assert "invalid: trainer crashed after 3 segments" in text(result)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b.on(ELSEWHERE), "measured on another machine"),
        (
            lambda b: b.monkeypatch.setattr(commit, "read_commit", lambda *_: Commit("c" * 40)),
            "it is stale: measured at commit aaaa",
        ),
        (lambda b: b.receipt(config=REFERENCE), "measured with config pro6000x8-qwen3.6-27b"),
        (lambda b: (b.path / "receipt.json").write_text("{}"), "schema None is not"),
        (lambda b: (b.path / "receipt.json").unlink(), "cannot read the receipt"),
    ],
)
def test_a_receipt_that_does_not_fit_is_refused(
    bench: Bench, change: Callable[[Bench], Any], message: str
) -> None:
    change(bench)
    usage_error(bench.run(), message)


@pytest.mark.slow
def test_skipped_gpu_benchmarks(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: skipped, an error where one is required, and never a passed comparison."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def measure(*arguments: str) -> pytest.RunResult:
        return bench.pytester.runpytest_inprocess(
            str(ROOT / "bench/test_throughput.py"), *QUIET, f"--bench-config={REFERENCE}", "-rs", *arguments
        )

    skipped = measure()
    assert skipped.ret == 0
    assert skipped.parseoutcomes()["skipped"] >= 3
    assert "needs CUDA, which is not available" in text(skipped)
    monkeypatch.setenv("BENCH_REQUIRE_CUDA", "1")
    required = measure()
    assert required.ret == FAILED
    assert required.parseoutcomes().get("failed", 0) + required.parseoutcomes().get("errors", 0) >= 3
    assert "BENCH_REQUIRE_CUDA=1: " in text(required)
    usage_error(measure("-m", "not gpu"), "GPU benchmarks are deselected")
    usage_error(bench.run(), "BENCH_REQUIRE_CUDA=1, but")
    monkeypatch.delenv("BENCH_REQUIRE_CUDA")
    reference = identity.describe(
        [("NVIDIA RTX PRO 6000 Blackwell", f"{i}") for i in range(8)], "AMD EPYC", 96, {}
    )
    bench.on(reference)
    compared = measure("--benchmark-compare", "--benchmark-only")
    assert compared.ret == FAILED
    assert "of the baseline were not measured" in text(compared)


@pytest.mark.slow
def test_it_measures_when_no_receipt_is_given(bench: Bench) -> None:
    """The light subject, for real; whatever the verdict on a busy machine, figures are there and the exit
    code is a test's."""
    result = bench.pytester.runpytest_inprocess(
        str(ROOT / "bench/test_throughput.py"),
        *QUIET,
        f"--bench-config={TINY}",
        "--bench-subject=spin",
        "--bench-minutes=0.02",
        "--benchmark-json=out.json",
    )
    assert result.ret in (0, FAILED), text(result)
    tree = json.loads((bench.path / "out.json").read_text())
    assert {e["name"] for e in tree["benchmarks"]} >= {"test_tokens[off]", "test_tokens[all]"}
    assert all(e["stats"]["ops"] > 1000 for e in tree["benchmarks"])
