"""A trainer that is a file of the user's: counted exactly, repeated bit for bit, refused in one line."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steptime import Periodic, Steps, cli
from steptime.errors import UserError
from steptime.records.pairs import CONTROL, Layer, Request, Segment
from steptime.records.types import ALL, OFF
from steptime.subjects.injection import parse_injection
from steptime.subjects.registry import SUBJECTS, find
from steptime.subjects.spin import SpinKind
from steptime.subjects.steps.counts import count
from steptime.subjects.steps.kind import StepsKind
from steptime.subjects.steps.loop import NO_LOSS, LoopPairs

LAYERS = 4
"""Parameters of the model: as many norms are read in a step."""


def trainer(hold: bool = True, loss: bool = True, every: int = 10) -> Steps:
    """A small net with a callback that reads gradient norms, one that does nothing, and a rare writer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [torch.randn(4, 8) for _ in range(4)]
    on = {"norms": False}

    def step(i: int) -> Any:
        value = model(batches[i]).square().mean()
        value.backward()
        if on["norms"]:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.norm().item()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach() if loss else None

    def norms(enabled: bool) -> None:
        on["norms"] = enabled

    written = Periodic(every, lambda: next(model.parameters()).sum().item())
    switches = {"norms": norms, "idle": lambda enabled: None, "written": written}
    return Steps(step, cycle=4, tokens=[1, 2, 3, 4], switches=switches, hold=hold)


def requests(count: int = 4) -> Iterator[Request]:
    for pair in range(count):
        for half, on in enumerate((frozenset({"norms"}), frozenset[str]())):
            yield Request(on, 2, pair % 4, Layer.PATH, pair, half)


@pytest.mark.slow
def test_counts_are_exact_by_switch() -> None:
    arms = {OFF: (), "norms": ("norms",), "idle": ("idle",), "written": ("written",), ALL: ()}
    counts = count(trainer, arms, everything=True)
    syncs = {name: found.syncs for name, found in counts.items()}
    assert syncs == {OFF: 0, "norms": 4 * LAYERS, "idle": 0, "written": 1, ALL: 4 * LAYERS + 1}
    assert counts["idle"].operations == counts[OFF].operations
    assert any("test_steps.py" in place.where for place in counts["norms"].places)


def test_a_loop_pays_the_control_in_its_segments_alone() -> None:
    loop = LoopPairs("made", trainer())
    assert loop.controlled
    assert CONTROL not in loop.switches
    taken: list[Segment] = []
    loop.open()
    halves = (frozenset({CONTROL}), frozenset[str](), frozenset({CONTROL, "norms"}))
    loop.run_pairs(iter([Request(on, 3, 0) for on in halves]), taken.append)
    loop.close()
    assert [segment.control_s > 0 for segment in taken] == [True, False, True]
    assert all(segment.control_s < segment.seconds for segment in taken)


@pytest.mark.fault
def test_a_loop_whose_own_switch_has_the_controls_name_has_no_control() -> None:
    made = trainer()
    made.switches = {CONTROL: lambda enabled: None, **made.switches}
    assert not LoopPairs("made", made).controlled


@pytest.mark.fault
def test_a_loop_on_cuda_has_no_control() -> None:
    """A wait of the host would hide behind the device."""
    made = trainer()
    made.devices = ("cuda:0",)
    assert not LoopPairs("made", made).controlled


def on_cuda() -> Steps:
    """A trainer that takes CUDA where there is some: work on the host beside one copy to the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(8, 2, device=device)
    batches = [torch.randn(4, 8) for _ in range(4)]

    def step(i: int) -> Any:
        batches[i].tolist()
        return model(batches[i].to(device)).sum()

    return Steps(step)


def test_a_trainer_that_takes_cuda_is_counted_as_there() -> None:
    found = count(on_cuda, {OFF: ()}, everything=False)[OFF]
    assert found.syncs == 4, "what stays on the host waits for nothing"
    assert all("blocking copy to device" in place.where for place in found.places)


def test_losses_of_a_batch_repeat_bit_for_bit_and_the_rate_is_given_back() -> None:
    segments: list[Segment] = []
    subject = LoopPairs("mine", trainer())
    subject.open()
    result = subject.run_pairs(requests(8), segments.append)
    assert [one.on for one in segments[:2]] == [("norms",), ()]
    assert [one.tokens for one in segments[::2]] == [2, 4, 6, 8] * 2
    by_group: dict[int, set[float]] = {}
    losses = dict(result.losses)
    for one in segments:
        for step in range(one.first_step, one.first_step + one.steps):
            by_group.setdefault(one.group, set()).add(losses[step])
    assert [len(values) for values in by_group.values()] == [1] * 4
    assert len(set.union(*by_group.values())) == 4


@pytest.mark.fault
def test_without_the_hold_losses_do_not_repeat() -> None:
    segments: list[Segment] = []
    subject = LoopPairs("mine", trainer(hold=False))
    subject.open()
    losses = dict(subject.run_pairs(requests(8), segments.append).losses)
    firsts = {losses[one.first_step] for one in segments if one.group == 0}
    assert len(firsts) > 1


def test_a_step_without_a_loss_is_told() -> None:
    subject = LoopPairs("mine", trainer(loss=False))
    subject.open()
    assert NO_LOSS in subject.run_pairs(requests(), lambda segment: None).notes


def test_what_acts_every_so_many_steps_is_a_tick() -> None:
    subject = LoopPairs("mine", trainer(), [parse_injection("5@tick")])
    assert subject.layers["written"] == {Layer.TICK}
    assert subject.layers["norms"] == {Layer.PATH}
    subject.open()
    assert list(subject.periods) == [Layer.TICK]
    with pytest.raises(UserError, match="of which one is a multiple"):
        LoopPairs("mine", Steps(print, switches={"a": Periodic(3, print), "b": Periodic(5, print)}))


GOOD = (
    "from steptime import Steps\ndef make():\n    return Steps(lambda i: 1.0)\ndef other():\n    return 3\n"
)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--subject", "none.py"], "there is no file or module none.py"),
        (["--subject", "mine.py:nothing"], "has no `nothing`"),
        (["--subject", "mine.py:other"], "other\\(\\) gives int, not Steps"),
        (["--subject", "mine.py", "--config", "a.toml"], "--config: subject mine.py has no config file"),
        (["--subject", "mine.py", "--set", "a=1"], "--set: subject mine.py has no config file"),
        (["--subject", "spin", "--config", "a.toml"], "--config: subject spin has no config file"),
        (["--subject", "mine.py"], "no collector to measure"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("steptime.subjects.registry.PROVIDERS", [])
    monkeypatch.setitem(SUBJECTS.entries, "spin", SpinKind())
    with pytest.raises(UserError, match=said):
        cli.call(["overhead", *words])


@pytest.mark.fault
def test_a_subject_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steptime.subjects.registry.PROVIDERS", [])
    monkeypatch.setattr("steptime.subjects.registry.DEFAULT", [])
    with pytest.raises(UserError, match="--subject is missing"):
        find(None)


def test_name_digest_and_commit_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(GOOD)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.chdir(tmp_path / "a")
    mine, other = StepsKind("train.py"), StepsKind("../b/train.py")
    assert mine.root == other.root == Path(os.path.realpath(tmp_path))
    assert mine.settings(None, ()).name == "train"
    assert mine.settings(None, ()).digest() != other.settings(None, ()).digest()
    assert mine.settings(None, ()).digest() == StepsKind("train.py").settings(None, ()).digest()
    assert mine.in_tree().name == "a/train.py"


def test_the_example_of_a_plain_loop_is_counted() -> None:
    kind = StepsKind(str(Path(__file__).parents[3] / "examples/plain_loop.py"))
    arms = {OFF: (), "norms": ("norms",), "histograms": ("histograms",)}
    counts = kind.count({"config": {}, "arms": arms, "all_collectors": False})
    syncs = {name: found.syncs for name, found in counts.items()}
    assert syncs == {OFF: 0, "norms": 4 * LAYERS, "histograms": LAYERS}


def test_the_stored_figures_of_any_repository_are_listed_without_a_subject(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from steptime.subjects import registry

    monkeypatch.setattr(registry, "PROVIDERS", [])
    monkeypatch.setattr(registry, "DEFAULT", [])
    monkeypatch.chdir(tmp_path)
    assert cli.main(["baseline", "list"]) == 0
    assert "nothing is stored" in capsys.readouterr().out
