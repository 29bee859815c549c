"""Stage: `python -m bench gate --base HEAD`: the tree against its own commit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu_check.stage import Found
from steptime.child_process import Ended, run_python

LIMIT_S = 75.0
MINUTES = "0.5"
UNRESOLVED = 3


class GateStage:
    """The same code on both sides: a slower head is a false alarm of the gate, or of the GPU."""

    name = "gate"
    asks = "Does a gate of this tree against its own commit run, and find no difference?"
    seconds = 80

    def look(self) -> Found:
        import torch

        from bench.gpu_check.workload import CONFIG, settings

        with tempfile.TemporaryDirectory() as folder:
            words = ["--base", "HEAD", "--minutes", MINUTES, "--config", str(CONFIG), "--out", folder]
            for setting in settings(torch.cuda.device_count()):
                words += ["--set", setting]
            ended = run_python(["-m", "bench", "gate", *words], limit_s=LIMIT_S)
            receipt = Path(folder) / "receipt.json"
            tree = json.loads(receipt.read_text(encoding="utf-8")) if receipt.is_file() else None
        return read(ended, tree)


def read(ended: Ended, receipt: Mapping[str, Any] | None) -> Found:
    """What a receipt says. Pure. A gate this short may leave the speed open; a slower head is a problem."""
    if receipt is None:
        why = f"exit code {ended.code}" if ended.code is not None else f"not finished in {LIMIT_S:g} s"
        return Found(0, "pairs", (f"no receipt: {why}: {ended.last_line}",))
    verdict = receipt["verdict"]
    problems = []
    if ended.code not in (0, UNRESOLVED) or (ended.code == UNRESOLVED and verdict != "unresolved"):
        problems.append(f"{verdict} (exit code {ended.code}): {'; '.join(receipt['reasons'])}")
    problems += [
        f"{name} was not counted: {'; '.join(one['unavailable'])}"
        for name, one in receipt["counts"].items()
        if not one["armed"]
    ]
    if not receipt["counts"]:
        problems.append("neither side was counted")
    return Found(len(receipt["pairs"]), "pairs", tuple(problems), (f"{verdict}, exit code {ended.code}",))
