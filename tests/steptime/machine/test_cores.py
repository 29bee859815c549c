"""Workers keep a core of their own where that is possible, and only there."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bench.subjects.trainer.harness import single_threaded_roles
from bench.subjects.trainer.pairs import PairTrainer
from steptime.machine import cores
from steptime.machine.cores import OwnCores, kept_on, usable
from steptime.records.pairs import Request, Segment
from tests.pipeline.run import small_config

pytestmark = pytest.mark.skipif(not usable(), reason="this system does not say which cores a thread may use")


def test_a_thread_is_kept_and_let_go() -> None:
    before = usable()
    with kept_on(before[-1]):
        assert usable() == [before[-1]]
        others: list[list[int]] = []
        thread = threading.Thread(target=lambda: others.append(usable()))
        thread.start()
        thread.join()
    assert usable() == before
    with kept_on(None):
        assert usable() == before


def test_each_worker_has_the_same_core_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "usable", lambda: [3, 4, 5])
    assert OwnCores(single_threaded_roles(small_config(tmp_path))).cores == {"drafter/0": 3, "target/0": 4}
    two = small_config(tmp_path, 'target.devices=["cpu:0", "cpu:1"]')
    assert OwnCores(single_threaded_roles(two)).cores == {"drafter/0": 3, "target/0": 4, "target/1": 5}


@pytest.mark.parametrize(
    "setting",
    [
        'target.devices=["cpu:0", "cpu:1", "cpu:2"]',  # four workers, three cores
        "train.threads_per_worker=2",
        'drafter.devices=["cuda:0"]',
    ],
)
def test_elsewhere_the_system_places_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setattr(cores, "usable", lambda: [3, 4, 5])
    assert OwnCores(single_threaded_roles(small_config(tmp_path, setting))).cores == {}
    monkeypatch.setattr(cores, "usable", list)
    assert OwnCores(single_threaded_roles(small_config(tmp_path))).cores == {}


@pytest.mark.slow
@pytest.mark.skipif(len(usable()) < 2, reason="one core for two workers")
def test_the_trainers_workers_run_where_they_should(tmp_path: Path) -> None:
    subject = PairTrainer(small_config(tmp_path))
    seen: list[list[int]] = []

    def on_segment(segment: Segment) -> None:
        seen.append(usable())

    before = usable()
    subject.open()
    try:
        subject.run_pairs(iter([Request(frozenset(), 4, 0)]), on_segment)
    finally:
        subject.close()
    assert seen == [[before[0]]]
    assert usable() == before
