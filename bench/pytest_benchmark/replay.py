"""pytest-benchmark's face of a receipt: pure functions. The hooks that call them are in `conftest.py`.

Segments are measured by the harness and *replayed*: a clock that stands still except when told to move on
shows each test seconds per token, so `ops` is tokens per second in the table, in the JSON and in whatever
reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tabulate import tabulate

from steptime.baselines.comparing import Comparison
from steptime.baselines.store import Baseline
from steptime.errors import UserError
from steptime.records.costs import SwitchCost
from steptime.records.pairs import ALL, Segment
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, Machine, Verdict
from steptime.statistics.throughput import all_segments, off_segments, on_segments

SCHEMA: Final = "dflash-bench/pytest/1"
BLOCK: Final = "dflash_bench"
"""Key of our own part in pytest-benchmark's JSON."""


class ReplayClock:
    """A timer for pytest-benchmark that moves only when told to: seconds per token of measured segments."""

    __name__ = "replayed_seconds_per_token"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def reset(self) -> None:
        """Back to 0, so that differences are exact however many rounds went before."""
        self._now = 0.0

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        self._now += seconds


def segments(receipt: Receipt, collector: str) -> list[Segment]:
    """The segments that a test's parameter names: with everything off, with all on, or with the collector on
    (each of the others was on in half of those); empty when none was measured."""
    if collector == OFF:
        return off_segments(receipt.pairs)
    return all_segments(receipt.pairs) if collector == ALL else on_segments(receipt.pairs, collector)


def samples(receipt: Receipt, collector: str) -> list[float]:
    """Seconds per token of each of those segments."""
    return [segment.seconds / segment.tokens for segment in segments(receipt, collector)]


def cost_of(receipt: Receipt, collector: str) -> SwitchCost | None:
    """The cost of the collector, or of all; None for `off`."""
    if collector == ALL:
        return receipt.all
    return next((cost for cost in receipt.collectors if cost.name == collector), None)


def extra_info(receipt: Receipt, collector: str) -> dict[str, Any]:
    """What stands beside the figures of a test in the JSON."""
    found: dict[str, Any] = {
        "unit": "tokens/s",
        "on": collector,
        "others": "half on" if collector not in (OFF, ALL) else collector,
        "tokens_per_segment": sorted({s.tokens for s in segments(receipt, collector)}),
        "steps_per_segment": sorted({s.steps for s in segments(receipt, collector)}),
        "load_1m": receipt.after.load_1m if receipt.after else None,
        "gpu_clocks_mhz": [gpu.sm_clock_mhz for gpu in receipt.after.gpus] if receipt.after else [],
    }
    cost = cost_of(receipt, collector)
    if cost is not None:
        found |= {
            "verdict": cost.verdict.value,
            "syncs_added": (cost.added or {}).get("syncs"),
            "accounted_percent": cost.accounted_percent,
        }
        if cost.estimate is not None:
            found |= {
                f"slowdown_{name}": getattr(cost.estimate, name) for name in ("percent", "low", "high", "mde")
            }
    return found


def machine_info(machine: Machine) -> dict[str, Any]:
    """The part of the machine that does not change between boots; versions go into our own block."""
    return {
        "key": machine.key,
        "gpus": [f"{model} {uuid}" for model, uuid in machine.gpus],
        "cpu": machine.cpu_model,
        "cpus": machine.cpus,
    }


def block(
    machine: Machine, config_name: str, config_hash: str, receipt: Receipt | None, origin: str
) -> dict[str, Any]:
    """Our own part of the JSON. `origin`: measured, or stated for a baseline that was not."""
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "config": {"name": config_name, "hash": config_hash},
        "versions": dict(machine.versions),
        "origin": origin,
    }
    if receipt is not None:
        found |= {
            "verdict": receipt.verdict.value,
            "exit_code": int(receipt.exit_code),
            "reasons": list(receipt.reasons),
        }
        found["placebo_percent"] = (
            receipt.placebo.estimate.percent if receipt.placebo and receipt.placebo.estimate else None
        )
    return found


def from_baseline(baseline: Baseline, machine: Machine, node: str, config_hash: str) -> dict[str, Any]:
    """A stored figure in pytest-benchmark's format, so that its table and its checks have something to read.

    `node`: node id of the test function. A stated figure has `off` alone; a measured one has every arm it
    measured. Mean, median, min and max are all the stored value; spreads are 0 and mean nothing."""
    entries = []
    for arm, value in baseline.arms.items():
        if ":" in arm or arm == "off-again":
            continue  # arms of an older harness, which measured each collector alone
        value = baseline.value if arm == OFF else value
        name = f"{node.rpartition('::')[2]}[{arm}]"
        seconds = 1.0 / value
        stats: dict[str, float | str] = dict.fromkeys(
            ("min", "max", "mean", "median", "q1", "q3", "ld15iqr", "hd15iqr", "total"), seconds
        )
        stats |= {"stddev": 0.0, "iqr": 0.0, "outliers": "0;0", "iqr_outliers": 0, "stddev_outliers": 0}
        stats |= {"rounds": max(1, len(baseline.sessions)), "iterations": 1, "ops": value}
        entries.append(
            {
                "group": None,
                "name": name,
                "fullname": f"{node}[{arm}]",
                "params": {"collector": arm},
                "param": arm,
                "extra_info": {"origin": baseline.origin, "sessions": len(baseline.sessions)},
                "options": {},
                "stats": stats,
            }
        )
    return {
        "machine_info": machine_info(machine),
        "commit_info": {"id": baseline.commit},
        "benchmarks": entries,
        "datetime": baseline.date,
        BLOCK: block(
            machine, baseline.config.name, baseline.config.hash or config_hash, None, baseline.origin
        )
        | {"versions": dict(baseline.versions)},
    }


def refusal(compared: Mapping[str, Any], machine: Machine, config_name: str, config_hash: str) -> str:
    """Why a file cannot be compared with a run here; empty: it can."""
    key = compared.get("machine_info", {}).get("key")
    ours = compared.get(BLOCK)
    if key is None or not isinstance(ours, Mapping) or ours.get("schema") != SCHEMA:
        return "it was not recorded by this harness (no machine key in it)"
    if key != machine.key:
        return f"it belongs to another machine ({key}; this is {machine.key})"
    config = ours.get("config", {})
    if (config.get("name"), config.get("hash")) != (config_name, config_hash):
        return (
            f"it was recorded with config {config.get('name')} {config.get('hash')}, not {config_name} "
            f"{config_hash}"
        )
    return ""


def group_by_collector(rows: Sequence[dict[str, Any]]) -> list[tuple[str | None, list[dict[str, Any]]]]:
    """Groups of `off` beside each collector, for `--benchmark-group-by=collector`."""
    collectors = list(dict.fromkeys(_collector(row) for row in rows))
    off = [row for row in rows if _collector(row) == OFF]
    groups: list[tuple[str | None, list[dict[str, Any]]]] = []
    for name in collectors:
        if name is None:
            groups.append((None, [row for row in rows if _collector(row) is None]))
        elif name != OFF:
            groups.append((f"collector={name}", [*off, *(row for row in rows if _collector(row) == name)]))
    return groups or [(f"collector={OFF}", off)]


def _collector(row: Mapping[str, Any]) -> str | None:
    params = row.get("params") or {}
    name = params.get("collector")
    return None if name is None else str(name)


def checks_of(arguments: Sequence[str], parsed: Sequence[Any]) -> list[Any]:
    """All `--benchmark-compare-fail` expressions. argparse keeps only the last one when the option is
    repeated."""
    from argparse import ArgumentTypeError

    from pytest_benchmark.utils import parse_compare_fail

    found = {str(vars(check)): check for check in parsed}
    for argument in arguments:
        name, _, text = argument.partition("=")
        if name == "--benchmark-compare-fail" and text:
            try:
                check = parse_compare_fail(text)
            except ArgumentTypeError as error:
                raise UserError(f"--benchmark-compare-fail={text}: {error}") from None
            found[str(vars(check))] = check
    return list(found.values())


def failed_checks(
    checks: Sequence[Any], now: Mapping[str, float], before: Mapping[str, float], source: str
) -> str:
    """A table of the checks that fail, or an empty string. `now`, `before`: pytest-benchmark's statistics,
    seconds per token."""
    rows = []
    for check in checks:
        if check.fails(now, before):
            old, new = before[check.field], now[check.field]
            allowed = (
                f"{check.threshold:g}%"
                if hasattr(check, "compute") and "Percentage" in type(check).__name__
                else check.threshold
            )
            change = f"{100 * (new / old - 1):+.2f}%" if old else "from 0"
            rows.append(
                [
                    check.field,
                    f"{old:.4g}",
                    f"{new:.4g}",
                    change,
                    allowed,
                    f"{1 / old:,.1f}" if old else "",
                    f"{1 / new:,.1f}",
                ]
            )
    if not rows:
        return ""
    head = ["field", "before s/token", "now s/token", "change", "allowed", "before tok/s", "now tok/s"]
    return f"slower than {source}\n{tabulate(rows, head, disable_numparse=True)}"


def cost_table(costs: Sequence[SwitchCost]) -> str:
    """The costs of a run, for a failing test."""
    rows = [
        [
            cost.name,
            *(
                ("", "", "")
                if cost.estimate is None
                else (
                    f"{cost.estimate.percent:+.2f}%",
                    f"{cost.estimate.low:+.2f} to {cost.estimate.high:+.2f}",
                    f"{cost.estimate.mde:.2f}%",
                )
            ),
            (cost.added or {}).get("syncs"),
            cost.verdict.value,
        ]
        for cost in costs
    ]
    return tabulate(
        rows, ["collector", "cost", "90% interval", "MDE", "syncs added", "verdict"], disable_numparse=True
    )


def regression(comparison: Comparison, baseline: Baseline, path: Path) -> str:
    """The table of a missed baseline, or an empty string."""
    if comparison.verdict is Verdict.WITHIN:
        return ""
    rows = [
        [
            f"{baseline.value:,.1f}",
            f"{comparison.value:,.1f}",
            f"{comparison.change_percent:+.2f}%",
            f"{comparison.limit:,.1f}",
        ]
    ]
    table = tabulate(rows, ["baseline tok/s", "now tok/s", "change", "limit"], disable_numparse=True)
    return f"{path}: {comparison.message}\n{table}"
