"""Rendered conversations -> token ids and the mask of the assistant's tokens, many at a time."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np

from dflash.data.template import Rendered


class Encoder:
    """Tokenises and masks.

    A mask needs to know which characters each token stands for. In byte-level vocabularies a token's own
    length says it, which is much cheaper than the tokenizer's offsets; those serve all other vocabularies,
    and any text whose bytes do not add up.

    Args:
        tokenizer: a fast Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._bytes = token_bytes(self._backend)

    def __call__(self, rendered: Sequence[Rendered]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each text int32 ids `[tokens]` and bool mask `[tokens]`.

        The text already holds the special tokens that the template wants, so none are added.
        """
        texts = [item.text for item in rendered]
        if self._bytes is None:
            return self._by_offsets(rendered, texts)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        results = []
        for item, encoding in zip(rendered, encodings, strict=True):
            ids = np.array(encoding.ids, np.int32)
            ends = np.cumsum(self._bytes[ids])
            plain = item.text.isascii()
            size = len(item.text) if plain else len(item.text.encode())
            if not len(ids) or ends[-1] != size or not (plain or unicodedata.is_normalized("NFC", item.text)):
                results += self._by_offsets([item], [item.text])
                continue
            spans = (
                item.spans
                if plain
                else tuple((_byte(item.text, start), _byte(item.text, end)) for start, end in item.spans)
            )
            results.append((ids, token_mask(ends - self._bytes[ids], spans)))
        return results

    def _by_offsets(
        self, rendered: Sequence[Rendered], texts: list[str]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        results = []
        for item, encoding in zip(
            rendered, self._backend.encode_batch(texts, add_special_tokens=False), strict=True
        ):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            results.append((np.array(encoding.ids, np.int32), token_mask(offsets[:, 0], item.spans)))
        return results


def token_mask(starts: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Which tokens start in a span.

    A token that begins in the prompt and ends in the answer is not the assistant's: it never generates such a
    one.

    Args:
        starts: int64 `[tokens]`, ascending.
        spans: `[start, end)`, ascending, disjoint.

    Returns:
        bool `[tokens]`.
    """
    mask = np.zeros(len(starts), bool)
    for first, last in np.searchsorted(starts, np.array(spans, np.int64)):
        mask[first:last] = True
    return mask


def token_bytes(backend: Any) -> np.ndarray | None:
    """Bytes that each token stands for, int64 `[vocabulary]`; None when the tokenizer is not byte-level."""
    parts = json.loads(backend.to_str())
    normalizer = parts.get("normalizer")
    decoder = parts.get("decoder") or {}
    prefixes = '"add_prefix_space":true' in json.dumps(parts.get("pre_tokenizer"), separators=(",", ":"))
    if decoder.get("type") != "ByteLevel" or prefixes or (normalizer and normalizer.get("type") != "NFC"):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    added = backend.get_added_tokens_decoder()
    if any(token.lstrip or token.rstrip for token in added.values()):
        return None
    sizes = np.zeros(max(vocabulary.values()) + 1, np.int64)
    for text, index in vocabulary.items():
        sizes[index] = (
            len(text.encode()) if index in added else len(text)
        )  # one character of the alphabet for each byte
    return sizes


def _byte(text: str, character: int) -> int:
    return len(text[:character].encode())
