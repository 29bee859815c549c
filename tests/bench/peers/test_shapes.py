"""The ratios come from pairs and the harness's own test, and a peer that waits or a missing pair is seen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from bench.peers import shapes, speed

SMALL = speed.Shape(32, 64, 1, 2, 1, 16, 50, 1, 48, 4, 4, 2)


def test_a_ratio_is_the_peers_time_over_ours_whatever_the_order():
    signs = [1, -1, 1, 1, -1, -1, 1, -1]
    own = [1.0, 1.1, 0.9, 1.2, 1.0, 1.3, 0.8, 1.0]
    noise = [1.01, 0.99, 1.02, 0.98, 1.0, 1.0, 1.01, 0.99]
    theirs = [1.5 * seconds * factor for seconds, factor in zip(own, noise, strict=True)]
    found = shapes.ratio_of(theirs, own, signs)
    assert found.value == pytest.approx(1.5, rel=0.01)
    assert 1.4 < found.low < 1.5 < found.high < 1.6
    assert str(found).startswith("1.50 (1.4")


def test_a_peer_as_fast_as_ours_is_not_told_apart():
    signs = [1, -1, 1, 1, -1, -1, 1, -1]
    theirs = [math.exp(0.1 * (-1) ** index) for index in range(8)]
    found = shapes.ratio_of(theirs, [1.0] * 8, signs)
    assert found.low < 1.0 < found.high


def test_too_few_pairs_have_no_interval():
    with pytest.raises(ValueError, match="5 pairs: an interval needs 6"):
        shapes.ratio_of([1.0] * 5, [1.0] * 5, [1] * 5)
    with pytest.raises(SystemExit):
        shapes.main(["--pairs", "5"])


def test_pairs_remember_who_came_first():
    ran: list[str] = []
    _, _, signs = shapes.in_pairs(lambda: ran.append("peer"), lambda: ran.append("ours"), 12, seed=0)
    firsts = ran[::2]
    assert [1 if name == "peer" else -1 for name in firsts] == signs
    assert set(signs) == {1, -1}


def test_our_step_waits_nowhere_and_a_planted_read_is_counted():
    step, _ = speed.make_step(SMALL)
    operations, syncs = shapes.counts_of(step)
    assert operations > 50
    assert syncs == 0

    def reads() -> torch.Tensor:
        loss = step()
        loss.item()
        return loss

    assert shapes.counts_of(reads)[1] == 1


@pytest.mark.slow
def test_the_peak_holds_what_a_step_reads():
    """A process of its own: seconds of imports."""
    features = 65536 * SMALL.taps * SMALL.hidden * 4
    assert shapes.peak_bytes("ours", replace(SMALL, context=65536)) > features


@pytest.mark.parametrize(("flags", "fast"), [("avx2 fma", False), ("avx512_bf16", True), ("amx_bf16", True)])
def test_bf16_is_left_out_where_it_has_no_instructions(flags, fast):
    assert shapes.fast_bf16(lambda: f"flags : fpu {flags}") is fast
