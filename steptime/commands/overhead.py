"""`overhead`: what does each collector cost?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from steptime import arguments, run_files
from steptime.arguments import option, to_budget, to_minutes, to_names
from steptime.baselines import comparing, store
from steptime.counting import counting
from steptime.errors import UserError, nearest
from steptime.machine import identity, state
from steptime.machine.commit import ROOT, read_commit
from steptime.measure.evidence import evidence
from steptime.measure.run import Asked, Measured, measure
from steptime.progress import Reporter
from steptime.records.costs import SwitchCost
from steptime.records.pairs import ALL, PLACEBO
from steptime.records.receipt import BaselineView, Receipt, SegmentLengths, SentinelTimes
from steptime.records.types import OFF, ConfigRef, ExactCounts, Machine, Throughput, Verdict
from steptime.report.files import write_all
from steptime.report.show import show
from steptime.statistics.judging import Budgets, judge
from steptime.statistics.observed import observe
from steptime.subjects.injection import Injection, parse_injection
from steptime.subjects.pairs import PairSubject
from steptime.subjects.protocol import Doors, Settings, SubjectKind

MINUTES = 8.0
"""Measuring goes on until the answer about all together is clear, so long at most."""
QUICK_MINUTES = 0.75
QUICK_END_S = 78.0
"""A quick run is over 90 s after its start: so much is left for building, counting and measuring together."""
FLUSHES, QUICK_FLUSHES = 3, 1
"""Of the undisturbed stretch from which the accounted cost comes."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        minutes: most time for pairs; building the subject, the undisturbed stretch and counting come on top.
            None: 8, or 0.75 when quick.
        budget_percent: for all collectors together; each one has half of it.
        injection: adds a switch of known cost.
        together: all collectors as one; no single one is measured.
        root: the tree whose code is measured.
        plant: name out of `bench.syncs.faults.planted.PLANTED`: adds that bad collector.
    """

    config: Settings
    quick: bool = False
    minutes: float | None = None
    budget_percent: float = 1.0
    only: tuple[str, ...] = ()
    together: bool = False
    injection: Injection | None = None
    plant: str = ""
    seed: int = 0
    out: str | None = None
    root: Path = ROOT

    @property
    def time_s(self) -> float:
        """Seconds for pairs."""
        default = QUICK_MINUTES if self.quick else MINUTES
        return 60.0 * (default if self.minutes is None else self.minutes)

    @property
    def budgets(self) -> Budgets:
        return Budgets(self.budget_percent, self.budget_percent / 2)


def make_subject(
    kind: SubjectKind,
    settings: Settings,
    *,
    injection: Injection | None = None,
    plant: str = "",
    time_stages: bool = False,
) -> tuple[PairSubject, counting.Counter | None]:
    """A subject of that kind, and what counts exactly for it (None: it does no device work).

    Raises:
        UserError: no such planted collector.
    """
    injections = () if injection is None else (injection,)
    subject = kind.make_pairs(settings, injections=injections, plant=plant, time_stages=time_stages)
    if not kind.counted:
        return subject, None
    plants = [plant] if plant else []
    return subject, counting.ProcessCounter(
        kind.counted_as(settings),
        subject=kind.name,
        module=kind.doors.counting,
        root=Path.cwd() if kind.doors == Doors() else ROOT,
        plants=plants,
    )


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("overhead", context_settings={"allow_extra_args": True})(overhead)


def overhead(
    context: typer.Context,
    config: arguments.Config = None,
    settings: arguments.Settings = None,
    seed: arguments.Seed = 0,
    out: arguments.Out = None,
    quick: Annotated[bool, option("--quick", "under 90 s in all; finds a cost of some percent")] = False,
    minutes: Annotated[
        float | None,
        option("--minutes M", "most time for measuring (default 8, quick 0.75)", to_minutes),
    ] = None,
    budget: Annotated[
        float,
        option("--budget PERCENT", "of all together, half for each (default 1%)", to_budget),
    ] = 1.0,
    only: Annotated[tuple, option("--only C,...", "measure these collectors only", to_names)] = (),
    together: Annotated[
        bool,
        option("--together", "all collectors as one against off: more precise, blames none"),
    ] = False,
    inject: Annotated[
        Injection | None,
        option("--inject PERCENT[@PLACE]", "add a switch of known cost, e.g. 2 or 2@tick", parse_injection),
    ] = None,
    plant: Annotated[str, option("--plant NAME", "add a bad collector, to see it found")] = "",
    subject: arguments.Subject = None,
    hf: arguments.Hf = False,
    lightning: arguments.Lightning = False,
) -> int:
    """What does each collector cost?
    Pairs of neighbouring segments do equal work with complementary sets of collectors on. Measuring goes on
    until the answer about all together is clear.
    """
    from steptime.subjects.registry import find  # heavy: torch

    arguments.one_process()
    framework = arguments.framework(context, hf, lightning)
    kind = find(framework or subject, context.args)
    loaded = kind.settings(config, settings or ())
    options = Options(
        config=loaded,
        quick=quick,
        minutes=minutes,
        budget_percent=budget,
        only=only,
        together=together,
        injection=inject,
        plant=plant,
        seed=seed,
        out=out,
        root=kind.root,
    )
    measured, counter = make_subject(kind, loaded, injection=inject, plant=plant, time_stages=True)
    return int(run_overhead(options, measured, Reporter(), count=counter).exit_code)


def choose_switches(available: Sequence[str], only: Sequence[str]) -> tuple[str, ...]:
    """What is judged: all that the subject has but the placebo, or those of `--only`, in the subject's order.

    Raises:
        UserError: naming an unknown collector and the nearest known one, or that there is none at all.
    """
    known = [name for name in available if name != PLACEBO]
    for name in only:
        if name not in known:
            raise UserError(
                f"--only {name}: no such collector{nearest(name, known)}; there are {', '.join(known)}"
            )
    chosen = tuple(name for name in known if not only or name in only)
    if not chosen:
        raise UserError("no collector to measure")
    return chosen


def run_overhead(
    options: Options, subject: PairSubject, reporter: Reporter, *, count: counting.Counter | None = None
) -> Receipt:
    """Measure, judge, write the three files, print the report. The receipt's exit code is the command's.

    Args:
        count: counts exactly in another process while the subject is built; None: nothing to count (no device
            work).

    Raises:
        UserError: bad input, before anything is measured.
    """
    started = time.monotonic()
    switches = choose_switches(subject.switches, options.only)
    store.read_all(store.folder(options.root))  # a broken file is refused now, not after minutes of measuring
    folder = run_files.choose_folder(options.out, "overhead")
    asked = Asked(
        switches,
        options.budget_percent,
        options.time_s,
        seed=options.seed,
        together=options.together,
        control=not options.quick,
        end_s=started + QUICK_END_S if options.quick and options.minutes is None else None,
    )
    pending = count.start(counted_arms(asked, quick=options.quick)) if count is not None else None
    try:
        run = measure(
            subject,
            asked,
            reporter,
            flushes=QUICK_FLUSHES if options.quick else FLUSHES,
            ready=(lambda: pending.wait(reporter)) if pending is not None else lambda: None,
            rounds=True,
        )
    finally:
        if pending is not None:
            pending.close()
    counts, faults = pending.result() if pending is not None else ({}, ())
    machine = identity.identify(subject.devices)
    receipt = make_receipt(options, run, machine, counts, faults, counts_required=count is not None)
    write_all(receipt, folder)
    show(receipt, folder)
    return receipt


def counted_arms(asked: Asked, *, quick: bool = False) -> dict[str, tuple[str, ...]]:
    """What is counted: all off, each switch alone, and all. A quick run has no time for each alone: what
    rises with all on is found, and not whose it is."""
    each = {} if asked.together or quick else {name: (name,) for name in asked.switches}
    return {OFF: (), **each, ALL: asked.switches}


def make_receipt(
    options: Options,
    run: Measured,
    this: Machine,
    counts: Mapping[str, ExactCounts],
    faults: Sequence[str],
    *,
    counts_required: bool,
) -> Receipt:
    """Judge a run. Pure but for the commit and the clock, which are read here."""
    found = observe(
        run.pairs,
        run.asked.switches,
        run.seconds_per,
        options.budgets,
        options.seed,
        only_together=options.together,
    )
    unfit = state.unfit(run.before, run.after) if run.before and run.after else ()
    shown = evidence(run, found, counts, faults, quick=options.quick)
    judgement = judge(shown, options.budgets, unfit, counts_required=counts_required)
    # It is not judged: that it is within or over would say nothing of a collector.
    placebo, injected = found.placebo, options.injection
    half = options.budgets.collector_percent
    return Receipt(
        command="overhead",
        commit=read_commit(options.root),
        machine=this,
        config=ConfigRef(options.config.name, options.config.digest()),
        pairs=run.pairs,
        losses_equal=run.losses_equal,
        collectors=judgement.collectors,
        all=judgement.all,
        throughput=run.throughput,
        baseline=_baseline(options, this, run.throughput),
        pipeline_efficiency=run.pipeline_efficiency,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created=run_files.now_utc(),
        headline=judgement.headline,
        budget_percent=options.budgets.all_percent,
        collector_budget_percent=half,
        reasons=judgement.reasons,
        placebo=None if placebo is None else SwitchCost(PLACEBO, placebo, half, Verdict.UNRESOLVED),
        control=found.control,
        cross_check_percent={} if options.together else found.squares,
        seconds_per=dict(run.seconds_per),
        lengths=None if run.lengths is None else SegmentLengths(run.lengths.steps, run.lengths.settled_steps),
        minutes=round(run.minutes, 3),
        sentinel=None if run.sentinel is None else SentinelTimes(**run.sentinel.as_receipt()),
        counts=dict(counts),
        before=run.before,
        after=run.after,
        subject=run.subject,
        rounds=run.result.rounds,
        options={
            "seed": options.seed,
            "minutes": round(options.time_s / 60, 3),
            "quick": options.quick,
            "only": ",".join(options.only),
            "together": options.together,
            "inject": None if injected is None else f"{injected.percent:g}@{injected.place}",
            "plant": options.plant,
            "stopped": run.stopped,
            "seconds": round(run.seconds, 1),
        },
        extra={"notes": list(run.notes), "peak_memory_bytes": run.result.peak_memory_bytes},
    )


def _baseline(options: Options, this: Machine, throughput: Throughput | None) -> BaselineView:
    try:
        return comparing.view(
            this,
            ConfigRef(options.config.name, options.config.digest()),
            throughput,
            store.folder(options.root),
        )
    except UserError as error:
        return BaselineView("missing", note=str(error))  # broken while measuring: the measurement stands
