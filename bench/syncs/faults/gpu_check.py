"""Everything about counting that needs a CUDA GPU, in under five minutes: one JSON and one Markdown page.

    python -m bench gpu-check [--out DIR]

Runs the `gpu` tests; every planted fault under every way; the truth table under the GPU trace hooks, CUPTI
and the modes, beside what the modes predict on the CPU; the cost of event pairs; the collectors in the real
trainer with everything on one GPU. Without a CUDA device it says so, exits with code 4, and writes nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

if TYPE_CHECKING:
    from bench.syncs.ways.way import Way

ROOT = Path(__file__).parents[3]
LIMIT_S = 290.0
EXIT_INVALID = 4
ADDED = ("syncs_added", "operations_added", "copies_added", "allocations_added")


@dataclass
class Check:
    """What was found. `problems` is empty when all is as claimed; a part that was not run is named in
    `left_out`."""

    gpu: str
    versions: dict[str, str]
    tests: dict[str, Any] = field(default_factory=dict)
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    truth: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    predicted: dict[str, bool] = field(default_factory=dict)
    event_ns: dict[str, float] = field(default_factory=dict)
    overhead: dict[str, Any] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Deadline:
    """Hands out what is left of the five minutes."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started, self._seconds = clock, clock(), seconds

    @property
    def spent_s(self) -> float:
        return self._clock() - self._started

    def left(self, most_s: float) -> float:
        """Seconds for the next part, at most `most_s`."""
        return max(1.0, min(most_s, self._seconds - self.spent_s))


def child(arguments: Sequence[str], timeout_s: float) -> tuple[int, str, str]:
    """Run `python ARGUMENTS` in the repository: exit code (124: out of time), stdout, stderr."""
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        return 124, "", f"not finished after {timeout_s:.0f} s"
    return done.returncode, done.stdout, done.stderr


def run_json(check: Check, name: str, arguments: Sequence[str], timeout_s: float) -> Any:
    """The JSON that a child prints; None, with a line in `left_out` or `problems`, when there is none."""
    code, out, err = child(arguments, timeout_s)
    last = err.strip().splitlines()[-1] if err.strip() else "no message"
    if code == EXIT_INVALID:
        check.left_out.append(f"{name}: {last}")
        return None
    if code != 0:
        check.problems.append(f"{name}: exit code {code}: {last}")
        return None
    return json.loads(out)


def _cuda_ways() -> list[Way]:
    """Those that count on a GPU."""
    from bench.syncs.ways.registry import make_ways

    return [way for way in make_ways("cuda") if way.device == "cuda"]


def planted(check: Check, deadline: Deadline) -> None:
    """Every fault under every way, each way in a process of its own."""
    for way in (one.name for one in _cuda_ways()):
        found = run_json(
            check, f"planted faults, {way}", ["-m", "bench.syncs.faults.fixture", way], deadline.left(40)
        )
        if found is None:
            continue
        check.faults[way] = found
        check.problems += [
            f"{way}: planted {name} was not found"
            for name, one in found.items()
            if one["claimed"] and not one["hits"]
        ]


def truth(check: Check, deadline: Deadline) -> None:
    """The truth table, and what the modes predict of it on the CPU."""
    for way in (one.name for one in _cuda_ways() if one.every_step):
        found = run_json(
            check, f"truth table, {way}", ["-m", "bench.syncs.faults.truth", way], deadline.left(40)
        )
        if found is not None:
            check.truth[way] = found
    check.predicted = predictions()
    check.problems += disagreements(check.predicted, check.truth)


def predictions() -> dict[str, bool]:
    """Which cases wait, by the modes on CPU tensors."""
    from bench.syncs.faults.truth import CASES, syncs_of
    from bench.syncs.ways.modes import ModesWay

    return {case.name: bool(syncs_of(ModesWay("cpu"), case)) for case in CASES}


def disagreements(
    predicted: Mapping[str, bool], counted: Mapping[str, Mapping[str, Mapping[str, int]]]
) -> list[str]:
    """Cases in which the prediction, the trace and CUPTI differ. Hidden copies are judged by the copy
    wrappers alone."""
    from bench.syncs.faults.truth import PAGEABLE_CASES
    from bench.syncs.ways.cupti import SYNCS

    lines = []
    for name, waits in predicted.items():
        judge = "copy wrappers" if name in PAGEABLE_CASES else "GPU trace"
        if judge in counted and bool(counted[judge].get(name)) != waits:
            lines.append(
                f"{name}: the CPU ways predict {_waits(waits)}, {judge} counts "
                f"{dict(counted[judge].get(name, {}))}"
            )
        if "CUPTI" in counted and "GPU trace" in counted and name not in PAGEABLE_CASES:
            driver = sum(
                n for kind, n in counted["CUPTI"].get(name, {}).items() if kind in set(SYNCS.values())
            )
            trace = sum(counted["GPU trace"].get(name, {}).values())
            if bool(driver) != bool(trace):
                lines.append(f"{name}: the GPU trace counts {trace} syncs, CUPTI {driver}")
    return lines


def _waits(waits: bool) -> str:
    return "a wait" if waits else "no wait"


def event_cost() -> dict[str, float]:
    """Host nanoseconds of an event pair on the hot path, of a poll, and of a stage timer as the recorder uses
    it."""
    import torch

    from dflash.device import Device
    from dflash.observe.recorder import WorkerRecorder

    device = Device("cuda:0")
    with device.active():
        pair = (device.event(timing=True), device.event(timing=True))
        pair[0].record(device.stream)
        pair[1].record(device.stream)
        torch.cuda.synchronize()
        recorder = WorkerRecorder("drafter", 0, device, 64)
        timer = recorder.timer("drafter.forward", gpu=True)
        timer.switch(True)

        def record() -> None:
            pair[0].record(device.stream)
            pair[1].record(device.stream)

        def span() -> None:
            timer.start()
            timer.stop()
            recorder.step_boundary()

        return {"record pair": _ns(record), "query": _ns(pair[1].query), "span with drain": _ns(span)}


def _ns(call: Any, calls: int = 500, repeats: int = 7) -> float:
    import torch

    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - started) / calls)
    return round(median(times), 1)


def overhead(check: Check, deadline: Deadline) -> None:
    """`python -m bench overhead --quick` of the small trainer, target and drafter on this GPU, exact counts
    included."""
    with tempfile.TemporaryDirectory() as folder:
        devices = ['target.devices=["cuda:0"]', 'drafter.devices=["cuda:0"]']
        arguments = ["-m", "bench", "overhead", "--quick", "--minutes", "0.5", "--out", folder]
        for setting in devices:
            arguments += ["--set", setting]
        code, _, err = child(arguments, deadline.left(150))
        receipt = Path(folder) / "receipt.json"
        if not receipt.is_file():
            check.problems.append(
                f"overhead: exit code {code}, no receipt: {(err.strip().splitlines() or ['no message'])[-1]}"
            )
            return
        tree = json.loads(receipt.read_text(encoding="utf-8"))
    check.overhead = {
        key: tree[key]
        for key in ("verdict", "exit_code", "losses_equal", "reasons", "collectors", "all", "throughput")
    }
    for cost in (*tree["collectors"], *([tree["all"]] if tree["all"] else [])):
        for what in ("syncs_added", "operations_added", "copies_added", "allocations_added"):
            if cost[what]:
                check.problems.append(
                    f"overhead: {cost['name']} adds {cost[what]} {what.removesuffix('_added')}"
                )
    if tree["losses_equal"] is False:
        check.problems.append("overhead: losses differ between the arms")


def gpu_tests(check: Check, deadline: Deadline) -> None:
    """`pytest -m gpu`."""
    code, out, err = child(
        ["-m", "pytest", "-m", "gpu", "tests", "-p", "no:cacheprovider"], deadline.left(120)
    )
    tail = (out.strip() or err.strip()).splitlines()
    check.tests = {"exit_code": code, "summary": tail[-1] if tail else "no output"}
    if code != 0:
        check.problems.append(f"gpu tests: exit code {code}: {check.tests['summary']}")


def machine() -> Check:
    """The GPU's name and the versions that matter."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    versions = {"torch": torch.__version__, "CUDA": str(torch.version.cuda), "python": sys.version.split()[0]}
    try:
        import pynvml

        pynvml.nvmlInit()
        versions["driver"] = str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # the page is as good without the driver's version
        versions["driver"] = f"unknown ({type(error).__name__})"
    return Check(gpu=properties.name, versions=versions)


def page(check: Check) -> str:
    """The Markdown page."""
    parts = [
        f"# Checked on {check.gpu}\n",
        f"`python -m bench gpu-check`, {check.seconds:.0f} s. "
        + ", ".join(f"{k} {v}" for k, v in check.versions.items())
        + ".\n",
        "## Outcome\n",
        "\n".join(f"- {line}" for line in check.problems) or "Everything as claimed.",
    ]
    if check.left_out:
        parts += ["\nNot run:\n", "\n".join(f"- {line}" for line in check.left_out)]
    parts += [
        f"\n## GPU tests\n\n{check.tests.get('summary', 'not run')}\n",
        "## Planted faults\n",
        _faults_table(check),
    ]
    parts += [
        "\n## Truth table\n",
        _truth_table(check),
        "\n## Events\n",
        _events_table(check),
        "\n## Collectors\n",
        _costs_table(check),
    ]
    return "\n".join([*parts, ""])


def _faults_table(check: Check) -> str:
    names = list(next(iter(check.faults.values()), {}))
    rows = [(f"`{name}`", *(_hit(check.faults[way][name]) for way in check.faults)) for name in names]
    return tabulate(rows, headers=("fault", *check.faults), tablefmt="github")


def _hit(one: Mapping[str, Any]) -> str:
    kinds = ", ".join(one["hits"])
    if one["claimed"]:
        return kinds or "**missed**"
    return f"{kinds} (unclaimed)" if kinds else "-"


def _truth_table(check: Check) -> str:
    rows = [
        (name, "waits" if waits else "-", *(_kinds(check.truth[way].get(name, {})) for way in check.truth))
        for name, waits in check.predicted.items()
    ]
    return tabulate(rows, headers=("case", "CPU ways predict", *check.truth), tablefmt="github")


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "-"


def _events_table(check: Check) -> str:
    return tabulate(list(check.event_ns.items()), headers=("call", "host ns"), tablefmt="github")


def _costs_table(check: Check) -> str:
    found = check.overhead
    if not found:
        return "not run"
    costs = [*found["collectors"], *([found["all"]] if found["all"] else [])]
    rows = [
        (
            cost["name"],
            "-"
            if cost["isolated"] is None
            else (
                f"{cost['isolated']['percent']:.2f} ({cost['isolated']['low']:.2f} to "
                f"{cost['isolated']['high']:.2f})"
            ),
            "-" if cost["accounted_percent"] is None else f"{cost['accounted_percent']:.4f}",
            *(cost[what] for what in ADDED),
        )
        for cost in costs
    ]
    headers = ("collector", "slowdown, %", "accounted, %", "syncs", "operations", "copies", "allocations")
    verdict = (
        f"`overhead --quick`, everything on one GPU: {found['verdict']} (exit code {found['exit_code']})."
    )
    return verdict + "\n\n" + tabulate(rows, headers=headers, tablefmt="github", missingval="-")


def check_gpu(folder: Path) -> int:
    """0: everything as claimed; 1: not; 4: no CUDA device, nothing written."""
    import torch

    if not torch.cuda.is_available():
        print("error: no CUDA device here; nothing was checked and no page is written", file=sys.stderr)
        return EXIT_INVALID
    deadline = Deadline(LIMIT_S)
    check = machine()
    check.event_ns = event_cost()
    for part in (planted, truth, gpu_tests, overhead):
        print(f"{deadline.spent_s:5.0f} s  {part.__name__.replace('_', ' ')}", file=sys.stderr)
        part(check, deadline)
    check.seconds = deadline.spent_s
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-check.json").write_text(
        json.dumps({"schema": "dflash-gpu-check/1", **asdict(check)}, indent=1), encoding="utf-8"
    )
    (folder / "gpu-check.md").write_text(page(check), encoding="utf-8")
    for line in check.problems:
        print(line)
    print(f"{folder}/gpu-check.json, gpu-check.md")
    return int(bool(check.problems))
