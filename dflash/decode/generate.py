"""Speculative decoding: the drafter guesses a block, the target checks it in one pass; the text is the
target's own.

Reference 1.5. The drafts are greedy. The target chooses its token after every slot, and drafts count while
they are what it chose: greedy output is then the target's greedy output, and sampled output has exactly the
target's distribution, since every committed token was drawn from the target's distribution after the tokens
before it.

Rows of a batch are decoded together, each with keys, values and recurrent states of its own length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dflash.decode.drafter_state import DrafterState
from dflash.decode.sampling import Sampler
from dflash.decode.target_state import TargetState, check_continues
from dflash.models.drafter import Drafter
from dflash.models.target import Target
from steptime.errors import UserError

GREEDY = Sampler()


@dataclass(frozen=True, slots=True)
class Cycle:
    """One verification.

    Attributes:
        accepted: drafts that were what the target chose, counted from slot 1.
        tried: slots that were judged: those after the end of the text were not.
        tokens: committed tokens: accepted drafts and the bonus token (no bonus after an accepted end of
            text). Between 1 and B; their mean is the acceptance length τ.
    """

    accepted: int
    tried: int
    tokens: int


@dataclass
class Generation:
    """What was generated after one prompt.

    Attributes:
        tokens: generated ids, the end-of-text id included, at most `max_new_tokens`.
        cycles: every verification; empty for plain decoding. The last may reach over `max_new_tokens`.
        passes: target passes, the prompt's included.
        ended: an end-of-text id came.
    """

    tokens: list[int] = field(default_factory=list)
    cycles: list[Cycle] = field(default_factory=list)
    passes: int = 0
    ended: bool = False


@dataclass(frozen=True)
class Decoded:
    """Generations in the order of the prompts, and how long they took together.

    Attributes:
        prefill_s: seconds for the prompts' pass.
        decode_s: seconds for all that came after.
    """

    rows: list[Generation]
    prefill_s: float
    decode_s: float


def leading_matches(drafts: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """How many leading drafts the target chose too: int64 `[rows]` from `[rows, B-1]` and `[rows, B]`."""
    return (drafts == chosen[:, :-1]).long().cumprod(dim=1).sum(dim=1)


@torch.no_grad()
def speculate(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampler: Sampler = GREEDY,
    block_size: int | None = None,
) -> Decoded:
    """Decode with the drafter's help.

    Args:
        drafter: on the target's device; best in the target's type.
        prompts: token ids, one or more rows.
        block_size: slots of a block; None is the drafter's own. A smaller one asks for less.

    Raises:
        UserError: an empty prompt, one longer than the target's context, a drafter for another target.
    """
    shape = drafter.shape
    check_pair(target, drafter)
    check_continues(target)
    check_lengths(target, prompts, max_new_tokens)
    size = block_size or shape.block_size
    if not 2 <= size <= shape.block_size:
        raise UserError(
            f"block size {size}: this drafter was trained with {shape.block_size}; at least 2 and at most "
            "that"
        )
    run = _Run(target, prompts, max_new_tokens, stop_ids, sampler)
    drafting = DrafterState(drafter, target.embedding, target.head, len(prompts))
    drafting.prefill(run.prefill(), [len(prompt) for prompt in prompts])
    run.drop_finished(drafting)
    while run.rows:
        drafts = drafting.draft(run.anchors, size)
        seen = run.state.look(torch.cat([run.anchors[:, None], drafts], dim=1))
        chosen = sampler.choose(seen.logits)
        kept = run.take(drafts, chosen)
        drafting.append(seen.features, kept)
        run.drop_finished(drafting)
    return run.result()


@torch.no_grad()
def decode_plainly(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    sampler: Sampler = GREEDY,
) -> Decoded:
    """The target alone, one token a pass: what speculation is compared with, in text and in time.

    Raises:
        UserError: an empty prompt, or one longer than the target's context.
    """
    check_lengths(target, prompts, max_new_tokens)
    run = _Run(target, prompts, max_new_tokens, stop_ids, sampler)
    run.prefill()
    run.drop_finished(None)
    while run.rows:
        chosen = sampler.choose(run.state.look(run.anchors[:, None]).logits)
        run.take_single(chosen[:, 0])
        run.drop_finished(None)
    return run.result()


def check_pair(target: Target, drafter: Drafter) -> None:
    """Refuse a drafter that was not made for a target of this shape.

    Raises:
        UserError: naming both sizes.
    """
    shape, info = drafter.shape, target.info
    for what, own, other in (
        ("hidden size", shape.hidden_size, info.hidden_size),
        ("vocabulary", shape.vocab_size, info.vocab_size),
        ("target layers", shape.target_layers, info.layers),
        ("tapped layers", list(shape.target_layer_ids), list(info.layer_ids)),
    ):
        if own != other:
            raise UserError(
                f"the drafter was made for another target: {what} {own}, target {info.model!r} has {other}"
            )


def check_lengths(target: Target, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    """Refuse prompts that do not fit the target's context together with what is to be generated.

    Raises:
        UserError: naming the prompt and both lengths.
    """
    limit = target.info.max_positions
    for number, prompt in enumerate(prompts, 1):
        if limit and len(prompt) + max_new_tokens > limit:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, with {max_new_tokens} new ones "
                f"{len(prompt) + max_new_tokens}: "
                f"longer than the context of target {target.info.model!r}, {limit}"
            )


class _Run:
    """The rows that are still being decoded, and what they have given."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop_ids: Sequence[int],
        sampler: Sampler,
    ) -> None:
        self.target, self.prompts, self.sampler = target, prompts, sampler
        self.limit, self.stops = max_new_tokens, frozenset(stop_ids)
        self.state = TargetState(target, prompts)
        self.generations = [Generation() for _ in prompts]
        self.rows = list(range(len(prompts)))
        self.anchors = torch.empty(0, dtype=torch.int64)
        self._prefill_s = 0.0
        self._started = time.perf_counter()

    def prefill(self) -> torch.Tensor:
        """Run the prompts; every row gets its first token, the first anchor. Returns the features."""
        seen = self.state.prefill()
        self.anchors = self.sampler.choose(seen.logits[:, -1:])[:, 0]
        for row, token in zip(self.rows, self.anchors.tolist(), strict=True):
            self._add(self.generations[row], [token])
        now = time.perf_counter()
        self._prefill_s, self._started = now - self._started, now
        return seen.features

    def take(self, drafts: torch.Tensor, chosen: torch.Tensor) -> list[int]:
        """Judge the drafts of a pass; returns how many of its tokens each row commits."""
        accepted = leading_matches(drafts, chosen)
        guesses, answers = drafts.tolist(), chosen.tolist()
        kept = []
        for place, (row, count) in enumerate(zip(self.rows, accepted.tolist(), strict=True)):
            generation = self.generations[row]
            tokens = [*guesses[place][:count], answers[place][count]]
            added = self._add(generation, tokens)
            # The slots after the end of the text were not judged.
            tried = min(added, len(guesses[place])) if generation.ended else len(guesses[place])
            generation.cycles.append(Cycle(min(count, added), tried, added))
            kept.append(count + 1)
        self.anchors = chosen.gather(1, accepted[:, None])[:, 0]
        self.state.commit(kept)
        return kept

    def take_single(self, chosen: torch.Tensor) -> None:
        for row, token in zip(self.rows, chosen.tolist(), strict=True):
            self._add(self.generations[row], [token])
        self.anchors = chosen
        self.state.commit([1] * len(self.rows))

    def drop_finished(self, drafting: DrafterState | None) -> None:
        """Go on with the rows that want more tokens."""
        left = [
            place
            for place, row in enumerate(self.rows)
            if not self.generations[row].ended and len(self.generations[row].tokens) < self.limit
        ]
        if len(left) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in left]
        if not left:
            return
        self.anchors = self.anchors[torch.tensor(left, device=self.anchors.device)]
        self.state.select(left)
        if drafting is not None:
            drafting.select(left)

    def result(self) -> Decoded:
        self.target.device.synchronize()
        decode_s = time.perf_counter() - self._started
        for generation in self.generations:
            generation.ended = generation.ended and len(generation.tokens) <= self.limit
            del generation.tokens[self.limit :]
        return Decoded(self.generations, self._prefill_s, decode_s)

    def _add(self, generation: Generation, tokens: list[int]) -> int:
        """Append up to the first end-of-text id; returns how many tokens that were."""
        generation.passes += 1
        for count, token in enumerate(tokens, 1):
            generation.tokens.append(token)
            if token in self.stops:
                generation.ended = True
                return count
        return len(tokens)
