"""report.md: the verdict first, the table, then what it rests on. Also the summary of a CI job."""

from __future__ import annotations

from collections.abc import Mapping

from tabulate import tabulate

from steptime.records.costs import SwitchCost
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, Verdict
from steptime.report import formatting, terminal
from steptime.statistics.intended import without_line

MARKS = {
    Verdict.WITHIN: "✅",
    Verdict.OVER: "❌",
    Verdict.SLOWER: "⚠️",
    Verdict.UNRESOLVED: "❔",
    Verdict.INVALID: "🚫",
    Verdict.NO_BASELINE: "❔",
}

NOTE = (
    "*Cost*: share of the throughput that is lost, with its one-sided 95% bounds, made of what it takes in "
    "the workers' *path* and at each *tick* and *flush* of the monitor. *Would find*: the smallest loss that "
    "95 of 100 such runs find. *Accounted*: what its own code takes of the time. *Added*: counted exactly, "
    "beyond all off. The minutes beside a verdict would settle it."
)
GATE_NOTE = (
    "*Cost*: share of base's throughput that head loses, with its one-sided 95% bounds. *Would find*: the "
    "smallest loss that 95 of 100 such runs find. *Added*: counted exactly, beyond base."
)


def render(receipt: Receipt) -> str:
    """The whole report as Markdown that ends with a newline."""
    parts = [
        f"# {MARKS[receipt.verdict]} {formatting.headline(receipt)}",
        *_accepted(receipt),
        *_reasons(receipt),
        _costs(receipt),
    ]
    parts += [_facts(receipt), _places(receipt), _machine(receipt), _run(receipt)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _reasons(receipt: Receipt) -> list[str]:
    return ["\n".join(f"- {escape(reason)}" for reason in receipt.reasons)] if receipt.reasons else []


def _accepted(receipt: Receipt) -> list[str]:
    """Changes that were let through, before all else."""
    if not receipt.accepted:
        return []
    return ["**Let through on purpose**\n\n" + "\n".join(f"- {escape(line)}" for line in receipt.accepted)]


def _costs(receipt: Receipt) -> str:
    costs = formatting.all_costs(receipt)
    if not costs:
        return ""
    gate = receipt.command == "gate"
    headers = ["commit" if gate else "collector", "cost %", "path %", "tick ms", "flush ms", "would find %"]
    headers += [*([] if gate else ["accounted %"])]
    headers += [f"{kind} added" for kind in ("syncs", "ops", "copies", "allocations")] + ["verdict"]
    rows = [_row(cost, gate) for cost in costs]
    if receipt.placebo is not None:
        blank = [""] * (len(headers) - 7)
        found = receipt.placebo.estimate
        rows.append(["`placebo`", formatting.estimate(found), *formatting.layers(found), "", *blank, "noise"])
    note = GATE_NOTE if gate else NOTE
    return table(rows, headers, "l" + "r" * (len(headers) - 2) + "l") + "\n\n" + note


def _row(cost: SwitchCost, gate: bool) -> list[str]:
    found = cost.estimate
    row = [f"`{cost.name}`", formatting.estimate(found), *formatting.layers(found)]
    row.append("-" if found is None else formatting.number(found.mde))
    row += [*([] if gate else [formatting.accounted(cost.accounted_percent)])]
    row += [formatting.added(formatting.count_added(cost, kind)) for kind in formatting.KINDS]
    return [*row, f"{MARKS[cost.verdict]} {formatting.verdict_of(cost)}"]


def _facts(receipt: Receipt) -> str:
    rows = [*terminal.facts(receipt), ("segments", formatting.lengths(receipt))]
    if receipt.cross_check_percent:
        rows.append(("least squares", _cross_check(receipt)))
    return table([[name, escape(text)] for name, text in rows], ["", ""], "ll")


def _cross_check(receipt: Receipt) -> str:
    """Of all pairs at once; it takes costs to add up."""
    return ", ".join(
        f"{name} {formatting.number(cost)} ± {formatting.number(error)}%"
        for name, (cost, error) in receipt.cross_check_percent.items()
    )


def _places(receipt: Receipt) -> str:
    """Where in the code the counts with something on differ from those with all off."""
    rows = differing_places(receipt)
    if not rows:
        return ""
    return "## Where counts differ\n\n" + table(
        [list(row) for row in rows], ["on", "kind", "role", "place", "more"], "llllr"
    )


def differing_places(receipt: Receipt) -> list[tuple[str, str, str, str, str]]:
    """(arm, kind, role, place, added) for every place that an arm visits more or less often than `off` (head
    than base)."""
    reference = "base" if receipt.command == "gate" else OFF
    off = receipt.counts.get(reference)
    if off is None:
        return []
    known = {(place.kind, place.role, place.where): place.count for place in off.places}
    moves = receipt.command == "gate"
    rows = []
    for arm, counts in receipt.counts.items():
        here = {(place.kind, place.role, place.where): place.count for place in counts.places}
        if arm == reference:
            continue
        more = {key: n for key in {*here, *known} if (n := here.get(key, 0) - known.get(key, 0))}
        for kind, role, where in sorted(without_moved(more) if moves else more):
            rows.append((arm, kind, role, where, f"{more[kind, role, where]:+d}"))
    return rows


def without_moved(more: Mapping[tuple[str, str, str], int]) -> dict[tuple[str, str, str], int]:
    """Differences by (kind, role, where), less those of lines that only moved: as much came to one line of a
    function as left another."""
    left = dict(more)
    for (kind, role, where), count in sorted(more.items()):
        twins = [
            key
            for key, other in left.items()
            if other == -count and key[:2] == (kind, role) and without_line(key[2]) == without_line(where)
        ]
        if (kind, role, where) in left and twins:
            del left[kind, role, where], left[min(twins)]
    return left


def _machine(receipt: Receipt) -> str:
    rows = formatting.state(receipt.before, receipt.after)
    versions = ", ".join(f"{name} {version}" for name, version in receipt.machine.versions.items())
    lines = [f"## Machine\n\n{formatting.machine(receipt)} (`{receipt.machine.key}`)", versions]
    if rows:
        lines.append(table([list(row) for row in rows], ["", "before", "after"], "lrr"))
    return "\n\n".join(line for line in lines if line)


def _run(receipt: Receipt) -> str:
    options = ", ".join(
        f"{name} {value}" for name, value in receipt.options.items() if value not in (None, "")
    )
    return (
        f"`{receipt.command}` of config `{receipt.config.name}` ({receipt.config.hash}), commit "
        f"`{formatting.commit(receipt)}`, {receipt.created}, exit code {int(receipt.exit_code)}. {options}"
    ).rstrip()


def table(rows: list[list[str]], headers: list[str], align: str) -> str:
    """A GitHub table; `align` is one of l, r for each column."""
    names = {"l": "left", "r": "right"}
    return tabulate(
        rows, headers=headers, tablefmt="github", colalign=[names[c] for c in align], disable_numparse=True
    )


def escape(text: str) -> str:
    """Keep a text from being read as a table's border or as HTML."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
