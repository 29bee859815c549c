"""Tokenised samples, flat in memory: three arrays, however many samples there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np

from dflash.data.anchors import AnchorCounts, count_anchors
from dflash.data.batch import Sample


class FlatSamples(Sequence[Sample]):
    """Samples as views into flat arrays.

    Args:
        input_ids: int32 `[tokens]`, all samples one after the other.
        loss_mask: bool `[tokens]`.
        offsets: int64 `[samples + 1]`.
        files, places: the file of each sample (index into `files` by `places[:, 0]`) and its line (`places[:,
            1]`).
        document_ids: int32 `[tokens]` when samples are packed rows.
    """

    def __init__(
        self,
        input_ids: np.ndarray,
        loss_mask: np.ndarray,
        offsets: np.ndarray,
        files: tuple[str, ...],
        places: np.ndarray,
        document_ids: np.ndarray | None = None,
    ) -> None:
        self.input_ids = input_ids
        self.loss_mask = loss_mask
        self.offsets = offsets
        self.files = files
        self.places = places
        self.document_ids = document_ids

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        if not 0 <= index < len(self):
            raise IndexError(index)
        cut = slice(self.offsets[index], self.offsets[index + 1])
        file, line = self.places[index]
        documents = None if self.document_ids is None else self.document_ids[cut]
        return Sample(self.input_ids[cut], self.loss_mask[cut], f"{self.files[file]}:{line}", documents)

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)


class FlatBuilder:
    """Collects samples into flat arrays; memory grows by the tokens themselves."""

    def __init__(self) -> None:
        self._ids: list[np.ndarray] = []
        self._masks: list[np.ndarray] = []
        self._documents: list[np.ndarray] = []
        self._places: list[tuple[int, int]] = []
        self._files: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(
        self, ids: np.ndarray, mask: np.ndarray, file: str, line: int, documents: np.ndarray | None = None
    ) -> None:
        self._ids.append(np.asarray(ids, np.int32))
        self._masks.append(np.asarray(mask, bool))
        self._places.append((self._files.setdefault(file, len(self._files)), line))
        if documents is not None:
            self._documents.append(np.asarray(documents, np.int32))

    def build(self) -> FlatSamples:
        offsets = np.zeros(len(self._ids) + 1, np.int64)
        np.cumsum([len(ids) for ids in self._ids], out=offsets[1:])
        return FlatSamples(
            np.concatenate(self._ids) if self._ids else np.zeros(0, np.int32),
            np.concatenate(self._masks) if self._masks else np.zeros(0, bool),
            offsets,
            tuple(self._files),
            np.asarray(self._places, np.int64).reshape(-1, 2),
            np.concatenate(self._documents) if self._documents else None,
        )


@dataclass(frozen=True)
class Dataset:
    """What training reads.

    Attributes:
        samples: tokenised conversations; each has a supervised pair (mask[a] and mask[a+1]) in one document.
        skipped: (origin, reason) of lines left out.
        tokenizer: what made the ids; None for token ids that came ready.
        cut: samples that were longer than max_length.
        dropped: how many of `skipped` had no supervised pair left within max_length.
    """

    samples: Sequence[Sample]
    skipped: list[tuple[str, str]] = field(default_factory=list)
    tokenizer: Any = None
    cut: int = 0
    dropped: int = 0

    @property
    def lengths(self) -> np.ndarray:
        """int64 `[samples]`, tokens."""
        if isinstance(self.samples, FlatSamples):
            return self.samples.lengths
        return np.fromiter((len(sample.input_ids) for sample in self.samples), np.int64, len(self.samples))

    def anchor_counts(self, anchors: int) -> AnchorCounts:
        """How many blocks an epoch has when every conversation gives at most `anchors`."""
        flat = self.samples
        if not isinstance(flat, FlatSamples):
            builder = FlatBuilder()
            for sample in flat:
                builder.add(sample.input_ids, sample.loss_mask, "", 0, sample.document_ids)
            flat = builder.build()
        return count_anchors(flat.loss_mask, flat.offsets, anchors, flat.document_ids)

    def count_token(self, token: int) -> int:
        """How often a token id stands in the data."""
        if isinstance(self.samples, FlatSamples):
            return int(np.count_nonzero(self.samples.input_ids == token))
        return sum(int(np.count_nonzero(sample.input_ids == token)) for sample in self.samples)

    def summary(self) -> str:
        """One line for people: how much there is and what was left out."""
        lengths = self.lengths
        text = f"{len(self.samples):,} samples, {int(lengths.sum()):,} tokens"
        if self.cut:
            text += f", {self.cut:,} cut to the longest length"
        if self.dropped:
            text += f", {self.dropped:,} dropped (no supervised pair left)"
        if len(self.skipped) > self.dropped:
            text += f", {len(self.skipped) - self.dropped:,} bad lines skipped"
        return text


def pack(samples: Iterable[Sample], max_length: int) -> FlatSamples:
    """Put several short samples into rows of at most `max_length` tokens, first-fit over the longest first.

    Row order and content depend only on the samples. Every row has `document_ids`, ascending from 0;
    `origin` is the first document's. Samples must be no longer than `max_length`."""
    samples = list(samples)
    order = sorted(range(len(samples)), key=lambda index: (-len(samples[index].input_ids), index))
    rows: list[list[int]] = []
    room: dict[int, list[int]] = {}  # free tokens -> rows with exactly so many
    levels = np.zeros(max_length + 1, bool)
    for index in order:
        length = len(samples[index].input_ids)
        fits = np.flatnonzero(levels[length:])
        if len(fits):  # best fit: the row with the least room that is enough
            free = int(fits[0]) + length
            row = room[free].pop()
            levels[free] = bool(room[free])
        else:
            free, row = max_length, len(rows)
            rows.append([])
        rows[row].append(index)
        room.setdefault(free - length, []).append(row)
        levels[free - length] = True
    builder = FlatBuilder()
    for places in sorted(rows, key=min):
        members = [samples[index] for index in sorted(places)]
        documents = np.repeat(
            np.arange(len(members), dtype=np.int32), [len(sample.input_ids) for sample in members]
        )
        file, _, line = members[0].origin.rpartition(":")
        ids = np.concatenate([sample.input_ids for sample in members])
        builder.add(ids, np.concatenate([sample.loss_mask for sample in members]), file, int(line), documents)
    return builder.build()


def has_pair(mask: np.ndarray) -> bool:
    """Whether some position and the next one are both supervised: the least that a block can be made of."""
    return bool(np.any(mask[:-1] & mask[1:]))
