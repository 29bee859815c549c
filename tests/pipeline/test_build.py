"""What is known of a run before a model is loaded."""

from __future__ import annotations

import json

import pytest

from dflash.config import TargetConfig
from dflash.data.collate import Collator
from dflash.data.plan import EpochPlan
from dflash.pipeline import dry_run
from dflash.pipeline.build import prepare_inputs
from dflash.pipeline.dry_run import make_plan, print_plan
from dflash.pipeline.known_targets import KNOWN_TARGETS
from steptime.errors import UserError
from tests.pipeline.run import small_config


def test_a_mask_token_that_stands_in_the_data_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"mask_token_id = 7: it stands \d+ times in the data \(\d\.\d+% of"):
        prepare_inputs(small_config(tmp_path, "drafter.mask_token_id=7"))
    allowed = small_config(tmp_path, "drafter.mask_token_id=7", "drafter.mask_in_data=true")
    assert prepare_inputs(allowed).shape.mask_token_id == 7


def epoch(inputs) -> tuple[int, int]:
    """Blocks and supervised slots of an epoch."""
    config = inputs.config.data
    plan = EpochPlan(inputs.dataset.lengths, config.buckets, config.batch_size, config.seed)
    collate = Collator(inputs.dataset, inputs.geometry)
    batches = [collate(plan.spec(index)) for index in range(plan.batches_per_epoch)]
    return sum(int(batch.keep.sum()) for batch in batches), sum(batch.supervised_slots for batch in batches)


@pytest.fixture
def chats(tmp_path):
    """Short conversations, of which several fit into a row."""
    path = tmp_path / "short.jsonl"
    rows = [
        {"input_ids": [1 + i % 50] * (6 + i % 9), "loss_mask": [0, 0] + [1] * (4 + i % 9)} for i in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.path={path}"


def test_packing_trains_on_the_same_share_of_the_tokens(tmp_path, chats):
    alone = prepare_inputs(small_config(tmp_path, chats, "data.batch_size=1"))
    packed = prepare_inputs(small_config(tmp_path, chats, "data.batch_size=1", "data.pack=true"))
    assert len(packed.dataset.samples) < len(alone.dataset.samples) / 3
    assert epoch(packed)[0] == epoch(alone)[0]
    blocks = alone.dataset.anchor_counts(alone.geometry.anchors)
    assert blocks == packed.dataset.anchor_counts(4).__class__(
        blocks.places, epoch(alone)[0], alone.geometry.anchors
    )
    assert packed.dataset.anchor_counts(4).share == blocks.share


def test_the_dry_run_says_how_much_of_the_data_blocks_cover(tmp_path, chats, capsys, monkeypatch):
    config = small_config(tmp_path, chats, "data.pack=true")
    plan = make_plan(config)
    counts = prepare_inputs(config).dataset.anchor_counts(4)
    assert (plan.anchors, plan.anchor_share) == (counts.fullest_row, counts.blocks / counts.places)
    monkeypatch.setattr(dry_run, "measured_rates", lambda config: (("cpu", 1e9),))
    print_plan(config)
    said = capsys.readouterr().out
    assert f"{counts.fullest_row} anchors" in said
    assert f"blocks start at {plan.anchor_share:.0%} of the supervised places" in said
    assert "MFLOP, drafters " in said
    assert f" {(plan.target_flops + plan.drafter_flops) / 1e9:.3g} s at 1 GFLOP/s" in said


def test_the_dry_run_asks_of_each_side_what_a_full_batch_does(tmp_path, chats):
    """Twice the drafters, twice the work of a step; a target that is run to its end does more."""
    one = make_plan(small_config(tmp_path, chats))
    two = make_plan(small_config(tmp_path, chats, 'drafter.devices=["cpu", "cpu"]'))
    assert two.drafter_flops == 2 * one.drafter_flops > 0
    assert two.target_flops == 2 * one.target_flops > 0
    taught = make_plan(small_config(tmp_path, chats, 'objective.kind="kd"'))
    assert taught.target_flops > one.target_flops
    assert taught.drafter_flops > one.drafter_flops
    known = KNOWN_TARGETS["Qwen/Qwen3-8B"]
    flops = known.flops(known.info(TargetConfig(taps=5)), to_the_end=True)
    assert flops.token == 2 * (known.parameters - 2 * known.vocab_size * known.hidden_size)


def test_auto_is_a_type_before_anything_is_planned(tmp_path, monkeypatch):
    monkeypatch.setattr("dflash.models.dtypes.fast_bfloat16", lambda device: device == "cpu:1")
    settings = (
        'target.dtype="auto"',
        'drafter.dtype="auto"',
        'target.devices=["cpu:1"]',
        'drafter.devices=["cpu:1", "cpu"]',
    )
    config = prepare_inputs(small_config(tmp_path, *settings)).config
    assert (config.target.dtype, config.drafter.dtype) == ("bfloat16", "float32")
    assert make_plan(small_config(tmp_path, *settings)).dtypes == ("bfloat16", "float32")
