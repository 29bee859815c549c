"""Acceptance by slot as a picture, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path

from dflash.decode.between import Between
from dflash.decode.figures import Figures

_LINES = (
    ("data", "training: the data's answers", "#9ecae1", "s--"),
    ("own", "training: the target's own answers", "#4292c6", "^-"),
    ("decoded", "decoding: accepted", "#08306b", "o-"),
)


def plot(path: Path, figures: Figures, title: str, between: Between | None = None) -> bool:
    """Share of blocks that are right up to each slot: in training, on the target's own answers, and accepted
    in decoding. The suffix of `path` says which kind of picture.

    Returns:
        False when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    slots = list(range(1, len(figures.slot_reached) + 1))
    # Equal figures give an equal file: no date, no random ids, text as text.
    with matplotlib.rc_context({"svg.hashsalt": "dflash", "svg.fonttype": "none"}):
        figure, axis = pyplot.subplots(figsize=(6.4, 3.8), constrained_layout=True)
        for name, label, colour, style in _LINES:
            line = getattr(between, name) if between is not None else None
            reached = figures.slot_reached if name == "decoded" else line.reached if line else None
            if reached is not None:
                axis.plot(slots, reached, style, color=colour, label=label)
        axis.set(xlabel="slot of the block", ylabel="right up to this slot", ylim=(0, 1), xticks=slots)
        axis.set_title(
            f"{title}: τ = {figures.tau:.2f} (95%: {figures.tau_low:.2f} to {figures.tau_high:.2f})",
            fontsize=10,
        )
        axis.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, loc="outside lower center", ncols=3, fontsize=8)
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True
