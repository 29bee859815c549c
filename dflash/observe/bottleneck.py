"""Which side holds the others up, and which stage of it: a pure function of the dashboard's own numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Side = Literal["target", "drafter", "data", "hand-over", "none", "unknown"]

IDLE = 0.10
"""Shares of time below this are noise; sides this close are even."""


@dataclass(frozen=True)
class Bottleneck:
    """Who is slowest.

    Attributes:
        side: whose work the others wait for; `hand-over`: both sides wait for each other (locks, the
            interpreter, or a ready threshold that is too high); `none`: everybody works; `unknown`: the
            collectors that tell are off.
        targets_idle, drafters_idle: mean share of wall time that the workers of a side did not work; None
            when unknown.
        stage, stage_share: the stage that sets the pace, and the share of its workers' time that it takes;
            empty without the profile collector.
    """

    side: Side
    targets_idle: float | None = None
    drafters_idle: float | None = None
    stage: str = ""
    stage_share: float = 0.0

    @property
    def text(self) -> str:
        """In words, e.g. `bottleneck: target side, drafters idle 41%; target.pack_hidden, 71%`."""
        return f"{self._side}; {self.stage}, {self.stage_share:.0%}" if self.stage else self._side

    @property
    def _side(self) -> str:
        targets, drafters = _idle("targets", self.targets_idle), _idle("drafters", self.drafters_idle)
        both = ", ".join(part for part in (targets, drafters) if part)
        match self.side:
            case "target":
                return f"bottleneck: target side, {drafters}"
            case "drafter":
                return f"bottleneck: drafter side, {targets}"
            case "data":
                return f"bottleneck: data side (prefetcher), {both}"
            case "hand-over":
                return f"bottleneck: hand-over, {both}"
            case "none":
                return f"no bottleneck, {both}"
        return "bottleneck: unknown (needs the workers collector)"


def find_bottleneck(values: Mapping[str, float], seconds: float) -> Bottleneck:
    """Judge one window of `seconds` by its `target/*`, `drafter/*` and `pipeline/*` values.

    A worker's idle share is what its busy time leaves, or its waits where the busy time is not known. A
    target that waits for input while the prefetcher is empty puts the blame on the data side. Time that
    training stood still for a look (`host/standing_s`) is no part of the window."""
    seconds = max(0.0, seconds - values.get("host/standing_s", 0.0))
    targets, drafters = _idle_share(values, "target", seconds), _idle_share(values, "drafter", seconds)
    side = _side_of(values, seconds, targets, drafters)
    return Bottleneck(side, targets, drafters, *_slowest_stage(values, seconds, side))


def _side_of(
    values: Mapping[str, float], seconds: float, targets: float | None, drafters: float | None
) -> Side:
    if targets is None or drafters is None:
        return "unknown"
    starved = _share(values, "target", "wait_in_s", seconds) or 0.0
    if starved > IDLE and values.get("pipeline/prefetch_fill_ratio", 1.0) < 0.5 and starved >= 0.5 * targets:
        return "data"
    if drafters > IDLE and drafters - targets > IDLE:
        return "target"
    if targets > IDLE and targets - drafters > IDLE:
        return "drafter"
    if min(targets, drafters) > 2 * IDLE:
        return "hand-over"
    return "none"


WAITS = ("drafter.queue_get",)
"""Stages that are waits: they set no pace."""


def _slowest_stage(values: Mapping[str, float], seconds: float, side: Side) -> tuple[str, float]:
    """The stage with the largest share of its workers' time, of the slow side where one is slow. ("", 0.0)
    where no stage is timed, or where it is the prefetcher that is slow."""
    shares: dict[str, float] = {}
    for name, mean_ms in values.items():
        stage = name.removeprefix("profile/").removesuffix("_ms")
        if name != f"profile/{stage}_ms" or stage in WAITS or side == "data" or seconds <= 0:
            continue
        role = stage.partition(".")[0]
        if side not in ("target", "drafter") or role == side:
            spans = values.get(f"profile/{stage}_count", 0.0)
            shares[stage] = mean_ms * 1e-3 * spans / seconds / max(1, _workers(values, role))
    if not shares:
        return "", 0.0
    if side in ("target", "drafter"):
        busy = _share(values, side, "busy_s", seconds) or 0.0
        shares[f"{side}, outside its stages"] = busy - sum(shares.values())
    stage = max(shares, key=lambda one: shares[one])
    return stage, min(1.0, shares[stage])


def _workers(values: Mapping[str, float], role: str) -> int:
    return len({name.split("/")[1] for name in values if name.startswith(f"{role}/") and name.count("/") > 1})


def _idle_share(values: Mapping[str, float], role: str, seconds: float) -> float | None:
    busy = _share(values, role, "busy_s", seconds)
    if busy is not None:
        return min(1.0, max(0.0, 1.0 - busy))
    waits = [_share(values, role, key, seconds) for key in ("wait_in_s", "wait_out_s")]
    known = [wait for wait in waits if wait is not None]
    return min(1.0, sum(known)) if known else None


def _share(values: Mapping[str, float], role: str, key: str, seconds: float) -> float | None:
    """Mean over the role's workers of `key` over `seconds`; None when no worker reports it."""
    found = [
        value for name, value in values.items() if name.startswith(f"{role}/") and name.endswith(f"/{key}")
    ]
    return sum(found) / len(found) / seconds if found and seconds > 0 else None


def _idle(who: str, share: float | None) -> str:
    return "" if share is None else f"{who} idle {share:.0%}"
