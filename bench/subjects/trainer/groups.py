"""A plan that repeats the batches of one optimizer step until another's are asked for."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from dflash.data.batch import BatchSpec
from dflash.data.plan import Plan


class GroupPlan:
    """The first `groups` steps of another plan, anchors and all; the index grows.

    It goes round the cycle until `turn` is called, and then repeats one group of batches.

    Args:
        groups: steps in the cycle.
        per_step: batches of a step, all drafters and accumulation together.
    """

    def __init__(self, inner: Plan, groups: int, per_step: int) -> None:
        self.groups, self.per_step = groups, per_step
        self._specs = tuple(inner.spec(index) for index in range(groups * per_step))
        self._asked = 0
        self._from = [0]
        self._group: list[int | None] = [None]

    def spec(self, index: int) -> BatchSpec:
        """The batch at `index`; the batches built so far are those that were asked for."""
        if index >= self._asked:
            self._asked = index + 1
        step, place = divmod(index, self.per_step)
        return replace(self._specs[self.group_of(step) * self.per_step + place], index=index)

    def group_of(self, step: int) -> int:
        """The group of an optimizer step."""
        group = self._group[bisect_right(self._from, step) - 1]
        return step % self.groups if group is None else group

    def turn(self, group: int | None) -> int:
        """Repeat `group` (None: go round the cycle) in all batches not built yet, from a whole step on. Call
        while nothing is being built.

        Returns the first step of it: when every step before is done, all stages hold nothing else.
        """
        if self._group[-1] != group:
            first = -(-self._asked // self.per_step)
            if first == self._from[-1]:
                self._group[-1] = group
            else:
                self._group.append(group)
                self._from.append(first)
        return self._from[-1]
