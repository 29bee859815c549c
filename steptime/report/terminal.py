"""The report on a terminal: a table of 80 columns, then the lines that explain it, the verdict last where the
eye is."""

from __future__ import annotations

import re

import tabulate as tables
from tabulate import tabulate

from steptime.records.costs import SwitchCost
from steptime.records.pairs import PLACEBO
from steptime.records.receipt import Receipt
from steptime.records.types import Verdict
from steptime.report import formatting
from steptime.statistics.control import told

STYLES = {
    Verdict.WITHIN: "32",
    Verdict.OVER: "1;31",
    Verdict.SLOWER: "33",
    Verdict.UNRESOLVED: "33",
    Verdict.INVALID: "1;35",
    Verdict.NO_BASELINE: "33",
}
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def render(receipt: Receipt, *, color: bool = False) -> str:
    """The whole report as text that ends with a newline."""
    parts = [_title(receipt), ""]
    table = cost_table(receipt, color=color)
    if table:
        parts += [table, ""]
    parts += [f"{name + ':':<14} {text}" for name, text in [*columns(receipt), *facts(receipt)]]
    parts.append("")
    parts += [f"  - {reason}" for reason in receipt.reasons]
    parts.append(
        paint(formatting.headline(receipt), receipt.verdict, color)
        + f"  (exit code {int(receipt.exit_code)})"
    )
    return "\n".join(parts) + "\n"


def _title(receipt: Receipt) -> str:
    return (
        f"{receipt.command} of {receipt.config.name}, commit "
        f"{formatting.commit(receipt)}\n{formatting.machine(receipt)}"
    )


def cost_table(receipt: Receipt, *, color: bool = False) -> str:
    """collector | cost % [low, high] | accounted % | syncs added | verdict; empty without costs."""
    costs = formatting.all_costs(receipt)
    if not costs:
        return ""
    gate = receipt.command == "gate"
    headers = ["commit" if gate else "collector", "cost %\n[low, high]"]
    headers += [*([] if gate else ["accounted\n%"]), "syncs\nadded", "verdict"]
    rows = [_row(cost, gate, color) for cost in (*costs, *([receipt.placebo] if receipt.placebo else []))]
    align = ["left", "right", *([] if gate else ["right"]), "right", "left"]
    padding, tables.MIN_PADDING = tables.MIN_PADDING, 0  # two blanks stand between columns as it is
    try:
        return tabulate(rows, headers=headers, tablefmt="simple", colalign=align, disable_numparse=True)
    finally:
        tables.MIN_PADDING = padding


def _row(cost: SwitchCost, gate: bool, color: bool) -> list[str]:
    placebo = cost.name == PLACEBO
    said = formatting.verdict_of(cost)
    return [
        cost.name,
        formatting.estimate(cost.estimate),
        *([] if gate else ["" if placebo else formatting.accounted(cost.accounted_percent)]),
        "" if placebo else formatting.added(formatting.count_added(cost, "syncs")),
        said if placebo else paint(said, cost.verdict, color),
    ]


def columns(receipt: Receipt) -> list[tuple[str, str]]:
    """What the table's columns mean."""
    if not formatting.all_costs(receipt):
        return []
    rows = [("cost", "share of the throughput that is lost, with its one-sided 95% bounds")]
    if receipt.command != "gate":
        rows.append(("accounted", "what its own code takes of the time, in the workers and in the monitor"))
    rows.append(("syncs added", "host syncs counted exactly, beyond those of " + _reference(receipt)))
    if receipt.placebo is not None:
        rows.append((PLACEBO, "a switch that does nothing, measured like the others"))
    return rows


def _reference(receipt: Receipt) -> str:
    return "base" if receipt.command == "gate" else "all off"


def facts(receipt: Receipt) -> list[tuple[str, str]]:
    """What stands under the table: (name, text)."""
    gate = receipt.command == "gate"
    rows = formatting.sides(receipt) if gate else []
    if receipt.all is not None and receipt.all.estimate is not None:
        each = (
            ""
            if gate or not receipt.collectors
            else f" for all, {formatting.mde(receipt.collectors)} for each"
        )
        rows.append(("would find", f"{formatting.mde([receipt.all])}{each} (in 95 of 100 runs)"))
    if receipt.control is not None:
        rows.append(("control", told(receipt.control)))
    rows += [("losses", formatting.losses(receipt)), ("exact counts", exact_line(receipt))]
    rows += [("added at", text) for text in formatting.added_syncs(receipt)]
    if not gate:
        rows += [
            ("throughput", formatting.throughput(receipt.throughput)),
            ("baseline", formatting.baseline(receipt)),
        ]
    if receipt.pipeline_efficiency is not None:
        rows.append(
            ("pipeline", f"{100 * receipt.pipeline_efficiency:.1f}% of what its slowest stage does alone")
        )
    rows.append(("measured", formatting.measured(receipt)))
    rows += [("note", str(note)) for note in receipt.extra.get("notes", ())]
    return rows


def exact_line(receipt: Receipt) -> str:
    """How exact counts were made and what changed."""
    if not receipt.counts:
        return "not counted"
    bad = [counts for counts in receipt.counts.values() if not counts.armed]
    if bad:
        return formatting.counting(bad[0])
    texts = [(cost.name, formatting.exact(cost)) for cost in formatting.all_costs(receipt)]
    changed = [f"{name}: {text}" for name, text in texts if text not in ("0", "n/a")]
    how = formatting.counting(next(iter(receipt.counts.values())))
    none = "head adds none" if receipt.command == "gate" else "no collector adds any"
    return ("; ".join(changed) if changed else none) + f" ({how})"


def paint(text: str, verdict: Verdict, color: bool) -> str:
    """`text` in the verdict's colour, only when colours are asked for."""
    return f"\x1b[{STYLES[verdict]}m{text}\x1b[0m" if color else text


def plain(text: str) -> str:
    """`text` without colours."""
    return _ANSI.sub("", text)
