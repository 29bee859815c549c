"""The comparison with the peers: our side runs, and the ratio is the faster peer's."""

from __future__ import annotations

import pytest

from bench.peers import speed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_our_step_learns(dtype):
    shape = speed.Shape(32, 64, 2, 2, 1, 16, 50, 1, 48, 8, 4, 2, dtype)
    step, parameters = speed.make_step(shape)
    losses = [float(step()) for _ in range(30)]
    assert parameters == 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32 + 2 * 16) + 64 * 32 + 2 * 32
    assert sum(losses[-5:]) < sum(losses[:5])


def test_ratios_are_against_the_faster_peer_round_by_round():
    result = speed.Compared(
        speed.Shape(),
        {"specforge": [3.0, 4.0], "speculators": [9.0, 2.0], "ours": [1.0, 2.0]},
        dict.fromkeys(speed.MAKERS, 10),
    )
    assert result.ratios() == [3.0, 2.0]
    assert "2.50 (2.25 to 2.75)" in speed.table([result])


def test_a_missing_peer_is_one_line(monkeypatch, capsys):
    def missing(shape: object) -> None:
        raise ImportError("No module named 'specforge'")

    monkeypatch.setitem(speed.MAKERS, "specforge", missing)
    assert speed.main(["--rounds", "1"]) == 2
    assert "nox -s peers installs them" in capsys.readouterr().err
