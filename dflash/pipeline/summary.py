"""What a finished run says of itself: a few lines, a JSON, a plot of the curve."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

from dflash.config import Config
from dflash.pipeline.scalars_log import StepScalars
from dflash.pipeline.trainer import TrainResult

START = 10
"""Steps averaged at the start of a run: few, since the loss falls fastest there."""


def window(scalars: list[StepScalars]) -> int:
    """Steps averaged at the end of a run."""
    return max(1, min(100, len(scalars) // 10))


def as_dict(config: Config, result: TrainResult, bottleneck: str = "") -> dict[str, object]:
    """The figures of a run. Loss and accuracies: means over the first `START` and the last `window` steps."""
    rows, span = result.scalars, window(result.scalars)
    figures: dict[str, object] = {
        "name": config.name,
        "config_digest": config.digest(),
        "finished": result.finished,
        "steps": len(rows),
        "seconds": round(result.seconds, 3),
        "tokens": result.tokens,
        "tokens_per_second": round(result.tokens / result.seconds, 1) if result.seconds else None,
        "supervised_slots_per_second": round(sum(r.supervised_slots for r in rows) / result.seconds, 1)
        if result.seconds
        else None,
        "bottleneck": bottleneck,
        "checkpoint": str(result.checkpoint) if result.checkpoint else None,
    }
    for name, part in (("first", rows[:START]), ("last", rows[-span:])):
        if part:
            figures[name] = {
                "loss": fmean(r.loss for r in part),
                "accept_length": fmean(r.accept_length for r in part),
                "slot_1_accuracy": fmean(r.slot_accuracy[0] for r in part),
                "steps": len(part),
            }
    return figures


def write(run_dir: Path, config: Config, result: TrainResult, bottleneck: str = "") -> None:
    """`summary.json`, and `curve.png` where matplotlib is installed."""
    (run_dir / "summary.json").write_text(
        json.dumps(as_dict(config, result, bottleneck), indent=1), encoding="utf-8"
    )
    if len(result.scalars) > 1:
        _plot(run_dir / "curve.png", config, result.scalars)


def text(config: Config, result: TrainResult, run_dir: Path, bottleneck: str = "") -> str:
    """The closing lines on the terminal."""
    rows, span = result.scalars, window(result.scalars)
    if not rows:
        return f"{config.name}: no step was done\n"
    first, last = rows[:START], rows[-span:]
    state = "finished" if result.finished else "stopped"
    lines = [
        f"{config.name}: {state} after {len(rows)} steps, {result.seconds:.1f} s, "
        f"{result.tokens / max(result.seconds, 1e-9):,.0f} tok/s",
        f"  loss             {fmean(r.loss for r in first):8.3f} -> {fmean(r.loss for r in last):.3f}",
        f"  slot-1 accuracy  {fmean(r.slot_accuracy[0] for r in first):8.3f} -> "
        f"{fmean(r.slot_accuracy[0] for r in last):.3f}",
        f"  accept length    {fmean(r.accept_length for r in first):8.3f} -> "
        f"{fmean(r.accept_length for r in last):.3f}",
        *([f"  {bottleneck}"] if bottleneck else []),
        f"  means of the first {len(first)} and the last {span} steps; run folder {run_dir}",
    ]
    return "\n".join(lines) + "\n"


def _plot(path: Path, config: Config, rows: list[StepScalars]) -> None:
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    steps = [row.step for row in rows]
    span = max(1, len(rows) // 60)
    left.plot(steps, [row.loss for row in rows], color="#9ecae1", linewidth=0.7)
    left.plot(steps, _smooth([row.loss for row in rows], span), color="#08519c", linewidth=1.6)
    left.set(title="loss", xlabel="step")
    for slot, colour in zip((1, 2, 4, 8), ("#00441b", "#238b45", "#74c476", "#c7e9c0"), strict=True):
        if slot <= len(rows[0].slot_accuracy):
            right.plot(
                steps,
                _smooth([row.slot_accuracy[slot - 1] for row in rows], span),
                color=colour,
                label=f"slot {slot}",
            )
    right.set(title="share guessed right", xlabel="step")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(config.name)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _smooth(values: list[float], span: int) -> list[float]:
    smoothed, window_values = [], []  # type: ignore[var-annotated]
    for value in values:
        window_values.append(value)
        if len(window_values) > span:
            window_values.pop(0)
        smoothed.append(fmean(window_values))
    return smoothed
