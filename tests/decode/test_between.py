"""Between training and serving: the shares by hand, and the sentence for each gap."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from dflash.config import Config, DataConfig
from dflash.decode.between import Between, Modes, SlotShares, has_thought, shares, table, verdict
from dflash.decode.figures import PromptResult
from dflash.decode.modes import modes_of, training_share
from dflash.decode.prompts import EvalPrompt
from dflash.decode.replay import Replayed, replay
from tests.decode import parts


def line(*reached: float, right: tuple[float, ...] = ()) -> SlotShares:
    return SlotShares(10, reached, right or reached)


def test_shares_by_hand():
    right = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1]], bool)
    judged = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 1]], bool)
    found = shares([Replayed(np.array([3, 4, 5]), right, judged, np.array([True]))])
    assert found.reached == pytest.approx((2 / 3, 1 / 2, 0 / 2))
    assert found.right == pytest.approx((2 / 3, 1 / 2, 1 / 2))
    assert found.tau == pytest.approx(1 + 2 / 3 + 1 / 2)
    assert shares([]) is None


HIGH, LOW, NONE = line(0.8, 0.6, 0.4), line(0.4, 0.2, 0.1), line(0.02, 0.0, 0.0)


@pytest.mark.parametrize(
    ("between", "says"),
    [
        (Between(HIGH, HIGH, HIGH, HIGH, 0.95), "No gap is large: decoding accepts what training says"),
        (
            Between(None, HIGH, HIGH, HIGH, None),
            "No gap is large: decoding accepts what the drafter is right",
        ),
        (Between(HIGH, LOW, LOW, LOW, 0.3), r"chosen 30% of the data's tokens.*prepare --regenerate"),
        (Between(HIGH, LOW, LOW, LOW, 0.95), r"better than the target's own \(2.80 -> 1.70\), though"),
        (
            Between(HIGH, LOW, LOW, LOW, 0.3, Modes(own=1.0, data=0.0)),
            r"thinks in 100% of its answers here, the drafter was trained on 0%.*\(--no-thinking\)",
        ),
        (
            Between(HIGH, HIGH, HIGH, HIGH, 0.9, Modes(own=0.0, data=0.0, training=1.0)),
            r"thinks in 0% of its answers here, the drafter was trained on 100%.*\(--thinking\)",
        ),
        (
            Between(HIGH, HIGH, HIGH, LOW, 0.9),
            r"less than the drafter is right at the same places \(2.80 -> 1",
        ),
        (
            Between(LOW, LOW, LOW, LOW, 0.95, logged_tau=2.8),
            r"logged 2.80 tokens a pass.* would be 1.70: .*layers, its weights or the template",
        ),
        (
            Between(HIGH, HIGH, HIGH, HIGH, 0.95, logged_tau=2.9),
            "No gap is large: decoding accepts what training says",
        ),
        (
            Between(HIGH, LOW, LOW, LOW, 0.3, logged_tau=7.0),
            r"chosen 30% of the data's tokens.*prepare --regenerate",
        ),
        (Between(HIGH, HIGH, LOW, LOW, 0.9), r"harder places than the average one \(2.80 -> 1.70\)"),
        (Between(NONE, NONE, NONE, NONE, 0.9), "hardly ever right, on the data's answers too"),
        (Between(NONE, NONE, NONE, NONE, 0.001), r"only 0% of the data's tokens, so rewrite the answers"),
        (
            Between(NONE, NONE, NONE, NONE, 0.9, logged_tau=2.8),
            r"logged 2.80 tokens a pass.* the template",
        ),
        (Between(None, NONE, NONE, NONE, None), "hardly ever right, even on the true tokens"),
        (Between(HIGH, None, None, NONE, 0.9), "too short to compare"),
    ],
)
def test_one_sentence_for_each_gap(between, says):
    assert re.search(says, verdict(between))
    shown = table(between)
    assert shown.rstrip().endswith(verdict(between))
    written = json.loads(json.dumps(between.to_json()))
    assert written["says"] == verdict(between)
    assert written["decoded"]["tau"] == between.decoded.tau


def test_the_target_would_have_chosen_its_own_text(target_of):
    from dflash.decode.generate import decode_plainly

    target = target_of("full")
    drafter = parts.make_drafter(target)
    (prompt,) = parts.prompts((9,))
    answer = decode_plainly(target, [prompt], max_new_tokens=20).rows[0].tokens
    mask = [False] * 9 + [True] * 20
    own = replay(target, drafter, prompt + answer, mask)
    assert own.chosen.tolist() == [True] * 20
    assert own.anchors.tolist() == list(range(9, 28))
    assert own.judged.sum(axis=1).tolist() == [min(7, 28 - a) for a in own.anchors]
    other = replay(target, drafter, prompt + [(token + 1) % 90 for token in answer], mask)
    assert other.chosen.mean() < 0.5


def test_the_blocks_of_a_long_text_do_not_depend_on_the_pieces(target_of, monkeypatch):
    from dflash.decode import replay as module

    target = target_of("hybrid")
    drafter = parts.make_drafter(target)
    ids = parts.prompts((60,))[0]
    whole = replay(target, drafter, ids, [True] * 60)
    monkeypatch.setattr(module, "_BLOCKS", 7)
    monkeypatch.setattr(module, "_PLACES", 5)
    again = replay(target, drafter, ids, [True] * 60)
    assert (whole.right == again.right).all()
    assert (whole.chosen == again.chosen).all()
    assert len(replay(target, drafter, ids, [False] * 60).anchors) == 0


@pytest.mark.parametrize(
    ("text", "thinks"),
    [
        ("<think>\nhm\n</think>\n\nyes", True),
        ("<think>never ends", True),
        ("<think>\n\n</think>\n\nyes", False),
        ("yes", False),
    ],
)
def test_thoughts_are_told_from_empty_pairs(text, thinks):
    assert has_thought(text) is thinks


class Words:
    """A tokenizer of whole words."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def decode(self, ids):
        return " ".join(self.words[index] for index in ids)


def result(*tokens: int) -> PromptResult:
    return PromptResult("p", 1, len(tokens), True, (), 1, None, None, 0.0, 1.0, None, tokens)


def test_modes_of_answers(tmp_path):
    words = Words("hi", "<think>", "</think>", "hm")
    prompts = [EvalPrompt("p:1", (0, 1), thinks=False), EvalPrompt("p:2", (0, 1))]
    modes = modes_of(words, prompts, [result(3, 2, 0), result(2, 0)], None, None)
    assert modes == Modes(None, "opens one", 0.5, 0.0, None)
    closed = modes_of(words, [EvalPrompt("p", (0, 1, 2))], [result(0)], False, None)
    assert closed == Modes(False, "closes an empty one", 0.0, None, None)
    assert modes_of(None, prompts, [], True, None) == Modes(True)
    path = tmp_path / "data.jsonl"
    rows = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": f"{t}b"}] for t in ("", "")]
    rows[0][1]["content"] = "<think>hm</think>b"
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    trained = Config(data=DataConfig(path=str(path), cache=str(tmp_path)))
    assert training_share(trained) == 0.5
    assert training_share(Config(data=DataConfig(path=str(tmp_path / "gone")))) is None
    assert training_share(Config()) == 0.0
