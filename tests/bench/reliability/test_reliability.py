"""The judge of the trials sees what a run lost; the runs themselves are `nox -s faults`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.reliability.__main__ import page
from bench.reliability.kinds import Kind
from bench.reliability.trials import STEPS, Trials, after

pytestmark = pytest.mark.fault


def made_run(out: Path, *, steps: int = STEPS, weights: bytes = b"whole", floor: int = 2 * STEPS) -> Path:
    checkpoint = out / "checkpoints" / f"step-{STEPS:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.safetensors").write_bytes(weights)
    place = {"step": STEPS, "floor": floor, "ahead": []}
    (checkpoint / "state.json").write_text(json.dumps({"progress": place}))
    rows = [json.dumps({"kind": "train", "step": step}) for step in range(steps)]
    (out / "metrics.jsonl").write_text("\n".join([*rows, '{"kind": "tr']) + "\n")
    return out


@pytest.fixture
def trials(tmp_path: Path) -> Trials:
    made = Trials(tmp_path)
    made._whole["1 drafter"] = b"whole"
    return made


@pytest.mark.parametrize(
    ("layout", "made", "lost"),
    [
        ("1 drafter", {}, 0),
        ("1 drafter", {"steps": STEPS - 1}, 1),
        ("1 drafter", {"weights": b"other"}, 1),
        ("mixed order", {"weights": b"other"}, 0),
        ("mixed order", {"floor": 2 * STEPS - 1}, 1),
    ],
)
def test_a_row_or_a_byte_that_was_lost_is_counted(trials: Trials, layout: str, made: dict, lost: int) -> None:
    assert trials.lost(made_run(trials.new(), **made), layout) == lost


def test_a_planted_fault_comes_after_so_many_calls() -> None:
    def fault() -> None:
        raise KeyError("planted")

    call = after(lambda value: value, fault, calls=2)
    assert [call(1), call(2)] == [1, 2]
    with pytest.raises(KeyError):
        call(3)


def test_the_page_says_what_was_lost() -> None:
    text = page(
        [Kind("kill", "goes on", 5, 0, {"exit 0"}), Kind("hang", "exit 75", 3, 2, {"exit 1"})], 3.0, 1
    )
    assert "| kill | 5 | goes on | exit 0 | nothing |" in text
    assert "| hang | 3 | exit 75 | exit 1 | 2 |" in text
    assert "8 trials of 2 kinds." in text
