"""Which samples make which batch, for ever and without state: place i of the plan is a pure function of the
seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dflash.data.batch import BatchSpec
from steptime.errors import UserError

_SEED_BITS = 0x7FFF_FFFF_FFFF_FFFF


class Plan(Protocol):
    """An endless, deterministic order of batches."""

    def spec(self, index: int) -> BatchSpec:
        """The batch at place `index` >= 0. Pure: equal plans and places give equal specs, in any order of
        asking."""
        ...


@dataclass(frozen=True, slots=True)
class _Epoch:
    number: int
    sample_ids: np.ndarray  # int64 [batches, batch_size]
    buckets: np.ndarray  # int64 [batches]


class EpochPlan:
    """Every sample once per epoch, in batches of constant size and low padding, in a fresh order every epoch.

    A sample goes to the shortest bucket that holds it. What is left of a bucket when it has been cut into
    batches moves up to the next longer bucket, so at most one batch of an epoch, a longest one, is not full;
    it is filled up with samples from the start of the epoch's order. So `batches_per_epoch` is ceil(samples /
    batch_size), at most batch_size-1 places of an epoch hold a sample for the second time (more only when
    there are fewer samples than a batch has places), and at most batch_size-1 samples of a bucket are padded
    further than they need.

    Batches of each bucket are spread evenly over the epoch, so that lengths stay mixed.

    Args:
        lengths: tokens of each sample.
        buckets: padded lengths, ascending; the last one holds the longest sample.
        batch_size: samples in a batch.
        seed: of the order and of the anchors.

    Raises:
        UserError: no samples, or a sample longer than the last bucket.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, buckets: Sequence[int], batch_size: int, seed: int
    ) -> None:
        sizes = np.asarray(lengths, np.int64)
        if not len(sizes):
            raise UserError("the data set is empty")
        if int(sizes.max()) > buckets[-1]:
            raise UserError(
                f"a sample has {int(sizes.max())} tokens, the longest of data.buckets is {buckets[-1]}"
            )
        self.batch_size = batch_size
        self.seed = seed
        self.samples = len(sizes)
        self.batches_per_epoch = -(-len(sizes) // batch_size)
        self._buckets = np.asarray(buckets, np.int64)
        self._bucket_of = np.searchsorted(self._buckets, sizes)
        self._last: _Epoch | None = None

    def spec(self, index: int) -> BatchSpec:
        number, place = divmod(index, self.batches_per_epoch)
        epoch = self._last
        if epoch is None or epoch.number != number:  # one reference is swapped in, so any thread may ask
            epoch = self._last = self._arrange(number)
        ids = tuple(epoch.sample_ids[place].tolist())
        return BatchSpec(index, anchor_seed(self.seed, index), ids, int(epoch.buckets[place]))

    def _arrange(self, number: int) -> _Epoch:
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(self.samples)
        size = self.batch_size
        rows, buckets, places = [], [], []
        rest = order[:0]
        for bucket in range(len(self._buckets)):
            members = np.concatenate([rest, order[self._bucket_of[order] == bucket]])
            count = len(members) // size
            rest = members[count * size :]
            if count:
                rows.append(members[: count * size].reshape(count, size))
                buckets.append(np.full(count, self._buckets[bucket]))
                places.append((np.arange(count) + rng.random(count)) / count)
        if len(rest):
            longest = int(self._buckets[self._bucket_of[rest].max()])
            others = order[~np.isin(order, rest)]
            rows.append(
                np.resize(np.concatenate([rest, others[self._fits(others, longest)], rest]), (1, size))
            )
            buckets.append(np.array([longest]))
            places.append(rng.random(1))
        mixed = np.argsort(np.concatenate(places), kind="stable")
        return _Epoch(number, np.concatenate(rows)[mixed], np.concatenate(buckets)[mixed])

    def _fits(self, samples: np.ndarray, bucket: int) -> np.ndarray:
        return self._buckets[self._bucket_of[samples]] <= bucket


class CyclePlan:
    """The first `length` batches of another plan over and over: the index grows, everything else repeats."""

    def __init__(self, inner: Plan, length: int) -> None:
        if length < 1:
            raise ValueError(f"a cycle of {length} batches")
        self.inner = inner
        self.length = length
        self._specs = tuple(inner.spec(index) for index in range(length))

    def spec(self, index: int) -> BatchSpec:
        return replace(self._specs[index % self.length], index=index)


def anchor_seed(seed: int, index: int) -> int:
    """A 63-bit seed for the anchors of place `index`: SplitMix64 over both, so that neighbours share
    nothing."""
    mixed = (seed * 0x9E37_79B9_7F4A_7C15 + (index + 1) * 0xD1B5_4A32_D192_ED03) & 0xFFFF_FFFF_FFFF_FFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58_476D_1CE4_E5B9) & 0xFFFF_FFFF_FFFF_FFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D0_49BB_1331_11EB) & 0xFFFF_FFFF_FFFF_FFFF
    return (mixed ^ (mixed >> 31)) & _SEED_BITS
