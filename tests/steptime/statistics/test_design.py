"""Which pair comes next: coins, questions, layers and their time."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest

from steptime.records.pairs import CONTROL, PLACEBO, Layer, Question
from steptime.statistics.design import MIN_PAIRS, SHARES, best_shares, draws, least_time_s, shares_for

SWITCHES = ("batch", "losses", "grads")
LENGTHS = {Layer.PATH: 0.3, Layer.TICK: 0.3, Layer.FLUSH: 0.6}


def test_halves_are_complements_and_all_against_none_is_one_coin() -> None:
    for draw in islice(draws(SWITCHES, 0, LENGTHS), 400):
        assert draw.first | draw.second == {*SWITCHES, PLACEBO}
        assert not draw.first & draw.second
        if draw.question is Question.TOGETHER:
            assert set(SWITCHES) in (draw.first - {PLACEBO}, draw.second - {PLACEBO})


@pytest.mark.parametrize("question", list(Question))
def test_every_coin_is_fair_and_by_itself(question: Question) -> None:
    taken = [d for d in islice(draws(SWITCHES, 1, LENGTHS), 4000) if d.question is question]
    columns = SWITCHES if question is Question.EACH else SWITCHES[:1]
    signs = np.array([[1 if name in d.first else -1 for name in (*columns, PLACEBO)] for d in taken])
    correlations = (signs.T @ signs + np.diag(signs.sum(0) - len(signs))) / len(signs) ** 0.5
    assert np.abs(correlations).max() < 3.5  # standard errors
    later = (signs[1:] * signs[:-1]).sum(0) / len(signs) ** 0.5
    assert np.abs(later).max() < 3.5


def test_layers_get_their_shares_of_the_time_and_questions_theirs_of_the_pairs() -> None:
    taken = list(islice(draws(SWITCHES, 2, LENGTHS, together=1 / 3), 3000))
    spent = {layer: LENGTHS[layer] * sum(d.layer is layer for d in taken) for layer in Layer}
    for layer, share in SHARES.items():
        assert spent[layer] / sum(spent.values()) == pytest.approx(share, abs=0.002)
        asked = [d.question for d in taken if d.layer is layer]
        assert asked.count(Question.TOGETHER) == pytest.approx(len(asked) / 3, abs=1)


def test_the_control_is_on_in_path_pairs_for_each_alone_and_all_else_is_drawn_as_without_it() -> None:
    plain, taken = (list(islice(draws(SWITCHES, 5, LENGTHS, control=one), 2000)) for one in (False, True))
    heads = []
    for without, draw in zip(plain, taken, strict=True):
        assert (draw.layer, draw.question) == (without.layer, without.question)
        assert (draw.first - {CONTROL}, draw.second - {CONTROL}) == (without.first, without.second)
        here = draw.layer is Layer.PATH and draw.question is Question.EACH
        assert (CONTROL in draw.first) + (CONTROL in draw.second) == here
        if here:
            heads.append(CONTROL in draw.first)
    assert abs(2 * sum(heads) - len(heads)) < 3.5 * len(heads) ** 0.5


@pytest.mark.fault
def test_no_switch_has_the_controls_name_beside_it() -> None:
    assert next(draws([CONTROL, "batch"], 0, LENGTHS))
    with pytest.raises(ValueError, match="may be named 'control'"):
        next(draws([CONTROL, "batch"], 0, LENGTHS, control=True))


def test_a_length_learnt_on_the_way_counts_from_then_on() -> None:
    lengths = dict(LENGTHS)
    coming = draws(SWITCHES, 3, lengths)
    list(islice(coming, 50))
    lengths[Layer.FLUSH] = 600.0  # a flush that takes ten minutes is not tried twice
    assert sum(d.layer is Layer.FLUSH for d in islice(coming, 500)) <= 1


def test_a_single_switch_is_drawn_for_each_and_seeds_repeat() -> None:
    one = list(islice(draws(["head"], 4, {Layer.PATH: 1.0}, placebo=False), 50))
    assert {d.question for d in one} == {Question.EACH}
    assert {d.first | d.second for d in one} == {frozenset({"head"})}
    assert one == list(islice(draws(["head"], 4, {Layer.PATH: 1.0}, placebo=False), 50))
    assert one != list(islice(draws(["head"], 5, {Layer.PATH: 1.0}, placebo=False), 50))


@pytest.mark.parametrize("time_s", [20.0, 60.0, 240.0])
def test_a_short_run_still_gets_the_fewest_pairs_of_each_layer_and_question(time_s: float) -> None:
    shares = shares_for(LENGTHS, time_s)
    assert sum(shares.values()) == pytest.approx(1.0)
    taken = list(islice(draws(SWITCHES, 6, LENGTHS, shares=shares), int(time_s / 0.3 * 2)))
    spent, kept = 0.0, []
    for draw in taken:
        spent += LENGTHS[draw.layer]
        if spent <= max(time_s, least_time_s(LENGTHS)) * 1.05:
            kept.append(draw)
    for layer in Layer:
        for question in Question:
            assert sum(d.layer is layer and d.question is question for d in kept) >= MIN_PAIRS - 1
    if time_s == 240.0:
        assert shares == pytest.approx(dict(SHARES), abs=0.02)


@pytest.mark.fault
@pytest.mark.parametrize(
    "bad",
    [
        {"switches": ()},
        {"switches": ("a", "a")},
        {"switches": (PLACEBO,)},
        {"switches": ("a",), "lengths_s": {}},
        {"switches": ("a",), "together": 1.5},
    ],
)
def test_what_cannot_be_drawn_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"named once|at least one layer"):
        next(draws(**{"seed": 0, "lengths_s": LENGTHS, **bad}))  # type: ignore[arg-type]


def test_the_best_shares_are_better_than_any_other() -> None:
    lengths_s = {Layer.PATH: 0.27, Layer.TICK: 0.55, Layer.FLUSH: 0.8}
    seconds_per = {Layer.PATH: 1.0, Layer.TICK: 1.11, Layer.FLUSH: 10.0}

    def error(shares: dict[Layer, float]) -> float:
        spread = {layer: lengths_s[layer] / 2 / seconds_per[layer] for layer in lengths_s} | {Layer.PATH: 1.0}
        return sum(spread[layer] ** 2 * lengths_s[layer] / shares[layer] for layer in lengths_s)

    best = best_shares(lengths_s, seconds_per)
    assert sum(best.values()) == pytest.approx(1.0)
    for give in Layer:
        for take in Layer:
            moved = best | {give: best[give] * 0.9}
            moved[take] = moved[take] + best[give] * 0.1
            assert error(moved) >= error(best) - 1e-12
    assert error(best) < error(dict(SHARES))
