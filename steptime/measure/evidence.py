"""What was measured and counted, as the verdict wants it: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from steptime.measure.run import Measured
from steptime.records.pairs import ALL
from steptime.records.types import OFF, ExactCounts
from steptime.statistics.counts import difference
from steptime.statistics.judging import Evidence
from steptime.statistics.observed import Observations
from steptime.statistics.one_switch import Observed


def evidence(
    measured: Measured,
    found: Observations,
    counts: Mapping[str, ExactCounts],
    faults: Sequence[str] = (),
    *,
    quick: bool = False,
) -> Evidence:
    """Everything that the verdict of `overhead` is taken from.

    Args:
        counts: exact counts under "off", each switch's name, and "all".
        faults: what went wrong while counting, one line each.
        quick: switches by themselves need not have been counted.
    """
    asked = measured.asked
    accounted = measured.result.accounted_percent or {}
    estimates = {**found.collectors, ALL: found.all}

    def observed(name: str) -> Observed:
        added, fault = None, ""
        if counts and (name in counts or name == ALL or not quick):
            added, fault = difference(
                counts.get(OFF), counts.get(name), "all off", f"{name} on" if name != ALL else "all on"
            )
        return Observed(name, estimates.get(name), accounted.get(name), added, fault)

    return Evidence(
        collectors=() if asked.together else tuple(observed(name) for name in asked.switches),
        all=observed(ALL),
        minutes=measured.minutes,
        incomplete=(*measured.faults, *faults, *found.incomplete),
        losses_equal=measured.losses_equal,
        loss_notes=_loss_notes(measured),
        counted=bool(counts),
        only_together=asked.together,
        control=found.control,
    )


def _loss_notes(measured: Measured) -> tuple[str, ...]:
    if measured.difference:
        return (f"losses differ: {measured.difference}",)
    if measured.losses_equal is None:
        lost = sum(pair.losses_equal is None for pair in measured.pairs)
        return (f"no loss arrived for {lost} of {len(measured.pairs)} pairs",)
    return ()
