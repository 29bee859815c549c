"""The counting process: what it is asked, and what becomes of one that fails."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from steptime.counting import counting
from steptime.counting.counting import ProcessCounter
from steptime.progress import Reporter
from steptime.records.types import OFF

QUIET = Reporter(quiet=True)
ARMS = {OFF: (), "a": ("a",), "b": ("b",), "all": ("a", "b")}
FOR_EVER = "import signal; signal.pause()"


def counter(folder: Path, body: str) -> ProcessCounter:
    """A counter whose process runs `body`."""
    (folder / "bench").mkdir()
    (folder / "bench/__init__.py").touch()
    (folder / "bench/counting.py").write_text(
        "import json, sys\nrequest = json.load(sys.stdin)\n" + textwrap.dedent(body)
    )
    return ProcessCounter({"name": "x"}, root=folder, python=sys.executable)


def test_the_answer_comes_back_by_arm(tmp_path: Path) -> None:
    body = """
    arms = request["arms"].items()
    counts = {arm: {"arm": arm, "steps": 4, "armed": True, "syncs": len(on), "ways": ["modes"]}
              for arm, on in arms}
    open(sys.argv[1], "w").write(json.dumps(counts))
    """
    pending = counter(tmp_path, body).start(ARMS)
    pending.wait(QUIET)
    counts, faults = pending.result()
    pending.close()
    assert faults == ()
    assert {arm: one.syncs for arm, one in counts.items()} == {"off": 0, "a": 1, "b": 1, "all": 2}


@pytest.mark.fault
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "sys.exit('planted: no counters here')",
            "the counting process failed (exit code 1): planted: no counters here",
        ),
        ("pass", "the counting process left no counts"),
        ("open(sys.argv[1], 'w').write('{\"off\": {\"arm\": ')", "the counting process left no counts"),
        (
            'open(sys.argv[1], \'w\').write(\'{"off": {"arm": "off", "steps": 4}}\')',
            "the counting process left no counts",
        ),
    ],
)
def test_a_process_that_fails_is_a_fault_and_never_zero_syncs(tmp_path: Path, body: str, said: str) -> None:
    pending = counter(tmp_path, body).start(ARMS)
    pending.wait(QUIET)
    counts, faults = pending.result()
    pending.close()
    assert counts == {}
    assert said in faults[0]


def test_closing_ends_a_process_that_still_runs(tmp_path: Path) -> None:
    pending = counter(tmp_path, FOR_EVER).start(ARMS)
    pending.close()
    assert pending.result()[0] == {}


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("waits", [True, False])
def test_a_process_that_hangs_is_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    monkeypatch.setattr(counting, "LIMIT_S", 0.2)
    pending = counter(tmp_path, FOR_EVER).start(ARMS)
    if waits:
        pending.wait(QUIET)
    counts, faults = pending.result()
    pending.close()
    assert counts == {}
    assert faults == ("the counting process gave no counts within 0.2 s",)


@pytest.mark.fault
def test_the_traceback_of_a_process_that_failed_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pending = counter(tmp_path, "request['planted']").start(ARMS)
    assert "KeyError: 'planted'" in pending.result()[1][0]
    pending.close()
    assert "in <module>" in capsys.readouterr().err
