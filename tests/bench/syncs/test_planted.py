"""Every planted fault is found by every way that claims to see it, and the page says so."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch

from bench.syncs.faults.document import page
from bench.syncs.faults.fixture import try_fault
from bench.syncs.faults.planted import BUSY_SHARE, COUNTED, HELD_SHARE, PLANTED, Plant, make_plant
from bench.syncs.ways.registry import make_ways
from dflash.device import Device
from steptime.counting.ways.way import Way
from steptime.errors import UserError
from tests.clock import Clock

PAGE = Path(__file__).parents[3] / "docs" / "syncs.md"
HERE = [way for way in make_ways() if way.available() is None]


@pytest.mark.fault
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("way", HERE, ids=lambda way: way.name)
def test_a_way_finds_what_it_claims(way: Way, name: str) -> None:
    fresh = next(one for one in make_ways() if one.name == way.name)
    found = try_fault(fresh, PLANTED[name])
    assert bool(found.hits) == (name in way.claims), found.rows


@pytest.mark.fault
@pytest.mark.parametrize("name", COUNTED)
def test_the_modes_name_the_fault(name: str) -> None:
    found = try_fault(make_ways()[0], PLANTED[name])
    assert PLANTED[name].kind in {row.kind for row in found.hits}


def test_every_fault_is_claimed_by_a_way_that_runs_anywhere() -> None:
    everywhere = frozenset().union(*(way.claims for way in make_ways() if way.device != "cuda"))
    assert set(COUNTED) <= everywhere


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page is that of a machine without a GPU")
def test_the_page_says_what_the_program_does() -> None:
    assert PAGE.read_text() == page(), "run: python -m bench.syncs.faults.document > docs/syncs.md"
    assert "**missed**" not in page()


def test_an_unknown_plant_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="did you mean 'backward_sync'"):
        make_plant("backwards_sync")


def test_a_plant_that_is_off_does_nothing() -> None:
    plant = make_plant("item")
    loss = torch.ones((), device="meta")  # reading it would raise
    plant.after_backward(loss)
    plant.switch(True)
    with pytest.raises(RuntimeError):
        plant.after_backward(loss)


TICK_S = 0.2


def in_the_monitor(name: str) -> Plant:
    """A planted monitor, switched on, that has seen a loss."""
    plant = make_plant(name)
    trainer = SimpleNamespace(
        replicas=[SimpleNamespace(device=Device("cpu"))],
        observer=SimpleNamespace(add=lambda build: None),
        config=SimpleNamespace(observe=SimpleNamespace(tick_s=TICK_S)),
    )
    plant.install(trainer)  # type: ignore[arg-type]
    plant.switch(True)
    plant.after_backward(torch.ones(()))
    return plant


def test_a_busy_loop_runs_for_its_share_of_a_tick(clock: Clock) -> None:
    plant = in_the_monitor("busy_loop")
    clock.step_ns = 1_000_000
    began_ns = clock.now_ns
    plant.mischief()
    # It looks at the clock again and again, in Python, until its share is over.
    assert (clock.now_ns - began_ns) / 1e9 == pytest.approx(BUSY_SHARE * TICK_S, abs=0.003)
    plant.switch(False)
    readings = clock.readings
    plant.mischief()
    assert clock.readings == readings


def test_held_gil_is_one_call_into_c_as_long_as_its_share_of_a_tick(clock: Clock) -> None:
    """Python gives the lock away between bytecodes only: a single call of `sum` keeps it to its end."""
    clock.step_ns = 1_000_000  # so that summing the trial length takes a millisecond
    trial = make_plant("held_gil").gil_length
    plant = in_the_monitor("held_gil")
    assert plant.gil_length == pytest.approx(trial * HELD_SHARE * TICK_S / 0.001, rel=1e-6)
    plant.gil_length = 1000
    calls: list[str] = []

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call") and frame.f_code is plant.fault.act.__code__:
            calls.append(event if event == "call" else argument.__name__)

    sys.setprofile(seen)
    try:
        total = plant.fault.act(torch.ones(()), plant)
    finally:
        sys.setprofile(None)
    assert calls == ["call", "sum"]
    assert total == sum(range(1000)), "all of it in that one call"
