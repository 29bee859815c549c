"""Tokenised samples as a few flat arrays, in memory or mapped from disk, however many samples there are."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from dflash.data.anchors import AnchorCounts, count_anchors
from dflash.data.batch import Sample

LISTED = 1000
"""Lines left out that are named; the rest are only counted."""
_RUN_TOKENS = 1 << 22
"""Tokens looked at in one go, so that no temporary array is as long as the data set."""


class MadeWhenAsked(Sequence[Sample]):
    """Samples that are made when they are asked for; a subclass makes one in `_at`."""

    @abc.abstractmethod
    def _at(self, index: int) -> Sample:
        """The sample at an index from 0, which is within the length."""

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self._at(place) for place in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._at(index)


class FlatSamples(MadeWhenAsked):
    """Samples as views into flat arrays.

    Args:
        input_ids: int32 `[tokens]`, all samples one after the other.
        loss_mask: bool `[tokens]`.
        offsets: int64 `[samples + 1]`.
        files, places: the file of each sample (index into `files` by `places[:, 0]`) and its line (`places[:,
            1]`).
    """

    def __init__(
        self,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        offsets: np.ndarray,
        files: tuple[str, ...],
        places: np.ndarray,
    ) -> None:
        self.input_ids = input_ids
        self.loss_mask = loss_mask
        self.offsets = offsets
        self.files = files
        self.places = places

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def _at(self, index: int) -> Sample:
        cut = slice(self.offsets[index], self.offsets[index + 1])
        file, line = self.places[index]
        return Sample(self.input_ids[cut], self.loss_mask[cut], f"{self.files[file]}:{line}")

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


class FlatBuilder:
    """Collects samples into flat arrays; memory grows by the tokens themselves."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._places: list[tuple[int, int]] = []
        self._files: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, ids: np.ndarray, mask: np.ndarray, file: str, line: int) -> None:
        self._ids.append(np.asarray(ids, np.int32))
        self._masks.append(np.asarray(mask, bool))
        self._places.append((self._files.setdefault(file, len(self._files)), line))

    def build(self) -> FlatSamples:
        offsets = np.zeros(len(self._ids) + 1, np.int64)
        np.cumsum([len(ids) for ids in self._ids], out=offsets[1:])
        return FlatSamples(
            np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32),
            np.concatenate(self._masks) if self._masks else np.zeros(0, bool),
            offsets,
            tuple(self._files),
            np.asarray(self._places, np.int64).reshape(-1, 2),
        )


@dataclass
class Tally:
    """What became of the lines that are no sample as they are.

    Attributes:
        cut: samples that were longer than max_length.
        left_out: lines that gave no sample.
        dropped: those of them that had no supervised pair left within max_length.
        skipped: (origin, reason) of the first thousand left out, so that memory stays bounded.
    """

    cut: int = 0
    left_out: int = 0
    dropped: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def leave_out(self, origin: str, reason: str) -> None:
        """Count a line, and name it if it is among the first."""
        self.left_out += 1
        if len(self.skipped) < LISTED:
            self.skipped.append((origin, reason))

    def add(self, later: Tally) -> None:
        """Count what a later part has."""
        self.cut += later.cut
        self.left_out += later.left_out
        self.dropped += later.dropped
        self.skipped += later.skipped[: max(0, LISTED - len(self.skipped))]


@dataclass(frozen=True)
class Dataset:
    """What training reads.

    Attributes:
        samples: tokenised conversations; each has a supervised pair (mask[a] and mask[a+1]) in one document.
        tokenizer: what made the ids; None for token ids that came ready.
        tally: what was cut and left out.
    """

    samples: Sequence[Sample]
    tokenizer: Any = None
    tally: Tally = field(default_factory=Tally)

    @property
    def skipped(self) -> list[tuple[str, str]]:
        """(origin, reason) of lines left out, the first thousand."""
        return self.tally.skipped

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[samples]`, tokens."""
        if isinstance(self.samples, FlatSamples | PackedSamples):
            return self.samples.lengths
        return np.fromiter((len(sample.input_ids) for sample in self.samples), np.int64, len(self.samples))

    def anchor_counts(self, anchors: int) -> AnchorCounts:
        """How many blocks an epoch has when every conversation gives at most `anchors`."""
        places = blocks = fullest = 0
        for run in self._runs():
            counts = count_anchors(run.mask, run.offsets, anchors, run.documents)
            places, blocks = places + counts.places, blocks + counts.blocks
            fullest = max(fullest, counts.fullest_row)
        return AnchorCounts(places, blocks, fullest)

    def count_token(self, token: int) -> int:
        """How often a token id stands in the data."""
        return sum(int(np.count_nonzero(run.ids == token)) for run in self._runs())

    def count_supervised(self) -> int:
        """Tokens that the loss covers."""
        return sum(int(np.count_nonzero(run.mask)) for run in self._runs())

    def _runs(self) -> Iterator[_Run]:
        """The samples in order, some million tokens at a time."""
        ends = np.cumsum(self.lengths)
        first = 0
        while first < len(ends):
            begin = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, begin + _RUN_TOKENS, side="right")))
            offsets = np.concatenate([[0], ends[first:last] - begin])
            if isinstance(self.samples, FlatSamples):
                flat = self.samples
                cut = slice(int(flat.offsets[first]), int(flat.offsets[last]))
                yield _Run(flat.input_ids[cut], flat.loss_mask[cut], offsets)
            else:
                yield _Run.of(self.samples[first:last], offsets)
            first = last

    def summary(self) -> str:
        """One line for people: how much there is and what was left out."""
        lengths = self.lengths
        text = f"{len(self.samples):,} samples, {int(lengths.sum()):,} tokens"
        tally = self.tally
        if tally.cut:
            text += f", {tally.cut:,} cut to the longest length"
        if tally.dropped:
            text += f", {tally.dropped:,} dropped (no supervised pair left)"
        if tally.left_out > tally.dropped:
            text += f", {tally.left_out - tally.dropped:,} bad lines skipped"
        return text


@dataclass(frozen=True)
class _Run:
    """Neighbouring samples one after the other; `documents` of each token when they are packed."""

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    documents: np.ndarray | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], offsets: np.ndarray) -> _Run:
        documents = [sample.document_ids for sample in samples if sample.document_ids is not None]
        return cls(
            np.concatenate([sample.input_ids for sample in samples]),
            np.concatenate([sample.loss_mask for sample in samples]),
            offsets,
            np.concatenate(documents) if documents else None,
        )


class PackedSamples(MadeWhenAsked):
    """Rows of several samples each. A row is put together when it is asked for; what is held is which samples
    make it.

    Args:
        samples: the conversations.
        members: int64 `[samples]`, their indices, row after row.
        starts: int64 `[rows + 1]`, where each row begins in `members`.
        lengths: int64 `[rows]`, tokens.
    """

    def __init__(
        self, samples: Sequence[Sample], members: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> None:
        self.samples, self.members, self.starts, self.lengths = samples, members, starts, lengths

    def __len__(self) -> int:
        return len(self.starts) - 1

    def _at(self, index: int) -> Sample:
        cut = slice(self.starts[index], self.starts[index + 1])
        rows = [self.samples[int(member)] for member in self.members[cut]]
        sizes = [len(row.input_ids) for row in rows]
        return Sample(
            np.concatenate([row.input_ids for row in rows]),
            np.concatenate([row.loss_mask for row in rows]),
            rows[0].origin,
            np.repeat(np.arange(len(rows), dtype=np.int32), sizes),
        )


def pack(samples: Sequence[Sample], lengths: np.ndarray, max_length: int) -> PackedSamples:
    """Put several short samples into rows of at most `max_length` tokens, best-fit over the longest first.

    Row order and content depend only on the lengths. Every row has `document_ids`, ascending from 0; `origin`
    is the first document's. Rows are in order of their first samples. Samples must be no longer than
    `max_length`.

    Args:
        lengths: int `[samples]`, tokens of each."""
    sizes = np.asarray(lengths, np.int64)
    row_of = np.empty(len(sizes), np.int64)
    used: list[int] = []
    room: dict[int, list[int]] = {}  # free tokens -> rows with exactly so many
    levels = np.zeros(max_length + 1, bool)
    for index in np.argsort(-sizes, kind="stable").tolist():
        length = int(sizes[index])
        free = length + int(levels[length:].argmax())
        if levels[free]:  # the row with the least room that is enough
            row = room[free].pop()
            levels[free] = bool(room[free])
        else:
            free, row = max_length, len(used)
            used.append(0)
        row_of[index] = row
        used[row] += length
        room.setdefault(free - length, []).append(row)
        levels[free - length] = True
    firsts = np.full(len(used), len(sizes))
    np.minimum.at(firsts, row_of, np.arange(len(sizes)))
    members = np.lexsort((np.arange(len(sizes)), firsts[row_of]))
    order = np.argsort(firsts, kind="stable")
    counts = np.bincount(row_of, minlength=len(used))[order]
    starts = np.concatenate([[0], np.cumsum(counts)])
    return PackedSamples(samples, members, starts, np.asarray(used, np.int64)[order])


def has_pair(mask: np.ndarray) -> bool:
    """Whether some position and the next one are both supervised: the least that a block can be made of."""
    return bool(np.any(mask[:-1] & mask[1:]))
