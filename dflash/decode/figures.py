"""What an evaluation says: acceptance length, acceptance by slot, tokens per pass, speed-up. Pure functions
of the cycles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash.decode.generate import Cycle

SAME, TIE, DIFFERS = "same", "tie", "differs"


@dataclass(frozen=True, slots=True)
class PromptResult:
    """One prompt's decoding.

    Attributes:
        origin: `file:line`.
        new_tokens: generated, the end of text included, cut at the limit.
        passes: target passes with the drafter's help, the prompt's included.
        lossless: `same` text as the target alone; `tie` when they part at a place where the target's two best
            logits are closer than its own passes agree; `differs`; None when sampled.
        parted_at: first new token that differs, else None.
        repeated: share of the new tokens that end a run of four tokens which the answer had before: loops are
            easy to draft.
        tokens: the generated ids.
        speculative_s, plain_s: seconds after the prompt's pass; None for plain when sampled.
    """

    origin: str
    prompt_tokens: int
    new_tokens: int
    ended: bool
    cycles: tuple[Cycle, ...]
    passes: int
    lossless: str | None
    parted_at: int | None
    repeated: float
    speculative_s: float
    plain_s: float | None
    tokens: tuple[int, ...] = ()

    @property
    def tau(self) -> float | None:
        """Mean of committed tokens per verification, the bonus token included; None when none was needed."""
        return float(np.mean([cycle.tokens for cycle in self.cycles])) if self.cycles else None


@dataclass(frozen=True)
class Figures:
    """Over all prompts.

    Attributes:
        tau: acceptance length pooled over all cycles (as vLLM and SGLang count); `tau_low`, `tau_high`: 95%,
            resampled prompts.
        tau_by_prompt: mean of the prompts' own (as z-lab's benchmark counts).
        acceptance_rate: accepted drafts of all judged ones, no bonus.
        slot_reached: share of cycles whose drafts were right up to slot k, k = 1..B-1.
        slot_right: share of those that came to slot k with all before it right, and had slot k right; None
            where none came.
        tokens_per_pass: new tokens per target pass, the prompt's pass included.
        speed_up: seconds of the target alone over seconds with the drafter, for the same text after the
            prompt's pass; None when not measured.
        repeated: share of the new tokens that end a run of four which their answer had before.
    """

    prompts: int
    cycles: int
    new_tokens: int
    tau: float
    tau_low: float
    tau_high: float
    tau_by_prompt: float
    acceptance_rate: float
    slot_reached: tuple[float, ...]
    slot_right: tuple[float | None, ...]
    tokens_per_pass: float
    tokens_per_second: float
    plain_tokens_per_second: float | None
    speed_up: float | None
    repeated: float
    same: int
    ties: int
    differ: int
    checked: bool

    @property
    def lossless(self) -> bool:
        """Checked, and no text differs."""
        return self.checked and self.differ == 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"lossless": self.lossless}


def summarise(results: Sequence[PromptResult], block_size: int) -> Figures:
    """The figures of an evaluation.

    Raises:
        ValueError: no prompt had a cycle.
    """
    cycles = [cycle for result in results for cycle in result.cycles]
    if not cycles:
        raise ValueError("no verification took place")
    low, high = _interval(results)
    tokens = sum(result.new_tokens for result in results)
    seconds = sum(result.speculative_s for result in results)
    plain = [result.plain_s for result in results if result.plain_s is not None]
    measured = len(plain) == len(results)
    # The first token comes from the prompt's pass, which both clocks leave out.
    timed = sum(result.new_tokens - 1 for result in results)
    accepted = np.array([cycle.accepted for cycle in cycles])
    tried = np.array([cycle.tried for cycle in cycles])
    verdicts = [result.lossless for result in results]
    return Figures(
        prompts=len(results),
        cycles=len(cycles),
        new_tokens=tokens,
        tau=float(np.mean([cycle.tokens for cycle in cycles])),
        tau_low=low,
        tau_high=high,
        tau_by_prompt=float(np.mean([result.tau for result in results if result.tau is not None])),
        acceptance_rate=float(accepted.sum() / tried.sum()),
        slot_reached=tuple(
            float(np.mean(accepted[tried >= k] >= k)) if (tried >= k).any() else 0.0
            for k in range(1, block_size)
        ),
        slot_right=tuple(_right(accepted, tried, k) for k in range(1, block_size)),
        tokens_per_pass=tokens / sum(result.passes for result in results),
        tokens_per_second=timed / seconds if seconds > 0 else 0.0,
        plain_tokens_per_second=timed / sum(plain) if measured and sum(plain) > 0 else None,
        speed_up=sum(plain) / seconds if measured and seconds > 0 else None,
        repeated=sum(result.repeated * result.new_tokens for result in results) / tokens,
        same=verdicts.count(SAME),
        ties=verdicts.count(TIE),
        differ=verdicts.count(DIFFERS),
        checked=None not in verdicts,
    )


def _right(accepted: np.ndarray, tried: np.ndarray, slot: int) -> float | None:
    came = (accepted >= slot - 1) & (tried >= slot)
    return float(np.mean(accepted[came] >= slot)) if came.any() else None


def _interval(results: Sequence[PromptResult], draws: int = 2000) -> tuple[float, float]:
    """95% interval of the pooled acceptance length, prompts drawn again and again."""
    tokens = np.array([sum(cycle.tokens for cycle in result.cycles) for result in results], float)
    counts = np.array([len(result.cycles) for result in results], float)
    picks = np.random.default_rng(0).integers(0, len(results), (draws, len(results)))
    sums = counts[picks].sum(axis=1)
    ratios = tokens[picks].sum(axis=1)[sums > 0] / sums[sums > 0]
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def repeated_share(tokens: Sequence[int], run: int = 4) -> float:
    """Share of the tokens that end a run of `run` tokens which came before in the same text."""
    seen: set[tuple[int, ...]] = set()
    again = 0
    for end in range(run, len(tokens) + 1):
        piece = tuple(tokens[end - run : end])
        again += piece in seen
        seen.add(piece)
    return again / len(tokens) if tokens else 0.0


def table(figures: Figures, results: Sequence[PromptResult], rows: int = 12) -> str:
    """What the terminal shows: the prompts with the least and the most acceptance, the slots, the totals."""
    ranked = sorted(
        (result for result in results if result.tau is not None), key=lambda result: -(result.tau or 0.0)
    )
    shown = ranked if len(ranked) <= rows else [*ranked[: rows // 2], *ranked[-(rows - rows // 2) :]]
    header = ("prompt", "tokens", "new", "passes", "τ", "text")
    body = [
        (
            _short(r.origin),
            f"{r.prompt_tokens}",
            f"{r.new_tokens}",
            f"{r.passes}",
            f"{r.tau:.2f}",
            r.lossless or "sampled",
        )
        for r in shown
    ]
    if len(shown) < len(ranked):
        body.insert(rows // 2, ("...", "", "", "", "", ""))
    slots = " ".join(f"{share:6.1%}" for share in figures.slot_reached)
    right = " ".join("     -" if share is None else f"{share:6.1%}" for share in figures.slot_right)
    names = " ".join(f"{k:>6}" for k in range(1, len(figures.slot_reached) + 1))
    lines = [
        *_aligned([header, *body]),
        "",
        f"slot                    {names}",
        f"right up to it          {slots}",
        f"right when all before   {right}",
        "",
        f"acceptance length τ     {figures.tau:.3f}  (95%: {figures.tau_low:.3f} to {figures.tau_high:.3f}; "
        f"mean of prompts {figures.tau_by_prompt:.3f}; {figures.cycles:,} cycles of {figures.prompts} "
        "prompts)",
        f"drafts accepted         {figures.acceptance_rate:.1%}",
        f"tokens per target pass  {figures.tokens_per_pass:.2f}",
        _speed(figures),
        f"repetition              {figures.repeated:.1%} of the tokens end a run of four that their answer "
        "had before",
        _losslessness(figures),
    ]
    return "\n".join(lines) + "\n"


def _speed(figures: Figures) -> str:
    if figures.speed_up is None or figures.plain_tokens_per_second is None:
        return f"speed                   {figures.tokens_per_second:,.1f} tok/s"
    return (
        f"speed-up                {figures.speed_up:.2f}x  ({figures.plain_tokens_per_second:,.1f} -> "
        f"{figures.tokens_per_second:,.1f} tok/s after the prompt, on this machine, in this run)"
    )


def _losslessness(figures: Figures) -> str:
    if not figures.checked:
        return "lossless                not checked: the text was sampled"
    text = (
        f"lossless                {figures.same} of {figures.prompts} prompts give the target's own text, "
        "token for token"
    )
    if figures.ties:
        text += f"; {figures.ties} part at a tie of the target's two best tokens"
    if figures.differ:
        text += f"; {figures.differ} DIFFER"
    return text


def _short(origin: str, width: int = 34) -> str:
    return origin if len(origin) <= width else "..." + origin[-(width - 3) :]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column in (0, len(row) - 1) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
