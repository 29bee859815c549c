"""The report on a terminal: a table of 80 columns, then the lines that explain it, the verdict last where the eye is."""

from __future__ import annotations

import re

from tabulate import tabulate

from bench.records.receipt import Receipt
from bench.records.types import Cost, Verdict
from bench.report import words

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
    parts += [f"{name + ':':<14} {text}" for name, text in facts(receipt)]
    parts.append("")
    parts += [f"  - {reason}" for reason in receipt.reasons]
    parts.append(paint(words.headline(receipt), receipt.verdict, color) + f"  (exit code {int(receipt.exit_code)})")
    return "\n".join(parts) + "\n"


def _title(receipt: Receipt) -> str:
    return f"{receipt.command} of {receipt.config.name}, commit {words.commit(receipt)}\n{words.machine(receipt)}"


def cost_table(receipt: Receipt, *, color: bool = False) -> str:
    """collector | isolated % [low, high] | marginal | accounted | syncs added | verdict; empty without costs."""
    costs = words.all_costs(receipt)
    if not costs:
        return ""
    marginal = words.has_marginal(receipt)
    gate = receipt.command == "gate"
    headers = ["commit" if gate else "collector", ("slower" if gate else "isolated") + " %\n[low, high]"]
    headers += [*(["marginal %\n[low, high]"] if marginal else [])]
    headers += ["own\n%", "new\nsync", "verdict"]
    rows = [_row(cost, marginal, color) for cost in costs]
    align = ["left", "right", *(["right"] if marginal else []), "right", "right", "left"]
    return tabulate(rows, headers=headers, tablefmt="simple", colalign=align, disable_numparse=True)


def _row(cost: Cost, marginal: bool, color: bool) -> list[str]:
    row = [cost.name, words.interval(cost.isolated)]
    if marginal:
        row.append(words.interval(cost.marginal))
    return [
        *row,
        words.accounted(cost.accounted_percent),
        words.added(cost.syncs_added),
        paint(cost.verdict.value, cost.verdict, color),
    ]


def facts(receipt: Receipt) -> list[tuple[str, str]]:
    """What stands under the table: (name, text)."""
    gate = receipt.command == "gate"
    rows = words.sides(receipt) if gate else [("A/A", _aa(receipt))]
    if receipt.all is not None:
        each = "" if gate or not receipt.collectors else f" for all, {words.mde(receipt.collectors)} for each"
        rows.append(("would find", f"{words.mde([receipt.all])}{each} (in 95 of 100 runs)"))
    rows += [("losses", words.losses(receipt)), ("exact counts", exact_line(receipt))]
    if not gate:
        rows += [("throughput", words.throughput(receipt.throughput)), ("baseline", words.baseline(receipt))]
    if receipt.pipeline_efficiency is not None:
        rows.append(("pipeline", f"{100 * receipt.pipeline_efficiency:.1f}% of what its slowest stage does alone"))
    rows.append(("measured", words.measured(receipt)))
    rows += [("note", str(note)) for note in receipt.extra.get("notes", ())]
    return rows


def _aa(receipt: Receipt) -> str:
    if receipt.aa is None:
        return "not measured"
    return f"off again against off: {words.interval(receipt.aa)} % (the harness measured by itself)"


def exact_line(receipt: Receipt) -> str:
    """How exact counts were made and what changed."""
    if not receipt.counts:
        return "not counted"
    bad = [counts for counts in receipt.counts.values() if not counts.armed]
    if bad:
        return words.counting(bad[0])
    changed = [f"{cost.name}: {text}" for cost in words.all_costs(receipt) if (text := words.exact(cost)) not in ("0", "n/a")]
    how = words.counting(next(iter(receipt.counts.values())))
    none = "head adds none" if receipt.command == "gate" else "no collector adds any"
    return ("; ".join(changed) if changed else none) + f" ({how})"


def paint(text: str, verdict: Verdict, color: bool) -> str:
    """`text` in the verdict's colour, only when colours are asked for."""
    return f"\x1b[{STYLES[verdict]}m{text}\x1b[0m" if color else text


def plain(text: str) -> str:
    """`text` without colours."""
    return _ANSI.sub("", text)
