"""The words and numbers that all reports share: a receipt in, short texts out. No statistics are made
here."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from steptime.baselines.comparing import record_command
from steptime.records.costs import Estimate, SwitchCost
from steptime.records.pairs import ALL, PLACEBO, Layer, Segment
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, ExactCounts, ExitCode, MachineState, Throughput, Verdict
from steptime.statistics.counts import KINDS as KINDS
from steptime.statistics.intended import rises_by_place

MEANING = {
    Verdict.WITHIN: "within the budget",
    Verdict.OVER: "over the budget",
    Verdict.SLOWER: "slower, but not resolved against the budget",
    Verdict.UNRESOLVED: "not resolved: the measurement is too coarse to say",
    Verdict.INVALID: "nothing may be concluded from this run",
    Verdict.NO_BASELINE: "nothing to compare with, or an incomplete set",
}


def number(value: float, digits: int = 2) -> str:
    """`-0.12`; never `-0.00`."""
    text = f"{value:.{digits}f}"
    return text.lstrip("-") if float(text) == 0 else text


def estimate(value: Estimate | None) -> str:
    """`0.12 [-0.20, 0.44]`, percent; one digit where bounds reach 10%, which are not worth two."""
    if value is None:
        return "-"
    digits = 1 if max(abs(value.low), abs(value.high), abs(value.percent)) >= 10 else 2
    return f"{number(value.percent, digits)} [{number(value.low, digits)}, {number(value.high, digits)}]"


def accounted(percent: float | None) -> str:
    """Own cost; three digits, since it lies far under the noise."""
    return "-" if percent is None else number(percent, 3)


def added(count: int | None) -> str:
    """`+3`, `0`, or `n/a` where it cannot be counted."""
    return "n/a" if count is None else "0" if count == 0 else f"{count:+d}"


def added_syncs(receipt: Receipt, most: int = 4) -> list[str]:
    """Where syncs were added, the most first: `norms: loop.py:28 make.<locals>.step (item()) +4`."""
    reference = "base" if receipt.command == "gate" else OFF
    off, single = receipt.counts.get(reference), any(one.name in receipt.counts for one in receipt.collectors)
    if off is None:
        return []
    found = [
        (rise.added, f"{arm}: {_without_main(rise.role)}{rise.where} {rise.added:+d}")
        for arm, counts in receipt.counts.items()
        if arm != reference and not (single and arm == ALL)
        for rise in rises_by_place(off, counts)
        if rise.kind == "syncs"
    ]
    lines = [text for _, text in sorted(found, key=lambda one: -one[0])]
    return lines if len(lines) <= most else [*lines[: most - 1], f"{len(lines) - most + 1} more places"]


def _without_main(role: str) -> str:
    return "" if role == "main" else f"{role} "


def layers(value: Estimate | None) -> tuple[str, str, str]:
    """Path in percent, a tick and a flush in ms; `-` where a layer was not measured."""
    if value is None:
        return "-", "-", "-"
    found = value.layers
    path, tick, flush = (
        "-" if one is None else number(one, digits)
        for one, digits in ((found.path_percent, 2), (found.tick_ms, 1), (found.flush_ms, 1))
    )
    return path, tick, flush


def count_added(cost: SwitchCost, kind: str) -> int | None:
    """None: it was not counted, or cannot be counted here."""
    return (cost.added or {}).get(kind)


def exact(cost: SwitchCost) -> str:
    """`0`, or the kinds that changed: `+2 syncs, +1 copies`; `n/a` where nothing could be counted."""
    values = {kind: count_added(cost, kind) for kind in KINDS}
    if all(value is None for value in values.values()):
        return "n/a"
    changed = [f"{value:+d} {kind}" for kind, value in values.items() if value]
    return ", ".join(changed) or "0"


def rate(tokens_per_second: float) -> str:
    """`14.2K`, `1,234`, `87.3`."""
    if tokens_per_second >= 10_000:
        return f"{tokens_per_second / 1000:.1f}K"
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 100 else f"{tokens_per_second:.1f}"


def throughput(value: Throughput | None) -> str:
    """`1,234 tok/s [1,220, 1,248]`."""
    if value is None:
        return "not measured"
    return f"{rate(value.tokens_per_second)} tok/s [{rate(value.low)}, {rate(value.high)}]"


def baseline(receipt: Receipt) -> str:
    """What the stored figure says about this run, one line."""
    view = receipt.baseline
    record = f"record one: {record_command(receipt.config.name, receipt.subject)}"
    if view.value is None:
        return f"none for this machine and config; {record}" if view.status == "missing" else view.status
    figure = f"{rate(view.value)} tok/s" + (f" ({view.origin})" if view.origin else "")
    if view.status == "match":
        return view.note or f"{figure}: {view.verdict or 'not compared'}"
    place = " / ".join(part for part in (view.machine, view.config) if part)
    whose = "machine" if view.status == "other-machine" else "config"
    return f"{figure} belongs to another {whose} ({place}); {record}"


def commit(receipt: Receipt) -> str:
    """`82b8ebf`, or `82b8ebf + uncommitted changes (1a2b3c)`."""
    text = receipt.commit.id[:10] or "unversioned"
    if receipt.commit.dirty:
        text += " + uncommitted changes" + (
            f" ({receipt.commit.diff_hash[:6]})" if receipt.commit.diff_hash else ""
        )
    return text


def machine(receipt: Receipt) -> str:
    """`AMD EPYC 7B13, 2 cores, 1x NVIDIA H200`."""
    models = [model for model, _ in receipt.machine.gpus]
    gpus = [f"{models.count(model)}x {model}" for model in dict.fromkeys(models)]
    cores = f"{receipt.machine.cpus} core" + ("s" if receipt.machine.cpus != 1 else "")
    return ", ".join([receipt.machine.cpu_model, cores, *(gpus or ["no GPU"])])


def all_costs(receipt: Receipt) -> tuple[SwitchCost, ...]:
    """The collectors, then all together."""
    return receipt.collectors + ((receipt.all,) if receipt.all is not None else ())


def verdict_of(cost: SwitchCost) -> str:
    """`within`, or `unresolved, 12 min` with the minutes that would settle it."""
    if cost.name == PLACEBO:
        return "noise"
    if cost.minutes_to_settle is None:
        return cost.verdict.value
    return f"{cost.verdict.value}, {minutes(cost.minutes_to_settle)}"


def minutes(value: float) -> str:
    """`12 min`, `3 h`."""
    return f"{max(1, round(value))} min" if value < 100 else f"{round(value / 60)} h"


def headline(receipt: Receipt) -> str:
    """The verdict's word, and the strongest true statement."""
    word = receipt.verdict.value.upper()
    if receipt.exit_code is ExitCode.INCOMPLETE:
        return f"{word}: incomplete. {receipt.headline}"
    return f"{word}: {receipt.headline.removeprefix(f'{word.capitalize()}: ') or MEANING[receipt.verdict]}"


def mde(costs: Iterable[SwitchCost]) -> str:
    """`0.31%` or `0.25-0.35%`: smallest slowdowns that would be found, over these costs."""
    values = sorted(cost.estimate.mde for cost in costs if cost.estimate is not None)
    if not values:
        return "unknown"
    low, high = number(values[0]), number(values[-1])
    return f"{low}%" if low == high else f"{low}-{high}%"


def losses(receipt: Receipt) -> str:
    """Whether training was the same in both halves of every pair."""
    gate = receipt.command == "gate"
    if receipt.losses_equal is None:
        return "not compared"
    if not receipt.losses_equal:
        return "DIFFER: " + (
            "the commits do not do the same work" if gate else "something that is on changes training"
        )
    compared = receipt.extra.get("compared_steps")
    more = f", and over the first {compared} steps of training" if compared else ""
    return f"equal bit for bit in both halves of {len(receipt.pairs)} pairs{more}"


def measured(receipt: Receipt) -> str:
    """`480 pairs (390 path, 60 tick, 30 flush) in 3.9 min, stopped: clear`."""
    counts = {layer: sum(pair.layer is layer for pair in receipt.pairs) for layer in Layer}
    parts = ", ".join(f"{count} {layer}" for layer, count in counts.items() if count)
    text = f"{len(receipt.pairs)} pairs" + (f" ({parts})" if parts else "")
    launches = receipt.options.get("launches")
    if launches:
        text += f" in {launches} launches"
    if receipt.minutes:
        text += f" in {receipt.minutes:.1f} min"
    stopped = receipt.options.get("stopped")
    return text + (f", stopped: {stopped}" if stopped else "")


def lengths(receipt: Receipt) -> str:
    """`1 step (path), 2 (tick), 3 (flush); a tick each 1 s, a flush each 10 s`."""
    if receipt.lengths is None:
        return "-"
    steps = ", ".join(f"{count} ({layer})" for layer, count in receipt.lengths.steps.items())
    every = [
        f"a {layer} each {seconds:g} s"
        for layer, seconds in receipt.seconds_per.items()
        if layer is not Layer.PATH
    ]
    return "; ".join([f"steps of a segment: {steps}", *([", ".join(every)] if every else [])])


def sides(receipt: Receipt) -> list[tuple[str, str]]:
    """base and head of a gate: commit, throughput, steps, memory."""
    rows = []
    commits = {
        "base": str(receipt.extra.get("base", {}).get("commit", ""))[:10] or "?",
        "head": commit(receipt),
    }
    for name, side in receipt.extra.get("sides", {}).items():
        parts = [commits.get(name, "")]
        if side.get("tokens_per_second"):
            parts.append(f"{rate(side['tokens_per_second'])} tok/s")
        if side.get("step_p50_ms"):
            parts.append(f"step {side['step_p50_ms']:.1f} ms, p99 {side['step_p99_ms']:.1f} ms")
        if side.get("peak_memory_bytes"):
            parts.append(f"peak {side['peak_memory_bytes'] / 1e6:,.0f} MB")
        rows.append((name, ", ".join(parts)))
    return rows


def segments(receipt: Receipt) -> tuple[Segment, ...]:
    """Every segment of the path layer in the order taken."""
    path = [pair for pair in receipt.pairs if pair.layer is Layer.PATH]
    ordered = sorted(path, key=lambda pair: (pair.process, pair.number))
    return tuple(segment for pair in ordered for segment in (pair.first, pair.second))


def counting(counts: ExactCounts | None) -> str:
    """How exact counts were made, or why not."""
    if counts is None:
        return "not counted"
    if not counts.armed:
        return "NOT ARMED: " + ("; ".join(counts.unavailable) or "no reason given")
    return f"over {counts.steps} steps by {', '.join(counts.ways) or 'unnamed ways'}"


_MACHINE_ROWS = (
    ("load (1 min)", "load_1m", "{:.2f}"),
    ("CPU clock, MHz", "cpu_mhz", "{:.0f}"),
    ("stolen CPU, s since boot", "steal_s", "{:.1f}"),
    ("held back by quota, s", "throttled_s", "{:.1f}"),
)
_GPU_ROWS = (
    ("SM clock, MHz", "sm_clock_mhz", "{:.0f}"),
    ("temperature, C", "temperature_c", "{:.0f}"),
    ("power, W", "power_w", "{:.0f}"),
    ("foreign processes", "foreign_processes", "{:.0f}"),
    ("throttled", "throttle_reasons", "{}"),
)


def state(before: MachineState | None, after: MachineState | None) -> list[tuple[str, str, str]]:
    """Rows (what, before, after) of the machine's state; values that are not available are left out."""
    rows = _state_rows("", _MACHINE_ROWS, before, after)
    pairs = zip_longest(before.gpus if before else (), after.gpus if after else ())
    for first, second in pairs:
        rows += _state_rows(f"GPU {(first or second).index} ", _GPU_ROWS, first, second)
    return rows


def _state_rows(
    prefix: str, fields: tuple[tuple[str, str, str], ...], *moments: object
) -> list[tuple[str, str, str]]:
    rows = []
    for name, key, form in fields:
        values = [getattr(moment, key, None) for moment in moments]
        shown = [", ".join(value) or "no" if isinstance(value, tuple) else value for value in values]
        if any(value is not None for value in shown):
            first, second = ("-" if value is None else form.format(value) for value in shown)
            rows.append((prefix + name, first, second))
    return rows


EXIT_MEANING = {
    ExitCode.WITHIN: "within budget",
    ExitCode.OVER: "over budget, or an exact count rose",
    ExitCode.USAGE: "usage or tool error",
    ExitCode.UNRESOLVED: "slower or unresolved",
    ExitCode.INVALID: "invalid, or another machine",
    ExitCode.INCOMPLETE: "no baseline, or an incomplete set",
}
