"""A run in a process of its own: a worker that steps and is observed. Prints what it measured as one line of JSON.

python -m tests.observe.wandb_kit.run FOLDER MODE SECONDS TIMEOUT_S
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Literal

from dflash.config import ObserveConfig
from dflash.observe.observer import Observer
from dflash.observe.roles import RoleMap

BLOCK = bytes(1 << 20)


def main(folder: Path, mode: Literal["off", "offline", "online"], seconds: float, timeout_s: float) -> dict[str, Any]:
    config = ObserveConfig(
        tick_s=0.05, flush_s=0.1, terminal="off", wandb=mode, wandb_timeout_s=timeout_s, collectors=("profile", "workers")
    )
    observer = Observer(config, folder, RoleMap(("cpu",), ("cpu",)))
    recorder = observer.recorder("drafter", 0)
    timer = recorder.timer("drafter.forward", gpu=True)
    observer.start()
    steps, calls = [], []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        if timer.on:
            timer.start()
        hashlib.sha256(BLOCK).digest()
        hashed = time.perf_counter()
        if timer.on:
            timer.stop()
        recorder.tokens += 100
        recorder.batches += 1
        recorder.step += 1
        recorder.step_boundary()
        observer.late(recorder.step, {"train/loss": 1.0 / recorder.step, "train/lr": 1e-3})
        done = time.perf_counter()
        steps.append(done - began)
        calls.append(done - hashed)
    closing = time.perf_counter()
    summary = observer.close()
    return {
        "steps": len(steps),
        "median_step_s": sorted(steps)[len(steps) // 2],
        "median_calls_s": sorted(calls)[len(calls) // 2],
        "calls_share": sum(calls) / sum(steps),
        "close_s": time.perf_counter() - closing,
        "dropped": summary.dropped,
    }


def child(folder: Path, environment: dict[str, str], mode: Literal["off", "offline", "online"], *limits: float) -> None:
    """Run `main` under an environment; results go to `out` and what is said on standard error to `err`, in `folder`."""
    os.environ.clear()
    os.environ.update(environment)
    err = os.open(folder / "err", os.O_CREAT | os.O_WRONLY)
    os.dup2(err, 2)
    measured = main(folder, mode, *limits)
    (folder / "out").write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    _, folder, mode, seconds, timeout_s = sys.argv
    print(json.dumps(main(Path(folder), mode, float(seconds), float(timeout_s))), flush=True)  # type: ignore[arg-type]
