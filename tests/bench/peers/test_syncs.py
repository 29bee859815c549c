"""Counting of the other trainers: its own parts; the trainers themselves are `nox -s peers`."""

from __future__ import annotations

import pytest
import torch

from bench.peers import syncs
from bench.peers.syncs import STEPS, WARMUP, Counted, PeerStep, alone, count, places, summary


def reading_step(steps: int) -> None:
    weight = torch.nn.Parameter(torch.ones(3, device=syncs.DEVICE))

    def loss() -> torch.Tensor:
        total = (weight * weight).sum()
        total.item()
        return total

    alone([weight], loss, steps)


def test_a_read_in_each_step_is_one_sync_per_step() -> None:
    counted = count(PeerStep("a peer", "drafter alone", reading_step))
    assert counted.steps == STEPS
    assert counted.per_step == 1.0
    assert "tests/bench/peers/test_syncs.py" in places([counted])
    assert "| a peer" in summary([counted])


def test_a_peer_that_stops_early_is_no_result() -> None:
    with pytest.raises(RuntimeError, match=f"optimizer steps instead of {WARMUP + STEPS}"):
        count(PeerStep("a peer", "drafter alone", lambda steps: reading_step(steps - 1)))


def test_a_missing_peer_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def specforge():  # type: ignore[no-untyped-def]
        raise ImportError("No module named 'specforge'")
        yield

    monkeypatch.setattr(syncs, "ours", lambda: [Counted("dflash-harness", "drafter/0", 4, {})])
    monkeypatch.setattr(syncs, "specforge", specforge)
    assert syncs.main([]) == 2
    assert capsys.readouterr().err.startswith("error: specforge is not installed")
