"""Stored figures: read strictly, matched to the machine, judged by sessions, recorded by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dflash.config import Config, load_config
from steptime.baselines import recording, store
from steptime.baselines.store import Baseline, Session, Status
from steptime.errors import UserError
from steptime.machine import identity
from steptime.records.types import Commit, ConfigRef, ExitCode, Machine, Throughput, Verdict
from tests.steptime.records.test_receipt import receipt

ROOT = Path(__file__).parents[3]
STATED = ROOT / "baselines/pro6000x8/qwen3.6-27b.json"
REFERENCE = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
HERE = identity.describe([("NVIDIA H200", "aaaa")], "AMD EPYC", 16, {"python": "3.11.7", "torch": "2.13.0"})
CONFIG = ConfigRef("cpu-tiny", "0123456789abcdef")


def reference(config: Config) -> ConfigRef:
    return ConfigRef(config.name, config.digest())


def sessions(*values: float) -> list[Session]:
    return [Session(value, "2026-11-29", {"off": value, "all": 0.99 * value}) for value in values]


def measured(*values: float, where: Machine = HERE) -> Baseline:
    return recording.build(
        where, CONFIG, sessions(*(values or (1000.0, 1010.0, 990.0, 1005.0))), "0" * 40, date="2026-11-29"
    )


def now(value: float, spread: float = 0.001) -> Throughput:
    return Throughput(value, value * (1 - spread), value * (1 + spread))


# The stated figure of the reference machine.


def reference_machine(count: int = 8) -> Machine:
    return identity.describe([(REFERENCE, f"{i:04d}") for i in range(count)], "AMD EPYC", 96, {})


def test_the_stated_figure() -> None:
    stated = store.read(STATED)
    assert (stated.value, stated.unit, stated.origin, stated.tolerance_percent) == (
        14200.0,
        "tokens/s",
        "stated",
        0.35,
    )
    assert store.limit(stated) == pytest.approx(14150.3)
    assert stated.arms == {"off": 14200.0}


def test_the_stated_figure_belongs_to_its_machine_and_config() -> None:
    stored = store.read_all(ROOT / "baselines")
    config = load_config(ROOT / "configs/pro6000x8-qwen3.6-27b.toml")
    reference = ConfigRef(config.name, config.digest())
    assert store.match(stored, reference_machine(), reference).status is Status.MATCH
    for other in (reference_machine(7), HERE, identity.describe([], "AMD EPYC", 96, {})):
        found = store.match(stored, other, reference)
        assert (found.status, found.exit_code) == (Status.OTHER_MACHINE, ExitCode.INVALID)
        assert "belongs to another machine (pro6000x8; this is" in found.message
    other_config = store.match(stored, reference_machine(), CONFIG)
    assert (other_config.status, other_config.exit_code) == (Status.MISSING, ExitCode.INCOMPLETE)


def test_elsewhere_the_stated_figure_of_another_machine_is_not_shown() -> None:
    """It can never apply there; `baseline list` names it."""
    seen = store.view(
        HERE, reference(load_config(ROOT / "configs/cpu-tiny.toml")), now(500.0), ROOT / "baselines"
    )
    assert (seen.status, seen.value, seen.origin, seen.machine) == ("missing", None, None, None)
    assert (seen.limit, seen.verdict) == (None, None)
    assert "record one: python -m bench baseline record --config configs/cpu-tiny.toml" in seen.note


@pytest.mark.parametrize(
    ("value", "spread", "verdict"),
    [
        (14200.0, 0.002, Verdict.WITHIN),
        (14160.0, 0.0005, Verdict.WITHIN),  # inside the rounding
        (14150.0, 0.002, Verdict.UNRESOLVED),
        (14000.0, 0.002, Verdict.OVER),
        (15000.0, 0.02, Verdict.WITHIN),
    ],
)
def test_a_stated_figure_is_a_constant_floor(value: float, spread: float, verdict: Verdict) -> None:
    assert store.compare(store.read(STATED), [now(value, spread)]).verdict is verdict


# Measured figures.


def test_limit_follows_the_sessions() -> None:
    """The table of multiples of the between-session spread, alpha .01."""
    for m, r, multiple in [(3, 1, 8.04), (5, 1, 4.10), (10, 1, 2.96), (10, 3, 1.86), (20, 3, 1.57)]:
        assert store.multiplier(m, r) == pytest.approx(multiple, abs=0.01)
    assert store.multiplier(10, 1, alpha=0.05) == pytest.approx(1.92, abs=0.01)
    values = (1000.0, 1010.0, 990.0, 1005.0)
    found = measured(*values)
    logs = np.log(values)
    expected = logs.mean() - stats.t.ppf(0.99, 3) * logs.std(ddof=1) * math.sqrt(1 + 1 / 4)
    assert store.limit(found) == pytest.approx(np.exp(expected), rel=1e-4)
    assert store.limit(found, 3) > store.limit(found, 1)


def test_a_lucky_spread_does_not_make_the_limit_touchy() -> None:
    found = measured(1000.0, 1000.0, 1000.0)
    assert store.limit(found) == pytest.approx(995.0)


def test_false_alarms_of_the_limit() -> None:
    """Sessions that differ by 1%: a new one falls under the limit of five in 1 of 100, whatever its own
    spread."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        stored = measured(*np.exp(rng.normal(7.0, 0.01, 5)))
        hits += (
            store.compare(stored, [now(float(np.exp(rng.normal(7.0, 0.01))), 1e-6)]).verdict is Verdict.OVER
        )
    assert hits <= 10 + 4 * 10**0.5


def test_regression_is_over_and_says_by_how_much() -> None:
    found = store.compare(measured(), [now(940.0)])
    assert found.verdict is Verdict.OVER
    assert found.change_percent == pytest.approx(-6.1, abs=0.1)
    assert "4 sessions, spread" in found.message
    assert store.compare(measured(), [now(1001.0)]).verdict is Verdict.WITHIN
    with pytest.raises(ValueError, match="no session"):
        store.compare(measured(), [])


def test_newer_python_or_a_reboot_keeps_the_baseline_another_gpu_does_not(tmp_path: Path) -> None:
    baselines_root = tmp_path / "baselines"
    recording.write(measured(), baselines_root)
    stored = store.read_all(baselines_root)
    newer = identity.describe(HERE.gpus, HERE.cpu_model, HERE.cpus, {"python": "3.12.1", "torch": "2.14.0"})
    assert store.match(stored, newer, CONFIG).status is Status.MATCH
    swapped = identity.describe([("NVIDIA H200", "bbbb")], HERE.cpu_model, HERE.cpus, {"python": "3.11.7"})
    refused = store.match(stored, swapped, CONFIG)
    assert (refused.status, refused.exit_code) == (Status.OTHER_MACHINE, ExitCode.INVALID)
    changed = store.match(stored, HERE, replace(CONFIG, hash="f" * 16))
    assert (changed.status, changed.exit_code) == (Status.OTHER_CONFIG, ExitCode.INVALID)
    none = store.match(stored, HERE, ConfigRef("h200-single", "1"))
    assert (none.status, none.exit_code) == (Status.MISSING, ExitCode.INCOMPLETE)
    assert "python -m bench baseline record --config configs/h200-single.toml" in none.message


def test_versions_are_shown_when_they_differ(tmp_path: Path) -> None:
    config = load_config(None, ["name=cpu-tiny"])
    stored = recording.build(
        HERE, ConfigRef(config.name, config.digest()), sessions(1000.0, 1010.0, 990.0), "0" * 40
    )
    recording.write(stored, tmp_path)
    newer = identity.describe(HERE.gpus, HERE.cpu_model, HERE.cpus, {"python": "3.12.1", "torch": "2.13.0"})
    seen = store.view(newer, reference(config), now(1000.0), tmp_path)
    assert (seen.status, seen.verdict, seen.sessions) == ("match", "within", 3)
    assert "python 3.11.7 -> 3.12.1" in seen.note
    assert "torch" not in seen.note


def test_no_folder_of_baselines_is_no_baseline(tmp_path: Path) -> None:
    seen = store.view(HERE, reference(load_config(None)), now(1.0), tmp_path / "absent")
    assert (seen.status, seen.value) == ("missing", None)


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


@pytest.mark.fault
def test_a_machine_that_is_slower_than_it_was_is_seen_by_its_sentinel() -> None:
    """A receipt of a machine 1.7 times slower, its sentinel too, says nothing of the code."""
    stored = replace(
        measured(), sessions=tuple(replace(one, sentinel_s={"cpu": 1.0}) for one in measured().sessions)
    )
    same, slower = (Session(1000.0, "", sentinel_s={"cpu": s}) for s in (1.02, 1.7))
    assert store.machine_moved(stored, [same]) == ""
    assert "cpu by +70.0%" in store.machine_moved(stored, [slower])
    assert store.machine_moved(measured(), [slower]) == "", "an older file has no sentinel to compare with"


@pytest.mark.fault
def test_a_figure_far_below_what_the_machine_does_is_stale() -> None:
    """Against it a run could lose two thirds of its speed and pass."""
    found = store.compare(measured(), [now(3000.0)])
    assert found.verdict is Verdict.NO_BASELINE
    assert found.message.startswith("stale: ")
    assert store.compare(measured(), [now(1100.0)]).verdict is Verdict.WITHIN


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


def test_list_shows_whose_figures_they_are(tmp_path: Path) -> None:
    recording.write(measured(), tmp_path)
    (row,) = store.table(store.read_all(tmp_path), HERE)
    assert (row["this machine"], row["origin"], row["sessions"]) == ("yes", "measured", "4")
    assert store.table(store.read_all(ROOT / "baselines"), HERE)[0]["this machine"] == "no"
