"""Sampled speculation draws from the target's distribution: chi-square against every continuation,
enumerated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

import dflash.decode.generate
from dflash.decode.drafter_state import DrafterState
from dflash.decode.generate import decode_plainly, leading_matches, speculate
from dflash.decode.sampling import Sampler
from steptime.errors import UserError
from tests.decode import parts

V = 6
PROMPT = [1, 4, 2]
DRAWN = 3  # tokens: V ** 3 = 216 continuations
SAME, OTHER = 1e-4, 1e-6  # p-values over and under which a test says so
SAMPLERS = {
    "temperature 1": Sampler(1.0),
    "temperature 0.6": Sampler(0.6, seed=1),
    "top_p 0.8": Sampler(1.0, 0.8, seed=2),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return parts.make_target(parts.full_model(vocab=V), tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return parts.make_target(parts.hybrid_model(vocab=V), tmp_path_factory.mktemp("hybrid"))


def exact(target, sampler):
    """Probability of each continuation: float64 `[V, V, V]`."""
    continuations = torch.tensor(list(itertools.product(range(V), repeat=DRAWN)))
    ids = torch.cat([torch.tensor(PROMPT).expand(len(continuations), -1), continuations], dim=1)
    with torch.no_grad():
        logits = target.model(ids, use_cache=False).logits[:, len(PROMPT) - 1 : -1]
    p = sampler.probabilities(logits).double().gather(-1, continuations[..., None])[..., 0].prod(dim=1)
    assert p.sum().item() == pytest.approx(1.0, abs=1e-5)
    return p.view(V, V, V).numpy()


def p_value(drawn, probabilities):
    """Of a chi-square test, continuations expected fewer than 8 times put together."""
    counts = np.zeros_like(probabilities)
    np.add.at(counts, tuple(np.array(drawn).T), 1)
    expected = probabilities * len(drawn)
    common = expected >= 8
    observed = [*counts[common], counts[~common].sum()]
    wanted = [*expected[common], expected[~common].sum()]
    if wanted[-1] < 8:
        if wanted[-1] < 1e-9:  # top_p: continuations that can never be
            assert observed[-1] == 0
        wanted[-2] += wanted.pop()
        observed[-2] += observed.pop()
    assert len(wanted) > 5
    return stats.chisquare(observed, np.array(wanted) * sum(observed) / sum(wanted)).pvalue


def likely(state, anchors, size):
    """Drafts that are right about half of the time: the likeliest token after the prompt, again and again."""
    return (anchors[:, None] + torch.arange(1, size) * 2) % V


def draw(target, sampler, monkeypatch, rows=4000):
    monkeypatch.setattr(DrafterState, "draft", likely)
    drafter = parts.make_drafter(target, block_size=4)
    decoded = speculate(target, drafter, [PROMPT] * rows, max_new_tokens=DRAWN, sampler=sampler)
    cycles = [cycle.accepted for row in decoded.rows for cycle in row.cycles]
    assert 0.05 < np.mean([count > 0 for count in cycles]) < 0.95
    return [row.tokens for row in decoded.rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_distribution_is_the_targets(target, name, monkeypatch):
    sampler = SAMPLERS[name]
    assert p_value(draw(target, sampler, monkeypatch), exact(target, sampler)) > SAME


@pytest.mark.slow
def test_the_distribution_is_a_hybrid_targets(hybrid, monkeypatch):
    sampler = Sampler(1.0, seed=7)
    assert p_value(draw(hybrid, sampler, monkeypatch, rows=500), exact(hybrid, sampler)) > SAME


def test_plain_sampling_too(target):
    sampler = Sampler(1.0, seed=5)
    decoded = decode_plainly(target, [PROMPT] * 4000, max_new_tokens=DRAWN, sampler=sampler)
    assert p_value([row.tokens for row in decoded.rows], exact(target, sampler)) > SAME


def lenient(drafts, chosen):
    """Planted: one draft in ten is accepted although the target chose another token."""
    generator = torch.Generator().manual_seed(0)
    forgiven = torch.rand(drafts.shape, generator=generator) < 0.1
    return ((drafts == chosen[:, :-1]) | forgiven).long().cumprod(dim=1).sum(dim=1)


def shifted(drafts, chosen):
    """Planted: drafts are held against the target's choice one slot further on."""
    return (drafts == chosen[:, 1:]).long().cumprod(dim=1).sum(dim=1)


def redrawn(drafts, chosen):
    """Planted: accepted only when it matches twice, so that the bonus token is drawn again after a
    rejection."""
    matches = (drafts == chosen[:, :-1]) & (
        torch.rand(drafts.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    )
    return matches.long().cumprod(dim=1).sum(dim=1)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [lenient, shifted])
def test_biased_acceptance_is_found(target, fault, monkeypatch):
    monkeypatch.setattr(dflash.decode.generate, "leading_matches", fault)
    sampler = SAMPLERS["temperature 1"]
    assert p_value(draw(target, sampler, monkeypatch), exact(target, sampler)) < OTHER


@pytest.mark.slow
def test_refusing_a_right_draft_is_no_bias(target, monkeypatch):
    """The target's own choice is committed either way: slower, and still its distribution."""
    monkeypatch.setattr(dflash.decode.generate, "leading_matches", redrawn)
    sampler = SAMPLERS["temperature 1"]
    assert p_value(draw(target, sampler, monkeypatch), exact(target, sampler)) > SAME


def test_leading_matches():
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    chosen = torch.tensor([[1, 2, 3, 4]] * 3)
    assert leading_matches(drafts, chosen).tolist() == [3, 1, 0]


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    torch.testing.assert_close(
        Sampler(1.0, 0.7).probabilities(logits), torch.tensor([0.625, 0.375, 0.0, 0.0])
    )
    torch.testing.assert_close(Sampler(1.0, 1e-6).probabilities(logits), torch.tensor([1.0, 0.0, 0.0, 0.0]))


def test_one_seed_gives_one_text(target):
    texts = [
        decode_plainly(target, [PROMPT], max_new_tokens=20, sampler=Sampler(1.0, seed=seed)).rows[0].tokens
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("values", "message"), [((-1.0,), "temperature"), ((1.0, 0.0), "top_p"), ((float("nan"),), "temperature")]
)
def test_senseless_settings_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        Sampler(*values)
