"""The field's own loaders on what `dflash export` writes.

ZLAB_PYTHON: an interpreter in whose environment `dflash` is z-lab's package (their pins need an environment
of its own). speculators is installed beside us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dflash.commands.train import train
from dflash.decode.drafter_state import DrafterState
from dflash.decode.generate import decode_plainly, speculate
from dflash.pipeline.trained import load_trained
from dflash.release.export import export
from dflash.release.released import build_drafter, load_released
from tests.decode import parts

HERE = Path(__file__).parent
PROMPTS = parts.prompts((12, 30, 3))
NEW = 41


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, and three releases for it: full attention, with a sliding layer, and one trained on the
    target's answers."""
    folder = tmp_path_factory.mktemp("interop")
    model = parts.full_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    target = parts.make_target(model, folder / "target")
    for name, sliding in (("full", 0), ("sliding", 1)):
        drafter = parts.make_drafter(target, 8, sliding, window=6)
        for form in ("zlab", "speculators"):
            export(drafter.shape, drafter.state_dict(), target.info, folder / f"{name}-{form}", format=form)
    trained = load_trained(train_on_answers(target, folder))
    export(trained.shape, trained.tensors, target.info, folder / "trained-zlab")
    return folder, target


def train_on_answers(target, folder):
    answers = [row.tokens for row in decode_plainly(target, PROMPTS, max_new_tokens=NEW).rows]
    rows = [
        {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * NEW}
        for prompt, answer in zip(PROMPTS, answers, strict=True)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        f"data.path={folder / 'answers.jsonl'}", "data.max_length=96", "data.buckets=[96]", "data.batch_size=3",
        f"target.model={folder / 'target'}", "target.layer_ids=[0,1,2]", "drafter.layers=2", "drafter.heads=4",
        "drafter.kv_heads=2", "drafter.head_dim=16", "drafter.block_size=8", "drafter.anchors=24",
        f"drafter.mask_token_id={parts.MASK_ID}", "queue.capacity=4", "queue.hs_min_ready=1", "queue.ordered=true",
        "train.steps=60", "train.lr=5e-3", "train.threads_per_worker=1", "observe.wandb=off", "observe.terminal=off",
        "observe.collectors=[]",
    ]  # fmt: skip
    assert train(None, settings, folder / "run", False, "allow") == 0
    return folder / "run"


def ours(target, release, monkeypatch):
    """Tokens, verified blocks and acceptance of our decoder for every prompt."""
    shape, tensors = load_released(release)
    drafter = build_drafter(shape, tensors, torch.device("cpu"), torch.float32)
    plain = DrafterState.draft
    runs = []
    for prompt in PROMPTS:
        blocks = []

        def draft(self, anchors, size, blocks=blocks):
            drafts = plain(self, anchors, size)
            blocks.append([*anchors.tolist(), *drafts[0].tolist()])
            return drafts

        with monkeypatch.context() as patch:
            patch.setattr(DrafterState, "draft", draft)
            row = speculate(target, drafter, [prompt], max_new_tokens=NEW).rows[0]
        runs.append(
            {"tokens": row.tokens, "blocks": blocks, "accepted": [cycle.tokens for cycle in row.cycles]}
        )
    return runs


def test_zlab_loads_strictly_and_drafts_the_same(folder, monkeypatch):
    python = os.environ.get("ZLAB_PYTHON")
    assert python, "set ZLAB_PYTHON to an interpreter with z-lab's dflash==0.1.0 (nox -s interop does)"
    folder, target = folder
    releases = ["full-zlab", "sliding-zlab", "trained-zlab"]
    (folder / "job.json").write_text(
        json.dumps({"releases": releases, "prompts": PROMPTS, "max_new_tokens": NEW})
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [python, str(HERE / "zlab_peer.py"), str(folder)],
        check=True,
        cwd=folder,
        env=environment,
        timeout=600,
    )
    answer = json.loads((folder / "answer.json").read_text())
    own_text = [row.tokens for row in decode_plainly(target, PROMPTS, max_new_tokens=NEW).rows]
    for name in releases:
        assert not any(answer[name]["loading"].values()), name  # nothing missing, unexpected or mismatched
        for mine, theirs, text in zip(
            ours(target, folder / name, monkeypatch), answer[name]["runs"], own_text, strict=True
        ):
            assert mine["tokens"] == theirs["tokens"] == text, name
            # Theirs narrows the last blocks so as not to pass the limit; ours does not.
            whole = [block for block in theirs["blocks"] if len(block) == 8]
            assert whole, name
            assert mine["blocks"][: len(whole)] == whole, name
            assert mine["accepted"][: len(whole)] == theirs["accepted"][: len(whole)], name
    trained = [count for run in answer["trained-zlab"]["runs"] for count in run["accepted"]]
    assert max(trained) > 3, "the comparison should see accepted drafts too"


@pytest.mark.parametrize("name", ["full", "sliding"])
def test_speculators_loads_it(folder, name):
    folder, target = folder
    release = folder / f"{name}-speculators"
    subprocess.run(
        [sys.executable, str(HERE / "speculators_peer.py"), str(release)], check=True, cwd=folder, timeout=600
    )
    said = json.loads((release / "loaded.json").read_text())
    assert said["class"] == "DFlashDraftModel"
    assert not said["report"].get("unexpected_keys")
    assert not said["report"].get("mismatched_keys")
    assert set(said["report"].get("missing_keys", ())) <= {
        "embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight", "t2d", "d2t",
    }  # fmt: skip
    assert said["layer_ids"] == [i + 1 for i in target.info.layer_ids]
    assert (said["block_size"], said["mask_token_id"], said["speculative_tokens"]) == (8, parts.MASK_ID, 7)
    assert said["sliding"] == ([0] if name == "sliding" else [])
    assert said["rope_theta"] == pytest.approx(1e6, rel=1e-3)
    loaded, written = load_file(release / "loaded.safetensors"), load_file(release / "model.safetensors")
    for tensor, value in written.items():
        assert torch.equal(loaded[tensor].float(), value.float()), tensor
    # The verifier's own weights came from the target's folder.
    assert torch.equal(loaded["embed_tokens.weight"].float(), target.embedding.to(torch.bfloat16).float())


def test_what_speculators_loaded_is_our_release_again(folder):
    folder, _ = folder
    for name in ("full", "sliding"):
        zlab, speculators = (
            load_released(folder / f"{name}-zlab"),
            load_released(folder / f"{name}-speculators"),
        )
        assert zlab[0] == speculators[0]
        assert all(torch.equal(tensor, speculators[1][key]) for key, tensor in zlab[1].items())
