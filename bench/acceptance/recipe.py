"""What a run of the acceptance bench consists of, and the data it is made from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.acceptance.language_model import Training
from dflash.config import Config
from dflash.data.batch import Sample
from dflash.data.conversations import load_samples
from dflash.data.corpus import ensure_stdlib
from dflash.data.prepare import Fields, convert
from dflash.data.tokenizer import read_tokenizer, train_tokenizer
from steptime.errors import UserError


@dataclass(frozen=True)
class Recipe:
    """Sizes of a run.

    Attributes:
        target: how the target is trained.
        answers: training conversations whose answers are rewritten by the target; 0 keeps the answers of the
            file.
        answer_tokens: longest rewritten answer, and the longest generated in evaluation.
        steps: of the drafter.
        heldout: prompts evaluated after training; `before`: prompts for the untrained drafter.
        goal: acceptance length to reach.
    """

    target: Training = field(default_factory=lambda: Training(tokens=1_100_000))
    answers: int = 2500
    answer_tokens: int = 96
    steps: int = 1200
    heldout: int = 32
    before: int = 8
    goal: float = 2.3

    def quick(self) -> Recipe:
        """A minute's worth: every stage, no claim to the goal."""
        return replace(
            self,
            target=replace(self.target, tokens=20_000),
            answers=48,
            answer_tokens=32,
            steps=30,
            heldout=4,
            before=2,
            goal=1.0,
        )


@dataclass(frozen=True)
class Corpus:
    """Conversations to train on and to evaluate on, and the tokenizer for both.

    Attributes:
        train_file, heldout_file: chat JSONL.
        tokenizer: folder.
        train, heldout: tokenised.
    """

    train_file: Path
    heldout_file: Path
    tokenizer: Path
    train: list[Sample]
    heldout: list[Sample]


def build_corpus(
    config: Config, out: Path, data: Path | None, heldout: Path | None, fields: Fields, length: int
) -> Corpus:
    """The standard library's conversations, or a user's two files with a tokenizer trained on the first.

    Raises:
        UserError: files that cannot be read.
    """
    if (data is None) != (heldout is None):
        raise UserError("--data and --heldout go together: one file to train on, the other to evaluate on")
    if data is None or heldout is None:
        folder = ensure_stdlib(config.data.cache, config.target.tiny.vocab_size)
        files = (folder / "train.jsonl", folder / "heldout.jsonl")
        tokenizer = folder / "tokenizer"
    else:
        files = (
            _as_chat(data, out / "train.jsonl", fields),
            _as_chat(heldout, out / "heldout.jsonl", fields),
        )
        tokenizer = out / "tokenizer"
        if not (tokenizer / "tokenizer.json").exists():
            train_tokenizer(_texts(files[0]), config.target.tiny.vocab_size).save_pretrained(tokenizer)
    read = read_tokenizer(tokenizer)
    settings = config.data.model_copy(
        update={"max_length": length, "buckets": (length,), "path": str(files[0])}
    )
    train = list(load_samples(settings, read).samples)
    held = list(load_samples(settings.model_copy(update={"path": str(files[1])}), read, limit=64).samples)
    return Corpus(files[0], files[1], tokenizer, train, held)


def _as_chat(file: Path, out: Path, fields: Fields) -> Path:
    """The file itself when it holds conversations, else converted from a question's and an answer's field."""
    try:
        with file.open(encoding="utf-8") as lines:
            first: Any = json.loads(next(lines))
    except (OSError, ValueError, StopIteration):
        first = None
    if isinstance(first, dict) and ("conversations" in first or "messages" in first):
        return file
    if not out.exists():
        convert(file, fields, out)
    return out


def _texts(file: Path) -> list[str]:
    texts = []
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            texts += [
                str(turn.get("content") or turn.get("value") or "")
                for turn in row.get("conversations") or row["messages"]
            ]
    return texts


def drafter_settings(target: Path, data: Path, steps: int, mask_token_id: int) -> list[str]:
    """What a run fills into the config file. The mask is named, since files of token ids come without a
    tokenizer."""
    return [
        f"target.model={target}",
        f"data.path={data}",
        f"train.steps={steps}",
        f"drafter.mask_token_id={mask_token_id}",
    ]
