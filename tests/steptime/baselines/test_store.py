"""Stored figures: read strictly, recorded by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptime.baselines import recording, store
from steptime.errors import UserError
from steptime.records.types import Commit, ConfigRef, ExitCode, Verdict
from tests.steptime.baselines.parts import (
    CONFIG,
    HERE,
    STATED,
    measured,
    reference_machine,
)
from tests.steptime.records.test_receipt import receipt

# The files.


def test_written_whole_and_read_back(tmp_path: Path) -> None:
    path = recording.write(measured(), tmp_path)
    assert path == tmp_path / HERE.key / "cpu-tiny.json"
    assert store.read(path) == measured()
    assert list(path.parent.iterdir()) == [path]
    keys = set(json.loads(path.read_text()))
    assert {
        "value",
        "unit",
        "direction",
        "tolerance_percent",
        "sessions",
        "between_session_spread_percent",
    } <= keys
    assert {"commit", "date", "origin", "machine", "config", "versions", "schema"} <= keys


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    tree = json.loads(STATED.read_text())
    change(tree)
    return json.dumps(tree, indent=2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "schema": "dflash-bench/baseline/1",\n  oops\n}', "b.json:3: not valid JSON"),
        ("[1]", "b.json:1: schema 'list' is not"),
        (edited(lambda t: t.update(schema="x/9")), "b.json:2: schema 'x/9' is not 'dflash-bench/baseline/1'"),
        (
            edited(lambda t: t.update(tolerence=1)),
            "unknown key 'tolerence'; did you mean 'tolerance_percent'?",
        ),
        (edited(lambda t: t["machine"].update(gpus=1)), "unknown key 'machine.gpus'"),
        (edited(lambda t: t.pop("value")), "missing key 'value'"),
        (edited(lambda t: t.update(value="fast")), "value = 'fast'"),
        (edited(lambda t: t.update(value=-1.0)), "value: must be positive"),
        (edited(lambda t: t.update(origin="guessed")), "origin = 'guessed'"),
        (edited(lambda t: t.update(unit="seconds")), "unit = 'seconds'"),
        (
            edited(lambda t: t.update(origin="measured")),
            "sessions: a measured figure needs at least 3, found 0",
        ),
        (edited(lambda t: t.update(tolerance_percent=-0.1)), "tolerance_percent: must not be negative"),
        (
            edited(lambda t: t.update(sessions=[{"tokens_per_second": 1.0, "date": "x"}])),
            "sessions: a stated figure has no sessions",
        ),
    ],
)
def test_a_broken_file_is_refused_by_name_and_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        store.parse(text, "b.json")
    assert message in str(refused.value)
    assert re.match(r"b\.json:\d+: ", str(refused.value))


def test_the_line_is_that_of_the_key() -> None:
    text = edited(lambda t: t.update(tolerence=1))
    with pytest.raises(UserError) as refused:
        store.parse(text, "b.json")
    line = int(str(refused.value).split(":")[1])
    assert "tolerence" in text.splitlines()[line - 1]


def test_an_edited_value_is_noticed(tmp_path: Path) -> None:
    path = recording.write(measured(), tmp_path)
    path.write_text(path.read_text().replace(f'"value": {measured().value}', '"value": 2000.0'))
    with pytest.raises(UserError, match="value: 2000 is not the geometric mean of the sessions"):
        store.read(path)


def test_a_file_in_another_machines_folder_is_refused(tmp_path: Path) -> None:
    path = recording.write(measured(), tmp_path)
    moved = tmp_path / "elsewhere" / path.name
    moved.parent.mkdir()
    path.rename(moved)
    with pytest.raises(UserError, match="is not the folder's name"):
        store.read_all(tmp_path)


# Recording.


def test_a_receipt_becomes_a_session() -> None:
    clean = replace(receipt(), commit=Commit("abc"), machine=HERE, config=CONFIG, subject="trainer")
    assert recording.unusable(clean, HERE, CONFIG, Commit("abc")) == []
    session = recording.session_of(clean)
    assert clean.throughput is not None
    assert session.tokens_per_second == round(clean.throughput.tokens_per_second, 3)
    assert session.arms["off"] == pytest.approx(session.tokens_per_second, rel=1e-6)
    assert set(session.arms) == {"off", "all", "profile", "pipeline"}
    assert session.sentinel_s == {"cpu": 0.5}


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"throughput": None}, "holds no throughput"), ({"pairs": ()}, "no segment with everything off")],
)
def test_a_receipt_that_holds_nothing_is_no_session(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        recording.session_of(replace(receipt(), **changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"machine": reference_machine()}, "measured on another machine"),
        ({"config": ConfigRef("cpu-tiny", "f")}, "measured with config cpu-tiny f"),
        ({"commit": Commit("old")}, "it is stale: measured at commit old"),
        ({"commit": Commit("abc", dirty=True)}, "on a tree with uncommitted changes"),
        (
            {"verdict": Verdict.INVALID, "exit_code": ExitCode.INVALID, "reasons": ("A/A failed",)},
            "verdict is invalid: A/A failed",
        ),
        ({"options": {"inject_percent": 2.0}}, "measured with inject 2.0"),
        ({"options": {"plant": "item"}}, "measured with plant item"),
        ({"subject": "spin"}, "not of `overhead` on the trainer"),
        ({"command": "gate"}, "not of `overhead` on the trainer"),
    ],
)
def test_an_unusable_receipt(changes: dict[str, Any], reason: str) -> None:
    clean = replace(receipt(), commit=Commit("abc"), machine=HERE, config=CONFIG, subject="trainer")
    reasons = recording.unusable(replace(clean, **changes), HERE, CONFIG, Commit("abc"))
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_a_stale_receipt_is_told_from_one_of_the_same_changes() -> None:
    edited_tree = replace(receipt(), commit=Commit("abc", True, "d1"), machine=HERE, config=CONFIG)
    assert recording.stale(edited_tree, HERE, CONFIG, Commit("abc", True, "d1")) == []
    for now_at in (Commit("abc", True, "d2"), Commit("abc"), Commit("abd", True, "d1")):
        assert "stale" in recording.stale(edited_tree, HERE, CONFIG, now_at)[0]


def test_recording_is_refused_on_a_dirty_tree_in_ci_and_with_few_sessions() -> None:
    with pytest.raises(UserError, match="uncommitted changes"):
        recording.refuse_recording(dirty=True, environment={})
    with pytest.raises(UserError, match="CI never writes baselines"):
        recording.refuse_recording(dirty=False, environment={"CI": "true"})
    recording.refuse_recording(dirty=False, environment={"CI": "false"})
    with pytest.raises(UserError, match="at least 3 sessions"):
        measured(1000.0, 1001.0)
