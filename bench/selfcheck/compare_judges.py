"""The same data judged by us and by others: who sounds a false alarm, who misses?

    python -m bench.selfcheck.compare_judges [RECEIPT]

One noise trace (segments of one piece of code, in the order they were taken) serves all judges. The others
measure base first and head second, as their users do; ours takes the two in turn, in random order inside
rounds. A known slowdown is laid on whatever segments are head's. Without a receipt the traces are simulated,
of the character found on shared machines; with one they are cut from its `off` segments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from tabulate import tabulate

from bench.records.receipt import Receipt
from bench.records.types import OFF, Verdict, log_ratio
from bench.selfcheck.other_judges import RIVALS
from bench.selfcheck.simulate import NOISES, STEPS, SegmentNoise, contrast, share, step_logs
from bench.statistics.contrasts import Floats
from bench.statistics.intervals import interval
from bench.statistics.verdict import classify
from steptime.errors import UserError

PAIRS: Final = 20
"""Segments of each side."""
BUDGET_PERCENT: Final = 1.0
SLOWDOWNS: Final = (0.0, 1.0, 2.0, 5.0)
OURS: Final = "ours: L > 0"
OURS_OVER: Final = "ours: over 1%"
OURS_WITHIN: Final = "ours: within 1%"


@dataclass(frozen=True, slots=True)
class Tally:
    """How often each judge said "slower" (and ours "over", "within") in `runs` runs on one noise."""

    noise: str
    percent: float
    runs: int
    hits: dict[str, int]


def judge_trace(logs: Floats, base: Floats, percent: float, rng: np.random.Generator) -> dict[str, bool]:
    """All judges on one trace: `logs` `[2 pairs, steps]` ln of step times in time order, `base` `[steps]` of
    the batches."""
    cost, pairs = log_ratio(percent), len(logs) // 2
    seconds = np.exp(logs + base).sum(-1)
    found = {name: judge(seconds[:pairs], seconds[pairs:] * np.exp(cost)) for name, judge in RIVALS.items()}
    rounds = logs.reshape(pairs, 2, -1)
    swap = rng.random(pairs) < 0.5
    arm = np.where(swap[:, None], rounds[:, 0], rounds[:, 1]) + cost
    control = np.where(swap[:, None], rounds[:, 1], rounds[:, 0])
    printed = interval(contrast(arm[None], control[None], base)[0])
    assert printed is not None
    verdict = classify(printed, BUDGET_PERCENT)
    slower = verdict in (Verdict.SLOWER, Verdict.OVER) or (
        printed.low > 0 and verdict is not Verdict.UNRESOLVED
    )
    return found | {OURS: slower, OURS_OVER: verdict is Verdict.OVER, OURS_WITHIN: verdict is Verdict.WITHIN}


def tally(name: str, traces: Sequence[Floats], base: Floats, percent: float, seed: int) -> Tally:
    """Judge every trace `[2 pairs, steps]`."""
    rng = np.random.default_rng([seed, int(1000 * percent)])
    hits: dict[str, int] = {}
    for trace in traces:
        for judge, said in judge_trace(trace, base, percent, rng).items():
            hits[judge] = hits.get(judge, 0) + said
    return Tally(name, percent, len(traces), hits)


def simulated(noise: SegmentNoise, runs: int, seed: int, pairs: int = PAIRS) -> tuple[list[Floats], Floats]:
    """Traces of a noise, and the batches' own lengths."""
    rng = np.random.default_rng([seed, len(noise.name)])
    return list(step_logs(noise, runs, 2 * pairs, STEPS, rng)), np.log(rng.uniform(0.5, 1.5, STEPS))


def recorded(receipt: Receipt, pairs: int) -> tuple[list[Floats], Floats]:
    """Traces cut from a receipt's `off` segments in the order they were taken, one starting at each segment
    that leaves room.

    They overlap, so their rates say less than as many runs of their own would.

    Raises:
        UserError: too few segments, or no step times.
    """
    segments = sorted(receipt.arms.get(OFF, ()), key=lambda s: (s.process, s.round, s.order))
    cycle = receipt.cycle
    segments = [s for s in segments if s.step_seconds and len(s.step_seconds) % cycle == 0]
    if len(segments) < 2 * pairs or len({len(s.step_seconds) for s in segments}) > 1:
        raise UserError(
            f"the receipt holds {len(segments)} usable 'off' segments, {2 * pairs} of one length are needed "
            "(--pairs)"
        )
    logs = np.log(np.array([np.roll(np.array(s.step_seconds), s.phase % cycle) for s in segments]))
    base = np.median(logs, axis=0)
    return [logs[i : i + 2 * pairs] - base for i in range(len(segments) - 2 * pairs + 1)], base


def character(traces: Sequence[Floats], base: Floats) -> str:
    """`paired spread 2.0%, lag-1 correlation 0.40` of the segments of the traces."""
    logs = np.log(np.exp(np.array(traces) + base).sum(-1))
    centred = logs - logs.mean(-1, keepdims=True)
    lag = float((centred[:, 1:] * centred[:, :-1]).mean() / (centred**2).mean())
    spread = float(np.diff(logs.reshape(len(logs), -1, 2), axis=-1).std())
    return f"paired spread {100 * spread:.1f}%, lag-1 correlation {lag:.2f}"


def report(tallies: Sequence[Tally]) -> str:
    """One row for each noise and slowdown: at 0 the figures are false alarms, else hits."""
    judges = (*RIVALS, OURS, OURS_OVER, OURS_WITHIN)
    rows = [
        [t.noise, f"{t.percent:g}%", t.runs, *(share(t.hits[judge], t.runs) for judge in judges)]
        for t in tallies
    ]
    return tabulate(rows, ["noise", "slowdown", "runs", *judges], tablefmt="github", disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.selfcheck.compare_judges", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument(
        "receipt", nargs="*", help="receipts whose off segments serve as noise (default: simulated)"
    )
    parser.add_argument("--runs", type=int, default=1000, help="simulated runs in each row (default 1000)")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="segments of each side (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        sources = [(path, *recorded(Receipt.read(path), options.pairs)) for path in options.receipt]
    except UserError as error:
        parser.error(str(error))
    if not sources:
        sources = [
            (noise.name, *simulated(noise, options.runs, options.seed, options.pairs)) for noise in NOISES
        ]
    tallies = []
    for name, traces, base in sources:
        print(f"{name}: {character(traces, base)}")
        tallies += [tally(name, traces, base, percent, options.seed) for percent in SLOWDOWNS]
    print(f"\n{options.pairs} + {options.pairs} segments; at 0% the figures are false alarms, else hits\n")
    print(report(tallies))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
