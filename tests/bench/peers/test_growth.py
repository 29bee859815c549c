"""The lines through the points, and the error that says when there is no line."""

from __future__ import annotations

import pytest

from bench.peers import growth


def test_a_line_is_found_and_a_bend_is_told():
    sizes = (1, 2, 4, 8)
    straight = growth.fit(sizes, [3.0 + 2.0 * n for n in sizes])
    assert (straight.c0, straight.c1) == (pytest.approx(3.0), pytest.approx(2.0))
    assert straight.error < 1e-9
    assert growth.fit(sizes, [float(n**2) for n in sizes]).error > 0.3
    with pytest.raises(ValueError, match="needs 3"):
        growth.fit((1, 2), (1.0, 2.0))


@pytest.mark.slow
def test_every_axis_is_a_size_of_the_shape_and_is_drawn(tmp_path):
    for name in growth.AXES:
        assert hasattr(growth.BASE, name)
    sizes = (1, 2, 3)
    line = growth.fit(sizes, sizes)
    axis = growth.Axis("context", sizes, (0.1, 0.2, 0.3), (1 << 20, 2 << 20, 3 << 20), line, line)
    growth.draw([axis, axis], tmp_path / "one.svg")
    growth.draw([axis, axis], tmp_path / "two.svg")
    assert "<svg" in (tmp_path / "one.svg").read_text(encoding="utf-8")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert "| context | 1 to 3" in growth.table([axis])
