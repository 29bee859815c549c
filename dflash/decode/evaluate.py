"""Evaluation of a drafter: every prompt decoded by the target alone and with the drafter's help, texts and
clocks compared."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash.data.progress import Progress
from dflash.decode.between import Between, Modes, chosen_share, decoded_shares, shares
from dflash.decode.figures import DIFFERS, SAME, TIE, Figures, PromptResult, repeated_share
from dflash.decode.generate import GREEDY, Decoded, decode_plainly, speculate
from dflash.decode.picture import plot
from dflash.decode.prompts import EvalPrompt
from dflash.decode.replay import Replayed, replay
from dflash.decode.sampling import Sampler
from dflash.decode.target_state import TargetState
from dflash.models.drafter import Drafter
from dflash.models.target import Target
from steptime.files import atomic_text

SCHEMA = "dflash-eval/1"
_TIE_PASSES = 8  # tokens looked at in one pass when the target's own agreement is measured


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[EvalPrompt],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampler: Sampler = GREEDY,
    batch: int = 1,
) -> list[PromptResult]:
    """Decode every prompt; greedy text is also decoded plainly, for the comparison and for the speed-up.

    Which of the two goes first alternates, so that a machine that slows down harms neither. A first batch is
    decoded beforehand and thrown away.

    Args:
        batch: rows decoded together. Clocks are shared out evenly over a batch's rows.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": stop_ids, "sampler": sampler}
    results: list[PromptResult] = []
    warm = [list(prompt.ids) for prompt in prompts[:batch]]
    speculate(target, drafter, warm, **options | {"max_new_tokens": min(max_new_tokens, 8)})
    decode_plainly(target, warm, **options | {"max_new_tokens": min(max_new_tokens, 8)})
    with Progress("Decoding", len(prompts), "prompts") as progress:
        for number, start in enumerate(range(0, len(prompts), batch)):
            part = prompts[start : start + batch]
            ids = [list(prompt.ids) for prompt in part]
            plain = decode_plainly(target, ids, **options) if sampler.greedy and number % 2 == 0 else None
            guessed = speculate(target, drafter, ids, **options)
            if sampler.greedy and plain is None:
                plain = decode_plainly(target, ids, **options)
            results += _compare(target, part, guessed, plain)
            progress.advance(len(part))
    return results


def _compare(
    target: Target, prompts: Sequence[EvalPrompt], guessed: Decoded, plain: Decoded | None
) -> list[PromptResult]:
    results = []
    for row, (prompt, generation) in enumerate(zip(prompts, guessed.rows, strict=True)):
        lossless, parted = None, None
        if plain is not None:
            own = plain.rows[row].tokens
            parted = first_difference(generation.tokens, own)
            lossless = SAME if parted is None else DIFFERS
            if parted is not None and parted < min(len(own), len(generation.tokens)):
                prefix = [*prompt.ids, *own[:parted]]
                lossless = TIE if is_tie(target, prefix, own[parted], generation.tokens[parted]) else DIFFERS
        results.append(
            PromptResult(
                origin=prompt.origin,
                prompt_tokens=len(prompt.ids),
                new_tokens=len(generation.tokens),
                tokens=tuple(generation.tokens),
                ended=generation.ended,
                cycles=tuple(generation.cycles),
                passes=generation.passes,
                lossless=lossless,
                parted_at=parted,
                repeated=repeated_share(generation.tokens),
                speculative_s=guessed.decode_s / len(prompts),
                plain_s=None if plain is None else plain.decode_s / len(prompts),
            )
        )
    return results


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """First place where two texts differ, the end of the shorter one included; None when they are equal."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return None if len(one) == len(other) else min(len(one), len(other))


@torch.no_grad()
def is_tie(target: Target, prefix: Sequence[int], one: int, other: int) -> bool:
    """Whether the target itself cannot tell which of two tokens comes next.

    A pass over several tokens and a pass over one round differently, in bfloat16 by much. The logits after
    `prefix` are computed in one pass over everything and in a pass over the last few tokens; where the two
    tokens' logits are no further apart than those passes disagree, either is the target's own."""
    whole = TargetState(target, [prefix]).prefill().logits[0, -1].float()
    cut = max(1, len(prefix) - _TIE_PASSES)
    if cut == len(prefix):
        return False
    state = TargetState(target, [prefix[:cut]])
    state.prefill()
    last = torch.tensor([list(prefix[cut:])], device=target.device.torch)
    looked = state.look(last).logits[0, -1].float()
    disagreement = (whole - looked).abs().max()
    gap = (whole[one] - whole[other]).abs()
    best = whole.max() - torch.minimum(whole[one], whole[other])
    return bool(torch.maximum(gap, best) <= 4.0 * disagreement)


def compare(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[EvalPrompt],
    results: Sequence[PromptResult],
    figures: Figures,
    modes: Modes | None = None,
    logged_tau: float | None = None,
) -> Between:
    """What training says of the data's answers and of the target's own, beside what decoding accepted.

    Args:
        prompts, results: in the same order; the results hold the target's own answers.
        modes: who thinks, when it is known.
        logged_tau: what training logged in its last steps, when it is known.
    """
    data, own, places = [], [], []
    with Progress("Comparing with training", len(prompts), "prompts") as progress:
        for prompt, result in zip(prompts, results, strict=True):
            if prompt.data_ids:
                data.append(replay(target, drafter, prompt.data_ids, prompt.data_mask))
            text = [*prompt.ids, *result.tokens]
            mask = [False] * len(prompt.ids) + [True] * len(result.tokens)
            own.append(replay(target, drafter, text, mask))
            places.append(_at(own[-1], _drafted_at(prompt, result)))
            progress.advance()
    return Between(
        data=shares(data),
        own=shares(own),
        same_places=shares(places),
        decoded=decoded_shares(figures),
        chosen=chosen_share(data),
        modes=modes or Modes(),
        logged_tau=logged_tau,
    )


def _drafted_at(prompt: EvalPrompt, result: PromptResult) -> list[int]:
    """The anchors of the cycles of one prompt."""
    committed = [0, *itertools.accumulate(cycle.tokens for cycle in result.cycles)]
    return [len(prompt.ids) + count for count in committed[: len(result.cycles)]]


def _at(replayed: Replayed, anchors: Sequence[int]) -> Replayed:
    """The blocks at these anchors only."""
    chosen = np.isin(replayed.anchors, anchors)
    return Replayed(
        replayed.anchors[chosen], replayed.right[chosen], replayed.judged[chosen], replayed.chosen[:0]
    )


def to_json(
    figures: Figures,
    results: Sequence[PromptResult],
    about: dict[str, Any],
    between: Between | None = None,
) -> dict[str, Any]:
    """All of an evaluation."""
    rows = [
        {
            "origin": result.origin,
            "prompt_tokens": result.prompt_tokens,
            "new_tokens": result.new_tokens,
            "ended": result.ended,
            "tau": result.tau,
            "passes": result.passes,
            "cycles": [cycle.tokens for cycle in result.cycles],
            "lossless": result.lossless,
            "parted_at": result.parted_at,
            "repeated": round(result.repeated, 4),
            "speculative_s": round(result.speculative_s, 6),
            "plain_s": None if result.plain_s is None else round(result.plain_s, 6),
        }
        for result in results
    ]
    beside = {} if between is None else {"between": between.to_json()}
    return {"schema": SCHEMA, **about, "figures": figures.to_json(), **beside, "prompts": rows}


def write(
    out: Path,
    figures: Figures,
    results: Sequence[PromptResult],
    about: dict[str, Any],
    between: Between | None = None,
) -> list[Path]:
    """`eval.json`, and `slots.svg` where matplotlib is installed. Returns what was written."""
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "eval.json"]
    with atomic_text(written[0]) as sink:
        json.dump(to_json(figures, results, about, between), sink, indent=1)
    if plot(out / "slots.svg", figures, str(about.get("name", "")), between):
        written.append(out / "slots.svg")
    return written
