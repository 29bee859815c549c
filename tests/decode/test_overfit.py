"""Trained on one answer of the target, a drafter guesses every slot of it: train, checkpoint, export, load,
decode."""

from __future__ import annotations

import json

import pytest
import torch

from dflash.commands.eval import evaluate
from dflash.commands.export import export
from dflash.commands.train import train
from dflash.decode import replay as replaying
from dflash.decode import target_state as target_states
from dflash.decode.between import verdict
from dflash.decode.drafter_state import DrafterState
from dflash.decode.evaluate import compare, is_tie
from dflash.decode.evaluate import evaluate as decode
from dflash.decode.figures import summarise
from dflash.decode.generate import decode_plainly, speculate
from dflash.decode.prompts import EvalPrompt
from dflash.pipeline.trained import load_trained
from dflash.release.released import build_drafter, load_released
from steptime.errors import UserError
from tests.decode import parts
from tests.pipeline.parts import reseal

pytestmark = pytest.mark.slow  # one of them trains it for all

PROMPT = parts.prompts((12,))[0]
NEW = 1 + 6 * 8  # the first token comes from the prompt's pass, then whole blocks
OPTIONS = {"limit": 4, "max_new_tokens": NEW, "temperature": 0.0, "top_p": 1.0, "seed": 0, "batch": 1}


def _train_on(folder, file, answer, name):
    """A run in `folder / name` that knows one answer by heart."""
    row = {"input_ids": PROMPT + answer, "loss_mask": [0] * len(PROMPT) + [1] * NEW}
    data = folder / file
    data.write_text(json.dumps(row) + "\n")
    settings = [
        f"data.path={data}",
        "data.max_length=64",
        "data.buckets=[64]",
        "data.batch_size=1",
        f"target.model={folder / 'target'}",
        "target.layer_ids=[0,1,2]",
        "drafter.layers=2",
        "drafter.heads=4",
        "drafter.kv_heads=2",
        "drafter.head_dim=16",
        "drafter.block_size=8",
        "drafter.anchors=48",
        f"drafter.mask_token_id={parts.MASK_ID}",
        "drafter.mask_in_data=true",
        "objective.gamma=100",
        "queue.capacity=4",
        "queue.hs_min_ready=1",
        "queue.ordered=true",
        "train.steps=150",
        "train.lr=5e-3",
        "train.threads_per_worker=1",
        "observe.wandb=off",
        "observe.terminal=off",
        "observe.collectors=[]",
    ]
    assert train(None, settings, folder / name) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder; its target is a hybrid whose config names no end of text."""
    folder = tmp_path_factory.mktemp("overfit")
    model = parts.hybrid_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    target = parts.make_target(model, folder / "target")
    answer = decode_plainly(target, [PROMPT], max_new_tokens=NEW).rows[0].tokens
    _train_on(folder, "one.jsonl", answer, "run")
    return folder, target, answer


def test_every_slot_is_right(run):
    folder, target, answer = run
    export(folder / "run", folder / "release", "zlab", False, None, None)
    shape, tensors = load_released(folder / "release")
    drafter = build_drafter(shape, tensors, torch.device("cpu"), torch.float32)
    generation = speculate(target, drafter, [PROMPT], max_new_tokens=NEW).rows[0]
    assert generation.tokens == answer
    assert [cycle.tokens for cycle in generation.cycles] == [8] * 6
    assert generation.passes == 7


def test_eval_says_so(run, capsys):
    folder, _, _ = run
    rc = evaluate(None, None, folder / "run", None, folder / "one.jsonl", out=folder / "eval", **OPTIONS)
    assert rc == 0
    shown = capsys.readouterr().out
    assert "1 of 1 prompts give the target's own text, token for token" in shown
    written = json.loads((folder / "eval" / "eval.json").read_text())
    figures = written["figures"]
    assert figures["tau"] == 8.0
    assert figures["slot_reached"] == [1.0] * 7
    assert figures["lossless"]
    assert figures["tokens_per_pass"] == NEW / 7
    assert figures["speed_up"] > 1.0
    assert written["prompts"][0]["cycles"] == [8] * 6
    assert written["step"] == 150
    assert (folder / "eval" / "slots.svg").exists()
    between = written["between"]
    for line in ("data", "own", "same_places", "decoded"):
        assert between[line]["reached"] == [1.0] * 7
    assert between["chosen"] == 1.0  # the data is what the target itself said
    assert between["says"] == "No gap is large: decoding accepts what training says."
    assert between["says"] in shown
    assert shown.count("100.0% 100.0%") >= 5


@pytest.fixture
def compared(run):
    """Evaluate prompts that the drafter never saw, with some other answer as the data's."""
    folder, target, _ = run
    trained = load_trained(folder / "run")
    drafter = build_drafter(trained.shape, trained.tensors, torch.device("cpu"), torch.float32)
    prompts = []
    for number, ids in enumerate(parts.prompts((7, 12), seed=21)):
        data = PROMPT + parts.prompts((NEW,), seed=number)[0]
        mask = [False] * len(PROMPT) + [True] * NEW
        prompts.append(EvalPrompt(f"p:{number}", tuple(ids), tuple(data), tuple(mask)))
    prompts.append(EvalPrompt("p:9", tuple(PROMPT)))

    def go():
        results = decode(target, drafter, prompts, max_new_tokens=24)
        figures = summarise(results, drafter.shape.block_size)
        return compare(target, drafter, prompts, results, figures), results

    return go


def test_training_and_decoding_agree_at_the_same_places(compared):
    """Two ways of computing the same drafts: all blocks of a text at once, and one after the other."""
    between, results = compared()
    assert between.same_places.blocks == between.decoded.blocks == sum(len(r.cycles) for r in results)
    assert between.same_places.reached[0] == pytest.approx(between.decoded.reached[0], abs=0.02)
    assert between.same_places.tau == pytest.approx(between.decoded.tau, abs=0.15)
    assert 0.0 < between.decoded.reached[-1] < 1.0
    assert between.own.blocks > between.same_places.blocks
    assert between.chosen < 0.2


@pytest.mark.fault
def test_a_decoder_with_other_features_than_training_is_named(compared, monkeypatch):
    """Planted: the decoder gives the drafter the taps in another order."""
    real = DrafterState.append
    monkeypatch.setattr(
        DrafterState, "append", lambda self, features, kept: real(self, features.flip(-1), kept)
    )
    between, _ = compared()
    assert verdict(between).startswith("Decoding accepts less than the drafter is right at the same places")


@pytest.mark.fault
def test_features_of_other_layers_than_in_training_are_named(run, monkeypatch, capsys):
    """Planted: the taps come from other layers than the drafter was trained on, everywhere alike."""
    folder, _, _ = run
    for module in (replaying, target_states):
        monkeypatch.setattr(module, "stack_taps", lambda taps: torch.cat([*taps[1:], taps[0]], dim=-1))
    evaluate(None, None, folder / "run", None, folder / "one.jsonl", out=folder / "layers", **OPTIONS)
    says = json.loads((folder / "layers" / "eval.json").read_text())["between"]["says"]
    assert says.startswith("Training logged 7.")
    assert "the target's layers, its weights or the template are not those of training" in says
    assert "--regenerate" not in says  # the answers are the target's own
    assert says in capsys.readouterr().out


@pytest.mark.fault
def test_another_template_than_in_training_is_named(run, capsys):
    """Planted: other markup stands before the same question, and the target answers to that."""
    folder, target, _ = run
    prompt = parts.prompts((6,), seed=9)[0] + PROMPT
    answer = decode_plainly(target, [prompt], max_new_tokens=NEW).rows[0].tokens
    file = folder / "template.jsonl"
    row = {"input_ids": prompt + answer, "loss_mask": [0] * len(prompt) + [1] * NEW}
    file.write_text(json.dumps(row) + "\n")
    evaluate(None, None, folder / "run", None, file, out=folder / "t", **OPTIONS)
    between = json.loads((folder / "t" / "eval.json").read_text())["between"]
    assert between["chosen"] == 1.0
    assert between["says"].startswith("Training logged 7.")
    assert "or the template are not those of training" in between["says"]
    assert between["says"] in capsys.readouterr().out


@pytest.mark.fault
def test_answers_of_somebody_else_are_named(run, capsys):
    """Planted: the drafter learns an answer that the target would never have given."""
    folder, _, _ = run
    _train_on(folder, "foreign.jsonl", parts.prompts((NEW,), seed=5)[0], "foreign")
    evaluate(None, None, folder / "foreign", None, folder / "foreign.jsonl", out=folder / "f", **OPTIONS)
    between = json.loads((folder / "f" / "eval.json").read_text())["between"]
    assert between["data"]["tau"] > between["own"]["tau"] + 1.0
    assert between["chosen"] < 0.2
    assert between["says"].startswith("The drafter knows the data's answers better than the target's own")
    assert "dflash prepare --regenerate" in between["says"]
    assert between["says"] in capsys.readouterr().out


def test_eval_of_a_release_sampled_and_batched(run, capsys):
    folder, _, _ = run
    export(folder / "run", folder / "spec", "speculators", False, None, None)
    (folder / "two.jsonl").write_text((folder / "one.jsonl").read_text() * 2)
    settings = [f"target.model={folder / 'target'}", f"data.path={folder / 'one.jsonl'}"]
    options = OPTIONS | {"temperature": 0.5, "batch": 2, "max_new_tokens": 16}
    rc = evaluate(
        None, settings, None, folder / "spec", folder / "two.jsonl", out=folder / "eval2", **options
    )
    assert rc == 0
    assert "not checked: the text was sampled" in capsys.readouterr().out
    assert len(json.loads((folder / "eval2" / "eval.json").read_text())["prompts"]) == 2


def test_a_text_that_is_not_the_targets_own_is_exit_code_1(run, monkeypatch, capsys):
    """Planted: rejected tokens stay in the recurrent state."""
    from dflash.decode.target_state import TargetState

    folder, _, _ = run
    monkeypatch.setattr(TargetState, "_roll_back_recurrent", lambda self, kept: None)
    prompts = folder / "other.jsonl"
    rows = [
        {"input_ids": [*ids, 1], "loss_mask": [0] * len(ids) + [1]} for ids in parts.prompts((9, 14), seed=8)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rc = evaluate(None, None, folder / "run", None, prompts, out=folder / "eval3", **OPTIONS)
    assert rc == 1
    assert "DIFFER" in capsys.readouterr().out


def test_ties_are_told_from_faults(run):
    _, target, answer = run
    prefix = PROMPT + answer[:9]
    with torch.no_grad():
        logits = target.model(torch.tensor([prefix]), use_cache=False).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    assert not is_tie(target, prefix, best, second)
    head = target.model.get_output_embeddings().weight
    kept = head[second].clone()
    try:
        with torch.no_grad():
            head[second] = head[best]  # now the target itself cannot tell the two apart
        assert is_tie(target, prefix, best, second)
        assert not is_tie(target, prefix, best, int(logits.argmin()))
        worst = logits.topk(5).indices[-2:].tolist()
        assert not is_tie(
            target, prefix, *worst
        )  # two equal ones that neither is the best would be no excuse
    finally:
        with torch.no_grad():
            head[second] = kept


@pytest.mark.parametrize("both", [True, False])
def test_one_drafter_is_evaluated(run, both):
    folder, _, _ = run
    with pytest.raises(UserError, match="give one of --checkpoint DIR"):
        evaluate(None, None, *([folder] * 2 if both else [None] * 2), None, out=None, **OPTIONS)


def test_a_checkpoint_with_a_tensor_missing_is_refused_by_name(run, tmp_path):
    import shutil

    from safetensors.torch import load_file, save_file

    folder, _, _ = run
    shutil.copytree(folder / "run", tmp_path / "run")
    path = load_trained(tmp_path / "run").path / "state.safetensors"
    tensors = load_file(path)
    del tensors["master/layers.1.mlp.down_proj.weight"]
    save_file(tensors, path)
    reseal(path.parent)
    with pytest.raises(UserError, match=r"tensor 'layers.1.mlp.down_proj.weight' is missing"):
        export(tmp_path / "run", tmp_path / "out", "zlab", False, None, None)


def test_a_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="no checkpoint here"):
        load_trained(tmp_path)
