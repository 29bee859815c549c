"""The figures of an evaluation, on cycles that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dflash.decode.between import Between, SlotShares, decoded_shares
from dflash.decode.evaluate import first_difference
from dflash.decode.figures import DIFFERS, SAME, TIE, PromptResult, repeated_share, summarise, table
from dflash.decode.generate import Cycle
from dflash.decode.picture import plot

A = PromptResult(
    origin="p.jsonl:1",
    prompt_tokens=10,
    new_tokens=9,
    ended=False,
    cycles=(Cycle(3, 3, 4), Cycle(0, 3, 1), Cycle(2, 3, 3)),
    passes=4,
    lossless=SAME,
    parted_at=None,
    repeated=0.0,
    speculative_s=2.0,
    plain_s=4.0,
)
B = PromptResult("p.jsonl:2", 5, 3, True, (Cycle(2, 2, 2),), 2, SAME, None, 1.0, 1.0, 1.0)


def test_counted_by_hand():
    figures = summarise([A, B], 4)
    assert figures.tau == pytest.approx((4 + 1 + 3 + 2) / 4)
    assert figures.tau_by_prompt == pytest.approx((8 / 3 + 2) / 2)
    assert figures.acceptance_rate == pytest.approx(
        7 / 11
    )  # B's third slot lay behind the end and was not judged
    assert figures.slot_reached == pytest.approx((3 / 4, 3 / 4, 1 / 3))
    assert figures.slot_right == pytest.approx((3 / 4, 1.0, 1 / 2))
    assert figures.tokens_per_pass == pytest.approx(12 / 6)
    assert figures.speed_up == pytest.approx(5 / 3)
    assert figures.tokens_per_second == pytest.approx((8 + 2) / 3)
    assert figures.plain_tokens_per_second == pytest.approx(10 / 5)
    assert figures.repeated == pytest.approx(3 / 12)
    assert figures.tau_low <= figures.tau <= figures.tau_high
    assert (figures.same, figures.ties, figures.differ, figures.lossless) == (2, 0, 0, True)


def test_a_slot_that_nobody_came_to_has_no_share():
    figures = summarise([replace(A, cycles=(Cycle(0, 3, 1),))], 4)
    assert figures.slot_right == (0.0, None, None)
    assert "-" in table(figures, [A])


def test_one_text_that_differs_is_not_lossless():
    figures = summarise([A, replace(B, lossless=DIFFERS, parted_at=2)], 4)
    assert not figures.lossless
    assert "1 DIFFER" in table(figures, [A, B])
    assert summarise([A, replace(B, lossless=TIE, parted_at=2)], 4).lossless


def test_sampled_text_is_not_called_lossless():
    sampled = [replace(result, lossless=None, plain_s=None) for result in (A, B)]
    figures = summarise(sampled, 4)
    assert not figures.checked
    assert not figures.lossless
    assert figures.speed_up is None
    assert "not checked" in table(figures, sampled)


def test_nothing_drafted_is_no_figure():
    with pytest.raises(ValueError, match="no verification"):
        summarise([replace(A, cycles=())], 4)


def test_the_table_shows_the_best_and_the_worst():
    many = [replace(A, origin=f"p.jsonl:{i}", cycles=(Cycle(i % 4, 3, i % 4 + 1),)) for i in range(40)]
    text = table(summarise(many, 4), many, rows=6)
    assert text.count("p.jsonl") == 6
    assert "4.00" in text
    assert "1.00" in text


@pytest.mark.parametrize(
    ("one", "other", "place"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None), ([5], [6], 0)],
)
def test_first_difference(one, other, place):
    assert first_difference(one, other) == place


def test_repeated_share():
    assert repeated_share([1, 2, 3, 4, 5, 6]) == 0.0
    assert repeated_share([7] * 10) == pytest.approx(
        6 / 10
    )  # the first run of four is new, every later one is not
    assert repeated_share([1, 2, 3, 4, 9, 1, 2, 3, 4]) == pytest.approx(1 / 9)
    assert repeated_share([]) == 0.0


@pytest.mark.slow
def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    figures = summarise([A, replace(A, cycles=(Cycle(0, 3, 1),))], 4)
    line = SlotShares(9, (0.9, 0.5, 0.25), (0.9, 0.6, 0.5))
    between = Between(line, line, line, decoded_shares(figures), 0.5)
    pictures = []
    for name, beside in (("alone", None), ("three", between), ("again", between)):
        assert plot(tmp_path / f"{name}.svg", figures, "run", beside)
        pictures.append((tmp_path / f"{name}.svg").read_text())
    labels = ["training: the data's answers", "training: the target's own answers", "decoding: accepted"]
    assert [label in pictures[0] for label in labels] == [False, False, True]
    assert all(label in pictures[1] for label in labels)
    assert pictures[1] == pictures[2]
