"""Losses against their plain statements, their gradients, the statistics, and the memory they take."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from dflash.config import ObjectiveConfig
from dflash.models.objectives import OBJECTIVES, make_objective
from dflash.models.objectives.base import StatLayout, gather_teacher
from dflash.models.objectives.ce import CrossEntropy
from tests.models.watch import watch

BATCH, COUNT, SLOTS, HIDDEN, VOCAB = 2, 5, 4, 12, 37


@pytest.fixture
def given():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, COUNT, SLOTS, HIDDEN, generator=generator)
    head = torch.randn(VOCAB, HIDDEN, generator=generator)
    labels = torch.randint(0, VOCAB, (BATCH, COUNT, SLOTS), generator=generator)
    weights = torch.exp(-torch.arange(SLOTS) / 3.0).expand(BATCH, COUNT, SLOTS).clone()
    weights[0, 1, 2] = 0.0
    weights[1, 3] = 0.0
    weights[1, 4, 2:] = 0.0
    return hidden, head, labels, weights


def plain_ce(hidden, head, labels):
    return F.cross_entropy((hidden @ head.T).flatten(0, 2), labels.flatten(), reduction="none").view(
        labels.shape
    )


def slow_dpace(loss, weights, alpha):
    """The paper's weights, block by block."""
    out = torch.zeros_like(loss)
    for b in range(loss.shape[0]):
        for n in range(loss.shape[1]):
            slots = [k for k in range(loss.shape[2]) if weights[b, n, k] > 0]
            reach, product = {}, 1.0
            for k in slots:
                product *= (1 - alpha) * math.exp(-loss[b, n, k]) + alpha
                reach[k] = product
            for k in slots:
                out[b, n, k] = sum(reach[m] for m in slots if m >= k)
    return out


def expected(kind, hidden, head, labels, weights, teacher=None):
    loss = plain_ce(hidden, head, labels)
    if kind == "dpace":
        weights = slow_dpace(loss.detach(), weights, 0.5)
    if kind == "kd":
        log_p, target = F.log_softmax(hidden @ head.T, -1), F.log_softmax(teacher @ head.T, -1)
        loss = 0.5 * loss + 0.5 * F.kl_div(log_p, target, log_target=True, reduction="none").sum(-1)
    return (loss * weights).sum()


@pytest.mark.parametrize("chunk", [1, 7, 8, 1000])
@pytest.mark.parametrize("kind", ["ce", "dpace", "kd"])
def test_loss_and_gradient(kind, chunk, given):
    hidden, head, labels, weights = given
    teacher = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4)) if kind == "kd" else None
    plain = hidden.clone().requires_grad_()
    total = expected(kind, plain, head, labels, weights, teacher)
    (total * 0.3).backward()
    ours = hidden.clone().requires_grad_()
    objective = OBJECTIVES[kind](ObjectiveConfig(chunk_slots=chunk))
    loss, stats = objective(ours, head, labels, weights, 0.3, teacher)
    (2.0 * loss).backward()
    assert float(loss.detach()) == pytest.approx(0.3 * float(total.detach()), rel=1e-5)
    torch.testing.assert_close(ours.grad, 2.0 * plain.grad, rtol=1e-4, atol=1e-6)
    assert float(stats[0]) == pytest.approx(float(total.detach()), rel=1e-5)
    # What the gradient is divided by, not the sum of the weights that an objective makes of these.
    assert float(stats[1]) == pytest.approx(float(weights.sum()), rel=1e-5)
    assert not stats.requires_grad


@pytest.mark.parametrize("kind", ["ce", "dpace", "kd"])
def test_capped_logits_are_capped_in_the_loss_and_in_its_gradient(kind, given, monkeypatch):
    hidden, head, labels, weights = given
    hidden = hidden * 3.0
    teacher = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4)) if kind == "kd" else None
    plain, ours = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    logits = 2.0 * torch.tanh(plain @ head.T / 2.0)
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    if kind == "kd":
        taught = F.log_softmax(2.0 * torch.tanh(teacher @ head.T / 2.0), -1)
        part = F.kl_div(F.log_softmax(logits, -1), taught, log_target=True, reduction="none").sum(-1)
        loss = 0.5 * loss + 0.5 * part
    used = slow_dpace(loss.detach(), weights, 0.5) if kind == "dpace" else weights
    (loss * used).sum().backward()
    made = OBJECTIVES[kind](ObjectiveConfig(chunk_slots=7), 2.0)
    found, _ = made(ours, head, labels, weights, 1.0, teacher)
    found.backward()
    assert float(found.detach()) == pytest.approx(float((loss * used).sum().detach()), rel=1e-5)
    torch.testing.assert_close(ours.grad, plain.grad, rtol=1e-4, atol=1e-6)


def test_statistics_count_acceptance_as_decoding_does(given):
    _, _, labels, weights = given
    head = torch.eye(VOCAB)
    guess = labels.clone()
    guess[0, 0, 1] = (guess[0, 0, 1] + 1) % VOCAB  # accepted 1, then wrong
    guess[0, 1, 0] = (guess[0, 1, 0] + 1) % VOCAB  # wrong at once
    guess[0, 2, 3] = (guess[0, 2, 3] + 1) % VOCAB  # accepted 3
    hidden = F.one_hot(guess, VOCAB).float() * 5.0
    _, stats = CrossEntropy(ObjectiveConfig(chunk_slots=8))(hidden, head, labels, weights, 1.0)
    layout = StatLayout(SLOTS)
    assert stats.shape == (layout.width,)
    assert float(stats[2]) == 9, "the dropped block is none"
    # Accepted in row 0: 1, 0, 3, 4, 4; in row 1: 4, 4, 4, dropped, 2 (two slots are unsupervised). And a
    # bonus each.
    assert float(stats[3]) == (1 + 0 + 3 + 4 + 4) + (4 + 4 + 4 + 2) + 9
    assert stats[layout.supervised].tolist() == [9, 9, 7, 8]
    assert stats[layout.correct].tolist() == [8, 8, 7, 7]


def test_an_unsupervised_slot_neither_ends_nor_lengthens_the_run(given):
    _, _, labels, weights = given
    hidden = F.one_hot(labels, VOCAB).float() * 5.0
    hidden[0, 1, 2] = 0.0  # weight 0 there, and the guess is wrong
    _, stats = CrossEntropy()(hidden, torch.eye(VOCAB), labels, weights, 1.0)
    only = weights.clone()
    only[0, 2:] = only[0, 0] = only[1] = 0.0
    _, one = CrossEntropy()(hidden, torch.eye(VOCAB), labels, only, 1.0)
    assert float(one[3]) == 3 + 1
    assert float(stats[2]) == 9


def test_statistics_of_two_batches_add_up(given):
    hidden, head, labels, weights = given
    objective = CrossEntropy()
    whole = objective(hidden, head, labels, weights, 1.0)[1]
    parts = [
        objective(hidden[i : i + 1], head, labels[i : i + 1], weights[i : i + 1], 1.0)[1] for i in range(2)
    ]
    torch.testing.assert_close(whole, parts[0] + parts[1])


def test_normalised_over_all_drafters_the_gradients_average(given):
    """Two drafters with unequal supervision, each scaled by 1 / the common weight sum, give the joint batch's
    gradient."""
    hidden, head, labels, weights = given
    scale = 1.0 / float(weights.sum())
    joint = hidden.clone().requires_grad_()
    CrossEntropy()(joint, head, labels, weights, scale)[0].backward()
    for row in range(BATCH):
        part = hidden[row : row + 1].clone().requires_grad_()
        CrossEntropy()(part, head, labels[row : row + 1], weights[row : row + 1], scale)[0].backward()
        torch.testing.assert_close(part.grad[0], joint.grad[row])
    # A mean in each drafter would have weighted the rows equally; they differ.
    assert float(weights[0].sum()) != float(weights[1].sum())


def test_bfloat16_logits_are_summed_in_float32(given):
    hidden, head, labels, weights = given
    exact = expected("ce", hidden, head, labels, weights)
    ours = hidden.bfloat16().requires_grad_()
    loss, stats = CrossEntropy(ObjectiveConfig(chunk_slots=8))(ours, head.bfloat16(), labels, weights, 1.0)
    loss.backward()
    assert loss.dtype == stats.dtype == torch.float32
    assert ours.grad.dtype == torch.bfloat16
    assert float(loss.detach()) == pytest.approx(float(exact), rel=2e-2)


def test_without_a_graph_no_gradient_is_made(given):
    hidden, head, labels, weights = given
    loss, _ = CrossEntropy()(hidden, head, labels, weights, 1.0)
    assert not loss.requires_grad


def test_kd_without_a_teacher_is_an_error(given):
    hidden, head, labels, weights = given
    with pytest.raises(ValueError, match="last hidden states"):
        OBJECTIVES["kd"]()(hidden, head, labels, weights, 1.0)


def test_teacher_stands_at_the_slot_before():
    last = torch.arange(2 * 9 * 1).float().view(2, 9, 1)
    anchors = torch.tensor([[0, 7], [3, 8]])
    found = gather_teacher(last, anchors, 4)[..., 0].tolist()
    assert found[0] == [[0, 1, 2], [7, 8, 8]]
    assert found[1] == [[12, 13, 14], [17, 17, 17]]


@pytest.mark.parametrize("kind", ["ce", "dpace", "kd"])
def test_never_more_than_a_chunk_of_logits_at_full_size(kind):
    """V = 248,320, 512 anchors, B = 16, one sample, without memory (meta): what is alive at the worst
    moment."""
    vocab, hidden, count, slots, chunk = 248_320, 64, 512, 15, 2048
    states = torch.empty(1, count, slots, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    head = torch.empty(vocab, hidden, dtype=torch.bfloat16, device="meta")
    labels = torch.empty(1, count, slots, dtype=torch.int64, device="meta")
    weights = torch.empty(1, count, slots, device="meta")
    teacher = torch.empty_like(states) if kind == "kd" else None
    with watch() as seen:
        objective = OBJECTIVES[kind](ObjectiveConfig(chunk_slots=chunk))
        loss, _ = objective(states, head, labels, weights, 1.0, teacher)
        loss.backward()
    logits = chunk * vocab
    beside = head.nbytes + 4 * states.nbytes + 3 * 64 * vocab * 4
    # The chunk in bfloat16 and in float32; for kd the teacher's in float32 too. And slices of 64 rows.
    assert seen.peak < {"ce": 6, "dpace": 6, "kd": 10}[kind] * logits + beside
    assert seen.biggest <= 4 * logits, "a tensor of more slots than a chunk's was made"
    assert chunk < count * slots


def test_config_chooses_the_objective():
    objective = make_objective(ObjectiveConfig(kind="kd", chunk_slots=33, kd_weight=0.25))
    assert type(objective) is OBJECTIVES["kd"]
    assert (objective.config.chunk_slots, objective.config.kd_weight) == (33, 0.25)
    assert [one.name for one in OBJECTIVES if one.needs_teacher] == ["kd"]
