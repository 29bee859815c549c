"""Which of the waiting batches a drafter gets in mixed order: all drafters of a step get equal work."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence


class EvenDraws:
    """Remembers what each drafter has drawn in its step. Used under the queue's lock.

    Gradients are summed at the end of a step, so a step takes as long as the drafter with the most work in
    it. The first drafter at a draw gets a random one of the lengths of which there is one for every drafter
    (of any, where there is none), so that lengths mix from draw to draw; the others at that draw get what
    brings their work in this step nearest to the first one's.

    Args:
        per_step: batches that a drafter draws for one optimizer step.
    """

    def __init__(self, drafters: int, per_step: int, seed: int) -> None:
        self._per_step = per_step
        self._drawn, self._load = [0] * drafters, [0] * drafters
        self._first: dict[int, int] = {}
        self._random = random.Random(seed)

    def choose(self, drafter: int, sizes: Sequence[int], *, overdue: bool = False) -> int:
        """Place in `sizes` of the batch that this drafter draws now.

        Args:
            sizes: padded tokens of each waiting batch, the one that waits longest first.
            overdue: that one has waited long enough for a length that all drafters can have.
        """
        draw, load = self._drawn[drafter], self._load[drafter]
        if draw not in self._first:
            place = 0 if overdue else self._mixed(sizes)
            self._first[draw] = load + sizes[place]
        else:
            wanted = self._first[draw] - load
            place = min(range(len(sizes)), key=lambda one: abs(sizes[one] - wanted))
        self._drawn[drafter] = draw + 1
        self._load[drafter] = 0 if (draw + 1) % self._per_step == 0 else load + sizes[place]
        if min(self._drawn) > draw:
            del self._first[draw]
        return place

    def _mixed(self, sizes: Sequence[int]) -> int:
        counts = Counter(sizes)
        enough = [size for size in sizes if counts[size] >= len(self._drawn)]
        return sizes.index(self._random.choice(enough or sizes))
