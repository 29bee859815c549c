"""The command line end to end on simulated clocks: exit codes, files, one line for a mistake."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from steptime import run_files
from steptime.baselines import store
from steptime.machine.commit import ROOT
from steptime.records.pairs import Layer, Question
from steptime.records.receipt import Receipt
from steptime.records.types import ExactCounts, ExitCode
from steptime.report.files import write_all
from steptime.statistics.intended import Allowance, Numerics
from steptime.subjects.protocol import INJECTED
from steptime.subjects.spin import Noise
from steptime.subjects.spin_pairs import Cost, SpinPairs, cost_of
from tests.steptime.scenes import within
from tests.waiting import HANG_S

fault = pytest.mark.fault


class Counted:
    """Counts made up at once; `rises` adds syncs wherever that collector is on."""

    def __init__(self, rises: str = "", failure: str = "", armed: bool = True) -> None:
        self.rises, self.failure, self.armed = rises, failure, armed
        self.closed = False

    def start(self, arms):  # type: ignore[no-untyped-def]
        self.arms = arms
        return self

    def wait(self, reporter) -> None:  # type: ignore[no-untyped-def]
        pass

    def result(self):  # type: ignore[no-untyped-def]
        if self.failure:
            return {}, (self.failure,)
        return {
            arm: ExactCounts(arm, 4, self.armed, 4 * (self.rises in on), 4000, 8, None, ways=("modes",))
            for arm, on in self.arms.items()
        }, ()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Run `overhead` on a simulated subject; returns (exit code, receipt)."""
    monkeypatch.setattr("steptime.machine.state.unfit", lambda before, after: [])

    def overhead(*arguments: str, counter: Counted | None = None, **changes: object) -> tuple[int, Receipt]:
        def make_subject(name, config, *, injection=None, plant="", time_stages=False):  # type: ignore[no-untyped-def]
            costs = {"a": Cost(), "b": Cost()} | (
                {injection.name: cost_of(injection)} if injection is not None else {}
            )
            settings = {"noise": Noise(step=0.003, slow=0.003)} | changes
            return SpinPairs(costs, **settings), counter or Counted()  # type: ignore[arg-type]

        monkeypatch.setattr("steptime.commands.overhead.make_subject", make_subject)
        out = tmp_path / "out"
        code = cli.main(
            ["overhead", "--config", "/dev/null", "--out", str(out), "--minutes", "1", *arguments]
        )
        return code, Receipt.read(out / "receipt.json")

    # The simulated clock must be the one that measuring is timed by.
    from steptime.commands import overhead as module

    real = module.measure
    monkeypatch.setattr(
        module,
        "measure",
        lambda subject, *rest, **named: real(subject, *rest, clock=subject.clock_s, **named),
    )
    return overhead


@pytest.mark.slow
def test_a_clean_run_is_0_and_leaves_three_whole_files(
    run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # type: ignore[no-untyped-def]
    code, receipt = run("--seed", "3")
    assert code == ExitCode.WITHIN
    assert receipt.options["seed"] == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "receipt.json",
        "report.html",
        "report.md",
    ]
    assert {layer for pair in receipt.pairs for layer in [pair.layer]} == set(Layer)
    assert set(receipt.counts) == {"off", "a", "b", "all"}
    assert "WITHIN" in capsys.readouterr().out.splitlines()[-1]
    tree = json.loads((tmp_path / "out/receipt.json").read_text())
    wanted = {
        "schema",
        "command",
        "commit",
        "machine",
        "config",
        "pairs",
        "losses_equal",
        "collectors",
        "all",
        "throughput",
    }
    wanted |= {"baseline", "pipeline_efficiency", "verdict", "exit_code"}
    assert wanted <= set(tree)
    assert tree["schema"] == "dflash-bench/receipt/2"
    assert {"seconds", "tokens", "on", "group"} <= set(tree["pairs"][0]["first"])


@pytest.mark.slow
@fault
def test_an_injected_slowdown_is_1_and_blames_itself(run) -> None:  # type: ignore[no-untyped-def]
    code, receipt = run("--inject", "2")
    assert code == ExitCode.OVER
    assert {cost.name: cost.verdict.value for cost in receipt.collectors} == {
        "a": "within",
        "b": "within",
        INJECTED: "over",
    }


@pytest.mark.slow
@fault
@pytest.mark.parametrize("place", ["tick", "flush"])
def test_a_cost_at_a_tick_or_a_flush_is_found_there(run, place: str) -> None:  # type: ignore[no-untyped-def]
    code, receipt = run("--inject", f"2@{place}")
    assert code == ExitCode.OVER
    found = {cost.name: cost.estimate for cost in receipt.collectors}[f"{INJECTED}@{place}"]
    assert found is not None
    assert found.percent == pytest.approx(1.98, abs=0.1)
    assert found.layers.path_percent == pytest.approx(0.0, abs=0.3)
    assert getattr(found.layers, f"{place}_ms") == pytest.approx({"tick": 20, "flush": 200}[place], rel=0.1)


@pytest.mark.slow
@fault
def test_together_is_one_question(run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    code, receipt = run("--together")
    assert code == ExitCode.WITHIN
    assert {pair.question for pair in receipt.pairs} == {Question.TOGETHER}
    assert set(receipt.counts) == {"off", "all"}
    assert receipt.collectors == ()
    text = (tmp_path / "out/report.md").read_text() + capsys.readouterr().out
    assert "all together cost at most" in text
    assert "for each" not in text
    assert run("--together", "--inject", "3")[0] == ExitCode.OVER
    assert run("--together", counter=Counted(rises="b"))[0] == ExitCode.OVER
    assert run("--together", corrupt="b")[0] == ExitCode.INVALID


@pytest.mark.slow
@fault
def test_a_budget_decides(run) -> None:  # type: ignore[no-untyped-def]
    assert run("--inject", "2", "--budget", "8%")[0] == ExitCode.WITHIN


@pytest.mark.slow
@fault
def test_an_exact_count_that_rose_is_1(run) -> None:  # type: ignore[no-untyped-def]
    code, receipt = run(counter=Counted(rises="b"))
    assert code == ExitCode.OVER
    assert {cost.name: (cost.added or {})["syncs"] for cost in receipt.collectors} == {"a": 0, "b": 4}
    assert "b: syncs rose by 4" in receipt.reasons


@pytest.mark.slow
@fault
def test_noise_that_hides_the_answer_is_3(run) -> None:  # type: ignore[no-untyped-def]
    assert run(noise=Noise(step=0.2, slow=0.1))[0] == ExitCode.UNRESOLVED


@pytest.mark.slow
@fault
def test_losses_that_differ_are_4_and_the_step_is_named(run) -> None:  # type: ignore[no-untyped-def]
    code, receipt = run(corrupt="b")
    assert code == ExitCode.INVALID
    assert receipt.losses_equal is False
    assert any(
        re.search(r"losses differ: step \d+ \(group \d+ of the cycle, on: ", reason)
        for reason in receipt.reasons
    )


@pytest.mark.slow
@fault
def test_a_counter_that_was_not_armed_is_4(run) -> None:  # type: ignore[no-untyped-def]
    assert run(counter=Counted(armed=False))[0] == ExitCode.INVALID


@pytest.mark.slow
@fault
def test_an_unfit_machine_is_4(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(
        "steptime.machine.state.unfit", lambda before, after: ["other programs used 80% of the cores"]
    )
    code, receipt = run()
    assert code == ExitCode.INVALID
    assert "other programs used 80% of the cores" in receipt.reasons


@fault
def test_a_crash_is_5_names_what_was_on_and_still_leaves_a_receipt(run) -> None:  # type: ignore[no-untyped-def]
    code, receipt = run(crash_with="b")
    assert code == ExitCode.INCOMPLETE
    assert re.match(r"spin-simulated crashed .* with .*b.* on: RuntimeError: planted", receipt.reasons[0])


@pytest.mark.slow
@fault
def test_a_counting_process_that_failed_is_5(run) -> None:  # type: ignore[no-untyped-def]
    counter = Counted(failure="the counting process failed (exit code 1): out of memory")
    code, receipt = run(counter=counter)
    assert code == ExitCode.INCOMPLETE
    assert "out of memory" in receipt.reasons[0]
    assert counter.closed


@fault
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["overhead", "--budgt", "2"], "no such option --budgt; did you mean '--budget'"),
        (["overhed"], "no such command 'overhed'; did you mean 'overhead'"),
        (["overhead", "--budget", "lots"], "'lots' is not a percentage such as 1% or 0.5%"),
        (["overhead", "--budget", "0"], "a budget of 0% cannot be met"),
        (["overhead", "--minutes", "-3"], "argument --minutes"),
        (["overhead", "--minutes", "0"], "'0' is not between 0 and 1440 minutes"),
        (["overhead", "--seed", "x"], "'x' is not a whole number"),
        (["overhead", "--config", "no/such.toml"], "no/such.toml: cannot read the config"),
        (
            ["overhead", "--config", "/dev/null", "--set", "train.lrr=1"],
            "unknown key 'train.lrr'; did you mean 'lr'",
        ),
        (["overhead", "--config", "/dev/null", "--subject", "spinn"], "did you mean 'spin'"),
        (["overhead", "--config", "/dev/null", "--subject", "spin", "--only", "idel"], "did you mean 'idle'"),
        (
            ["overhead", "--config", "/dev/null", "--subject", "spin", "--plant", "item"],
            "--plant needs the trainer",
        ),
        (["overhead", "--config", "/dev/null", "--plant", "itm"], "did you mean 'item'"),
        (
            ["overhead", "--config", "/dev/null", "--subject", "spin", "--out", "/proc/nowhere"],
            "cannot write there",
        ),
        (["gate"], "--base"),
        (
            ["gate", "--config", "/dev/null", "--base", "no-such-ref"],
            "--base no-such-ref: no such commit here",
        ),
        (["baseline", "recrd"], "no such command 'recrd'; did you mean 'record'"),
        (["baseline"], "missing command (there are record, compare, list)"),
        (["gpu-chek"], "no such command 'gpu-chek'; did you mean 'gpu-check'"),
        (["--hlp"], "no such option --hlp; did you mean '--help'"),
        (["gate", "--base", "HEAD", "--minuts", "3"], "no such option --minuts; did you mean '--minutes'"),
        (["baseline", "compare", "--receit", "x"], "no such option --receit; did you mean '--receipt'"),
        (["gate", "--base"], "option '--base' requires an argument"),
        (["overhead", "--inject", "200"], "--inject 200: PERCENT[@PLACE]"),
        (["overhead", "--inject", "2@tik"], "no such place; did you mean 'tick'"),
        (["gate", "--base", "HEAD", "--numerics", "changed"], "say why with --reason"),
        (["gate", "--base", "HEAD", "--allow-count", "syncs: a b +1"], "say why with --reason"),
        (["gate", "--base", "HEAD", "--allow-count", "sync", "--reason", "x"], "'KIND: ROLE PLACE +N'"),
        (["overhead", "spin"], "unexpected extra argument"),
        (["selfcheck", "--inject", "1,x"], "--inject x: PERCENT[@PLACE]"),
        (["selfcheck", "--inject", "1@tik"], "did you mean 'tick'"),
        (["selfcheck", "--commands", "gates"], "did you mean 'gate'"),
        (["selfcheck", "gates.jsonl"], "'gates.jsonl': files belong to --again"),
        (["selfcheck", "--again", "one.jsonl", "two.jsonl"], "one.jsonl"),
        (["selfcheck", "--config", "/dev/null", "--subjects", "spi"], "did you mean 'spin'"),
        (["gate", "--base", "HEAD", "--subject", "spi"], "did you mean 'spin'"),
        (["syncs", "no-such-script.py"], "no such script: no-such-script.py"),
    ],
)
def test_a_mistake_is_one_line_and_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == ExitCode.USAGE
    captured = capsys.readouterr()
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments",
    [["overhead"], ["gate", "--base", "HEAD"], ["baseline", "record"], ["baseline", "compare"]],
    ids=lambda words: words[0] if isinstance(words, list) else None,
)
def test_one_of_several_ranks_measures_nothing(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(arguments) == ExitCode.USAGE
    assert capsys.readouterr().err.startswith("error: WORLD_SIZE = 2 is set: one process is measured")


COMMANDS = [[], ["overhead"], ["gate"], ["baseline", "record"], ["selfcheck"], ["syncs"], ["gpu-check"]]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_the_exit_codes(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    if not command:
        assert all(name in text for name in cli.COMMANDS)
        assert "4 invalid, or another machine" in text
    if command == ["overhead"]:
        flags = (
            "--config",
            "--quick",
            "--minutes",
            "--budget",
            "--only",
            "--inject",
            "--plant",
            "--seed",
            "--out",
        )
        assert all(flag in text for flag in flags)


def test_without_arguments_the_help_is_shown_and_the_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == ExitCode.USAGE
    captured = capsys.readouterr()
    assert "exit codes:" in captured.out
    assert captured.err == ""


@pytest.mark.slow
def test_help_imports_no_torch() -> None:
    """One process shows the help of every command."""
    calls = "; ".join(f"cli.main({[*command, '--help']})" for command in COMMANDS)
    code = f"import sys; from bench import cli; {calls}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_options_become_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Percents, minutes, lists and settings as the gate gets them."""
    seen: list[Any] = []
    monkeypatch.setattr(
        "steptime.commands.gate.run_gate", lambda options, _: seen.append(options) or within()
    )
    words = ["--config", "/dev/null", "--set", "train.steps=7", "--set", "train.steps=9", "--base", "HEAD"]
    words += ["--budget", "2%", "--inject", "0.5", "--minutes", "3", "--seed", "4", "--launches", "5"]
    words += ["--numerics", "close", "--allow-count", "syncs: drafter/0 a.py f +1", "--reason", "wanted"]
    assert cli.main(["gate", *words]) == ExitCode.WITHIN
    (gate,) = seen
    assert (gate.budget_percent, gate.inject, gate.minutes) == (2.0, "0.5@step", 3.0)
    assert (gate.numerics, gate.allowances) == (
        Numerics.CLOSE,
        (Allowance("syncs", "drafter/0", "a.py f", 1, "wanted"),),
    )
    assert (gate.seed, gate.launches, gate.config.train.steps) == (4, 5, 9)
    assert (gate.kind.name, gate.out) == ("trainer", None)


def test_options_become_what_a_self_check_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: dict[str, Any] = {}
    monkeypatch.setattr("bench.commands.selfcheck.run_selfcheck", lambda _, **got: checked.update(got) or 0)
    words = ["--config", "/dev/null", "--subjects", "spin, trainer", "--inject", "0,1@tick", "--no-plants"]
    assert cli.main(["selfcheck", *words, "--commands", "overhead", "--quick"]) == 0
    assert (checked["subjects"], checked["injected"]) == (("spin", "trainer"), ("", "1@tick"))
    assert (checked["plants"], checked["run_minutes"]) == (False, {"overhead": 0.75})
    assert cli.main(["selfcheck", "--config", "/dev/null"]) == 0
    costs = ("1@step", "2@step", "5@step")
    assert (checked["subjects"], checked["injected"], checked["plants"]) == (("spin",), costs, True)
    assert (checked["minutes"], checked["out"]) == (20.0, None)
    assert checked["run_minutes"] == {"gate": 1.5, "overhead": 8.0}


def test_again_takes_several_files(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("bench.commands.selfcheck.judge_again", lambda *given: seen.append(given) or 0)
    assert cli.main(["selfcheck", "--again", "a.jsonl", "b.jsonl", "--out", "there"]) == 0
    assert seen == [([Path("a.jsonl"), Path("b.jsonl")], "there")]


@fault
@pytest.mark.parametrize("raised", [KeyboardInterrupt, BrokenPipeError])
def test_ctrl_c_and_a_closed_pipe_are_2(
    raised: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run_list() -> int:
        raise raised

    monkeypatch.setattr("steptime.commands.baseline.run_list", run_list)
    assert cli.main(["baseline", "list"]) == ExitCode.USAGE
    assert capsys.readouterr().err == ("error: interrupted\n" if raised is KeyboardInterrupt else "")


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("sent", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_ctrl_c_leaves_a_receipt_and_is_5(tmp_path: Path, sent: signal.Signals) -> None:
    command = [
        sys.executable,
        "-m",
        "bench",
        "overhead",
        "--subject",
        "spin",
        "--quick",
        "--minutes",
        "2",
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background has SIGINT ignored, and its children would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("plan"):
                process.send_signal(sent)
                break
        _, rest = process.communicate(timeout=HANG_S)
    receipt = Receipt.from_json((tmp_path / "receipt.json").read_text(encoding="utf-8"))
    assert (process.returncode, receipt.exit_code) == (5, ExitCode.INCOMPLETE)
    assert receipt.reasons[0].startswith("interrupted ")
    assert "Traceback" not in rest


def test_an_earlier_receipt_is_gone_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "receipt.json").write_text("{}")
    run_files.choose_folder(tmp_path, "overhead")
    assert not (tmp_path / "receipt.json").exists()


def test_files_are_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "receipt.json"
    run_files.write(path, "old")
    monkeypatch.setattr("steptime.files.os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        run_files.write(path, "new")
    assert path.read_text() == "old"


@pytest.mark.slow
def test_in_ci_the_markdown_goes_to_the_job_summary(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    run()
    assert summary.read_text().startswith("before\n# ✅ WITHIN")


def test_part_of_a_measurement_posts_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    monkeypatch.setenv("ELSE", "kept")
    environment = run_files.child_environment()
    assert "GITHUB_STEP_SUMMARY" not in environment
    assert environment["ELSE"] == "kept"


@pytest.mark.fault
def test_a_fault_of_the_harness_is_2_and_no_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python's own exit code would be 1: over budget."""
    monkeypatch.setattr("steptime.commands.baseline.run_list", lambda: 1 // 0)
    assert cli.main(["baseline", "list"]) == ExitCode.USAGE
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert "no verdict" in shown


@pytest.mark.fault
def test_a_broken_baseline_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "steptime.commands.overhead.measure", lambda *arguments, **named: pytest.fail("measured")
    )
    broken_baselines(tmp_path, monkeypatch)
    assert cli.main(["overhead", "--subject", "spin", "--out", str(tmp_path / "out")]) == ExitCode.USAGE
    assert "x.json:1: not valid JSON" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.fault
def test_a_baseline_that_breaks_meanwhile_costs_the_history_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gate needs no baseline; another machine's broken file must not take its answer away."""
    broken_baselines(tmp_path, monkeypatch)
    receipt = within()
    write_all(receipt, tmp_path)
    assert (tmp_path / "report.html").exists()
    assert "x.json:1: not valid JSON" in capsys.readouterr().err


def broken_baselines(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder / "baselines" / "machine"
    place.mkdir(parents=True)
    (place / "x.json").write_text("{")
    real = store.read_all
    monkeypatch.setattr(store, "read_all", lambda root=None: real(folder / "baselines"))
