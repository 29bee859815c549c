"""The kinds of fault, each tried on real runs and then brought to the end by the same command."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from bench.reliability.trials import ALONE, RANKS, Trials, end, log, newest, saves


@dataclass
class Kind:
    """One kind of fault and what became of it."""

    name: str
    promised: str
    tried: int = 0
    lost: int = 0
    seen: set[str] = field(default_factory=set)


def kills(trials: Trials, count: int, seed: int) -> list[Kind]:
    """SIGKILL at random moments, several in a run, until each layout has had its share."""
    kinds, chance = [], random.Random(seed)
    for layout in ALONE:
        kind = Kind(
            f"SIGKILL at a random moment, {layout}", "the same command goes on; the final bytes and every row"
        )
        trials.whole(layout)
        inside = 0
        while kind.tried < -(-count // len(ALONE)):
            out, code = trials.new(), -9
            while code != 0:
                process = trials.start(out, layout)
                if kind.tried % 4:  # else while it starts
                    saves(out, process)
                process.join(chance.uniform(0.0, 0.4))
                if process.exitcode is None:
                    process.kill()
                    kind.tried += 1
                code = end(process)
                if code == -999 or code > 0:
                    kind.lost += 1
                    break
                inside += bool(code and list((out / "checkpoints").glob(".step-*")))
            else:
                kind.lost += trials.lost(out, layout)
        kind.seen.add(f"went on; {inside} of them inside a save")
        kinds.append(kind)
    return kinds


def signals(trials: Trials, times: int) -> list[Kind]:
    """SIGTERM, SIGINT, and a second SIGINT."""
    kinds = []
    for name, numbers in (("SIGTERM", [15]), ("SIGINT", [2]), ("a second SIGINT at once", [2, 2])):
        kind = Kind(name, f"exit {128 + numbers[0]} with a checkpoint of the last whole step; goes on")
        for layout in ALONE[:times]:
            out = trials.new()
            process = trials.start(out, layout)
            saves(out, process)
            for number in numbers:
                if process.pid is not None and process.exitcode is None:
                    os.kill(process.pid, signal.Signals(number))
                    time.sleep(0.01)
            judge(kind, trials, out, layout, end(process), 128 + numbers[0])
        kinds.append(kind)
    return kinds


def lost_ranks(trials: Trials, times: int, seed: int) -> list[Kind]:
    """SIGKILL of one rank of several, rank 0 too, at a random moment after the first checkpoint."""
    kinds, chance = [], random.Random(seed)
    for layout, ranks in RANKS.items():
        kind = Kind(
            f"SIGKILL of one of {layout}", "every other rank ends with exit 1 and names it; goes on likewise"
        )
        trials.whole(layout)
        for trial in range(times):
            out = trials.new()
            processes = trials.start_ranks(out, layout)
            saves(out, processes[0])
            processes[0].join(chance.uniform(0.0, 0.2))
            lost = trial % ranks
            processes[lost].kill()
            codes = [end(process) for process in processes]
            others = {codes[rank] for rank in range(ranks) if rank != lost}
            named = [
                f"rank {lost}" in log(out, rank).read_text(encoding="utf-8")
                for rank in range(ranks)
                if rank != lost
            ]
            kind.tried += 1
            kind.seen.add(f"exit {', '.join(map(str, sorted(others)))}")
            ended = codes[lost] == -signal.SIGKILL and others == {1} and all(named)
            # A run that was over before the kill has nobody to name.
            ended = ended or set(codes) <= {0, -signal.SIGKILL}
            kind.lost += int(not ended or trials.run(out, layout) != 0 or trials.lost(out, layout))
        kinds.append(kind)
    return kinds


def judge(kind: Kind, trials: Trials, out: Path, layout: str, code: int, expected: int) -> None:
    """Count a trial that has met its fault, and bring its run to the end."""
    kind.tried += 1
    kind.seen.add(f"exit {code}")
    again = trials.run(out, layout)
    kind.lost += int(code not in (expected, 0) or again != 0 or trials.lost(out, layout))


def planted(trials: Trials, name: str, promised: str, plants: list[str], expected: int) -> Kind:
    """A fault inside the process."""
    kind = Kind(name, promised)
    for plant in plants:
        for layout in ("1 drafter", "3 drafters"):
            trials.whole(layout)
            out = trials.new()
            judge(kind, trials, out, layout, trials.run(out, layout, plant), expected)
    return kind


def refusals(trials: Trials) -> list[Kind]:
    """What is found before a worker starts: one line, exit code 2, and nothing changed."""
    layout = "1 drafter"
    data = trials.data.read_text(encoding="utf-8")

    def vanish(out: Path) -> None:
        trials.data.unlink()

    def change(out: Path) -> None:
        trials.data.write_text(data.replace("[1, 6,", "[2, 6,", 1), encoding="utf-8")

    def flip(out: Path) -> None:
        file = newest(out) / "state.safetensors"
        bits = bytearray(file.read_bytes())
        bits[len(bits) // 2] ^= 4
        shutil.copy(file, out.with_name("kept"))
        file.write_bytes(bits)

    def mend(out: Path) -> None:
        trials.data.write_text(data, encoding="utf-8")
        if (kept := out.with_name("kept")).exists():
            kept.replace(newest(out) / "state.safetensors")

    kinds = []
    for name, spoil in (
        ("data file vanishes", vanish),
        ("data file changes", change),
        ("one bit of a checkpoint flips", flip),
    ):
        kind = Kind(name, "one line, exit 2; goes on when it is put right")
        out = trials.new()
        process = trials.start(out, layout)
        saves(out, process)
        process.terminate()
        end(process)
        before = len(log(out).read_text(encoding="utf-8"))
        spoil(out)
        code = trials.run(out, layout)
        said = [
            line for line in log(out).read_text(encoding="utf-8")[before:].splitlines() if "error" in line
        ]
        mend(out)
        kind.lost += int(len(said) != 1)
        judge(kind, trials, out, layout, code, 2)
        kinds.append(kind)
    kind = Kind("a second run in the same folder", "one line, exit 2; the first goes on")
    out = trials.new()
    process = trials.start(out, layout)
    saves(out, process)
    code = trials.run(out, layout)
    end(process)
    judge(kind, trials, out, layout, code, 2)
    return [*kinds, kind]


def nan(trials: Trials) -> Kind:
    """A rate that no run survives."""
    import torch
    from safetensors.torch import load_file

    kind = Kind(
        "NaN (a rate of 1e30)", "exit 1 with step, batch and samples; the newest checkpoint is finite"
    )
    for layout in ("1 drafter", "3 drafters"):
        out = trials.new()
        code = trials.run(
            out,
            layout,
            "",
            "--set",
            "train.lr=1e30",
            "--set",
            "train.warmup=0",
            "--set",
            "train.checkpoint_every=2",
        )
        kind.tried += 1
        kind.seen.add(f"exit {code}")
        found = list((out / "checkpoints").glob("step-*"))
        finite = all(
            bool(torch.isfinite(tensor).all())
            for path in found
            for tensor in load_file(path / "state.safetensors").values()
        )
        kind.lost += int(code != 1 or not finite or "samples" not in log(out).read_text(encoding="utf-8"))
    return kind


def all_kinds(trials: Trials, count: int, seed: int) -> list[Kind]:
    workers = ["target", "drafter", "prefetcher"]
    goes_on = "with the state of the last whole step; goes on"
    return [
        *kills(trials, count, seed),
        *signals(trials, len(ALONE)),
        *lost_ranks(trials, times=4, seed=seed),
        planted(
            trials,
            "exception in a worker",
            f"exit 1, its traceback, {goes_on}",
            [f"raise {one}" for one in [*workers, "update"]],
            1,
        ),
        planted(
            trials,
            "hang of a worker",
            f"exit 75, its stack, {goes_on}",
            [f"hang {one}" for one in workers],
            75,
        ),
        planted(
            trials, "out of memory on a device", f"exit 1 {goes_on}", ["memory target", "memory drafter"], 1
        ),
        planted(trials, "disk full at one checkpoint", "training goes on, exit 0", ["full once"], 0),
        *refusals(trials),
        nan(trials),
    ]
