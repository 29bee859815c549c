"""The real trainer, counted: no collector adds anything, every planted fault is found, losses stay what they
were."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.subjects.trainer.counts import OFF, Proof, count_arms, exact_counts
from bench.subjects.trainer.harness import harness_config
from bench.subjects.trainer.kind import TrainerKind
from bench.syncs.faults import planted
from bench.syncs.faults.planted import COUNTED, PLANTED, Plant
from bench.syncs.ways.fake_device import audit
from dflash.observe.observer import Observer
from dflash.observe.registry import COLLECTORS
from dflash.observe.sinks.jsonl import JsonlSink
from steptime.syncs.counting import CountingScopes
from tests.pipeline.run import losses, small_config, small_trainer
from tests.waiting import HANG_S

pytestmark = [pytest.mark.timeout(5 * HANG_S), pytest.mark.slow]
NAMES = tuple(collector.name for collector in COLLECTORS)
ONE_LAYER = "drafter.layers=1"
"""Every layer is counted operation by operation; a second one would be counted as the first."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("proof")


@pytest.fixture(scope="module")
def proof(folder: Path) -> Proof:
    """Off, each collector, all together, and each planted fault, in one run."""
    arms: dict[str, tuple[str, ...]] = {OFF: (), "all": NAMES}
    arms |= {f"only:{name}": (name,) for name in (*NAMES, *COUNTED)}
    return count_arms(harness_config(small_config(folder, ONE_LAYER)), arms, plants=COUNTED, cycle=2)


def test_the_steady_state_has_no_sync(proof: Proof) -> None:
    assert proof.syncs(OFF) == 0
    assert proof.ways == ("modes",)
    assert set(proof.roles) >= {"target/0", "drafter/0", "prefetcher", "monitor"}


def test_there_is_work_to_count(proof: Proof) -> None:
    counts = exact_counts(proof)[OFF]
    assert counts.armed
    assert counts.operations
    assert counts.copies == 7 * proof.steps + proof.steps, (
        "ids for the target, six tensors for the drafter, one row back"
    )


@pytest.mark.parametrize("arm", ["all", *(f"only:{name}" for name in NAMES)])
def test_collectors_add_nothing(proof: Proof, arm: str) -> None:
    assert proof.difference(arm) == []


@pytest.mark.fault
@pytest.mark.parametrize("name", COUNTED)
def test_planted_faults_are_found_in_the_trainer(proof: Proof, name: str) -> None:
    fault = PLANTED[name]
    file, lines = fault.lines()
    rows = [row for row in proof.difference(f"only:{name}") if row.kind == fault.kind]
    (row,) = rows
    assert (row.role, row.place.file) == (fault.role, file)
    assert row.place.line in lines
    least = {"monitor": proof.steps, "flush": 1}.get(fault.where)
    assert row.on == proof.steps if least is None else row.on >= least


@pytest.mark.fault
def test_a_tensor_as_a_metrics_value_ends_the_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were it let through, a sink would wait for it, in a thread where nobody looks."""

    class GivesTensor(Plant):
        def sample(self, now_ns: int) -> dict[str, float]:
            return {} if self._loss is None else {"planted/loss": self._loss}  # type: ignore[dict-item]

    monkeypatch.setattr(planted, "make_plant", lambda name: GivesTensor(PLANTED[name]))
    with pytest.raises(RuntimeError, match=r"item went off in the middle.*planted/loss is a Tensor"):
        count_arms(
            harness_config(small_config(folder, ONE_LAYER)),
            {OFF: (), "only:item": ("item",)},
            plants=["item"],
            cycle=2,
        )


def test_what_a_sink_waits_for_is_charged_to_its_thread(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's own rows pass no collector: a tensor in one reaches the sinks, and is read there."""
    late = Observer.late
    kept = torch.ones(())
    monkeypatch.setattr(
        Observer, "late", lambda self, step, values: late(self, step, values | {"planted": kept})
    )
    monkeypatch.setattr(
        JsonlSink, "write", lambda self, rows: [float(row.values.get("planted", 0.0)) for row in rows]
    )
    counted = count_arms(harness_config(small_config(folder, ONE_LAYER)), {OFF: ()}, cycle=2)
    (found,) = [key for key in counted.counts[OFF] if key[0].startswith("sink/")]
    assert found[:2] == ("sink/jsonl", "float()")
    assert counted.syncs(OFF) > 0


def test_losses_are_equal_in_every_arm(proof: Proof) -> None:
    assert proof.losses_equal
    assert len(proof.losses[OFF]) == proof.steps


def test_two_proofs_are_equal(folder: Path, proof: Proof) -> None:
    again = count_arms(harness_config(small_config(folder, ONE_LAYER)), {OFF: ()}, cycle=2)
    assert again.counts[OFF] == proof.counts[OFF]


def test_counting_does_not_change_training(tmp_path: Path) -> None:
    scopes = CountingScopes()
    scopes.arm()
    plain = losses(small_trainer(tmp_path, name="plain"))
    assert losses(small_trainer(tmp_path, name="counted", scopes=scopes)) == plain
    assert len(plain) == 6


def test_a_bfloat16_step_with_two_drafters_has_no_sync(folder: Path) -> None:
    settings = ('drafter.devices=["cpu:1", "cpu:2"]', 'drafter.dtype="bfloat16"', "train.accumulation=2")
    counted = count_arms(
        harness_config(small_config(folder, ONE_LAYER, *settings)), {OFF: (), "all": NAMES}, cycle=2
    )
    assert counted.syncs(OFF) == 0
    assert counted.difference("all") == []
    assert set(counted.roles) >= {"drafter/0", "drafter/1"}


def test_answer_speaks_the_harness_words(folder: Path) -> None:
    config = harness_config(small_config(folder, ONE_LAYER)).model_dump(mode="json")
    request = {
        "config": config,
        "plants": ["item"],
        "arms": {OFF: [], "only:item": ["item"]},
        "all_collectors": False,
    }
    counts = TrainerKind().count(request)
    assert (counts[OFF].syncs, counts["only:item"].syncs) == (0, counts[OFF].steps)
    (place,) = [place for place in counts["only:item"].places if place.kind == "sync"]
    assert place.where.startswith("bench/syncs/faults/planted.py:")
    assert place.role == "drafter/0"


def test_an_unarmed_way_is_not_zero(proof: Proof) -> None:
    blind = SimpleNamespace(**{**vars(proof), "unavailable": ("GPU trace: no CUDA device",)})
    blind.difference, blind.syncs = proof.difference, proof.syncs
    assert not exact_counts(blind)[OFF].armed  # type: ignore[arg-type]


def test_the_audit_finds_nothing_in_the_trainer(folder: Path) -> None:
    way = audit(harness_config(small_config(folder, ONE_LAYER)))
    assert way.counts() == {}
    assert way.operations["target/0"] > 100
    assert way.operations["drafter/0"] > 100


@pytest.mark.fault
def test_the_audit_finds_a_planted_item(folder: Path) -> None:
    counts = audit(harness_config(small_config(folder, ONE_LAYER)), plant="item").counts()
    ((role, kind, place),) = counts
    assert (role, kind, place.function) == ("drafter/0", "local_scalar_dense", "_item")
