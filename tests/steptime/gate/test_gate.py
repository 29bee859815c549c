"""The gate on the light subject, and on trees that die, lie, hang or predate the harness."""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.subjects.registry import BenchSpin
from bench.subjects.trainer.kind import TrainerKind
from dflash.config import Config, load_config
from steptime.commands import gate as gate_command
from steptime.commands.gate import run_gate
from steptime.errors import UserError
from steptime.gate import session, worker, worker_process, worktrees
from steptime.gate.counters import Counted, added, count_both, counting_code, overlay
from steptime.gate.launch import Launch
from steptime.gate.session import gather
from steptime.gate.verdict import BASE, HEAD, GateEvidence, Options, judge, memory_rise
from steptime.gate.worker import PROTOCOL
from steptime.gate.worktrees import NoHarness, Tree, checked_out, resolve
from steptime.machine import commit
from steptime.machine.commit import ROOT, read_commit
from steptime.progress import Reporter
from steptime.records.pairs import Layer, Pair, Question, Segment
from steptime.records.receipt import Receipt
from steptime.records.types import Commit, ExactCounts, ExitCode, Verdict
from tests.waiting import HANG_S, wait_until

TINY = ("data.batch_size=1", "drafter.anchors=8")
QUIET = Reporter(quiet=True)
SHORT = Options(base="HEAD", config=Config(), minutes=0.02, kind=BenchSpin(), launches=2)
OURS = (Tree(BASE, Commit("a"), ROOT, sys.executable), Tree(HEAD, Commit("b"), ROOT, sys.executable))

SIMULATED = """
import runpy, sys
from steptime.subjects.spin import Noise, SpinKind
from steptime.subjects.spin_pairs import Cost, SpinPairs, cost_of

def simulated(self, settings, *, injections=()):
    costs = {"idle": Cost()} | {one.name: cost_of(one) for one in injections}
    return SpinPairs(costs, noise=Noise(step=0.001, slow=0.001))

SpinKind.make_pairs = simulated
runpy.run_module("bench.gate_worker", run_name="__main__", alter_sys=True)
"""
"""A worker of this tree whose steps take their time on a simulated clock: no load changes them."""

fault = pytest.mark.fault


def slow(*values: str) -> Any:
    """One of many like cases, each of which starts processes."""
    return pytest.param(*values, marks=pytest.mark.slow)


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True
    ).stdout.strip()


def tree_with_worker(folder: Path, body: str, name: str = HEAD) -> Tree:
    """A tree whose worker is `body`."""
    (folder / "bench").mkdir(parents=True)
    (folder / "bench/__init__.py").touch()
    head = "import itertools, json, sys\nsys.stdin.readline()\n"
    (folder / "bench/gate_worker.py").write_text(head + textwrap.dedent(body))
    return Tree(name, Commit("c" * 40), folder, sys.executable)


def answers(root: Path, turns: int | None = None) -> str:
    """The body of a worker that builds nothing and measures nothing: it greets, and answers so many turns, or
    all."""
    return textwrap.dedent(f"""
    print(json.dumps({{"hello": {{"protocol": {PROTOCOL}, "root": {str(root)!r}, "groups": 8,
        "switches": [], "periods": {{"tick": 1.0, "flush": 10.0}}}}}}), flush=True)
    for line in itertools.islice(sys.stdin, {turns}):
        order = json.loads(line)
        if "stop" in order:
            break
        steps = order["steps"]
        print(json.dumps({{"segment": {{"on": [], "steps": steps, "tokens": 100, "seconds": 1.0, "group": 0,
            "first_step": 1, "step_seconds": [1.0 / steps] * steps, "tick_s": 0.1}}}}), flush=True)
    """)


@pytest.fixture
def base(tmp_path: Path) -> Tree:
    """The other side of a gate whose head fails."""
    return tree_with_worker(tmp_path / "base", answers(tmp_path / "base"), BASE)


class Interrupting(Reporter):
    """Presses Ctrl-C in the launch that it is told."""

    def __init__(self, launch: int) -> None:
        super().__init__(quiet=True)
        self.launch = launch

    def begin(self, what: str) -> None:
        if what.startswith(f"launch {self.launch} "):
            raise KeyboardInterrupt


@pytest.mark.thorough
@pytest.mark.slow
@fault
def test_an_interrupted_gate_keeps_the_launches_it_has_and_is_incomplete() -> None:
    evidence = gather(SHORT, *OURS, Interrupting(launch=2))
    assert {pair.process for pair in evidence.pairs} == {0}
    judgement = judge(SHORT, evidence)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INCOMPLETE)
    assert judgement.reasons[0] == f"interrupted after {len(evidence.pairs)} pairs"


# -- two persistent worker processes -------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.slow
@fault
def test_two_processes_take_turns_at_the_same_work_and_a_large_slowdown_is_found(tmp_path: Path) -> None:
    (tmp_path / "simulated.py").write_text(SIMULATED)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/simulated.py"\n')
    python.chmod(0o755)
    base, head = (replace(tree, python=str(python)) for tree in OURS)
    options = replace(SHORT, inject="40@step", launches=7)
    evidence = gather(options, base, head, QUIET)
    assert evidence.incomplete == []
    assert evidence.not_comparable == []
    assert {pair.process for pair in evidence.pairs} == set(range(7))
    for pair in evidence.pairs:
        assert {pair.first.on, pair.second.on} == {(), (HEAD,)}
        assert (pair.first.group, pair.first.steps) == (pair.second.group, pair.second.steps)
    assert {pair.losses_equal for pair in evidence.pairs} == {True}
    assert {pair.layer for pair in evidence.pairs} == set(Layer)
    found = evidence.estimate(1.0)
    assert found is not None
    assert found.n == 7, "the launch is the unit"
    assert found.percent == pytest.approx(40.0, abs=0.5)
    evidence.before = evidence.after = None  # a busy machine is no matter here
    assert judge(options, evidence, counts_required=False).exit_code is ExitCode.OVER


@fault
def test_fewer_than_seven_launches_tell_nothing() -> None:
    evidence = measured_evidence(launches=6)
    judgement = judge(SHORT, evidence)
    assert judgement.exit_code is ExitCode.INCOMPLETE
    assert "6 whole launches; at least 7 are needed" in judgement.reasons[0]


@pytest.mark.parametrize(
    ("minutes", "clear_after", "launches", "stopped"),
    [
        (10.0, 99, 12, "time"),
        (8.0, 99, 10, "time"),  # one for each 0.8 minutes
        (1.0, 99, 7, "time"),  # the fewest that tell anything
        (10.0, 8, 8, "clear"),
    ],
)
def test_as_many_launches_as_the_time_allows(
    monkeypatch: pytest.MonkeyPatch, minutes: float, clear_after: int, launches: int, stopped: str
) -> None:
    evidence = GateEvidence()
    shares: list[float] = []

    def launch(trees: object, orders: object, number: int, time_s: float, *_: object, **__: object) -> Launch:
        shares.append(time_s)
        return Launch(seconds_per={Layer.PATH: 1.0})

    monkeypatch.setattr(session, "launch", launch)
    monkeypatch.setattr(session, "launches_clear", lambda *_: len(shares) >= clear_after)
    session._launch_all(replace(SHORT, minutes=minutes, launches=None), OURS, {}, evidence, QUIET)
    assert (len(shares), evidence.stopped) == (launches, stopped)
    assert shares[0] == pytest.approx(60.0 * minutes / shares_asked(minutes), rel=0.01)


def shares_asked(minutes: float) -> int:
    """Launches that a gate of so many minutes plans."""
    return min(12, max(7, round(minutes / 0.8)))


@fault
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "raise SystemExit('planted: no such module')",
            "head crashed (exit code 1): planted: no such module",
        ),
        slow("print('hello?')", "instead of a message"),
        slow("print(json.dumps({'error': 'the config is wrong'}))", "head refused: the config is wrong"),
        slow(
            "raise SystemExit('train.new_knob\\n  Extra inputs are not permitted [type=extra_forbidden]\\n')",
            "head does not know `train.new_knob`",
        ),
        slow("print(json.dumps({'hello': {'protocol': 99}}))", "speaks gate protocol 99"),
        slow(
            "print(json.dumps({'hello': {'protocol': 3, 'root': '/elsewhere'}}))",
            "ran the code in /elsewhere",
        ),
        slow("print(json.dumps({'greetings': 1}))", "does not understand: KeyError: 'hello'"),
        slow("print('[1, 2]')", "does not understand: TypeError"),
    ],
)
def test_a_worker_that_is_lost_is_an_incomplete_set(tmp_path: Path, base: Tree, body: str, said: str) -> None:
    evidence = gather(SHORT, base, tree_with_worker(tmp_path / "head", body), QUIET)
    judgement = judge(SHORT, evidence)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INCOMPLETE)
    assert said in judgement.reasons[0]


@fault
def add_trainer() -> None:
    importlib.import_module("bench.subjects.registry")


def test_a_setting_that_a_commit_does_not_know_is_named() -> None:
    order = {"subject": "trainer", "config": {"train": {"new_knob": 1, "lr": "high"}}, "trace_steps": 0}
    source = io.StringIO(json.dumps(order) + "\n")
    with pytest.raises(UserError) as refused:
        worker.serve(
            worker.Lines(source, io.StringIO()), lambda: importlib.import_module("bench.subjects.registry")
        )
    said = str(refused.value).split("; ")
    assert "does not know `train.new_knob`" in said
    assert any(text.startswith("does not accept `train.lr`") for text in said)


@pytest.mark.slow
@fault
def test_the_traceback_of_a_worker_that_crashed_is_shown(
    tmp_path: Path, base: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    gather(SHORT, base, tree_with_worker(tmp_path / "head", "import os\nos.environ['planted']"), QUIET)
    shown = capsys.readouterr().err
    assert "--- stderr of head" in shown
    assert "in <module>" in shown
    assert "KeyError: 'planted'" in shown


@pytest.mark.slow
@fault
def test_a_python_that_is_gone_is_a_lost_worker(tmp_path: Path, base: Tree) -> None:
    tree = replace(OURS[1], python=str(tmp_path / "no-python"))
    evidence = gather(SHORT, base, tree, QUIET)
    assert "head cannot be started" in judge(SHORT, evidence).reasons[0]
    assert judge(SHORT, evidence).exit_code is ExitCode.INCOMPLETE


@fault
def test_a_worker_that_is_ended_cleans_up_after_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that still builds reads no message; killed at once it would leave its folders behind."""
    body = f"""
    import pathlib, signal
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    mark = pathlib.Path({str(tmp_path / "mark")!r})
    try:
        mark.touch()
        signal.pause()
    finally:
        mark.unlink()
    """
    worker = worker_process.WorkerProcess(tree_with_worker(tmp_path / "head", body), {})
    wait_until((tmp_path / "mark").exists)
    # It does not end by itself, and once it is told it has all the time to clean up.
    wait, patience = worker._process.wait, iter((0.0, HANG_S))
    monkeypatch.setattr(worker._process, "wait", lambda timeout=None: wait(next(patience)))
    worker.close()
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
@fault
def test_a_worker_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "BUILD_S", 0.5)
    worker = worker_process.WorkerProcess(tree_with_worker(tmp_path / "head", "sys.stdin.read()"), {})
    with pytest.raises(worker_process.WorkerLost, match=r"head gave no answer within 0\.5 s"):
        worker.greet()
    worker.close()


@pytest.mark.slow
@fault
def test_a_worker_that_dies_in_the_middle_keeps_what_was_measured_and_is_incomplete(
    tmp_path: Path, base: Tree
) -> None:
    body = answers(tmp_path / "head", turns=3) + 'sys.exit("planted: out of memory")'
    evidence = gather(SHORT, base, tree_with_worker(tmp_path / "head", body), QUIET)
    judgement = judge(SHORT, evidence)
    assert judgement.exit_code is ExitCode.INCOMPLETE
    assert "planted: out of memory" in judgement.reasons[0]


# -- what is compared besides time ---------------------------------------------------------------------------


@fault
def test_work_that_differs_is_not_comparable() -> None:
    evidence = GateEvidence(
        not_comparable=["not comparable, training differs: loss of step 3: base 2.0, head 2.5"]
    )
    judgement = judge(SHORT, evidence)
    assert (judgement.verdict, judgement.exit_code) == (Verdict.INVALID, ExitCode.INVALID)
    assert "loss of step 3" in judgement.reasons[0]


@fault
def test_an_exact_count_that_rose_is_red_whatever_the_timing_says() -> None:
    evidence = measured_evidence()
    evidence.counted = Counted(
        {
            HEAD: {
                BASE: ExactCounts(BASE, 4, True, 0, 4000, 8, 0, ways=("modes",)),
                HEAD: ExactCounts(HEAD, 4, True, 4, 4000, 8, 0, ways=("modes",)),
            }
        }
    )
    judgement = judge(SHORT, evidence)
    assert judgement.exit_code is ExitCode.OVER
    assert judgement.reasons[0] == "head: syncs rose by 4"


@fault
def test_a_counter_that_was_not_armed_is_invalid() -> None:
    evidence = measured_evidence()
    evidence.counted = Counted(
        {
            HEAD: {
                BASE: ExactCounts(BASE, 4, True, 0, 4000, 8, 0),
                HEAD: ExactCounts(HEAD, 4, False, unavailable=("no trace hooks",)),
            }
        }
    )
    assert added(evidence.counted, BASE, HEAD)[1] == ["the counter of head was not armed: no trace hooks"]
    assert judge(SHORT, evidence).exit_code is ExitCode.INVALID


@fault
@pytest.mark.parametrize(
    ("base", "head", "said"),
    [
        (
            ExactCounts(BASE, 4, True, 0, ways=("modes",)),
            ExactCounts(HEAD, 4, True, 4, ways=("modes", "trace")),
            "other ways",
        ),
        (
            ExactCounts(BASE, 4, True, 4, ways=("modes", "trace")),
            ExactCounts(HEAD, 4, True, 0, ways=("modes",)),
            "other ways",
        ),
        (
            ExactCounts(BASE, 4, True, None),
            ExactCounts(HEAD, 4, True, None),
            "syncs of head were not counted",
        ),
        (None, ExactCounts(HEAD, 4, True, 0), "exact counts of base are missing"),
        (ExactCounts(BASE, 4, True, 0), ExactCounts(HEAD, 8, True, 0), "over 8 steps"),
    ],
)
def test_counts_that_cannot_be_compared_are_never_a_pass(
    base: ExactCounts | None, head: ExactCounts | None, said: str
) -> None:
    evidence = measured_evidence()
    evidence.counted = Counted({HEAD: {n: one for n, one in ((BASE, base), (HEAD, head)) if one is not None}})
    judgement = judge(SHORT, evidence)
    assert judgement.exit_code is ExitCode.INVALID
    assert said in judgement.reasons[0]


def counted(base: int, head: int) -> dict[str, ExactCounts]:
    """Syncs of both sides, as one counter counts them."""
    return {
        BASE: ExactCounts(BASE, 4, True, base, 4000, 8, 0, ways=("modes",)),
        HEAD: ExactCounts(HEAD, 4, True, head, 4000, 8, 0, ways=("modes",)),
    }


def test_a_sharper_counter_does_not_blame_head() -> None:
    """Head's counter sees eight syncs that were always there; by one counter, nothing has risen."""
    evidence = measured_evidence()
    evidence.counted = Counted({HEAD: counted(8, 8), BASE: counted(0, 0)})
    assert judge(SHORT, evidence).exit_code is ExitCode.WITHIN


@fault
def test_a_blinded_counter_does_not_hide_a_sync() -> None:
    evidence = measured_evidence()
    evidence.counted = Counted({HEAD: counted(0, 0), BASE: counted(0, 4)})
    judgement = judge(SHORT, evidence)
    assert judgement.exit_code is ExitCode.OVER
    assert judgement.reasons[0] == "head: syncs rose by 4"


@fault
def test_no_counter_that_could_count_both_sides_is_incomplete() -> None:

    assert added(Counted({}, ["head: crashed"]), BASE, HEAD) == ({}, ["head: crashed"])


def test_the_code_that_counts_is_known_by_its_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "steptime/counting/ways").mkdir(parents=True)
        (tmp_path / name / "steptime/counting/ways/way.py").write_text("ways = 1\n")
    first, second = counting_code(tmp_path / "a"), counting_code(tmp_path / "b")
    assert first == second
    (tmp_path / "b/steptime/counting/ways/way.py").write_text("ways = 2\n")
    assert counting_code(tmp_path / "b") != first


def test_an_overlay_lays_one_trees_counter_over_the_others_trainer(tmp_path: Path) -> None:
    for name in ("base", "head"):
        for place in ("bench", "steptime", "dflash"):
            (tmp_path / name / place).mkdir(parents=True)
            (tmp_path / name / place / "whose.txt").write_text(name)
    (tmp_path / "mixed").mkdir()
    mixed = overlay(tmp_path / "head", tmp_path / "base", tmp_path / "mixed")
    whose = {place: (mixed / place / "whose.txt").read_text() for place in ("bench", "steptime", "dflash")}
    assert whose == {"bench": "head", "steptime": "head", "dflash": "base"}


@pytest.mark.thorough
@pytest.mark.slow
@fault
def test_a_planted_sync_is_found_though_the_counter_was_blinded(tmp_path: Path) -> None:
    """Head plants `.item()` in the drafter's step, and makes its counter blind to it."""
    trees = []
    for name in (BASE, HEAD):
        root = tmp_path / name
        for place in ("bench", "steptime", "dflash", "configs"):
            shutil.copytree(ROOT / place, root / place, ignore=shutil.ignore_patterns("__pycache__"))
        trees.append(Tree(name, Commit(name), root, sys.executable))
    worker_file = trees[1].root / "dflash/pipeline/drafter_worker.py"
    text = worker_file.read_text()
    planted = text.replace("        loss.backward()\n", "        loss.backward()\n        loss.item()\n")
    assert planted != text
    worker_file.write_text(planted)
    scopes = trees[1].root / "steptime/syncs/scopes.py"
    scopes.write_text(scopes.read_text() + "\nScope.record = lambda *arguments, **named: None\n")
    kind = TrainerKind()
    settings = load_config("configs/cpu-tiny.toml", TINY)
    order = {"config": kind.to_order(settings, lambda shared, code: shared)}
    found = count_both(kind, trees, dict.fromkeys((BASE, HEAD), order), QUIET)
    more, faults = added(found, BASE, HEAD)
    assert not faults
    assert set(found.by_counter) == {HEAD, BASE}
    assert (more["syncs"] or 0) > 0


def test_a_trainer_that_was_not_counted_is_incomplete() -> None:
    evidence = measured_evidence()
    assert judge(replace(SHORT, kind=TrainerKind()), evidence).exit_code is ExitCode.INCOMPLETE
    assert judge(SHORT, evidence).exit_code is ExitCode.WITHIN


@fault
def test_memory_that_rose_in_every_launch_is_red() -> None:
    evidence = measured_evidence()
    evidence.memory_bytes = [{BASE: 100_000_000, HEAD: 110_000_000} for _ in range(7)]
    judgement = judge(SHORT, evidence)
    assert judgement.exit_code is ExitCode.OVER
    assert "peak memory rose from at most 100 MB to at least 110 MB" in judgement.reasons[0]
    evidence.memory_bytes[0][HEAD] = 101_000_000
    assert memory_rise(evidence.memory_bytes) == "", "one launch in which it did not rise: noise"


def measured_evidence(launches: int = 7) -> GateEvidence:
    """Clean launches of equal speed."""
    pairs = [
        Pair(
            number,
            Layer.PATH,
            Question.EACH,
            Segment((HEAD,) if number % 2 else (), 1, 1000, 0.1 + 1e-5 * (number % 3)),
            Segment(() if number % 2 else (HEAD,), 1, 1000, 0.1 + 1e-5 * (number % 3)),
            process=process,
            losses_equal=True,
        )
        for process in range(launches)
        for number in range(4)
    ]
    return GateEvidence(pairs=pairs, seconds_per={Layer.PATH: 1.0}, minutes=1.0)


# -- commits -------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits: before the harness, and with a gate worker."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "README.md").write_text("before the harness\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "tag", "old")
    tree_with_worker(folder, "sys.exit('planted')")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "second")
    return folder


def test_a_clean_head_gets_a_worktree_of_its_own_and_all_are_removed(repository: Path) -> None:
    with checked_out("HEAD", lambda text: None, repository) as (base, head):
        assert base.commit.id == head.commit.id == git(repository, "rev-parse", "HEAD")
        assert base.root != head.root != repository
        assert (head.root / "bench/gate_worker.py").exists()
        assert base.python == head.python == sys.executable
        assert git(repository, "worktree", "list").count("\n") == 2
    assert git(repository, "worktree", "list").count("\n") == 0
    assert not base.root.exists()


@fault
def test_worktrees_of_a_gate_that_was_killed_are_swept_up_and_those_of_one_that_runs_are_not(
    repository: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True
    )
    dead, alive = (
        tmp_path / f"{worktrees.PREFIX}{pid}-abc" / "base" for pid in (ended.stdout.strip(), os.getpid())
    )
    for place in (dead, alive):
        git(repository, "worktree", "add", "--detach", str(place), "HEAD")
    with checked_out("HEAD", lambda text: None, repository):
        pass
    assert not dead.parent.exists()
    assert (alive / "bench").exists()
    assert git(repository, "worktree", "list").count("\n") == 1


def test_a_dirty_head_is_measured_in_place_and_labelled(repository: Path) -> None:
    (repository / "README.md").write_text("changed\n")
    with checked_out("HEAD", lambda text: None, repository) as (base, head):
        assert head.root == repository
        assert head.commit.dirty
        assert len(head.commit.diff_hash) == 16
        assert not base.commit.dirty
        assert (base.root / "README.md").read_text() == "before the harness\n"


def test_a_base_that_predates_the_harness_is_said_and_incomplete(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(NoHarness, match="predates the harness"),
        checked_out("old", lambda text: None, repository),
    ):
        pass
    receipt = run_gate(replace(SHORT, base="old", out=str(tmp_path / "out")), QUIET, root=repository)
    assert receipt.exit_code is ExitCode.INCOMPLETE
    assert "predates the harness" in receipt.reasons[0]
    assert Receipt.read(tmp_path / "out/receipt.json") == receipt
    assert "predates the harness" in (tmp_path / "out/report.md").read_text()
    assert "predates the harness" in capsys.readouterr().out


def test_an_unknown_base_says_what_to_fetch(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="git fetch origin upstream/main"):
        resolve("upstream/main", repository)
    with pytest.raises(UserError, match="not a git repository"):
        resolve("HEAD", tmp_path)
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", "shallow")
    with pytest.raises(UserError, match="git fetch --unshallow"):
        resolve("HEAD^1", tmp_path / "shallow")


def test_the_parent_of_a_merge_is_the_base_of_a_pull_request_from_a_fork(repository: Path) -> None:
    # What CI checks out for a pull request is a merge commit: its first parent is the base, wherever head
    # came from.
    git(repository, "checkout", "--quiet", "-b", "fork", "old")
    (repository / "new.txt").write_text("from a fork\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "theirs")
    git(repository, "checkout", "--quiet", "main")
    git(repository, "merge", "--quiet", "--no-edit", "fork")
    with checked_out("HEAD^1", lambda text: None, repository) as (base, head):
        assert not (base.root / "new.txt").exists()
        assert (head.root / "new.txt").exists()


def test_an_environment_of_its_own_only_where_the_locks_differ(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    monkeypatch.setattr(worktrees, "_environment", lambda root, say: made.append(root) or "/other/python")
    (repository / "constraints.txt").write_text("torch==2.13.0\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "other packages")
    with checked_out("HEAD^1", lambda text: None, repository) as (base, head):
        assert base.python == "/other/python"
        assert head.python == sys.executable
    with checked_out("HEAD", lambda text: None, repository) as (base, _):
        assert base.python == sys.executable
    assert len(made) == 1


@fault
def test_packages_that_head_wants_and_this_environment_lacks_are_named(repository: Path) -> None:
    """Else both sides would run the old ones, and a bump that was never measured would be `within`."""
    (repository / "constraints.txt").write_text("numpy==0.1\nno-such-package-here==1\n# a remark\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "other packages")
    with pytest.raises(UserError, match=r"numpy is \d.*, not 0\.1; install it: python -m pip install"):
        with checked_out("HEAD^1", lambda text: None, repository):
            pass
    assert git(repository, "worktree", "list").count("\n") == 0


def test_base_gets_the_extras_that_head_has(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"flash-linear-attention"}

    def version(name: str) -> str:
        if name not in have:
            raise worktrees.metadata.PackageNotFoundError
        return "1"

    monkeypatch.setattr(worktrees.metadata, "version", version)
    assert worktrees.extras() == "bench,cuda"
    have.clear()
    assert worktrees.extras() == "bench"


def test_changes_made_while_a_dirty_head_is_measured_are_noticed(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "README.md").write_text("changed\n")

    def gather_and_edit(*arguments: object) -> GateEvidence:
        (repository / "README.md").write_text("changed again\n")
        return measured_evidence()

    monkeypatch.setattr(gate_command, "gather", gather_and_edit)
    receipt = run_gate(replace(SHORT, out=str(tmp_path / "out")), QUIET, root=repository)
    assert receipt.exit_code is ExitCode.INCOMPLETE
    assert "changed while they were measured" in receipt.reasons[0]


def test_the_hash_of_uncommitted_changes_covers_untracked_files(repository: Path) -> None:
    assert not read_commit(repository).dirty
    (repository / "new.py").write_text("a = 1\n")
    first = read_commit(repository)
    (repository / "new.py").write_text("a = 2\n")
    second = read_commit(repository)
    assert first.dirty
    assert second.dirty
    assert first.diff_hash != second.diff_hash
    assert first == replace(first, diff_hash=first.diff_hash)


def test_changes_that_are_no_utf_8_have_a_hash_too(repository: Path) -> None:
    (repository / "latin.txt").write_bytes(b"caf\xe9\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "latin")
    hashes = set()
    for text in (b"th\xe9\n", b"t\xe9\n"):
        (repository / "latin.txt").write_bytes(text)
        (repository / os.fsdecode(b"n\xe9w.txt")).write_bytes(text)
        hashes.add(read_commit(repository).diff_hash)
    assert len(hashes) == 2


@fault
@pytest.mark.parametrize("silent", ["status", "diff"])
def test_where_git_does_not_tell_what_changed_the_tree_is_dirty_and_like_no_other(
    repository: Path, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    (repository / "README.md").write_text("changed\n")
    real = commit.git_bytes
    monkeypatch.setattr(
        commit, "git_bytes", lambda *words, cwd: None if words[0] == silent else real(*words, cwd=cwd)
    )
    first, second = read_commit(repository), read_commit(repository)
    assert first.dirty
    assert first.diff_hash != second.diff_hash


def test_outside_a_repository_nothing_can_be_named(tmp_path: Path) -> None:
    assert read_commit(tmp_path) == Commit("", dirty=True)


def test_local_paths_of_the_config_are_those_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worktrees hold what is committed: data lies where the command was given."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "stdlib").mkdir()
    trainer = replace(SHORT, kind=TrainerKind())
    options = replace(
        trainer, config=load_config(None, ["data.path=chats.jsonl", "target.model=Qwen/Qwen3-8B"])
    )
    sent = session._order(options, *OURS)["config"]
    assert sent["data"]["path"] == str(tmp_path / "chats.jsonl")
    assert sent["target"]["model"] == "Qwen/Qwen3-8B"
    assert options.config.data.path == "chats.jsonl", "and the config is still known by what the user wrote"
    assert "path" not in session._order(trainer, *OURS)["config"].get("data", {}), (
        "the built-in corpus is no folder"
    )


@pytest.mark.parametrize(("same_data_code", "shares"), [(True, True), (False, False)])
def test_base_prepares_its_own_data_where_the_code_for_it_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same_data_code: bool, shares: bool
) -> None:
    monkeypatch.setattr(session, "git", lambda *words: "" if same_data_code else None)
    base = Tree(BASE, Commit("a" * 40), tmp_path / "worktrees" / "base", sys.executable)
    shared = Path(SHORT.config.data.cache).resolve()
    assert session._cache(shared, "dflash/data", base, OURS[1]) == shared
    assert session._cache(shared, "dflash/data", base, base) == (
        shared if shares else tmp_path / "worktrees" / "cache"
    )
    assert session._cache(shared, "dflash/data", OURS[0], OURS[0]) == shared, (
        "a self-check leaves nothing beside the working tree"
    )
