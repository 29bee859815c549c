"""Whatever is drafted, the text is the target's own."""

from __future__ import annotations

import pytest
import torch

from dflash.decode.drafter_state import DrafterState
from dflash.decode.generate import Cycle, decode_plainly, speculate
from dflash.decode.target_state import TargetState
from steptime.errors import UserError
from tests.decode import parts

FAMILIES = ["hybrid", "next", "full", "sliding"]
N = 20


def own_text(target, prompt, new_tokens=N):
    ids = torch.tensor([prompt])
    with torch.no_grad():
        # The mask is given, or generate() would take tokens of the pad's id for padding.
        output = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(params=FAMILIES)
def target(request, target_of):
    return target_of(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9,), (17, 5, 30, 1)], ids=["one row", "four rows"])
def test_plain_decoding_is_the_targets_own(target, lengths):
    prompts = parts.prompts(lengths)
    decoded = decode_plainly(target, prompts, max_new_tokens=N)
    assert [row.tokens for row in decoded.rows] == [own_text(target, prompt) for prompt in prompts]
    assert [row.passes for row in decoded.rows] == [N] * len(prompts)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9,), (17, 5, 30, 1)], ids=["one row", "four rows"])
def test_an_untrained_drafter_changes_nothing(target, lengths):
    prompts = parts.prompts(lengths)
    decoded = speculate(target, parts.make_drafter(target), prompts, max_new_tokens=N)
    assert [row.tokens for row in decoded.rows] == [own_text(target, prompt) for prompt in prompts]


def test_own_text_wanders(target):
    """Else the tests above would prove little."""
    assert len(set(own_text(target, parts.prompts((9,))[0]))) > 8


def decode_with_oracle(target, lengths, monkeypatch, wrong_every=5, **options):
    """Many accepted, some rejected, in every row at other places."""
    prompts = parts.prompts(lengths)
    texts = [own_text(target, prompt, N + 16) for prompt in prompts]
    oracle = parts.Oracle(texts, list(lengths), wrong_every)
    monkeypatch.setattr(DrafterState, "draft", lambda self, anchors, size: oracle.draft(self, anchors, size))
    return speculate(target, parts.make_drafter(target), prompts, max_new_tokens=N, **options), [
        text[:N] for text in texts
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(9,), (17, 5, 30, 1)], ids=["one row", "four rows"])
@pytest.mark.parametrize("wrong_every", [3, 8])
def test_rejected_drafts_leave_no_trace(target, lengths, wrong_every, monkeypatch):
    decoded, texts = decode_with_oracle(target, lengths, monkeypatch, wrong_every)
    assert [row.tokens for row in decoded.rows] == texts
    lengths_seen = {cycle.tokens for row in decoded.rows for cycle in row.cycles}
    assert len(lengths_seen) > 1
    assert all(row.passes == 1 + len(row.cycles) for row in decoded.rows)


def keeps_the_text(target, monkeypatch):
    try:
        decoded, texts = decode_with_oracle(target, (9,), monkeypatch)
    except parts.LostTrack:
        return False
    return decoded.rows[0].tokens == texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hybrid", "next"])
def test_a_state_that_is_not_rolled_back_is_found(family, target_of, monkeypatch):
    """Planted: the recurrent state keeps the rejected tokens, as transformers' crop alone would leave it."""
    assert keeps_the_text(target_of(family), monkeypatch)
    monkeypatch.setattr(TargetState, "_roll_back_recurrent", lambda self, kept: None)
    assert not keeps_the_text(target_of(family), monkeypatch)


def test_keys_that_are_not_cut_are_found(target_of, monkeypatch):
    """Planted: rejected tokens stay in the attention's memory."""
    plain = TargetState.commit
    monkeypatch.setattr(
        TargetState, "commit", lambda self, kept: plain(self, [self._pending or 1] * len(kept))
    )
    assert not keeps_the_text(target_of("full"), monkeypatch)


def test_transformers_crop_does_not_roll_back_a_recurrent_state(target_of):
    """Why the mixers are replayed. Should this fail, transformers can do it by itself, and the replay may
    go."""
    from transformers import DynamicCache

    target = target_of("hybrid")
    cache = DynamicCache(config=target.text_model.config)
    cache.activate_past_recording()
    with torch.no_grad():
        target.text_model(torch.tensor([[1, 2, 3, 4, 5]]), cache=cache, use_cache=True)
        cache.crop(0)
        before = cache.layers[0].recurrent_states[0].clone()
        target.text_model(torch.tensor([[6, 7, 8]]), cache=cache, use_cache=True)
        cache.crop(-3)
    assert not torch.equal(cache.layers[0].recurrent_states[0], before)


@pytest.mark.slow
def test_the_end_of_the_text_ends_a_row(target_of, monkeypatch):
    target = target_of("hybrid")
    lengths = (9, 5)
    texts = [own_text(target, prompt) for prompt in parts.prompts(lengths)]
    stop = texts[0][9]
    first = texts[0].index(stop)
    decoded, _ = decode_with_oracle(target, lengths, monkeypatch, 12, stop_ids=(stop,))
    row = decoded.rows[0]
    assert row.tokens == texts[0][: first + 1]
    assert row.ended
    assert 1 + sum(cycle.tokens for cycle in row.cycles) == first + 1
    other = decoded.rows[1]
    cut = texts[1].index(stop) + 1 if stop in texts[1] else N
    assert other.tokens == texts[1][:cut]


def test_perfect_drafts_commit_a_whole_block_a_cycle(target_of, monkeypatch):
    decoded, _ = decode_with_oracle(target_of("hybrid"), (9,), monkeypatch, 100)
    cycles = decoded.rows[0].cycles
    assert cycles == [Cycle(accepted=7, tried=7, tokens=8)] * len(cycles)
    assert len(cycles) == 3  # 1 + 3 * 8 >= 20


def test_the_limit_is_kept_and_the_last_cycle_counts_in_full(target_of, monkeypatch):
    decoded, _ = decode_with_oracle(target_of("full"), (9,), monkeypatch, 100)
    row = decoded.rows[0]
    assert len(row.tokens) == N
    assert not row.ended
    assert sum(cycle.tokens for cycle in row.cycles) == 24


def test_a_smaller_block_can_be_asked_for(target_of, monkeypatch):
    decoded, texts = decode_with_oracle(target_of("hybrid"), (9,), monkeypatch, 100, block_size=4)
    assert decoded.rows[0].tokens == texts[0]
    assert {cycle.tokens for cycle in decoded.rows[0].cycles} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["hybrid", "sliding"])
def test_rows_do_not_disturb_each_other(family, target_of):
    """A drafter's guesses for a row are the same alone and among longer rows."""
    target = target_of(family)
    prompts = parts.prompts((17, 5, 40, 1))
    drafter = parts.make_drafter(target)
    together = speculate(target, drafter, prompts, max_new_tokens=12)
    alone = [speculate(target, drafter, [prompt], max_new_tokens=12).rows[0] for prompt in prompts]
    assert [row.cycles for row in together.rows] == [row.cycles for row in alone]


@pytest.mark.slow
def test_a_text_model_in_a_wrapper(target_of, monkeypatch):
    target = target_of("wrapped")
    decoded, texts = decode_with_oracle(target, (9, 14), monkeypatch)
    assert [row.tokens for row in decoded.rows] == texts
    ids = parts.prompts((9,))[0]
    for token in texts[0][:6]:
        with torch.no_grad():
            assert int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()) == token
        ids = [*ids, token]


@pytest.mark.parametrize(
    ("lengths", "new", "message"),
    [
        ((250,), 20, "prompt 1 has 250 tokens, with 20 new ones 270: longer than the context of target"),
        ((0,), 4, "no tokens"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(target_of, lengths, new, message):
    target = target_of("full")
    with pytest.raises(UserError, match=message):
        speculate(target, parts.make_drafter(target), parts.prompts(lengths), max_new_tokens=new)
    with pytest.raises(UserError, match=message):
        decode_plainly(target, parts.prompts(lengths), max_new_tokens=new)


def test_a_drafter_for_another_target_is_refused(target_of, tmp_path):
    small = parts.make_target(parts.full_model(vocab=61), tmp_path)
    drafter = parts.make_drafter(target_of("full"))
    with pytest.raises(UserError, match=r"made for another target: vocabulary 97, target .* has 61"):
        speculate(small, drafter, [[1, 2]], max_new_tokens=4)
