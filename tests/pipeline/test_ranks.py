"""Whole runs on several ranks, each a trainer in a thread with real gloo groups."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from dflash.data.plan import EpochPlan
from dflash.observe.syncs.guard import GuardScopes
from dflash.pipeline import checkpoint
from dflash.pipeline.build import prepare_inputs
from dflash.pipeline.dry_run import print_plan
from dflash.pipeline.exchange import GradientExchange
from dflash.pipeline.progress import Progress
from dflash.pipeline.rank_begin import check_samples, check_settings
from dflash.pipeline.resume import resumption
from dflash.pipeline.supervisor import WorkerFailed
from dflash.ranks.across import Across
from dflash.ranks.watch import RankFailed
from steptime.errors import UserError
from tests.clock import Clock
from tests.pipeline.ranked import ranked, run, trainers
from tests.pipeline.run import losses, small_config, small_trainer, write_ids
from tests.ranks.worlds import move_on, worlds
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(3 * HANG_S)
MIXED = "queue.ordered=false"
BFLOAT16_SUMS = ("drafter.dtype=bfloat16", "train.accumulation=2")
TWO_DRAFTERS = 'drafter.devices=["cpu:0", "cpu:1"]'


def weights(trainer) -> torch.Tensor:
    return trainer.replicas[0].flat.master


@pytest.mark.parametrize(
    ("ranks", "settings", "drafters"),
    [
        pytest.param(2, (), 1, id="2"),
        pytest.param(4, (), 1, id="4", marks=pytest.mark.slow),
        pytest.param(2, (TWO_DRAFTERS,), 2, id="2 with 2 drafters", marks=pytest.mark.slow),
        pytest.param(2, ("train.accumulation=2",), 1, id="2 accumulating 2", marks=pytest.mark.slow),
    ],
)
def test_ranks_train_as_one_that_accumulates(tmp_path, ranks, settings, drafters):
    """Ranks x drafters x accumulation batches a step, whoever takes them."""
    made, results = ranked(tmp_path, ranks, *settings, drafters=drafters)
    batches = ranks * drafters * made[0].config.train.accumulation
    alone = small_trainer(tmp_path, f"train.accumulation={batches}", name="alone")
    expected = losses(alone)
    assert [row.loss for row in results[0].scalars] == pytest.approx(expected, rel=1e-5)
    assert results[0].tokens == alone.result.tokens
    assert results[1].scalars == []
    for trainer in made:
        assert torch.equal(weights(trainer), weights(made[0]))
        torch.testing.assert_close(weights(trainer), weights(alone), rtol=1e-4, atol=1e-6)
    by_step = [row.plan_indices for row in results[0].scalars]
    assert [sorted(indices) for indices in by_step] == [
        list(range(step * batches, (step + 1) * batches)) for step in range(6)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), (MIXED, TWO_DRAFTERS, "train.checkpoint_every=2")])
def test_no_worker_of_a_rank_waits_for_its_device(tmp_path, settings):
    scopes = GuardScopes("disallow")
    with worlds(2, 1 + len(settings) // 2) as all_of_them:
        made = trainers(tmp_path, all_of_them, *settings, scopes=scopes)
        results = run(made)
    assert not any(isinstance(result, Exception) for result in results), results
    assert {reason for _, reason in scopes.ledger.declared} <= {"end of the run: the last scalars"}


@pytest.mark.parametrize("settings", [(), ("train.accumulation=3",), (TWO_DRAFTERS,), BFLOAT16_SUMS])
def test_layers_are_summed_while_the_backward_goes_on_and_give_the_same_bits(tmp_path, settings, monkeypatch):
    """Two parts for two layers, then what lies around them. With two drafters in a rank, or sums of
    micro-batches in a buffer of their own, all at the end."""
    began = []
    begin = Across.begin

    def seen(self, drafter, gradient):
        began.append(gradient.numel())
        begin(self, drafter, gradient)

    monkeypatch.setattr(Across, "begin", seen)
    drafters = 2 if TWO_DRAFTERS in settings else 1
    made, results = ranked(tmp_path, 2, *settings, name="overlapped", drafters=drafters)
    steps = len(results[0].scalars)
    each = {(): 4, ("train.accumulation=3",): 4, (TWO_DRAFTERS,): 0, BFLOAT16_SUMS: 1}[settings]
    assert len(began) == 2 * steps * each
    monkeypatch.setattr(GradientExchange, "overlaps", False)
    plain, _ = ranked(tmp_path, 2, *settings, name="plain", drafters=drafters)
    for one, other in zip(made, plain, strict=True):
        assert torch.equal(weights(one), weights(other))


@pytest.mark.fault
def test_a_rank_that_keeps_its_gradient_to_itself_would_be_found(tmp_path):
    with worlds(2) as all_of_them:
        made = trainers(tmp_path, all_of_them)
        begin = all_of_them[1].across.begin
        all_of_them[1].across.begin = lambda drafter, gradient: begin(drafter, gradient.clone())
        run(made)
    assert not torch.equal(weights(made[0]), weights(made[1]))


@pytest.mark.slow
def test_few_samples_and_a_rank_whose_batches_hold_nothing_to_learn(tmp_path):
    """Three batches an epoch over four ranks; in one batch no token is supervised."""
    path = write_ids(tmp_path / "ids.jsonl", samples=5)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows.append({"input_ids": list(range(1, 31)), "loss_mask": [0] * 29 + [1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("data.batch_size=1", "train.steps=5")
    _, results = ranked(tmp_path, 4, *settings)
    alone = small_trainer(tmp_path, *settings, "train.accumulation=4", name="alone")
    assert [row.loss for row in results[0].scalars] == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("again", [1, 4])
def test_a_mixed_run_goes_on_from_its_last_checkpoint_on_another_number_of_ranks(tmp_path, again):
    """No batch of the plan comes twice, and none is left out."""
    settings = (MIXED, "train.steps=7", "train.accumulation=2", "queue.capacity=8")
    made, _ = ranked(tmp_path, 2, *settings)
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert state.progress.step == 7
    assert state.settings["ranks"] == 2
    first = set(range(state.progress.floor)) | set(state.progress.ahead)
    assert len(first) == 7 * 4
    settings = (MIXED, "train.steps=12", "train.accumulation=2", "queue.capacity=8")
    if again == 1:
        last = small_trainer(tmp_path, *settings)
        losses(last)
        seen = last.result.scalars
    else:
        made, results = ranked(tmp_path, again, *settings)
        assert made[1].config.train.accumulation == 1
        seen = results[0].scalars
    second = [index for row in seen for index in row.plan_indices]
    assert len(second) == len(set(second)) == 5 * 4
    assert not first & set(second)
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert set(range(state.progress.floor)) | set(state.progress.ahead) == first | set(second)


@pytest.mark.slow
def test_checkpoints_on_the_way_hold_the_place_of_all_ranks(tmp_path):
    settings = (MIXED, "train.steps=40", "train.checkpoint_every=3", "train.keep_checkpoints=99")
    _, results = ranked(tmp_path, 3, *settings)
    by_step = {row.step: row.plan_indices for row in results[0].scalars}
    states = [checkpoint.load(path) for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints")]
    assert len(states) > 1
    for state in states:
        done = {index for step in range(state.progress.step) for index in by_step[step]}
        assert set(range(state.progress.floor)) | set(state.progress.ahead) == done


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("failing", [0, 1])
def test_one_rank_that_fails_ends_all_and_no_whole_step_is_lost(tmp_path, failing, mixed):
    with worlds(2) as all_of_them:
        made = trainers(
            tmp_path, all_of_them, f"queue.ordered={str(not mixed).lower()}", "train.steps=100000"
        )
        target, worker = made[failing]._targets[0], made[failing].drafter_workers[0]
        taps = target.taps

        def planted(*arguments, **named):
            if worker.step_index >= 3:
                raise RuntimeError("planted")
            return taps(*arguments, **named)

        target.taps = planted
        results = run(made)
    assert all(isinstance(result, WorkerFailed) for result in results)
    own, other = results[failing], results[1 - failing]
    assert str(own) == "target/0 failed: RuntimeError: planted"
    assert str(other) == f"rank {failing}: target/0 failed: RuntimeError: planted"
    assert isinstance(other.failure.error, RankFailed)
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert state.progress.step == made[0].drafter_workers[0].step_index >= 3
    trained = state.progress.step * 2
    assert len(set(range(state.progress.floor)) | set(state.progress.ahead)) == trained


@pytest.mark.slow
@pytest.mark.fault
def test_a_rank_that_died_without_a_word_leaves_a_checkpoint_that_says_so(tmp_path, monkeypatch):
    """Its connections break as a killed process's do; it tells nobody where it stood."""
    clock = Clock()
    with worlds(2, clock_s=clock.seconds) as all_of_them:
        made = trainers(tmp_path, all_of_them, MIXED, "train.steps=100000")
        dead = made[1]
        monkeypatch.setattr(all_of_them[1], "fail", lambda line: None)
        monkeypatch.setattr(dead.part, "end", lambda *arguments: None)
        step = dead.drafter_workers[0].step

        def dies():
            if dead.drafter_workers[0].step_index >= 3:
                all_of_them[1].watch.close()
                move_on(clock, [all_of_them[0].watch], until=lambda: all_of_them[0].watch.failure)
                raise SystemExit
            return step()

        dead.drafter_workers[0].step = dies
        told = []
        monkeypatch.setattr(made[0].observer, "event", lambda line, **values: told.append(line))
        results = run(made)
    assert str(results[0]).startswith("rank 1: no sign of life for 60 s")
    state = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert state.progress.step == 3
    assert state.progress.floor + len(state.progress.ahead) == 6
    assert any("rank 1 did not say which batches it has drawn" in line for line in told)


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_on_any_rank_ends_all_after_the_same_step(tmp_path, asked):
    with worlds(2) as all_of_them:
        made = trainers(tmp_path, all_of_them, "train.steps=100000")
        boundary = made[asked]._boundary

        def stops(steps_done, save):
            if steps_done == 4:
                made[asked].request_stop()
            boundary(steps_done, save)

        made[asked].drafter_workers[0]._checkpoint = stops
        results = run(made)
    assert not any(isinstance(result, Exception) for result in results)
    assert [trainer.drafter_workers[0].step_index for trainer in made] == [5, 5]
    assert checkpoint.newest(tmp_path / "run" / "checkpoints").progress.step == 5


@pytest.mark.slow
@pytest.mark.fault
def test_a_nan_on_one_rank_ends_all_and_no_bad_weights_are_saved(tmp_path):
    with worlds(2) as all_of_them:
        made = trainers(tmp_path, all_of_them, "train.steps=100000", "train.checkpoint_every=2")
        norms = [
            module for name, module in made[1]._targets[0].model.named_modules() if name.endswith("norm")
        ]
        worker, step = made[1].drafter_workers[0], made[1].drafter_workers[0].step

        def poisoned():
            if worker.step_index == 4:
                norms[0].weight.data[0] = float("nan")
            return step()

        worker.step = poisoned
        results = run(made)
    assert "NonFiniteLoss" in str(results[0])
    assert str(results[1]).startswith("rank 0: main failed: NonFiniteLoss: step")
    for path in checkpoint.checkpoints(tmp_path / "run" / "checkpoints"):
        assert all(bool(torch.isfinite(tensor).all()) for tensor in checkpoint.load(path).tensors.values())


def test_rank_0_writes_the_rows_and_lines_of_all_ranks(tmp_path):
    with worlds(2) as all_of_them:
        made = trainers(tmp_path, all_of_them)
        made[1].observer.event("something on rank 1", number=7)
        run(made)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    own = [row["values"] for row in rows if row["kind"] == "metrics"][-1]
    others = [row["values"] for row in rows if row["kind"] == "rank"][-1]
    # Where somebody looked at the lock meanwhile, and where there was a tick before.
    timed = {"host/lock_held_ratio", "host/lock_wakes", "monitor/tick_ms"}
    assert {key.removeprefix("rank1/") for key in others} - timed == own.keys() - timed
    assert all(key.startswith("rank1/") for key in others)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(6))
    (event,) = [row["values"] for row in rows if row["kind"] == "event"]
    assert event == {"text": "rank 1: something on rank 1", "number": 7}


def test_other_settings_and_other_samples_are_refused(tmp_path):
    config = small_config(tmp_path)
    inputs = prepare_inputs(config)
    other = dataclasses.replace(inputs, dataset=prepare_inputs(_other_data(tmp_path)).dataset)
    with worlds(2) as all_of_them:
        first, second = all_of_them
        check_settings(first, config)
        with pytest.raises(UserError, match=r"train.lr is 0.01 on rank 0 and 0.5 on rank 1"):
            check_settings(second, small_config(tmp_path, "train.lr=0.5"))
        check_settings(second, small_config(tmp_path, "queue.capacity=9"))
        check_samples(first, inputs)
        with pytest.raises(UserError, match=r"the ranks' samples differ: data.path is"):
            check_samples(second, other)


def _other_data(folder):
    write_ids(folder / "other.jsonl", samples=23)
    return small_config(folder, f"data.path={folder / 'other.jsonl'}")


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_another_number_of_ranks_keeps_the_batches_of_a_step(tmp_path, ranks, accumulation):
    config = small_config(tmp_path, "train.accumulation=2")
    state = checkpoint.State(Progress(3, 12), {}, {}, config.leaves() | {"ranks": 2})
    asked = small_config(tmp_path, f"train.accumulation={7 if ranks != 2 else 2}")
    assert resumption(asked, state, "run", ranks).config.train.accumulation == accumulation


@pytest.mark.fault
def test_ranks_that_cannot_share_a_step_are_refused(tmp_path):
    config = small_config(tmp_path, "train.accumulation=2")
    state = checkpoint.State(Progress(3, 12), {}, {}, config.leaves() | {"ranks": 2})
    with pytest.raises(UserError, match=r"a step has 4 batches, which so many cannot share evenly \(1, 2, 4"):
        resumption(config, state, "run", 3)


def test_a_resumed_run_names_the_samples_of_a_batch_by_its_place_in_the_plan(tmp_path):
    losses(small_trainer(tmp_path, "train.steps=6"))
    again = small_trainer(tmp_path, "train.steps=8")
    assert [again.sample_ids(index) for index in range(8)] == [
        again.plan.spec(index).sample_ids for index in range(8)
    ]
    plan = EpochPlan(again.inputs.dataset.lengths, again.config.data.buckets, 2, again.config.data.seed)
    assert again.sample_ids(7) == plan.spec(7).sample_ids


def test_the_dry_run_tells_of_all_ranks(tmp_path, capsys):
    config = small_config(tmp_path)
    print_plan(config)
    one = capsys.readouterr().out
    print_plan(config, ranks=3)
    three = capsys.readouterr().out
    assert "at most 128 context tokens, 24 supervised slots" in one
    assert "at most 384 context tokens, 72 supervised slots" in three
    assert "shared evenly by 3 ranks; what follows is one rank's" in three
