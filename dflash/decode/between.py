"""Between training and serving: what training said, what it would say of the target's own answers, and what
decoding accepted, slot by slot. Pure functions of counts.

The three lines have one measure, "right up to slot k". From the first line to the second the text changes,
from the second to the third the places and the way of computing do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dflash.decode.figures import Figures
from dflash.decode.replay import Replayed

_LARGE = 0.15  # a gap over this share of the drafts that were right before is large
_LEAST = 0.1  # and over so many tokens
_OWN = 0.8  # answers of which the target would have chosen less are somebody else's
_ANOTHER_MODE = 0.5  # shares of answers with thoughts that are further apart are two modes
_HARDLY = 0.3  # fewer right drafts than this mean that the drafter knows nothing
_THOUGHT = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class SlotShares:
    """One line of the picture.

    Attributes:
        blocks: how many were drafted.
        reached: share of the blocks whose slots 1..k are all right, k = 1..B-1, of those judged so far.
        right: share of the judged slots k that are right, as training logs it.
        tau: 1 + the sum of `reached`: tokens that a verification would commit on average.
    """

    blocks: int
    reached: tuple[float, ...]
    right: tuple[float, ...]

    @property
    def tau(self) -> float:
        return 1.0 + sum(self.reached)


@dataclass(frozen=True)
class Modes:
    """Who thinks: shares of answers with a thought that is not empty, 0 to 1; None where it is not known.

    Attributes:
        asked: what `--thinking` or `--no-thinking` asked of the template; None: nothing.
        prompt: what the prompt does with thoughts: `opens one`, `closes an empty one`, or `nothing`.
        own, data, training: of the target's answers here, of the prompts' answers, and of the first ones that
            the drafter was trained on.
    """

    asked: bool | None = None
    prompt: str = "nothing"
    own: float | None = None
    data: float | None = None
    training: float | None = None

    @property
    def differ(self) -> bool:
        """The target answers in another mode than the drafter was trained on."""
        trained = self.data if self.training is None else self.training
        return self.own is not None and trained is not None and abs(self.own - trained) > _ANOTHER_MODE


@dataclass(frozen=True)
class Between:
    """All of it.

    Attributes:
        data: the drafter on the data's answers, each block from the true tokens before it; None without them.
        own: the same on the target's own answers.
        same_places: the same at the places where decoding drafted.
        decoded: what decoding accepted.
        chosen: share of the data's tokens that the target itself would have chosen.
        logged_tau: accepted length that training logged in its last steps; None: not known.
    """

    data: SlotShares | None
    own: SlotShares | None
    same_places: SlotShares | None
    decoded: SlotShares
    chosen: float | None
    modes: Modes = field(default_factory=Modes)
    logged_tau: float | None = None

    def to_json(self) -> dict[str, Any]:
        lines = {
            name: None if line is None else asdict(line) | {"tau": line.tau}
            for name, line in (
                ("data", self.data),
                ("own", self.own),
                ("same_places", self.same_places),
                ("decoded", self.decoded),
            )
        }
        thinking = asdict(self.modes) | {"differ": self.modes.differ}
        known = {"chosen": self.chosen, "logged_tau": self.logged_tau}
        return {**lines, **known, "thinking": thinking, "says": verdict(self)}


def shares(replayed: Sequence[Replayed]) -> SlotShares | None:
    """One line of several texts; None where no block was drafted."""
    blocks = [item for item in replayed if len(item.anchors)]
    if not blocks:
        return None
    right = np.concatenate([item.right for item in blocks])
    judged = np.concatenate([item.judged for item in blocks])
    # A slot that is not judged neither ends nor lengthens a run, as in training.
    reached = (right | ~judged).cumprod(axis=1).astype(bool)
    counts = np.maximum(judged.sum(axis=0), 1)
    return SlotShares(
        blocks=len(right),
        reached=tuple(((reached & judged).sum(axis=0) / counts).tolist()),
        right=tuple(((right & judged).sum(axis=0) / counts).tolist()),
    )


def decoded_shares(figures: Figures) -> SlotShares:
    """The line of decoding. A slot alone is not judged there, so `right` is empty."""
    return SlotShares(figures.cycles, figures.slot_reached, ())


def chosen_share(replayed: Sequence[Replayed]) -> float | None:
    """Share of the supervised tokens that the target would have chosen; None without any."""
    tokens = sum(len(item.chosen) for item in replayed)
    return float(sum(item.chosen.sum() for item in replayed) / tokens) if tokens else None


def has_thought(text: str) -> bool:
    """Whether an answer, with what its prompt opened, holds a thought that is not empty."""
    return any(found.strip() for found in _THOUGHT.findall(text))


def verdict(between: Between) -> str:
    """One sentence: which gap is large, and what to do."""
    data, own, places, decoded = between.data, between.own, between.same_places, between.decoded
    if own is None or places is None:
        return "The answers are too short to compare: nothing was drafted after their first token."
    known = own if data is None or own.tau > data.tau else data
    unlike = data is not None and between.logged_tau is not None and _large(between.logged_tau, data.tau)
    if known.tau - 1.0 < _HARDLY and unlike:  # it did learn
        return _unlike_training(between)
    if known.tau - 1.0 < _HARDLY:
        text = "on the data's answers too" if data is not None else "even on the true tokens"
        other = between.chosen is not None and between.chosen < _OWN
        return (
            f"The drafter is hardly ever right, {text} ({known.tau:.2f} tokens a pass): it was trained too "
            "little, or for other layers, another template or another target"
            + (
                f"; and the target would have chosen only {between.chosen:.0%} of the data's tokens, so "
                "rewrite the answers with `dflash prepare --regenerate` first."
                if other
                else "."
            )
        )
    if _large(places.tau, decoded.tau):
        return (
            f"Decoding accepts less than the drafter is right at the same places ({places.tau:.2f} -> "
            f"{decoded.tau:.2f}): it does not get the features of training; compare types, layers and "
            "windows, and report it."
        )
    if data is not None and _large(data.tau, own.tau):
        return _other_answers(between, data.tau, own.tau)
    if between.modes.differ:
        return _other_mode(between.modes)
    if unlike:
        return _unlike_training(between)
    if _large(own.tau, decoded.tau):
        return (
            f"Decoding drafts at harder places than the average one ({own.tau:.2f} -> {decoded.tau:.2f}): it "
            "starts again where a draft was wrong; more training is what helps."
        )
    if data is None:
        return "No gap is large: decoding accepts what the drafter is right at."
    return "No gap is large: decoding accepts what training says."


def _unlike_training(between: Between) -> str:
    assert between.data is not None
    return (
        f"Training logged {between.logged_tau:.2f} tokens a pass in its last steps, and on the data's "
        f"answers here it would be {between.data.tau:.2f}: either these texts are unlike those of training "
        "(add such ones), or the target's layers, its weights or the template are not those of training."
    )


def _other_answers(between: Between, before: float, after: float) -> str:
    gap = f"The drafter knows the data's answers better than the target's own ({before:.2f} -> {after:.2f})"
    if between.modes.differ:
        return f"{gap}. {_other_mode(between.modes)}"
    if between.chosen is not None and between.chosen < _OWN:
        return (
            f"{gap}: the target would have chosen {between.chosen:.0%} of the data's tokens, so they are "
            "somebody else's; rewrite them with `dflash prepare --regenerate` and train on those."
        )
    return f"{gap}, though the data is nearly its own text: add answers like those it gives here."


def _other_mode(modes: Modes) -> str:
    trained = modes.data if modes.training is None else modes.training
    assert modes.own is not None
    assert trained is not None
    switch = "--no-thinking" if modes.own > trained else "--thinking"
    return (
        f"The target thinks in {modes.own:.0%} of its answers here, the drafter was trained on "
        f"{trained:.0%}: serve in the mode of training ({switch}), or regenerate the answers in the mode "
        "that you serve."
    )


def _large(before: float, after: float) -> bool:
    return before - after > max(_LEAST, _LARGE * (before - 1.0))


def table(between: Between) -> str:
    """The lines for the terminal."""
    size = len(between.decoded.reached)
    names = " ".join(f"{k:>6}" for k in range(1, size + 1))
    lines = ["", f"right up to slot        {names}    tokens a pass"]
    for label, line in (
        ("training, data's answers", between.data),
        ("training, own answers", between.own),
        ("  where decoding drafted", between.same_places),
        ("decoding accepted", between.decoded),
    ):
        if line is not None:
            lines.append(
                f"{label:<24}{' '.join(f'{share:6.1%}' for share in line.reached)}    {line.tau:.2f}"
            )
    if between.data is not None:
        alone = " ".join(f"{share:6.1%}" for share in between.data.right)
        lines.append(f"{'  each slot alone':<24}{alone}    (data's answers, as training logs it)")
    if between.logged_tau is not None:
        lines.append(f"training logged         {between.logged_tau:.2f} tokens a pass in its last steps")
    if between.chosen is not None:
        lines.append(f"data's own tokens       {between.chosen:.1%} are what the target would have chosen")
    return "\n".join([*lines, *_thinking(between.modes), "", verdict(between)]) + "\n"


def _thinking(modes: Modes) -> list[str]:
    known = [
        f"{name} {share:.0%}"
        for name, share in (("own", modes.own), ("data", modes.data), ("training", modes.training))
        if share
    ]
    if not known and modes.prompt == "nothing":
        return []
    return [
        f"answers with a thought  {', '.join(known) or 'none'}; the prompt "
        + {"nothing": "leaves it open"}.get(modes.prompt, modes.prompt)
    ]
