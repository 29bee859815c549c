"""What a run says of itself when it ends: a few lines, a JSON, a plot of the curve. All of them tell of the
whole run, over all its legs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from dflash.config import Config
from dflash.observe.closing import NOTHING, Closing
from dflash.pipeline.history import SLOTS, History, Point, mean

if TYPE_CHECKING:
    from dflash.pipeline.trainer import TrainResult

_ENOUGH = 20
"""Steps before which nobody can say that nothing was learnt."""
_SAME = 0.01
"""A loss that changed by less than this share did not change."""


def as_dict(
    config: Config, result: TrainResult, closing: Closing = NOTHING, failure: str = ""
) -> dict[str, object]:
    """The figures of a run. Loss and accuracies: means over its first and its last steps."""
    history = result.history
    running_s = history.running_s
    figures: dict[str, object] = {
        "name": config.name,
        "config_digest": config.digest(),
        "finished": result.finished,
        "failure": failure or None,
        "steps": history.steps,
        "legs": history.legs,
        "seconds": round(history.seconds, 3),
        "stalled_seconds": round(history.stalled_seconds, 3),
        "evaluating_seconds": round(history.evaluating_seconds, 3),
        "tokens": history.tokens,
        "tokens_per_second": round(history.tokens / running_s, 1) if running_s else None,
        "supervised_slots_per_second": round(history.supervised_slots / running_s, 1) if running_s else None,
        **closing.figures,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
        "best_heldout_loss": history.best_heldout,
        "tau": history.last_tau[1] if history.last_tau else None,
    }
    for name, part in (("first", history.first), ("last", history.window())):
        if part:
            point = mean(part)
            figures[name] = {
                "loss": _plain(point.loss),
                "accept_length": _plain(point.accept_length),
                "slot_1_accuracy": _plain(point.slots[0]),
                "steps": len(part),
            }
    return figures


def write(
    run_dir: Path, config: Config, result: TrainResult, closing: Closing = NOTHING, failure: str = ""
) -> None:
    """`summary.json`, and `curve.png` where matplotlib is installed."""
    figures = as_dict(config, result, closing, failure)
    (run_dir / "summary.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    if len(result.history.curve) > 1:
        _plot(run_dir / "curve.png", config, result.history)


def text(config: Config, result: TrainResult, run_dir: Path, closing: Closing = NOTHING) -> str:
    """The closing lines on the terminal."""
    history = result.history
    if not history.steps:
        return f"{config.name}: no step was done\n"
    start, end = history.first, history.window()
    first, last = mean(start), mean(end)
    state = "finished" if result.finished else "stopped"
    running_s = max(history.running_s, 1e-9)
    over = f" in {history.legs} legs" if history.legs > 1 else ""
    stalled = f" (stood still for {history.stalled_seconds:.0f} s)" if history.stalled_seconds >= 1.0 else ""
    lines = [
        f"{config.name}: {state} after {history.steps} steps{over}, {history.seconds:.1f} s{stalled}, "
        f"{history.tokens / running_s:,.0f} tok/s",
        f"  loss             {first.loss:8.3f} -> {last.loss:.3f}",
        f"  slot-1 accuracy  {first.slots[0]:8.3f} -> {last.slots[0]:.3f}",
        f"  accept length    {first.accept_length:8.3f} -> {last.accept_length:.3f}",
        *(f"  {line}" for line in (*_tau_lines(history), *closing.lines)),
        *([f"  {warning}"] if (warning := nothing_learnt(history, config.train.lr)) else []),
        f"  means of the first {len(start)} and the last {len(end)} steps; run folder {run_dir}",
    ]
    return "\n".join(lines) + "\n"


def _tau_lines(history: History) -> list[str]:
    """The acceptance length in decoding, where it was measured."""
    first, last = history.first_tau, history.last_tau
    if first is None or last is None:
        return []
    return [
        f"tau on held-out  {first[1]:8.3f} -> {last[1]:.3f} in decoding, after {first[0]} and {last[0]} "
        f"steps ({history.evaluating_seconds:.1f} s, not in tok/s)"
    ]


def nothing_learnt(history: History, lr: float) -> str:
    """One line for a run whose loss did not fall; empty when it did, or it was too short to tell."""
    if history.steps < _ENOUGH or not lr:
        return ""
    before, after = mean(history.first[:1]).loss, mean(history.window())
    if not after.loss > before * (1.0 - _SAME):
        return ""
    no_gradient = " and there is no gradient left" if after.grad_norm < 1e-6 else ""
    return (
        f"nothing was learnt: the loss began at {before:.3f} and ends at {after.loss:.3f}{no_gradient}; "
        f"train.lr = {lr:g} may be too high"
    )


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _plot(path: Path, config: Config, history: History) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    points: list[Point] = history.curve
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    steps = [point.step for point in points]
    span = max(1, len(points) // 60)
    left.plot(steps, [point.loss for point in points], color="#9ecae1", linewidth=0.7)
    left.plot(steps, _smooth([point.loss for point in points], span), color="#08519c", linewidth=1.6)
    left.set(title="loss", xlabel="step")
    colours = ("#00441b", "#238b45", "#74c476", "#c7e9c0")
    for at, (slot, colour) in enumerate(zip(SLOTS, colours, strict=True)):
        if at < len(points[0].slots):
            values = _smooth([point.slots[at] for point in points], span)
            right.plot(steps, values, color=colour, label=f"slot {slot}")
    right.set(title="share guessed right", xlabel="step")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(config.name)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _smooth(values: list[float], span: int) -> list[float]:
    """Means over the last `span` values at each place."""
    return [fmean(values[max(0, at + 1 - span) : at + 1]) for at in range(len(values))]
