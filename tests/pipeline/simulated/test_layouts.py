"""Every layout runs on simulated devices without a race, a misuse or a wait, and gives the CPU's bits."""

from __future__ import annotations

import itertools

import pytest

from dflash.data.plan import EpochPlan
from tests.pipeline.run import Hooks
from tests.pipeline.simulated.parts import Ended, Replayed, assert_same, devices, plain, simulated
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(5 * HANG_S)

ALL_COLLECTORS = (
    'observe.collectors=["profile", "gpu", "pipeline", "workers", "batch", "cuda"]',
    "observe.tick_s=0.05",
)


def same_as_the_cpu(
    tmp_path, targets: int, drafters: int, *settings: str, together=False, seed=None
) -> Ended:
    """Run both; a mixed run is compared with an ordered one that draws as it did."""
    ended = simulated(
        tmp_path, *devices(targets, drafters, together=together), *settings, seed=seed, name="simulated"
    )
    assert ended.simulation is not None
    assert ended.simulation.faults == []
    arguments = {}
    if "queue.ordered=false" in settings:
        trainer = ended.trainer
        data = trainer.config.data
        whole = EpochPlan(trainer.inputs.dataset.lengths, data.buckets, data.batch_size, data.seed)
        arguments["plan"] = Replayed(whole, ended.order())
        settings = (*settings, "queue.ordered=true")
    reference = plain(tmp_path, *devices(targets, drafters, "cpu"), *settings, name="plain", **arguments)
    assert_same(ended, reference)
    roles = {role for role, _ in ended.simulation.counts.default_stream if "/" in role}
    assert roles == set(), "a worker has used a default stream"
    return ended


MIXED = (
    "objective.kind=dpace",
    "train.accumulation=2",
    "queue.ordered=false",
    "data.pack=true",
    "train.steps=2",
)
THROUGH_HOST = (
    "objective.kind=kd",
    "queue.hand_over=pinned",
    "train.checkpoint_every=2",
    "train.steps=3",
)


@pytest.mark.parametrize(
    ("targets", "drafters", "settings"),
    [
        pytest.param(1, 1, ("objective.kind=ce", *ALL_COLLECTORS), id="1+1"),
        pytest.param(5, 3, MIXED, id="5+3 mixed", marks=pytest.mark.slow),
        pytest.param(1, 3, THROUGH_HOST, id="1+3 through the host", marks=pytest.mark.slow),
    ],
)
def test_a_layout_gives_the_cpus_bits(tmp_path, targets, drafters, settings):
    same_as_the_cpu(tmp_path, targets, drafters, *settings)


CHOICES = {
    "targets": (1, 5),
    "drafters": (1, 3),
    "objective": ("ce", "dpace", "kd"),
    "ordered": ("true", "false"),
    "accumulation": (1, 2),
    "pack": ("true", "false"),
    "hand_over": ("peer", "pinned"),
    "collectors": (True, False),
}
ROWS = (
    (5, 1, "ce", "true", 1, "false", "peer", False),
    (1, 3, "ce", "false", 2, "true", "pinned", True),
    (5, 3, "kd", "true", 1, "false", "pinned", True),
    (1, 1, "kd", "false", 2, "true", "peer", False),
    (5, 3, "dpace", "false", 1, "true", "pinned", False),
    (1, 3, "dpace", "true", 2, "false", "peer", True),
    (5, 1, "dpace", "false", 2, "false", "pinned", True),
    (1, 3, "ce", "true", 1, "true", "pinned", True),
)
"""Each value of a choice meets each value of each other one; `product.py` has all combinations."""


def chosen(objective, ordered, accumulation, pack, hand_over, collectors=True) -> tuple[str, ...]:
    """The settings that make these choices."""
    return (
        f"objective.kind={objective}",
        f"queue.ordered={ordered}",
        f"train.accumulation={accumulation}",
        f"data.pack={pack}",
        f"queue.hand_over={hand_over}",
        *(ALL_COLLECTORS if collectors else ()),
    )


def pairs(rows):
    return {
        (one, row[one], other, row[other])
        for row in rows
        for one, other in itertools.combinations(range(len(CHOICES)), 2)
    }


def test_the_rows_have_every_pair_of_choices():
    assert pairs(ROWS) == pairs(itertools.product(*CHOICES.values()))


@pytest.mark.thorough
@pytest.mark.parametrize(tuple(CHOICES), ROWS)
def test_each_pair_of_choices_gives_the_cpus_bits(
    tmp_path, targets, drafters, objective, ordered, accumulation, pack, hand_over, collectors
):
    same_as_the_cpu(
        tmp_path,
        targets,
        drafters,
        *chosen(objective, ordered, accumulation, pack, hand_over, collectors),
        *(("train.checkpoint_every=2",) if ordered == "true" else ()),
    )


@pytest.mark.slow
def test_target_and_drafter_on_one_device_hand_over_in_place(tmp_path):
    ended = same_as_the_cpu(tmp_path, 1, 1, "objective.kind=kd", together=True)
    assert "device to device" not in ended.simulation.counts.copies


@pytest.mark.slow
def test_bfloat16_weights_and_their_masters(tmp_path):
    same_as_the_cpu(tmp_path, 1, 2, 'drafter.dtype="bfloat16"', 'target.dtype="bfloat16"', "train.steps=3")


@pytest.mark.thorough
def test_no_delay_at_a_hand_over_makes_a_race(tmp_path):
    settings = ("objective.kind=kd", "train.steps=3")
    reference = plain(tmp_path, *devices(2, 2, "cpu"), *settings, name="plain")
    for seed in range(20):
        ended = simulated(tmp_path, *devices(2, 2), *settings, seed=seed, name=f"seed {seed}")
        assert ended.simulation.faults == []
        assert_same(ended, reference)


@pytest.mark.slow
def test_a_resumed_run_gives_the_bits_of_one_that_was_never_stopped(tmp_path):
    layout = devices(1, 2)

    class StopAt(Hooks):
        def after_step(self, step, tokens):
            return step < 1

    head = simulated(tmp_path, *layout, "train.steps=5", name="halves", hooks=StopAt())
    assert 2 <= len(head.losses) < 5
    tail = simulated(tmp_path, *layout, "train.steps=5", name="halves")
    whole = plain(tmp_path, *devices(1, 2, "cpu"), "train.steps=5", name="whole")
    assert head.losses + tail.losses == whole.losses
    assert_same(Ended(tail.trainer, None, whole.losses, tail.weights), whole)


@pytest.mark.slow
def test_dropped_scalars_are_told_and_the_other_steps_keep_their_losses(tmp_path):
    settings = ("train.steps=6", "observe.ring=1")
    ended = simulated(tmp_path, *devices(1, 2), *settings, queries=1, name="simulated")
    whole = plain(tmp_path, *devices(1, 2, "cpu"), "train.steps=6", name="plain")
    rows = ended.trainer.result.scalars
    told = {row.step: row.loss for row in rows if not row.missing}
    assert sum(worker.late.dropped for worker in ended.trainer.drafter_workers) > 0
    assert 0 < len(told) < 6
    assert told == {step: whole.losses[step] for step in told}


@pytest.mark.slow
def test_streams_are_made_once_and_no_stage_of_a_step_is_new_to_its_stream(tmp_path):
    made = []
    ended = simulated(
        tmp_path, *devices(2, 2), prepare=lambda trainer: made.append(streams_of(trainer)), name="run"
    )
    assert ended.simulation.counts.streams == made[0]


def streams_of(trainer) -> int:
    return trainer.replicas[0].device.simulation.counts.streams
