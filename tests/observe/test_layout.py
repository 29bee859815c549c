"""Eight GPUs, simulated: five targets and three drafters. How many keys, how many bytes.

How long a tick takes is for `bench/test_hot_path.py`.
"""

from __future__ import annotations

from pathlib import Path

from dflash.observe.metric import MetricIndex
from dflash.observe.registry import all_metrics
from tests.observe.layout import DRAFTERS, TARGETS, Layout, measure


def test_keys_and_bytes(tmp_path: Path) -> None:
    found = measure(tmp_path, windows=2)
    print(found)
    # W&B keeps under 10,000 names a project, and a few hundred points a second; a window is one call.
    assert 200 < found.keys < 300
    assert 150 < found.wandb_keys <= 200
    assert found.flush_bytes < 20_000


def test_every_worker_and_every_gpu_is_on_the_dashboard(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.start()
    for _ in range(3):
        layout.work()
        layout.observer._monitor.tick()
    layout.work()
    layout.observer._monitor.tick(last=True)
    layout.observer.close()
    values = layout.sink.of("metrics")[0].values
    for role, count in (("target", TARGETS), ("drafter", DRAFTERS)):
        for index in range(count):
            for key in ("tokens_per_second", "wait_in_s", "wait_out_s", "step", "batches"):
                assert f"{role}/{index}/{key}" in values
        assert f"{role}/skew" in values
    for gpu in range(TARGETS + DRAFTERS):
        assert f"gpu/{gpu}/util_pct" in values
        assert f"cuda/{gpu}/reserved_gb" in values
    assert not [key for key in values if MetricIndex(all_metrics()).find(key) is None]


def test_training_scalars_keep_until_the_flush_as_no_screen_shows_them(tmp_path: Path) -> None:
    """Each wake-up of a sink costs as much as a collector; a full half of the deque goes at once all the
    same."""
    layout = Layout(tmp_path)
    layout.start()
    monitor = layout.observer._monitor
    monitor._live = False
    layout.late(1)
    monitor.tick()
    layout.late(2)
    assert len(layout.observer._late) == 2
    monitor.tick(last=True)
    for step in range(3, 2052):
        layout.late(step)
    monitor.tick()
    assert len(layout.observer._late) == 0
    layout.observer.close()
    assert [row.step for row in layout.sink.of("train")] == list(range(1, 2052))
