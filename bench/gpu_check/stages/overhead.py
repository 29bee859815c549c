"""Stage: `python -m bench overhead --quick` with the workers on the GPUs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu_check.stage import Found, Table, rows_of
from steptime.child_process import Ended, run_python

LIMIT_S = 65.0
MINUTES = "0.3"
UNRESOLVED = 3
"""Exit code of a quick run that the clock could not settle: no problem of the GPU's."""


class OverheadStage:
    """Exact counts included: an arm that was not counted is red."""

    name = "overhead"
    asks = "What do the collectors cost here, and do they add a sync, an operation or a copy?"
    seconds = 70

    def look(self) -> Found:
        import torch

        from bench.gpu_check.workload import CONFIG, settings

        with tempfile.TemporaryDirectory() as folder:
            words = ["--quick", "--minutes", MINUTES, "--config", str(CONFIG), "--out", folder]
            for setting in settings(torch.cuda.device_count()):
                words += ["--set", setting]
            ended = run_python(["-m", "bench", "overhead", *words], limit_s=LIMIT_S)
            receipt = Path(folder) / "receipt.json"
            tree = json.loads(receipt.read_text(encoding="utf-8")) if receipt.is_file() else None
        return read(ended, tree)


ADDED = ("syncs", "operations", "copies")


def read(ended: Ended, receipt: Mapping[str, Any] | None) -> Found:
    """What a receipt says. Pure."""
    if receipt is None:
        why = f"exit code {ended.code}" if ended.code is not None else f"not finished in {LIMIT_S:g} s"
        return Found(0, "pairs", (f"no receipt: {why}: {ended.last_line}",))
    problems = []
    if ended.code not in (0, UNRESOLVED):
        problems.append(f"{receipt['verdict']} (exit code {ended.code}): {'; '.join(receipt['reasons'])}")
    counts = receipt["counts"]
    if not counts:
        problems.append("nothing was counted")
    for name, one in counts.items():
        if not one["armed"]:
            problems.append(f"{name}: not armed: {'; '.join(one['unavailable'])}")
        elif not one["operations"]:
            problems.append(f"{name}: no operation was counted")
    costs = [*receipt["collectors"], *([receipt["all"]] if receipt["all"] else [])]
    for cost in costs:
        for what in ADDED:
            more = (cost["added"] or {}).get(what)
            if more is None:
                problems.append(f"{cost['name']}: {what} were not counted")
            elif more:
                problems.append(f"{cost['name']} adds {more} {what}")
    if receipt["losses_equal"] is not True:
        problems.append("losses differ, or were not compared")
    rows = rows_of(
        *(
            (cost["name"], _percent(cost), *((cost["added"] or {}).get(what) for what in ADDED))
            for cost in costs
        )
    )
    headers = ("collector", "slowdown, %", *(f"{what} added" for what in ADDED))
    return Found(
        len(receipt["pairs"]),
        "pairs",
        tuple(problems),
        (f"{receipt['verdict']}, exit code {ended.code}",),
        (Table("Collectors", headers, rows),),
    )


def _percent(cost: Mapping[str, Any]) -> str:
    found = cost.get("estimate")
    return "-" if found is None else f"{found['percent']:.2f} ({found['low']:.2f} to {found['high']:.2f})"
