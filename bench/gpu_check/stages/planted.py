"""Stage: every planted fault under every way, and the truth table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from bench.gpu_check.stage import Found, Table, rows_of
from steptime.child_process import Ended, run_python

if TYPE_CHECKING:
    from steptime.counting.ways.way import Way

LIMIT_S = 28.0
AT_ONCE = 4
"""Processes: nothing is timed in them, and most of their time is torch's start."""


class PlantedStage:
    """Each way in a process of its own: the trace cannot be turned off, and CUPTI takes one subscriber."""

    name = "planted"
    asks = "Does each way of counting find the faults that it claims, and agree with the rules on what waits?"
    seconds = 60

    def look(self) -> Found:
        ways = cuda_ways()
        faults, problems = run_ways("bench.syncs.faults.fixture", [way.name for way in ways], run_python)
        every_step = [way.name for way in ways if way.every_step]
        truth, more = run_ways("bench.syncs.faults.truth", every_step, run_python)
        return read(faults, truth, predictions(), [*problems, *more])


def cuda_ways() -> list[Way]:
    """Those that count on a GPU."""
    from bench.syncs.ways.registry import make_ways

    return [way for way in make_ways("cuda") if way.device == "cuda"]


def run_ways(module: str, ways: list[str], run: Callable[..., Ended]) -> tuple[dict[str, Any], list[str]]:
    """What each way's process prints, and a line for each that printed nothing of use: an unavailable way is
    one."""
    found, problems = {}, []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(lambda way: run(["-m", module, way], limit_s=LIMIT_S), ways))
    for way, ended in zip(ways, ends, strict=True):
        if ended.code == 0:
            found[way] = json.loads(ended.out)
        elif ended.code is None:
            problems.append(f"{way}: not finished after {LIMIT_S:g} s")
        else:
            problems.append(f"{way}: exit code {ended.code}: {ended.last_line}")
    return found, problems


def read(
    faults: Mapping[str, Mapping[str, Any]],
    truth: Mapping[str, Mapping[str, Mapping[str, int]]],
    predicted: Mapping[str, bool],
    problems: list[str],
) -> Found:
    """What the ways' answers say. Pure."""
    tried = [(way, name, one) for way, all_of in faults.items() for name, one in all_of.items()]
    claims = [(way, name, one["hits"]) for way, name, one in tried if one["claimed"]]
    missed = [f"{way}: planted {name} was not found" for way, name, hits in claims if not hits]
    if not truth:
        missed.append("no way counted the truth table")
    names = list(next(iter(faults.values()), {}))
    hits = rows_of(*((f"`{name}`", *(_hit(faults[way][name]) for way in faults)) for name in names))
    cases = rows_of(
        *(
            (name, "waits" if waits else "-", *(_kinds(truth[way].get(name, {})) for way in truth))
            for name, waits in predicted.items()
        )
    )
    return Found(
        len(claims) + sum(map(len, truth.values())),
        "faults and cases",
        (*problems, *missed, *disagreements(predicted, truth)),
        tables=(
            Table("Planted faults", ("fault", *faults), hits),
            Table("Truth table", ("case", "rules", *truth), cases),
        ),
    )


def predictions() -> dict[str, bool]:
    """Which cases wait, by the modes on CPU tensors."""
    from bench.syncs.faults.truth import CASES, syncs_of
    from steptime.counting.ways.modes import ModesWay

    return {case.name: bool(syncs_of(ModesWay("cpu"), case)) for case in CASES}


def disagreements(
    predicted: Mapping[str, bool], counted: Mapping[str, Mapping[str, Mapping[str, int]]]
) -> list[str]:
    """Cases in which the prediction, the trace and CUPTI differ. Hidden copies are judged by the copy
    wrappers alone."""
    from bench.syncs.faults.truth import PAGEABLE_CASES
    from steptime.counting.ways.cupti import SYNCS

    lines = []
    for name, waits in predicted.items():
        judge = "copy wrappers" if name in PAGEABLE_CASES else "GPU trace"
        if judge in counted and bool(counted[judge].get(name)) != waits:
            lines.append(
                f"{name}: the rules predict {'a wait' if waits else 'no wait'}, {judge} counts "
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


def _hit(one: Mapping[str, Any]) -> str:
    kinds = ", ".join(one["hits"])
    if one["claimed"]:
        return kinds or "**missed**"
    return f"{kinds} (unclaimed)" if kinds else "-"


def _kinds(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in counts.items()) or "-"
