"""Whose a stored figure is, and whether new sessions are within it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dflash.config import load_config
from steptime.baselines import comparing, recording, store
from steptime.baselines.comparing import Status
from steptime.baselines.store import Session
from steptime.machine import identity
from steptime.records.types import ConfigRef, ExitCode, Verdict
from tests.steptime.baselines.parts import (
    CONFIG,
    HERE,
    ROOT,
    STATED,
    measured,
    now,
    reference,
    reference_machine,
    sessions,
)


def test_the_stated_figure() -> None:
    stated = store.read(STATED)
    assert (stated.value, stated.unit, stated.origin, stated.tolerance_percent) == (
        14200.0,
        "tokens/s",
        "stated",
        0.35,
    )
    assert comparing.limit(stated) == pytest.approx(14150.3)
    assert stated.arms == {"off": 14200.0}


def test_the_stated_figure_belongs_to_its_machine_and_config() -> None:
    stored = store.read_all(ROOT / "baselines")
    config = load_config(ROOT / "configs/pro6000x8-qwen3.6-27b.toml")
    reference = ConfigRef(config.name, config.digest())
    assert comparing.match(stored, reference_machine(), reference).status is Status.MATCH
    for other in (reference_machine(7), HERE, identity.describe([], "AMD EPYC", 96, {})):
        found = comparing.match(stored, other, reference)
        assert (found.status, found.exit_code) == (Status.OTHER_MACHINE, ExitCode.INVALID)
        assert "belongs to another machine (pro6000x8; this is" in found.message
    other_config = comparing.match(stored, reference_machine(), CONFIG)
    assert (other_config.status, other_config.exit_code) == (Status.MISSING, ExitCode.INCOMPLETE)


def test_elsewhere_the_stated_figure_of_another_machine_is_not_shown() -> None:
    """It can never apply there; `baseline list` names it."""
    seen = comparing.view(
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
    assert comparing.compare(store.read(STATED), [now(value, spread)]).verdict is verdict


# Measured figures.


def test_limit_follows_the_sessions() -> None:
    """The table of multiples of the between-session spread, alpha .01."""
    for m, r, multiple in [(3, 1, 8.04), (5, 1, 4.10), (10, 1, 2.96), (10, 3, 1.86), (20, 3, 1.57)]:
        assert comparing.multiplier(m, r) == pytest.approx(multiple, abs=0.01)
    assert comparing.multiplier(10, 1, alpha=0.05) == pytest.approx(1.92, abs=0.01)
    values = (1000.0, 1010.0, 990.0, 1005.0)
    found = measured(*values)
    logs = np.log(values)
    expected = logs.mean() - stats.t.ppf(0.99, 3) * logs.std(ddof=1) * math.sqrt(1 + 1 / 4)
    assert comparing.limit(found) == pytest.approx(np.exp(expected), rel=1e-4)
    assert comparing.limit(found, 3) > comparing.limit(found, 1)


def test_a_lucky_spread_does_not_make_the_limit_touchy() -> None:
    found = measured(1000.0, 1000.0, 1000.0)
    assert comparing.limit(found) == pytest.approx(995.0)


def test_false_alarms_of_the_limit() -> None:
    """Sessions that differ by 1%: a new one falls under the limit of five in 1 of 100, whatever its own
    spread."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        stored = measured(*np.exp(rng.normal(7.0, 0.01, 5)))
        hits += (
            comparing.compare(stored, [now(float(np.exp(rng.normal(7.0, 0.01))), 1e-6)]).verdict
            is Verdict.OVER
        )
    assert hits <= 10 + 4 * 10**0.5


def test_regression_is_over_and_says_by_how_much() -> None:
    found = comparing.compare(measured(), [now(940.0)])
    assert found.verdict is Verdict.OVER
    assert found.change_percent == pytest.approx(-6.1, abs=0.1)
    assert "4 sessions, spread" in found.message
    assert comparing.compare(measured(), [now(1001.0)]).verdict is Verdict.WITHIN
    with pytest.raises(ValueError, match="no session"):
        comparing.compare(measured(), [])


def test_newer_python_or_a_reboot_keeps_the_baseline_another_gpu_does_not(tmp_path: Path) -> None:
    baselines_root = tmp_path / "baselines"
    recording.write(measured(), baselines_root)
    stored = store.read_all(baselines_root)
    newer = identity.describe(HERE.gpus, HERE.cpu_model, HERE.cpus, {"python": "3.12.1", "torch": "2.14.0"})
    assert comparing.match(stored, newer, CONFIG).status is Status.MATCH
    swapped = identity.describe([("NVIDIA H200", "bbbb")], HERE.cpu_model, HERE.cpus, {"python": "3.11.7"})
    refused = comparing.match(stored, swapped, CONFIG)
    assert (refused.status, refused.exit_code) == (Status.OTHER_MACHINE, ExitCode.INVALID)
    changed = comparing.match(stored, HERE, replace(CONFIG, hash="f" * 16))
    assert (changed.status, changed.exit_code) == (Status.OTHER_CONFIG, ExitCode.INVALID)
    none = comparing.match(stored, HERE, ConfigRef("h200-single", "1"))
    assert (none.status, none.exit_code) == (Status.MISSING, ExitCode.INCOMPLETE)
    assert "python -m bench baseline record --config configs/h200-single.toml" in none.message


def test_versions_are_shown_when_they_differ(tmp_path: Path) -> None:
    config = load_config(None, ["name=cpu-tiny"])
    stored = recording.build(
        HERE, ConfigRef(config.name, config.digest()), sessions(1000.0, 1010.0, 990.0), "0" * 40
    )
    recording.write(stored, tmp_path)
    newer = identity.describe(HERE.gpus, HERE.cpu_model, HERE.cpus, {"python": "3.12.1", "torch": "2.13.0"})
    seen = comparing.view(newer, reference(config), now(1000.0), tmp_path)
    assert (seen.status, seen.verdict, seen.sessions) == ("match", "within", 3)
    assert "python 3.11.7 -> 3.12.1" in seen.note
    assert "torch" not in seen.note


def test_no_folder_of_baselines_is_no_baseline(tmp_path: Path) -> None:
    seen = comparing.view(HERE, reference(load_config(None)), now(1.0), tmp_path / "absent")
    assert (seen.status, seen.value) == ("missing", None)


@pytest.mark.fault
def test_a_machine_that_is_slower_than_it_was_is_seen_by_its_sentinel() -> None:
    """A receipt of a machine 1.7 times slower, its sentinel too, says nothing of the code."""
    stored = replace(
        measured(), sessions=tuple(replace(one, sentinel_s={"cpu": 1.0}) for one in measured().sessions)
    )
    same, slower = (Session(1000.0, "", sentinel_s={"cpu": s}) for s in (1.02, 1.7))
    assert comparing.machine_moved(stored, [same]) == ""
    assert "cpu by +70.0%" in comparing.machine_moved(stored, [slower])
    assert comparing.machine_moved(measured(), [slower]) == "", (
        "an older file has no sentinel to compare with"
    )


@pytest.mark.fault
def test_a_figure_far_below_what_the_machine_does_is_stale() -> None:
    """Against it a run could lose two thirds of its speed and pass."""
    found = comparing.compare(measured(), [now(3000.0)])
    assert found.verdict is Verdict.NO_BASELINE
    assert found.message.startswith("stale: ")
    assert comparing.compare(measured(), [now(1100.0)]).verdict is Verdict.WITHIN


def test_list_shows_whose_figures_they_are(tmp_path: Path) -> None:
    recording.write(measured(), tmp_path)
    (row,) = comparing.table(store.read_all(tmp_path), HERE)
    assert (row["this machine"], row["origin"], row["sessions"]) == ("yes", "measured", "4")
    assert comparing.table(store.read_all(ROOT / "baselines"), HERE)[0]["this machine"] == "no"
