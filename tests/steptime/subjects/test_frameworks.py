"""Scripts of frameworks that need no change: each callback is a switch, counted exactly. They skip, and are
counted, where the framework is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from steptime.errors import UserError
from steptime.records.pairs import Layer
from steptime.records.types import OFF
from steptime.subjects.registry import find
from steptime.subjects.steps.loop import LoopPairs
from tests.steptime.subjects.test_steps import requests

EXAMPLES = Path(__file__).parents[3] / "examples"
PARAMETERS = 21
"""Of the example's model: so many norms are read in a step."""


@pytest.mark.thorough
def test_each_callback_of_a_hugging_face_run_is_counted_by_name() -> None:
    pytest.importorskip("accelerate")
    script = str(EXAMPLES / "hf_trainer.py")
    kind = find("hf", [script])
    arms = {OFF: (), "GradNorms": ("GradNorms",), "Steps": ("Steps",), "Losses": ("Losses",)}
    request = {"config": {"words": [script]}, "arms": arms, "all_collectors": False}
    counts = kind.count(request)
    off = counts[OFF].syncs
    assert off is not None
    assert {name: (found.syncs or 0) - off for name, found in counts.items()} == {
        OFF: 0,
        "GradNorms": 4 * PARAMETERS,
        "Steps": 0,
        "Losses": 0,
    }
    assert any("hf_trainer.py" in place.where for place in counts["GradNorms"].places)


@pytest.mark.slow
def test_a_hugging_face_run_repeats_bit_for_bit_and_its_log_is_a_tick() -> None:
    pytest.importorskip("accelerate")
    kind = find("hf", [str(EXAMPLES / "hf_trainer.py")])
    settings = kind.settings(None, ())
    assert settings.name == "hf-hf_trainer"
    subject = kind.make_pairs(settings)
    assert isinstance(subject, LoopPairs)
    assert subject.layers["Losses"] == {Layer.PATH, Layer.TICK}
    assert subject.layers["GradNorms"] == {Layer.PATH}
    assert subject.every == {Layer.TICK: 10}
    segments = []
    subject.open()
    result = subject.run_pairs((request for request in _norms(8)), segments.append)
    losses, by_group = dict(result.losses), dict[int, set[float]]()
    for one in segments:
        by_group.setdefault(one.group, set()).add(losses[one.first_step])
    assert [len(values) for values in by_group.values()] == [1] * 4


def _norms(count: int):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    for request in requests(count):
        yield replace(request, on=frozenset({"GradNorms"}) if request.on else request.on)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print(1)", "never called transformers:Trainer.train"),
        ("import sys; sys.exit(3)", "ended with exit code 3 before it trained"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_script_that_does_not_train_is_one_line(text: str, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    kind = find("hf", [str(script)])
    with pytest.raises(UserError, match=said):
        kind.make_pairs(kind.settings(None, ()))
    with pytest.raises(UserError, match="no such script"):
        find("hf", ["nothing.py"]).settings(None, ())


@pytest.mark.thorough
def test_each_callback_and_logger_of_a_lightning_run_is_counted_by_name() -> None:
    pytest.importorskip("lightning")
    script = str(EXAMPLES / "lightning_run.py")
    arms = {OFF: (), "GradNorms": ("GradNorms",), "Batches": ("Batches",), "CSVLogger": ("CSVLogger",)}
    counts = find("lightning", [script]).count(
        {"config": {"words": [script]}, "arms": arms, "all_collectors": False}
    )
    off = counts[OFF].syncs
    assert off is not None
    found = {name: (one.syncs or 0) - off for name, one in counts.items()}
    assert (found["GradNorms"], found["Batches"]) == (4 * 4, 0)
    assert found["CSVLogger"] >= 0


def test_a_lightning_run_repeats_bit_for_bit() -> None:
    pytest.importorskip("lightning")
    kind = find("lightning", [str(EXAMPLES / "lightning_run.py")])
    subject = kind.make_pairs(kind.settings(None, ()))
    assert isinstance(subject, LoopPairs)
    assert subject.layers["CSVLogger"] == {Layer.TICK}
    assert set(subject.switches) >= {"GradNorms", "Batches", "CSVLogger"}
    segments = []
    subject.open()
    result = subject.run_pairs((request for request in _norms(8)), segments.append)
    losses, by_group = dict(result.losses), dict[int, set[float]]()
    for one in segments:
        by_group.setdefault(one.group, set()).add(losses[one.first_step])
    assert [len(values) for values in by_group.values()] == [1] * 4
    assert len(set.union(*by_group.values())) == 4
