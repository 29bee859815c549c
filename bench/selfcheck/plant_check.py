"""Planted bad collectors: is each one found, and by what? Those that counters can see, by counting; the
others by their time."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.config import Config
from steptime.counting.counting import ProcessCounter
from steptime.progress import Reporter
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, ExactCounts, Verdict
from steptime.report import formatting
from steptime.run_files import child_environment
from steptime.statistics.counts import KINDS

PLANT_MINUTES = 0.5


@dataclass(frozen=True, slots=True)
class PlantFound:
    """One planted fault: whether it was found (None: not tried), and by what."""

    name: str
    found: bool | None
    how: str


def check_plants(
    config: Config, config_path: str, settings: Sequence[str], end: float, reporter: Reporter
) -> list[PlantFound]:
    """Every planted fault: those that counters can see by the exact counts, the others by their time, as long
    as it lasts."""
    from bench.syncs.faults.planted import COUNTED, PLANTED

    reporter.say(f"selfcheck: counting {len(COUNTED)} planted faults")
    found = count_plants(config, COUNTED)
    longest = 0.0
    for name in PLANTED:
        began = time.monotonic()
        if name in COUNTED:
            continue
        if began + longest > end:
            found.append(PlantFound(name, None, "no time was left to try it"))
            continue
        reporter.say(f"selfcheck: timing planted fault {name}")
        found.append(time_plant(name, config_path, settings))
        longest = max(longest, time.monotonic() - began)
    return found


def count_plants(config: Config, names: Sequence[str]) -> list[PlantFound]:
    """Whether the exact counts with each fault on differ from those with all off; one process counts them
    all."""
    from bench.subjects.trainer.harness import harness_config

    prepared = harness_config(config).model_dump(mode="json")
    pending = ProcessCounter(prepared, plants=names).start({OFF: (), **{name: (name,) for name in names}})
    try:
        counts, faults = pending.result()
    finally:
        pending.close()
    if faults:
        return [PlantFound(name, False, faults[0]) for name in names]
    return [judge_plant(name, counts[OFF], counts[name]) for name in names]


def judge_plant(name: str, off: ExactCounts, on: ExactCounts) -> PlantFound:
    """Pure: what the fault added."""
    added = {kind: (getattr(on, kind) or 0) - (getattr(off, kind) or 0) for kind in KINDS}
    text = ", ".join(f"{more:+d} {kind}" for kind, more in added.items() if more)
    return PlantFound(name, any(more > 0 for more in added.values()), text or "nothing changed")


def time_plant(name: str, config_path: str, settings: Sequence[str]) -> PlantFound:
    """Whether `overhead` calls a fault that costs only time slower; a run of its own."""
    with tempfile.TemporaryDirectory(prefix="dflash-plant-") as folder:
        command = [sys.executable, "-m", "bench", "overhead", "--config", config_path, "--out", folder]
        command += [word for setting in settings for word in ("--set", setting)]
        command += ["--quick", "--minutes", str(PLANT_MINUTES), "--plant", name, "--only", name]
        done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
        path = Path(folder) / "receipt.json"
        if not path.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return PlantFound(name, False, f"no receipt (exit code {done.returncode}): {last}")
        receipt = Receipt.read(path)
    if not receipt.collectors or receipt.collectors[0].estimate is None:
        return PlantFound(name, False, "not measured")
    cost = receipt.collectors[0]
    slower = cost.verdict in (Verdict.OVER, Verdict.SLOWER)
    return PlantFound(name, slower, f"{cost.verdict.value}: {formatting.estimate(cost.estimate)} %")
