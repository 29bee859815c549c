"""A run goes on under other settings where they change nothing that is learnt, and is refused by name where
they do."""

from __future__ import annotations

import json

import pytest

from dflash.config import Config, Effect, effects, load_config
from dflash.data.dataset import Dataset
from dflash.pipeline import checkpoint, resume
from dflash.pipeline.checkpoint import State
from dflash.pipeline.progress import Progress
from dflash.pipeline.schedule import learning_rate
from steptime.errors import UserError
from tests.pipeline.run import losses, settled_trainer, small_config, small_trainer

PLANNED = ("train.steps=100", "train.accumulation=6", "train.lr=1.0", "train.warmup=0.1")


def written(*settings: str) -> State:
    """A checkpoint of a run with these settings, as JSON gives it back."""
    leaves = load_config(None, [*PLANNED, *settings]).leaves()
    return State(Progress(40, 240), {}, {}, json.loads(json.dumps(leaves)))


def going_on(state: State, *settings: str) -> resume.Resumption:
    return resume.resumption(load_config(None, [*PLANNED, *settings]), state, "run")


def refusal(state: State, *settings: str) -> str:
    with pytest.raises(UserError) as caught:
        going_on(state, *settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_says_what_it_does_to_a_run_that_goes_on():
    assert effects().keys() == Config().leaves().keys()
    assert {effects()[key] for key in effects() if key.startswith("observe.")} == {Effect.OBSERVING}
    assert effects()["train.lr"] is Effect.TRAINING
    assert effects()["target.tiny.seed"] is Effect.TRAINING
    assert effects()["drafter.devices"] is Effect.PLACE


OTHER = {
    "data.path": "moved.jsonl",
    "data.cache": "elsewhere",
    "data.prefetch": 9,
    "target.devices": '["cpu:0", "cpu:1"]',
    "drafter.attention": "dense",
    "queue.capacity": 99,
    "train.checkpoint_every": 7,
    "train.keep_checkpoints": 7,
    "train.hang_s": 7.0,
    "train.threads_per_worker": 2,
    "observe.wandb": "off",
    "observe.collectors": "[]",
    "observe.tensorboard": "true",
    "name": "other",
}


@pytest.mark.parametrize("key", OTHER)
def test_what_observes_keeps_or_speeds_never_blocks(key):
    assert effects()[key] is not Effect.TRAINING
    begin = going_on(written(), f"{key}={OTHER[key]}")
    assert begin.config.leaves()[key] != Config().leaves()[key]
    assert begin.notes == ()


def test_what_changes_training_is_refused_with_each_setting_and_both_values():
    text = refusal(written(), "train.lr=0.5", "data.seed=3", "observe.wandb=off")
    assert "train.lr was 1.0, now 0.5" in text
    assert "data.seed was 0, now 3" in text
    assert "wandb" not in text
    assert "drafter.init" in text


def test_a_setting_that_this_version_does_not_know_is_named():
    state = written()
    state.settings["train.momentum"] = 0.3
    assert "train.momentum was 0.3" in refusal(state)


def test_a_setting_that_the_checkpoints_version_did_not_have_had_todays_default():
    state = written()
    del state.settings["objective.dpace_alpha"]
    assert going_on(state).state is state
    assert "objective.dpace_alpha was 0.5, now 0.25" in refusal(state, "objective.dpace_alpha=0.25")


def test_a_plan_may_grow_not_shrink():
    assert "train.steps was 100, now 60" in refusal(written(), "train.steps=60")


def test_more_steps_have_the_rate_of_a_run_planned_so_long():
    begin = going_on(written(), "train.steps=200")
    whole = load_config(None, [*PLANNED, "train.steps=200"]).train
    assert [learning_rate(step, begin.config.train) for step in range(200)] == [
        learning_rate(step, whole) for step in range(200)
    ]
    assert "as if so many had been planned" in begin.notes[0]


def test_extended_steps_rise_and_fall_once_more_and_the_steps_done_keep_their_rate():
    begin = going_on(written(), "train.steps=150", "train.schedule=extend")
    train, before = begin.config.train, load_config(None, PLANNED).train
    assert train.legs == (100,)
    rates = [learning_rate(step, train) for step in range(150)]
    assert rates[:100] == [learning_rate(step, before) for step in range(100)]
    assert rates[104] == pytest.approx(1.0)
    assert rates[105:] == sorted(rates[105:], reverse=True)
    # The same command again finds the plan that it made.
    again = going_on(
        written("train.steps=150", "train.legs=[100]"), "train.steps=150", "train.schedule=extend"
    )
    assert again.config.train.legs == (100,)
    assert again.notes == ()
    further = going_on(
        written("train.steps=150", "train.legs=[100]"), "train.steps=180", "train.schedule=extend"
    )
    assert further.config.train.legs == (100, 150)


def test_legs_that_are_not_the_runs_are_refused():
    assert "train.legs was [], now [30]" in refusal(written(), "train.legs=[30]")
    with pytest.raises(UserError, match=r"train\.legs = \[100\]: must ascend, all below"):
        load_config(None, [*PLANNED, "train.legs=[100]"])


@pytest.mark.parametrize(("drafters", "accumulation"), [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_another_number_of_drafters_keeps_the_batches_of_a_step(drafters, accumulation):
    devices = json.dumps([f"cpu:{index}" for index in range(drafters)])
    begin = going_on(written(), f"drafter.devices={devices}")
    assert begin.config.train.accumulation == accumulation
    assert bool(begin.notes) == (drafters > 1)


def test_a_number_that_cannot_share_the_step_says_which_could():
    text = refusal(written(), 'drafter.devices=["cpu:0", "cpu:1", "cpu:2", "cpu:3"]')
    assert "6 batches, which so many cannot share evenly (1, 2, 3, 6 could)" in text
    assert "train.accumulation was 6, now 5" in refusal(written(), "train.accumulation=5")


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_as_if_so_many_had_been_planned(tmp_path):
    flat = ("train.warmup=0.0", "train.min_lr_ratio=1.0")  # one rate, so that the plan's length is no matter
    whole = losses(small_trainer(tmp_path, "train.steps=8", *flat, name="whole"))
    first = losses(small_trainer(tmp_path, "train.steps=4", *flat, name="grown"))
    second = small_trainer(tmp_path, "train.steps=8", *flat, 'observe.collectors=["gpu"]', name="grown")
    assert first + losses(second) == whole
    assert second.result.history.steps == 8
    assert second.result.history.legs == 2


@pytest.mark.slow
@pytest.mark.parametrize("order", ["true", "false"])
def test_another_number_of_drafters_trains_on_what_is_left(tmp_path, order):
    first = settled_trainer(
        tmp_path, "train.accumulation=2", "train.checkpoint_every=2", f"queue.ordered={order}"
    )
    head = losses(first)
    second = small_trainer(
        tmp_path,
        "train.accumulation=2",
        "train.steps=9",
        f"queue.ordered={order}",
        'drafter.devices=["cpu:0", "cpu:1"]',
    )
    result = second.run()
    second.observer.close()
    seen = [index for row in result.scalars for index in row.plan_indices]
    assert len(head) == 6
    assert sorted(seen) == list(range(12, 18))


@pytest.mark.slow
@pytest.mark.fault
def test_other_samples_and_another_drafter_are_refused(tmp_path):
    losses(small_trainer(tmp_path, "train.steps=2"))
    data = tmp_path / "ids.jsonl"
    lines = data.read_text().splitlines()
    row = json.loads(lines[3])
    row["input_ids"][7] += 1
    data.write_text("\n".join([*lines[:3], json.dumps(row), *lines[4:]]) + "\n")
    with pytest.raises(UserError, match="trained on other samples"):
        small_trainer(tmp_path, "train.steps=4")
    data.write_text("\n".join(lines) + "\n")
    second = small_trainer(tmp_path, "train.steps=4")
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    state.drafter_shape["mask_token_id"] = 60
    with pytest.raises(UserError, match="the drafter's mask_token_id was 60, now 63"):
        resume.check_same_run(state, second.inputs, "run")
    assert losses(second)


def test_the_fingerprint_changes_with_any_sample_looked_at(tmp_path):
    from dflash.pipeline.build import prepare_inputs

    dataset = prepare_inputs(small_config(tmp_path)).dataset
    samples = list(dataset.samples)
    assert resume.fingerprint(Dataset(samples)) == resume.fingerprint(dataset)
    assert resume.fingerprint(Dataset([*samples[1:], samples[0]])) != resume.fingerprint(dataset)
    assert resume.fingerprint(Dataset(samples[:-1])) != resume.fingerprint(dataset)
