"""`python -m bench overhead`: what does each collector cost?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from bench import arguments, files
from bench.arguments import option, to_budget, to_minutes, to_names, to_percent
from bench.baselines import store
from bench.machine import identity, state
from bench.machine.commit import read_commit
from bench.measure.plan import choose_collectors, make_arms
from bench.measure.runner import MeasuredRun, measure
from bench.progress import Reporter
from bench.records.receipt import BaselineView, Receipt
from bench.records.types import ALL, ConfigRef, ExactCounts, Machine, Segment
from bench.report.files import write_all
from bench.report.show import show
from bench.statistics.analysis import Analysis, analyse
from bench.statistics.stopping import StoppingRule, judged
from bench.statistics.verdict import Budgets, Judgement, judge
from bench.subjects.protocol import Settings, Subject
from bench.syncs import counting
from dflash.config import load_config
from steptime.errors import UserError

MINUTES = 4.0
QUICK_MINUTES = 0.75
QUICK_END_S = 78.0
"""A quick run is over 90 s after its start: so much is left for building, counting and measuring together."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        minutes: time for measuring; building the subject and counting syncs come on top. None: 4, or 0.75
            when quick.
        budget_percent: for all collectors together; each one has half of it.
        inject_percent: adds a collector `injected` that loses this share of the throughput.
        together: all collectors as one against `off`; no single one is measured.
        plant: name out of `bench.syncs.faults.planted.PLANTED`: adds that bad collector.
    """

    config: Settings
    quick: bool = False
    minutes: float | None = None
    budget_percent: float = 1.0
    only: tuple[str, ...] = ()
    together: bool = False
    inject_percent: float = 0.0
    plant: str = ""
    seed: int = 0
    out: str | None = None

    @property
    def time_s(self) -> float:
        """Seconds for measuring."""
        default = QUICK_MINUTES if self.quick else MINUTES
        return 60.0 * (default if self.minutes is None else self.minutes)

    @property
    def budgets(self) -> Budgets:
        return Budgets(self.budget_percent, self.budget_percent / 2)


def make_subject(
    name: str, settings: Settings, *, inject_percent: float = 0.0, plant: str = "", time_stages: bool = False
) -> tuple[Subject, counting.Counter | None]:
    """The subject of that name, and what counts exactly for it (None: it does no device work).

    Raises:
        UserError: no such subject, or no such planted collector.
    """
    from bench.subjects.registry import SUBJECTS  # heavy: torch

    kind = SUBJECTS[name]
    subject = kind.make(settings, inject_percent=inject_percent, plant=plant, time_stages=time_stages)
    if not kind.counted:
        return subject, None
    plants = [plant] if plant else []
    return subject, counting.ProcessCounter(kind.counted_as(settings), subject=name, plants=plants)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("overhead")(overhead)


def overhead(
    config: arguments.Config = arguments.CONFIG,
    settings: arguments.Settings = None,
    seed: arguments.Seed = 0,
    out: arguments.Out = None,
    quick: Annotated[bool, option("--quick", "isolated costs only; under 90 s in all")] = False,
    minutes: Annotated[
        float | None,
        option("--minutes M", "time for measuring (default 4, quick 0.75)", to_minutes),
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
        float,
        option("--inject PERCENT", "add a collector of known cost, e.g. 2%", to_percent),
    ] = 0.0,
    plant: Annotated[str, option("--plant NAME", "add a bad collector, to see it found")] = "",
    subject: arguments.Subject = "trainer",
) -> int:
    """What does each collector cost?
    Every arm replays the same batches; costs come with intervals and a verdict.
    """
    loaded = load_config(config, settings or ())
    options = Options(
        config=loaded,
        quick=quick,
        minutes=minutes,
        budget_percent=budget,
        only=only,
        together=together,
        inject_percent=inject,
        plant=plant,
        seed=seed,
        out=out,
    )
    measured, counter = make_subject(subject, loaded, inject_percent=inject, plant=plant, time_stages=True)
    return int(run_overhead(options, measured, Reporter(), count=counter).exit_code)


def run_overhead(
    options: Options, subject: Subject, reporter: Reporter, *, count: counting.Counter | None = None
) -> Receipt:
    """Measure, judge, write the three files, print the report. The receipt's exit code is the command's.

    Args:
        count: counts exactly in another process while the subject is built; None: nothing to count (no device
            work).

    Raises:
        UserError: bad input, before anything is measured.
    """
    started = time.monotonic()
    names = choose_collectors(subject.collectors, options.only)
    store.read_all()  # a broken file is refused now, not after minutes of measuring
    machine = identity.identify(subject.devices)
    folder = files.choose_folder(options.out, "overhead")
    arms = make_arms(names, marginal=not options.quick, together=options.together)
    if options.together:
        names = ()
    contrasts = judged(arms, names)
    budgets = options.budgets
    limits = {name: budgets.all_percent if name == ALL else budgets.collector_percent for name in contrasts}
    pending = count.start(arms) if count is not None else None
    try:
        run = measure(
            subject,
            arms,
            names,
            seed=options.seed,
            time_s=options.time_s,
            rule=StoppingRule(contrasts, limits, subject.cycle),
            reporter=reporter,
            end_s=started + QUICK_END_S if options.quick and options.minutes is None else None,
            ready=(lambda: pending.wait(reporter)) if pending is not None else None,
        )
    finally:
        if pending is not None:
            pending.close()
    counts, faults = pending.result() if pending is not None else ({}, ())
    receipt = make_receipt(options, run, machine, counts, faults, counts_required=count is not None)
    write_all(receipt, folder)
    show(receipt, folder)
    return receipt


def make_receipt(
    options: Options,
    run: MeasuredRun,
    this: Machine,
    counts: Mapping[str, ExactCounts],
    faults: Sequence[str],
    *,
    counts_required: bool,
) -> Receipt:
    """Judge a run. Pure but for the commit and the clock, which are read here."""
    measurement = replace(run.measurement, counts=counts, faults=(*run.measurement.faults, *faults))
    analysis = analyse(measurement)
    unfit = (
        state.unfit(measurement.before, measurement.after) if measurement.before and measurement.after else ()
    )
    judgement = judge(analysis, options.budgets, unfit, counts_required=counts_required)
    arms: dict[str, list[Segment]] = {arm.name: [] for arm in measurement.arms}
    for segment in measurement.segments:
        arms[segment.arm].append(segment)
    return Receipt(
        command="overhead",
        commit=read_commit(),
        machine=this,
        config=ConfigRef(options.config.name, options.config.digest()),
        arms={name: tuple(segments) for name, segments in arms.items()},
        losses_equal=analysis.losses_equal,
        collectors=judgement.collectors,
        all=judgement.all,
        throughput=analysis.throughput,
        baseline=_baseline(options, this, analysis),
        pipeline_efficiency=measurement.pipeline_efficiency,
        verdict=judgement.verdict,
        exit_code=judgement.exit_code,
        created=files.now_utc(),
        budget_percent=options.budgets.all_percent,
        collector_budget_percent=options.budgets.collector_percent,
        reasons=_reasons(judgement, run),
        aa=analysis.aa,
        counts=dict(counts),
        losses=dict(measurement.losses),
        before=measurement.before,
        after=measurement.after,
        subject=measurement.subject,
        cycle=measurement.cycle,
        options={
            "seed": options.seed,
            "minutes": round(options.time_s / 60, 3),
            "quick": options.quick,
            "only": ",".join(options.only),
            "together": options.together,
            "inject_percent": options.inject_percent,
            "plant": options.plant,
            "stopped": measurement.stopped,
            "washout_steps": measurement.washout_steps,
            "warmup_steps": measurement.warmup_steps,
            "seconds": round(run.seconds, 1),
        },
        extra={
            "notes": list(run.result.notes),
            "peak_memory_bytes": run.result.peak_memory_bytes,
            "sentinel": run.sentinel.as_receipt() if run.sentinel else None,
        },
    )


def _reasons(judgement: Judgement, run: MeasuredRun) -> tuple[str, ...]:
    """The verdict's reasons; where losses differ, the step that shows it comes right behind."""
    reasons = list(judgement.reasons)
    if run.difference:
        reasons.append(f"first difference: {run.difference}")
    return tuple(reasons)


def _baseline(options: Options, this: Machine, analysis: Analysis) -> BaselineView:
    try:
        return store.view(this, ConfigRef(options.config.name, options.config.digest()), analysis.throughput)
    except UserError as error:
        return BaselineView("missing", note=str(error))  # broken while measuring: the measurement stands
