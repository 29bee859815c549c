"""`--sync-guard`: log tells once, disallow raises in the worker."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.syncs.faults.planted import make_plant
from dflash.device import Device
from dflash.observe.syncs import allowed_sync, mark_step
from dflash.observe.syncs.guard import GuardScopes
from dflash.pipeline.supervisor import WorkerFailed
from steptime.syncs.scopes import SyncNotAllowed
from tests.pipeline.run import small_trainer
from tests.waiting import HANG_S


def steps(scopes: GuardScopes, count: int = 4) -> None:
    with scopes.enter("drafter/0", Device("cpu")):
        value = torch.ones((), device="cpu:0")
        for step in range(count):
            mark_step(step)
            value.item()


def test_log_tells_each_place_once(caplog: pytest.LogCaptureFixture) -> None:
    scopes = GuardScopes("log")
    with caplog.at_level(logging.WARNING):
        steps(scopes)
    (record,) = caplog.records
    assert (
        "drafter/0 waits for its device: item() at tests/observe/test_sync_guard.py:" in record.getMessage()
    )
    assert scopes.summary()[0].startswith("drafter/0: 3 x item() at tests/observe/test_sync_guard.py:")


def test_disallow_raises_after_the_first_step() -> None:
    with pytest.raises(SyncNotAllowed, match=r"item\(\) at tests/observe/test_sync_guard.py:\d+ steps"):
        steps(GuardScopes("disallow"))
    steps(GuardScopes("disallow"), count=1)


def test_the_monitor_is_watched_from_the_start() -> None:
    value = torch.ones(())
    with pytest.raises(SyncNotAllowed, match="monitor waits"), GuardScopes("disallow").enter("monitor"):
        value.item()


def test_declared_syncs_pass() -> None:
    scopes = GuardScopes("disallow")
    with scopes.enter("drafter/0", Device("cpu")):
        value = torch.ones((), device="cpu:0")
        for step in range(3):
            mark_step(step)
            with allowed_sync("checkpoint"):
                value.item()
    assert scopes.summary() == ["drafter/0: 2 declared: checkpoint"]


@pytest.mark.slow
@pytest.mark.timeout(2 * HANG_S)
def test_the_trainer_passes_disallow(tmp_path: Path) -> None:
    scopes = GuardScopes("disallow")
    trainer = small_trainer(tmp_path, "train.steps=4", "train.checkpoint_every=2", scopes=scopes)
    result = trainer.run()
    trainer.observer.close()
    assert result.finished
    assert any("declared: end of the run" in line for line in scopes.summary())


@pytest.mark.timeout(2 * HANG_S)
@pytest.mark.fault
def test_a_planted_item_ends_a_guarded_run(tmp_path: Path) -> None:
    plant = make_plant("item")
    trainer = small_trainer(tmp_path, scopes=GuardScopes("disallow"), hooks=plant.hooks())
    plant.install(trainer)
    trainer.observer.switch("item", True)
    with pytest.raises(WorkerFailed) as raised:
        trainer.run()
    trainer.observer.close()
    assert isinstance(raised.value.failure.error, SyncNotAllowed)
    assert "bench/syncs/faults/planted.py" in str(raised.value.failure.error)


@pytest.mark.slow
def test_unguarded_runs_import_no_bench() -> None:
    code = (
        "import sys, dflash.pipeline.trainer; sys.exit(any(name.split('.')[0] == 'bench' for name in "
        "sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], env=os.environ, timeout=HANG_S).returncode == 0
