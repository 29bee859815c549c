"""Every planted fault is found by every way that claims to see it, and the page says so."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.syncs.faults.document import page
from bench.syncs.faults.fixture import try_fault
from bench.syncs.faults.planted import BUSY_SHARE, COUNTED, HELD_SHARE, PLANTED, make_plant
from bench.syncs.ways import make_ways
from bench.syncs.ways.way import Way
from dflash.device import Device
from steptime.errors import UserError

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


@pytest.mark.parametrize(("name", "share"), [("busy_loop", BUSY_SHARE), ("held_gil", HELD_SHARE)])
def test_plants_that_cost_only_time_take_their_share_of_a_tick(name: str, share: float) -> None:
    plant = make_plant(name)
    trainer = SimpleNamespace(
        replicas=[SimpleNamespace(device=Device("cpu"))],
        observer=SimpleNamespace(add=lambda build: None),
        config=SimpleNamespace(observe=SimpleNamespace(tick_s=0.2)),
    )
    plant.install(trainer)  # type: ignore[arg-type]
    plant.switch(True)
    plant.after_backward(torch.ones(()))
    started = time.perf_counter()
    plant.mischief()
    assert time.perf_counter() - started > 0.3 * share * 0.2
