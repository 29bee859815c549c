"""Large data sets: tokenised by several processes, a piece at a time, on disk.

Rendering a chat template is Python and holds the interpreter's lock, so threads gain nothing; processes write
their pieces themselves, so nothing large goes from one to another. What is finished stays: after Ctrl-C, a
kill or a full disk the same command goes on, and the bytes are those of an uninterrupted run."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.config import DataConfig
from dflash.data import token_cache
from dflash.data.dataset import Dataset, Tally
from dflash.data.parts import PartWriter, join, read_part
from dflash.data.progress import Progress
from dflash.data.rows import Piece, pieces_of, read_piece
from dflash.data.samples import SampleReader
from steptime.errors import UserError
from steptime.files import atomic_folder

GOES_ON = "what is finished is kept, the same command goes on"


@dataclass(frozen=True)
class Job:
    """All that a process needs to know. Goes to each of them once."""

    config: DataConfig
    tokenizer: Any
    vocab_size: int | None
    parts: Path

    def folder(self, number: int) -> Path:
        return self.parts / f"part-{number:06}"


def tokenise_large(
    config: DataConfig, tokenizer: Any, vocab_size: int | None, files: Sequence[Path], folder: Path
) -> Dataset:
    """Make the cache `folder` and map it. Whoever else wants the same one waits, and then finds it.

    Raises:
        UserError: a bad or damaged file, a folder that cannot be written, a process that was killed.
    """
    parts = folder.parent / f".{folder.name}.parts"
    with _alone(parts):
        found = token_cache.read(folder, tokenizer)
        if found is not None:
            return found
        _clear(folder, parts)
        stamps = [_stamp(file) for file in files]
        pieces = [piece for file in files for piece in pieces_of(file)]
        job = Job(config, tokenizer, vocab_size, parts)
        _tokenise(job, pieces)
        for file, stamp in zip(files, stamps, strict=True):
            if _stamp(file) != stamp:
                shutil.rmtree(parts, ignore_errors=True)
                raise UserError(f"{file}: changed while it was read")
        _join(job, pieces, folder)
        shutil.rmtree(parts, ignore_errors=True)
    made = token_cache.read(folder, tokenizer)
    if made is None:
        raise UserError(f"{folder}: was written and cannot be read back; is the disk sound?")
    return made


@contextlib.contextmanager
def _alone(parts: Path) -> Iterator[None]:
    """Hold the folder of parts. The lock is the kernel's: a killed process holds nothing."""
    try:
        parts.mkdir(parents=True, exist_ok=True)
        with (parts / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                sys.stderr.write("dflash: another process tokenises this data; waiting for it\n")
                fcntl.flock(file, fcntl.LOCK_EX)
            parts.mkdir(exist_ok=True)  # the other one takes the folder away when it is through
            yield
    except OSError as error:
        raise UserError(f"{parts}: cannot write: {error.strerror or error}; {GOES_ON}") from None


def _clear(folder: Path, parts: Path) -> None:
    """Remove what a killed process was in the middle of."""
    for place, name in ((parts, ".part-*.tmp"), (folder.parent, f".{folder.name}.*.tmp")):
        for left in place.glob(name):
            shutil.rmtree(left, ignore_errors=True)


def _stamp(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from None
    return found.st_size, found.st_mtime_ns


def _tokenise(job: Job, pieces: Sequence[Piece]) -> None:
    """Make the parts that are not there yet."""
    missing = [
        (number, piece) for number, piece in enumerate(pieces) if read_part(job.folder(number), piece) is None
    ]
    for number, _ in missing:
        shutil.rmtree(job.folder(number), ignore_errors=True)
    if len(missing) < len(pieces):
        sys.stderr.write(f"dflash: {len(pieces) - len(missing)} of {len(pieces)} pieces are there already\n")
    workers = min(job.config.workers or len(os.sched_getaffinity(0)), len(missing))
    total = sum(piece.bytes for piece in pieces)
    done = total - sum(piece.bytes for _, piece in missing)
    run = _one_by_one(job, missing) if workers < 2 else _in_processes(job, missing, workers)
    with Progress("Tokenising", total, "bytes", done) as progress, contextlib.closing(run):
        for piece in run:
            progress.advance(piece.bytes)


def _one_by_one(job: Job, missing: Sequence[tuple[int, Piece]]) -> Generator[Piece]:
    worker = _Worker(job)
    for number, piece in missing:
        worker(number, piece)
        yield piece


def _in_processes(job: Job, missing: Sequence[tuple[int, Piece]], workers: int) -> Generator[Piece]:
    """The pieces in order, each when its part is there; the first bad line in their order is the one told."""
    context = multiprocessing.get_context("forkserver")  # what they import, one process imports for all
    context.set_forkserver_preload([__name__, type(job.tokenizer).__module__, "jinja2", "pyarrow.parquet"])
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, _begin, (job,))
    try:
        futures = [(piece, pool.submit(_work, number, piece)) for number, piece in missing]
        for piece, future in futures:
            future.result()
            yield piece
        pool.shutdown()
    except (BrokenProcessPool, EOFError, ConnectionError):  # the last two: the process that makes them
        hand = sorted(int(left.name.split(".")[1].split("-")[1]) for left in job.parts.glob(".part-*.tmp"))
        known = dict(missing)
        where = " or ".join(_name(known[number]) for number in hand[:workers] if number in known)
        raise UserError(
            f"a process was killed while tokenising {where or 'its first piece'} (out of memory? fewer with "
            f"data.workers); {GOES_ON}"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()


def _name(piece: Piece) -> str:
    return f"{piece.path}" + (f" row group {piece.group}" if piece.group >= 0 else f" from line {piece.line}")


def _join(job: Job, pieces: Sequence[Piece], folder: Path) -> None:
    found = []
    for number, piece in enumerate(pieces):
        record = read_part(job.folder(number), piece)
        if record is None:
            raise UserError(f"{job.folder(number)}: was written and cannot be read back; is the disk sound?")
        found.append((job.folder(number), record))
    with atomic_folder(folder) as temporary:
        token_cache.write_record(temporary, join(temporary, found))


# -- in each process -----------------------------------------------------------------------------------------


class _Worker:
    """Makes parts, one after the other, with one renderer."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._reader: SampleReader | None = None

    def __call__(self, number: int, piece: Piece) -> None:
        job, tally = self._job, Tally()
        try:
            with atomic_folder(job.folder(number)) as folder, contextlib.ExitStack() as files:
                sink = PartWriter(folder, files)
                if self._reader is None:
                    self._reader = SampleReader(job.config, job.tokenizer, job.vocab_size, sink, tally)
                self._reader.sink, self._reader.tally = sink, tally
                self._reader.read(piece.path, read_piece(piece))
                files.close()
                sink.close(piece, tally)
        except OSError as error:
            raise UserError(f"{job.parts}: cannot write: {error.strerror or error}; {GOES_ON}") from None


_worker: _Worker | None = None


def _begin(job: Job) -> None:
    """A process begins: Ctrl-C is the parent's affair, and without the parent there is nothing to do."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _worker = _Worker(job)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _work(number: int, piece: Piece) -> None:
    assert _worker is not None
    _worker(number, piece)
