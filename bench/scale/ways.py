"""Ways of making a large data set ready, each run as a process of its own; see bench.scale."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dflash.config import DataConfig
from dflash.data import conversations
from dflash.data.anchors import BlockGeometry
from dflash.data.collate import Collator
from dflash.data.corpus import ensure_stdlib
from dflash.data.dataset import Dataset, FlatBuilder, Tally
from dflash.data.plan import EpochPlan
from dflash.data.rows import RawRow
from dflash.data.samples import SampleReader
from dflash.data.tokenizer import read_tokenizer

ROWS_OF_A_SHARD = 20_000
ROWS_OF_A_GROUP = 5_000
WORDS_ASKED, WORDS_ANSWERED = (10, 60), (20, 120)
BATCHES = 200


def ready(folder: Path) -> Path:
    """The tokenizer."""
    return ensure_stdlib(folder) / "tokenizer"


def shards(folder: Path, rows: int) -> Path:
    """Parquet files of `rows` conversations, made when they are not there; always the same ones."""
    import pyarrow as pa
    from pyarrow import parquet

    out = folder / f"rows-{rows}"
    out.mkdir(parents=True, exist_ok=True)
    lines = (ensure_stdlib(folder) / "train.jsonl").read_text(encoding="utf-8").splitlines()[:3000]
    texts = (turn["content"] for line in lines for turn in json.loads(line)["conversations"])
    words = [word for text in texts for word in text.split()]
    rng = np.random.default_rng(0)

    def some(size: int) -> str:
        first = int(rng.integers(0, len(words) - size))
        return " ".join(words[first : first + size])

    for number, first in enumerate(range(0, rows, ROWS_OF_A_SHARD)):
        chats = [
            [
                {"role": role, "content": some(int(rng.integers(*size)))}
                for role, size in (("user", WORDS_ASKED), ("assistant", WORDS_ANSWERED))
            ]
            for _ in range(min(ROWS_OF_A_SHARD, rows - first))
        ]
        path = out / f"shard-{number:05}.parquet"
        if not path.exists():
            parquet.write_table(pa.table({"messages": chats}), path, row_group_size=ROWS_OF_A_GROUP)
    return out


def _config(data: Path, cache: Path, workers: int) -> DataConfig:
    return DataConfig(path=str(data), cache=str(cache), workers=workers)


def ours(data: Path, cache: Path, tokenizer: Any, workers: int) -> int:
    """`dflash prepare`."""
    conversations.LARGE_FROM_BYTES = 0
    return _rows(conversations.load_samples(_config(data, cache, workers), tokenizer))


def serial(data: Path, cache: Path, tokenizer: Any, workers: int) -> int:
    """One process, in memory; the tokenizer's own threads are its only parallelism."""
    conversations.LARGE_FROM_BYTES = sys.maxsize
    return _rows(conversations.load_samples(_config(data, cache, workers), tokenizer))


def with_datasets(data: Path, cache: Path, tokenizer: Any, workers: int) -> int:
    """`datasets`: the files become Arrow, `map` with processes makes the ids, which become flat arrays."""
    import datasets

    config = _config(data, cache, workers)
    files = sorted(str(file) for file in data.glob("*.parquet"))
    table = datasets.Dataset.from_parquet(files, cache_dir=str(cache))
    reader: list[SampleReader] = []

    def tokenise(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        builder = FlatBuilder()
        if not reader:
            reader.append(SampleReader(config, tokenizer, len(tokenizer), builder, Tally()))
        reader[0].sink = builder
        rows = [RawRow(line, {"messages": chat}) for line, chat in enumerate(batch["messages"])]
        reader[0].read(data, rows)
        samples = builder.build()
        return {
            "input_ids": [sample.input_ids for sample in samples],
            "loss_mask": [sample.loss_mask for sample in samples],
        }

    mapped = table.map(
        tokenise, batched=True, batch_size=512, num_proc=workers, remove_columns=table.column_names
    )
    cache.mkdir(parents=True, exist_ok=True)
    for name, dtype in (("input_ids", np.int32), ("loss_mask", np.bool_)):
        with (cache / name).open("wb") as file:
            for batch in mapped.with_format("arrow").select_columns([name]).iter(1000):
                flat = batch[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
                file.write(flat.astype(dtype).tobytes())
    return len(mapped)


def opened(data: Path, cache: Path, tokenizer: Any, workers: int) -> int:
    """What a trainer does with the cache that `ours` made: map it, plan an epoch, build batches."""
    conversations.tokenise_large = conversations._tokenise = None  # type: ignore[assignment]  # not again
    config = _config(data, cache, workers)
    dataset = conversations.load_samples(config, tokenizer)
    dataset.count_token(0)
    plan = EpochPlan(dataset.lengths, config.buckets, config.batch_size, seed=0)
    collate = Collator(dataset, BlockGeometry(8, 16))
    for index in range(min(BATCHES, plan.batches_per_epoch)):
        collate(plan.spec(index))
    return _rows(dataset)


def _rows(dataset: Dataset) -> int:
    """Rows that were looked at: samples, and those that were too long to have a supervised pair."""
    return len(dataset.samples) + dataset.tally.left_out


WAYS: dict[str, Callable[[Path, Path, Any, int], int]] = {
    "ours": ours,
    "serial": serial,
    "datasets": with_datasets,
    "open": opened,
}


def main() -> None:
    way, data, cache, tokenizer, workers = sys.argv[1:]
    made = read_tokenizer(tokenizer)
    began = time.perf_counter()
    samples = WAYS[way](Path(data), Path(cache), made, int(workers))
    seconds = time.perf_counter() - began
    print(json.dumps({"samples": samples, "seconds": seconds}))


if __name__ == "__main__":
    main()
