"""What a pair says about a switch."""

from steptime.records.pairs import Layer, Pair, Question, Segment


def _segment(*on: str) -> Segment:
    return Segment(on=on, steps=1, tokens=10, seconds=0.1)


def test_sign_is_of_the_half_that_has_the_switch_on_alone() -> None:
    pair = Pair(0, Layer.PATH, Question.EACH, _segment("a", "c"), _segment("b", "c"))
    assert [pair.sign(name) for name in "abcd"] == [1, -1, 0, 0]
