"""A run in a process of its own: a worker that steps and is observed. Prints what it found as a line of JSON.

python -m tests.observe.wandb_kit.run FOLDER MODE [INIT_S FINISH_S PAUSE_AFTER]

Its clock and its monitor's ticks are its own, so a run holds the same steps and windows on any machine; only
W&B's own process and its time-outs live in real time.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

from dflash.config import ObserveConfig
from dflash.observe.observer import Observer
from dflash.observe.roles import RoleMap
from tests.clock import Clock
from tests.waiting import HANG_S, wait_until

WINDOWS, STEPS, WINDOW_S = 24, 20, 0.25
"""Flush windows, the optimizer steps in each, and its length."""
LIMIT_S = 7.0
"""What the config says of W&B's time-outs; the time-outs themselves are the tests' own."""
Mode = Literal["off", "offline", "online"]


class Touched:
    """A module or an object of W&B, and which threads asked it for anything."""

    def __init__(self, inner: Any, threads: set[str]) -> None:
        self._inner, self._threads = inner, threads

    def __getattr__(self, name: str) -> Any:
        self._threads.add(threading.current_thread().name)
        return getattr(self._inner, name)


class TouchedWandb(Touched):
    """`wandb` as the sink sees it; the first `init` and its `finish` have these time-outs, later ones none.

    Attributes:
        limits: the time-outs that the sink asked for.
    """

    def __init__(self, inner: Any, threads: set[str], init_s: float, finish_s: float) -> None:
        super().__init__(inner, threads)
        self._seconds = iter([(init_s, finish_s)])
        self.limits: set[float] = set()

        def settings(**named: Any) -> Any:
            waits = [name for name in ("init_timeout", "finish_timeout", "x_service_wait") if name in named]
            self.limits.update(named[name] for name in waits)
            init_s, finish_s = next(self._seconds, (HANG_S, HANG_S))
            own = {"init_timeout": init_s, "finish_timeout": finish_s, "x_service_wait": HANG_S}
            return inner.Settings(**(named | {name: own[name] for name in waits}))

        settings.model_fields = inner.Settings.model_fields  # type: ignore[attr-defined]
        self.Settings = settings

    def init(self, **named: Any) -> Touched:
        self._threads.add(threading.current_thread().name)
        return Touched(self._inner.init(**named), self._threads)


def main(
    folder: Path,
    mode: Mode,
    init_s: float = HANG_S,
    finish_s: float = HANG_S,
    pause_after: int = 0,
) -> dict[str, Any]:
    """The whole run; after window `pause_after`, once W&B's run is there, it waits for `go` in the folder.

    When W&B's run is another one from then on, half of the windows come after that was noticed.
    """
    clock = Clock()
    clock.install(pytest.MonkeyPatch())
    config = ObserveConfig(
        tick_s=3600,
        flush_s=36_000,
        terminal="off",
        wandb=mode,
        wandb_timeout_s=LIMIT_S,
        collectors=("profile", "workers"),
    )
    observer = Observer(config, folder, RoleMap(("cpu",), ("cpu",)))
    (thread,) = [one for one in observer._sinks if one.sink.name == "wandb"]
    sink = thread.sink
    threads: set[str] = set()
    sink._wandb = wandb = TouchedWandb(sink._wandb, threads, init_s, finish_s)  # type: ignore[attr-defined]
    sink.close_timeout_s = 2 * HANG_S
    recorder = observer.recorder("drafter", 0)
    timer = recorder.timer("drafter.forward", gpu=True)
    observer.start()

    def window() -> None:
        for _ in range(STEPS):
            if timer.on:
                timer.start()
            clock.advance(WINDOW_S / STEPS)
            if timer.on:
                timer.stop()
            recorder.tokens += 100
            recorder.batches += 1
            recorder.step += 1
            recorder.step_boundary()
            observer.late(recorder.step, {"train/loss": 1.0 / recorder.step, "train/lr": 1e-3})
        observer._monitor.tick(last=True)

    for done in range(1, WINDOWS + 1):
        window()
        if done == pause_after:
            wait_until(lambda: sink._run is not None)  # type: ignore[attr-defined]
            first = sink._run  # type: ignore[attr-defined]
            (folder / "paused").touch()
            wait_until((folder / "go").exists)
            if (folder / "go").read_text() == "until there is a new run":

                def noticed(first: Any = first) -> bool:
                    if len(thread.outbox) < 1000:  # a new run may take long, and a full outbox drops rows
                        window()
                    return sink._run is not first  # type: ignore[attr-defined]

                wait_until(noticed)
    observer.close()
    return {
        "steps": recorder.step,
        "threads": sorted(threads),
        "limits": sorted(wandb.limits),
        "dropped": {one.sink.name: one.dropped for one in observer._sinks},
    }


def child(folder: Path, environment: dict[str, str], mode: Mode, *arguments: float) -> None:
    """Run `main` under an environment; results go to `out` and what is said on standard error to `err`, in
    `folder`."""
    os.environ.clear()
    os.environ.update(environment)
    err = os.open(folder / "err", os.O_CREAT | os.O_WRONLY)
    os.dup2(err, 2)
    found = main(folder, mode, *arguments)  # type: ignore[arg-type]
    (folder / "out").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _, folder, mode, *limits = sys.argv
    print(json.dumps(main(Path(folder), mode, *map(float, limits))), flush=True)  # type: ignore[arg-type]
