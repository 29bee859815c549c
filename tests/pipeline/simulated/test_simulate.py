"""`dflash train --simulate`: the layout of a config with everything else tiny, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash.config import load_config
from dflash.pipeline import simulate
from dflash.pipeline.hand_over import Receiver
from steptime.errors import UserError
from tests.pipeline.run import small_trainer
from tests.pipeline.simulated.parts import devices
from tests.waiting import HANG_S

pytestmark = pytest.mark.timeout(5 * HANG_S)

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(simulate, "SEEDS", (0,))
    monkeypatch.setattr(simulate, "STEPS", 2)
    settings = ("train.accumulation=1", "queue.capacity=2", "queue.hs_min_ready=1", 'drafter.dtype="float32"')
    layout = ('target.devices=["cuda:0"]', 'drafter.devices=["cuda:1", "cuda:2"]', 'target.dtype="float32"')
    return load_config(CONFIGS / "pro6000x8-qwen3.6-27b.toml", [*settings, *layout])


def test_what_workers_do_with_each_other_is_kept(tmp_path):
    config = load_config(CONFIGS / "pro6000x8-qwen3.6-27b.toml")
    layout = simulate.layout_of(config, tmp_path)
    assert layout.target.devices == tuple(f"sim:{index}" for index in range(5))
    assert layout.drafter.devices == ("sim:5", "sim:6", "sim:7")
    assert layout.queue == config.queue
    assert (layout.train.accumulation, layout.objective.kind) == (8, config.objective.kind)
    assert layout.target.taps == len(config.target.layer_ids)
    assert layout.drafter.dtype == config.drafter.dtype


@pytest.mark.slow
def test_a_clean_layout_says_what_was_looked_at(small, capsys):
    assert simulate.simulate_layout(small) == 0
    text = capsys.readouterr().out
    assert "1 targets, 2 drafters, mixed, ce, accumulation 1" in text
    assert "no race, no misuse, no undeclared wait" in text
    numbers = [int(line.split()[0].replace(",", "")) for line in text.splitlines()[2:-1]]
    assert len(numbers) == 7
    assert all(number > 0 for number in numbers)


@pytest.mark.slow
@pytest.mark.fault
def test_a_fault_is_one_line_and_exit_code_1(small, capsys, monkeypatch):
    def unmarked(self, buffer):
        buffer.freed = None

    monkeypatch.setattr(Receiver, "_free_after_reads", unmarked)
    small = small.model_copy(update={"train": small.train.model_copy(update={"accumulation": 4})})
    assert simulate.simulate_layout(small) == 1
    text = capsys.readouterr().out
    assert text.startswith("fault found, in ")
    assert "Race: nothing orders these two" in text
    assert text.count("\n") == 1


def test_a_simulated_device_without_a_simulation_is_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="no simulation is open"):
        small_trainer(tmp_path, *devices(1, 1))
