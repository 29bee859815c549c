"""Each family as a user brings it: a folder, taps held against transformers' own, a run of two steps, an
evaluation that is lossless, an export, and the export read back and evaluated. docs/targets.md is the
table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from dflash.commands.eval import evaluate
from dflash.commands.export import export
from dflash.commands.train import train
from dflash.config import TargetConfig
from dflash.device import Device
from dflash.models import dtypes
from dflash.models.target import load_target, save_target
from dflash.pipeline.trained import load_trained
from dflash.release.released import check_same, load_released
from steptime.errors import UserError
from tests.decode.parts import shaken
from tests.models.families import FAMILIES, FAST, VOCAB, Family, build

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
OPTIONS = {"config": None, "limit": 3, "max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0}
CASES = [pytest.param(name, marks=[] if name in FAST else pytest.mark.thorough) for name in FAMILIES]
MASK = VOCAB - 1


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_target_of_each_family(name, tmp_path, capsys, monkeypatch):
    family = FAMILIES[name]
    save_target(shaken(build(name)), tmp_path / "target")
    monkeypatch.setattr(dtypes, "_said", set())
    monkeypatch.setattr("dflash.decode.evaluate.plot", lambda *_: False)
    settings = TargetConfig(model=str(tmp_path / "target"), layer_ids=(0, 1, 2))
    target = load_target(settings, Device("cpu"))
    said = f"has no SDPA: its attention is '{family.attention}'"
    assert capsys.readouterr().err.count(said) == (family.attention != "sdpa")
    holds_what_the_target_computes(target, family)
    trains_decodes_and_exports(tmp_path, family)


def trains_decodes_and_exports(tmp_path: Path, family: Family, *, ties: bool = False) -> None:
    """A run of two steps on the target in `tmp_path / "target"`, and all that follows it.

    Args:
        ties: texts may part where two passes of the target disagree by as much.
    """
    run = tmp_path / "run"
    assert train(None, run_settings(tmp_path), run) == 0
    trained = load_trained(run)
    assert (trained.shape.embedding_scale, trained.shape.logit_scale) == pytest.approx(family.scales[:2])
    assert trained.step == 2
    options = OPTIONS | {"prompts": tmp_path / "ids.jsonl", "batch": 3}
    if family.refused:
        with pytest.raises(UserError, match=family.refused):
            evaluate(settings=[], checkpoint=run, drafter=None, out=tmp_path / "eval", **options)
        return
    assert evaluate(settings=[], checkpoint=run, drafter=None, out=tmp_path / "eval", **options) == 0
    export(run, tmp_path / "release", "zlab", False, None, None)
    shape, _ = load_released(tmp_path / "release")
    check_same(shape, trained.shape, "the release")
    where = [f"target.model={tmp_path / 'target'}", f"data.path={tmp_path / 'ids.jsonl'}"]
    out = tmp_path / "released"
    assert evaluate(settings=where, checkpoint=None, drafter=tmp_path / "release", out=out, **options) == 0
    found = [json.loads((tmp_path / name / "eval.json").read_text()) for name in ("eval", "released")]
    assert found[0]["figures"]["lossless"]
    assert found[1]["figures"]["lossless"]
    assert ties or found[1]["figures"]["same"] == 3


@torch.no_grad()
def holds_what_the_target_computes(target, family):
    """Taps, embedding and head against transformers' own pass with all hidden states."""
    ids = torch.randint(1, MASK, (2, 24), generator=torch.Generator().manual_seed(5))
    whole = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    taps, last = target.taps_and_last(ids)
    for tap, hidden in zip(taps, whole.hidden_states[1:], strict=False):
        torch.testing.assert_close(tap, hidden, rtol=0, atol=1e-5)
    info = target.info
    assert (info.embedding_scale, info.logit_scale, info.logit_softcap) == pytest.approx(family.scales)
    logits = last @ target.head.T
    if info.logit_softcap:
        logits = info.logit_softcap * torch.tanh(logits / info.logit_softcap)
    bias = target.model.get_output_embeddings().bias if target.head_has_bias else 0.0
    torch.testing.assert_close(logits + bias, whole.logits, rtol=1e-4, atol=1e-4)
    rows = F.embedding(ids, target.embedding)
    assert torch.allclose(rows, whole.hidden_states[0], atol=1e-5) is family.plain_rows
    padded = target.taps(torch.cat([ids, torch.zeros(2, 8, dtype=torch.int64)], dim=1))
    for tap, longer in zip(taps, padded, strict=True):
        torch.testing.assert_close(tap, longer[:, :24], rtol=0, atol=1e-4)


def run_settings(folder: Path) -> list[str]:
    rows = [[1 + (7 * i + 3 * place) % (MASK - 1) for place in range(30 + i)] for i in range(4)]
    with (folder / "ids.jsonl").open("w") as sink:
        for ids in rows:
            sink.write(
                json.dumps({"input_ids": ids, "loss_mask": [int(p >= 9) for p in range(len(ids))]}) + "\n"
            )
    return [
        f"data.path={folder / 'ids.jsonl'}",
        f"data.cache={folder / 'cache'}",
        "data.max_length=48",
        "data.buckets=[48]",
        "data.batch_size=2",
        f"target.model={folder / 'target'}",
        "target.layer_ids=[0,1,2]",
        "drafter.layers=1",
        "drafter.heads=2",
        "drafter.kv_heads=1",
        "drafter.head_dim=16",
        "drafter.block_size=4",
        "drafter.anchors=8",
        f"drafter.mask_token_id={MASK}",
        "queue.capacity=2",
        "queue.hs_min_ready=1",
        "train.steps=2",
        "train.threads_per_worker=1",
        "observe.wandb=off",
        "observe.terminal=off",
        "observe.collectors=[]",
    ]


@pytest.mark.slow
def test_a_head_with_a_bias_teaches_no_distribution(tmp_path):
    save_target(build("Phi"), tmp_path / "target")
    with pytest.raises(UserError, match=r"objective.kind = kd: the head of target .* has a bias"):
        train(None, [*run_settings(tmp_path), "objective.kind=kd"], tmp_path / "run")


@pytest.mark.parametrize(
    ("config", "settings", "said"),
    [
        ("BertConfig", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4}, "found no decoder"),
        ("T5Config", {"vocab_size": 97, "d_model": 32, "num_layers": 4}, "'t5' is not a causal language"),
    ],
)
def test_what_is_no_decoder_is_refused(config, settings, said, tmp_path):
    import transformers

    made = getattr(transformers, config)(
        **settings, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64
    )
    if config == "BertConfig":
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
    else:
        made.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=said):
        load_target(TargetConfig(model=str(tmp_path), layer_ids=(0, 1)), Device("cpu"))


def test_the_page_lists_what_is_tried():
    rows = re.findall(
        r"^\| ([^|]+?) \| ([^|]*?) \| (eager|sdpa) \| ([^|]*?) \|$", PAGE.read_text(), re.MULTILINE
    )
    listed = {name: (special, attention, tried) for name, special, attention, tried in rows}
    assert listed == {
        name: (
            family.special,
            family.attention,
            "trained for; evaluation refused" if family.refused else "yes",
        )
        for name, family in FAMILIES.items()
    }
