"""`baseline record | compare | list` on made-up sessions: what is refused, what is written, what is red."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.subjects.trainer.kind import TrainerKind
from dflash.config import load_config
from steptime.baselines.store import read
from steptime.commands import baseline
from steptime.errors import UserError
from steptime.machine.identity import describe, identify
from steptime.records.receipt import Receipt, SentinelTimes
from steptime.records.types import Commit, ConfigRef, ExitCode
from tests.steptime.make import made_receipt

fault = pytest.mark.fault
COMMIT = Commit("1" * 40)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own with a config, a clean commit and no CI."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "tiny.toml").write_text("[train]\nsteps = 5\n")
    monkeypatch.setattr(baseline, "read_commit", lambda root=None: COMMIT)
    monkeypatch.setattr(baseline.store, "ROOT", tmp_path / "baselines")
    return tmp_path


def session(folder: Path, number: int, speed: float = 1.0, **changes: object) -> str:
    """A finished session's receipt as a file."""
    config = load_config("tiny.toml")
    receipt = made_receipt(identify(), ConfigRef(config.name, config.digest()), COMMIT, speed=speed)
    kept: dict[str, Any] = {"subject": "trainer", "sentinel": SentinelTimes({"cpu": 1.0}, {"cpu": 1.01})}
    receipt = replace(receipt, **(kept | changes))
    path = folder / f"session-{number}.json"
    path.write_text(receipt.to_json())
    return str(path)


def bench(action: str, *receipts: str) -> int:
    words = [word for receipt in receipts for word in ("--receipt", receipt)]
    return cli.main(["baseline", action, "--config", "tiny.toml", *words])


def record(folder: Path) -> None:
    assert (
        bench("record", *(session(folder, number, 1 + 0.001 * number) for number in range(3)))
        == ExitCode.WITHIN
    )


def test_three_sessions_make_a_reviewable_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(here)
    path = here / "baselines" / identify().key / "tiny.json"
    stored = read(path)
    assert (len(stored.sessions), stored.commit, stored.origin) == (3, COMMIT.id, "measured")
    assert str(path) in capsys.readouterr().out
    assert cli.main(["baseline", "list"]) == ExitCode.WITHIN
    assert "tiny" in capsys.readouterr().out


def test_the_same_speed_is_within_and_a_real_drop_is_over(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(here)
    assert bench("compare", session(here, 7)) == ExitCode.WITHIN
    assert bench("compare", session(here, 8, speed=0.95)) == ExitCode.OVER
    assert "OVER" in capsys.readouterr().out


@fault
def test_no_baseline_is_5_and_names_the_command(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("compare", session(here, 0)) == ExitCode.INCOMPLETE
    assert "python -m bench baseline record" in capsys.readouterr().out


@fault
def test_a_baseline_of_another_machine_is_4_before_anything_is_measured(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record(here)
    other = describe([("NVIDIA H200", "ffff0000")], "Another CPU", 64, {})
    monkeypatch.setattr(baseline.identity, "identify", lambda devices=None: other)
    assert bench("compare") == ExitCode.INVALID
    assert "belongs to another machine" in capsys.readouterr().out


@pytest.mark.slow
@fault
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"commit": Commit("2" * 40)}, "it is stale"),
        (
            {"sentinel": SentinelTimes({"cpu": 1.0}, {"cpu": 1.2})},
            "sentinel workload moved while measuring (cpu by +20.0%)",
        ),
        ({"options": {"plant": "item"}}, "measured with plant item"),
    ],
)
def test_a_session_that_says_nothing_is_4_and_never_recorded(
    here: Path, changes: dict[str, object], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    record(here)
    bad = session(here, 9)
    receipt = replace(Receipt.read(bad), **changes)  # type: ignore[arg-type]
    Path(bad).write_text(receipt.to_json())
    assert bench("compare", bad) == ExitCode.INVALID
    assert said in capsys.readouterr().out
    assert bench("record", bad, session(here, 1, 1.001), session(here, 2, 1.002)) == ExitCode.USAGE
    assert said in capsys.readouterr().err


@fault
def test_a_session_with_uncommitted_changes_may_be_compared_but_not_recorded(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(here)
    dirty = replace(COMMIT, dirty=True, diff_hash="abcd")
    path = session(here, 9, commit=dirty)
    assert bench("record", path, session(here, 1, 1.001), session(here, 2, 1.002)) == ExitCode.USAGE
    monkeypatch.setattr(baseline, "read_commit", lambda root=None: dirty)
    assert bench("compare", path) == ExitCode.WITHIN


@fault
@pytest.mark.parametrize(("dirty", "ci"), [(True, ""), (False, "true")])
def test_recording_is_refused_on_a_dirty_tree_and_in_ci(
    here: Path, monkeypatch: pytest.MonkeyPatch, dirty: bool, ci: str
) -> None:
    monkeypatch.setattr(baseline, "read_commit", lambda root=None: replace(COMMIT, dirty=dirty))
    monkeypatch.setenv("CI", ci)
    assert bench("record", session(here, 0)) == ExitCode.USAGE
    assert not (here / "baselines").exists()


@fault
def test_fewer_than_three_sessions_are_refused(here: Path) -> None:
    assert bench("record", session(here, 0), session(here, 1)) == ExitCode.USAGE
    assert cli.main(["baseline", "record", "--config", "tiny.toml", "--sessions", "2"]) == ExitCode.USAGE


@fault
def test_a_broken_file_is_refused_by_name_and_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(here)
    path = here / "baselines" / identify().key / "tiny.json"
    path.write_text(path.read_text().replace('"value"', '"valve"'))
    assert bench("compare", session(here, 0)) == ExitCode.USAGE
    assert f"{path}:" in capsys.readouterr().err


@fault
def test_a_session_that_leaves_no_receipt_is_an_error(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from steptime.progress import Reporter

    class Done:
        returncode, stdout = 3, ""

    environments = []

    def run(command: list[str], **named: Any) -> Done:
        environments.append(named["env"])
        return Done()

    monkeypatch.setenv("GITHUB_STEP_SUMMARY", "summary.md")
    monkeypatch.setattr(baseline.subprocess, "run", run)
    options = baseline.Options(load_config("tiny.toml"), TrainerKind(), ("--config", "tiny.toml"))
    with pytest.raises(UserError, match="left no receipt"):
        baseline._sessions(options, Reporter(quiet=True))
    assert [(environment["PATH"], "GITHUB_STEP_SUMMARY" in environment) for environment in environments] == [
        (os.environ["PATH"], False)
    ]


def test_in_ci_what_a_comparison_says_is_in_the_job_summary(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(here)
    summary = here / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert bench("compare", session(here, 8, speed=0.95)) == ExitCode.OVER
    assert summary.read_text().startswith("Baseline: OVER: ")


@pytest.mark.slow
@fault
@pytest.mark.parametrize("action", ["record", "compare"])
@pytest.mark.parametrize("changes", [{"command": "gate"}, {"subject": "spin"}])
def test_only_sessions_of_the_trainers_overhead_count(
    here: Path, action: str, changes: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Hashed blocks a second, or head with all collectors on, are no tokens per second of `off`."""
    record(here)
    kept = (here / "baselines" / identify().key / "tiny.json").read_text()
    code = bench(action, *(session(here, number, 1 + 0.001 * number, **changes) for number in range(3)))
    assert code == (ExitCode.USAGE if action == "record" else ExitCode.INVALID)
    shown = capsys.readouterr()
    assert "not of `overhead` on the trainer" in shown.out + shown.err
    assert (here / "baselines" / identify().key / "tiny.json").read_text() == kept


@fault
def test_a_session_counts_once(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = session(here, 0)
    assert bench("record", one, session(here, 1, 1.001), one) == ExitCode.USAGE
    assert "session-0.json is the same session as" in capsys.readouterr().err
    assert not (here / "baselines").exists()


@fault
@pytest.mark.parametrize("changes", [{"pairs": ()}, {"throughput": None}])
def test_a_session_without_segments_is_5_and_never_recorded(
    here: Path, changes: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    record(here)
    assert bench("compare", session(here, 7, **changes)) == ExitCode.INCOMPLETE
    assert "session-7.json: it holds no" in capsys.readouterr().out
    sessions = [session(here, number, 1 + 0.001 * number, **changes) for number in range(3)]
    assert bench("record", *sessions) == ExitCode.USAGE


@pytest.mark.slow
@fault
def test_a_slower_machine_is_4(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(here)
    slow = session(here, 7, 1 / 1.7, sentinel=SentinelTimes({"cpu": 1.7}, {"cpu": 1.7}))
    assert bench("compare", slow) == ExitCode.INVALID
    assert "sentinel workload is not what it was" in capsys.readouterr().out


@fault
def test_a_figure_that_differs_is_replaced_only_when_somebody_says_yes(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(here)
    path = here / "baselines" / identify().key / "tiny.json"
    kept = path.read_text()
    faster = [session(here, number, 1.23 + 0.001 * number) for number in range(3)]
    assert bench("record", *faster) == ExitCode.USAGE
    assert "the new figure is +22.98" in capsys.readouterr().err
    assert path.read_text() == kept
    words = [word for receipt in faster for word in ("--receipt", receipt)]
    assert cli.main(["baseline", "record", "--yes", "--config", "tiny.toml", *words]) == ExitCode.WITHIN
    assert path.read_text() != kept


@fault
def test_a_stale_figure_is_5(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(here)
    assert bench("compare", session(here, 7, speed=3.0)) == ExitCode.INCOMPLETE
    assert "stale: " in capsys.readouterr().out
