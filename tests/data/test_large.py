"""Large data sets are made on disk, a piece at a time: the same bytes however often it is interrupted."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pytest
from pyarrow import parquet

from dflash.config import DataConfig
from dflash.data import conversations, large, parts, rows, samples
from dflash.data.conversations import load_samples
from dflash.data.dataset import PackedSamples
from dflash.data.progress import Progress
from steptime.errors import UserError
from tests.waiting import HANG_S, wait_until

GROUPS = 4
ROWS_OF_A_GROUP = 5


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Everything is large, and its pieces are small."""
    monkeypatch.setattr(conversations, "LARGE_FROM_BYTES", 0)
    monkeypatch.setattr(rows, "PIECE_ROWS", ROWS_OF_A_GROUP)
    monkeypatch.setattr(rows, "PIECE_BYTES", 500)
    monkeypatch.setattr(samples, "CHUNK", 3)


def chat(number: int) -> list[dict[str, str]]:
    answer = "the quick brown fox " * (1 + number % 7)
    return [{"role": "user", "content": f"{number}?"}, {"role": "assistant", "content": f"{answer}{number}"}]


@pytest.fixture
def shards(tmp_path) -> Path:
    """Two Parquet files of four row groups each."""
    folder = tmp_path / "data"
    folder.mkdir()
    size = GROUPS * ROWS_OF_A_GROUP
    for shard in range(2):
        chats = [chat(shard * size + number) for number in range(size)]
        path = folder / f"shard-{shard}.parquet"
        parquet.write_table(
            pa.table({"messages": chats}), path, row_group_size=ROWS_OF_A_GROUP, write_page_checksum=True
        )
    return folder


@pytest.fixture
def load(tokenizer, tmp_path):
    def run(path: Path, cache: str = "cache", **settings):
        settings = {"max_length": 64, "buckets": (64,), "workers": 1, **settings}
        return load_samples(DataConfig(path=str(path), cache=str(tmp_path / cache), **settings), tokenizer)

    return run


def bytes_of(cache: Path) -> dict[str, bytes]:
    """Of the one data set under a cache folder; nothing else may be there."""
    (folder,) = cache.iterdir()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def listed(dataset):
    return [(s.input_ids.tolist(), s.loss_mask.tolist(), s.origin) for s in dataset.samples]


def test_the_same_samples_as_in_memory(load, shards, monkeypatch, tmp_path):
    found = load(shards)
    monkeypatch.setattr(conversations, "LARGE_FROM_BYTES", sys.maxsize)
    monkeypatch.setattr(conversations, "CACHED_FROM_S", 0.0)
    memory = load(shards, "other")
    assert listed(found) == listed(memory)
    assert len(found.samples) == 2 * GROUPS * ROWS_OF_A_GROUP
    assert bytes_of(tmp_path / "cache") == bytes_of(tmp_path / "other")


def test_what_is_left_out_is_counted_and_only_the_first_are_named(load, jsonl, monkeypatch):
    monkeypatch.setattr("dflash.data.dataset.LISTED", 7)
    path = jsonl(*[{"messages": chat(n)} if n % 2 else "{" for n in range(60)])
    dataset = load(path, skip_bad=True)
    assert (len(dataset.samples), dataset.tally.left_out) == (30, 30)
    assert [origin for origin, _ in dataset.skipped] == [f"{path}:{2 * n + 1}" for n in range(7)]
    assert "30 bad lines skipped" in dataset.summary()


# -- memory --------------------------------------------------------------------------------------------------


def most_held(monkeypatch, run) -> int:
    """Rows that were read and not yet written, at most, while `run` goes on."""
    held = most = 0
    read, add = rows.read_piece, parts.PartWriter.add

    def reading(piece):
        nonlocal held, most
        for row in read(piece):
            held += 1
            most = max(most, held)
            yield row

    def adding(self, *sample):
        nonlocal held
        add(self, *sample)
        held -= 1

    with monkeypatch.context() as patch:
        patch.setattr(large, "read_piece", reading)
        patch.setattr(parts.PartWriter, "add", adding)
        run()
    assert held == 0
    return most


@pytest.mark.parametrize("shape", ["many pieces", "one piece"])
def test_no_more_than_a_chunk_of_rows_is_held(load, shards, monkeypatch, shape):
    if shape == "one piece":
        monkeypatch.setattr(rows, "PIECE_ROWS", 10**6)
    assert most_held(monkeypatch, lambda: load(shards)) == samples.CHUNK


def test_long_conversations_make_smaller_chunks(load, shards, monkeypatch):
    monkeypatch.setattr(samples, "CHUNK", 1000)
    monkeypatch.setattr(samples, "CHUNK_CHARACTERS", 1)
    assert most_held(monkeypatch, lambda: load(shards)) == 1


@pytest.mark.fault
def test_a_reader_that_keeps_its_rows_is_found(load, shards, monkeypatch):
    monkeypatch.setattr(samples, "CHUNK", 1000)
    assert most_held(monkeypatch, lambda: load(shards)) > 3


def test_training_reads_from_the_mapped_file(load, shards):
    found = load(shards)
    assert isinstance(found.samples[3].input_ids.base, np.ndarray)
    for name in ("input_ids", "loss_mask"):
        array = getattr(found.samples, name)
        while isinstance(array, np.ndarray):
            array = array.base
        assert isinstance(array, mmap.mmap), f"{name} is not mapped"
    packed = load(shards, pack=True)
    assert isinstance(packed.samples, PackedSamples)
    assert packed.samples.samples.input_ids.base is not None
    own = (packed.samples.members, packed.samples.starts, packed.samples.lengths)
    assert sum(len(array) for array in own) <= 3 * len(found.samples) + 1, "only numbers of samples are held"


# -- interruptions -------------------------------------------------------------------------------------------


def in_a_child(run) -> int:
    """Run in a forked process; its wait status."""
    child = os.fork()
    if not child:
        try:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at(moment: int, seen: Path) -> None:
    """From now on, end this process at its n-th operation on a file, or write to a part; or note their
    number."""
    count = 0

    def happened() -> None:
        nonlocal count
        count += 1
        if count == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment < 0:
            seen.write_text(str(count))

    looked_at = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")

    def hook(event: str, arguments: tuple) -> None:
        if event in looked_at and any("tokens-" in str(argument) for argument in arguments[:2]):
            happened()

    put = parts.PartWriter._put

    def putting(self, *what):
        put(self, *what)
        happened()

    parts.PartWriter._put = putting
    sys.addaudithook(hook)


@pytest.mark.slow
@pytest.mark.fault
def test_killed_at_any_moment_it_goes_on_and_gives_the_same_bytes(load, shards, tmp_path, monkeypatch):
    load(shards, "whole")
    whole = bytes_of(tmp_path / "whole")
    counted, done = tmp_path / "counted", list[int]()
    assert in_a_child(lambda: (killed_at(-1, counted), load(shards, "counted-run"))) == 0
    moments = int(counted.read_text())
    assert moments > 200
    tokenised, call = [], large._Worker.__call__

    def counting(self, number, piece):
        tokenised.append(number)
        call(self, number, piece)

    monkeypatch.setattr(large._Worker, "__call__", counting)
    for moment in range(1, moments, 17):
        cache = f"killed-{moment}"
        status = in_a_child(lambda m=moment, c=cache: (killed_at(m, counted), load(shards, c)))
        assert os.WTERMSIG(status) == signal.SIGKILL
        finished = len(list((tmp_path / cache).glob(".tokens-*.parts/part-*")))
        gone_on = bool(list((tmp_path / cache).glob("tokens-*")))
        tokenised.clear()
        load(shards, cache)
        assert len(tokenised) == (0 if gone_on else 2 * GROUPS - finished), "a finished piece was made again"
        done.append(finished)
        if not gone_on:
            assert bytes_of(tmp_path / cache) == whole
    assert {0, 1, 2 * GROUPS - 1, 2 * GROUPS} <= set(done)


@pytest.mark.fault
def test_a_spoilt_or_foreign_part_is_made_again(load, shards, tmp_path, monkeypatch):
    load(shards, "whole")
    with monkeypatch.context() as patch:
        patch.setattr(large, "_join", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load(shards)
    folder = next((tmp_path / "cache").glob(".tokens-*.parts"))
    raw = bytearray((folder / "part-000002" / "input_ids").read_bytes())
    raw[5] ^= 1
    (folder / "part-000002" / "input_ids").write_bytes(raw)
    record = json.loads((folder / "part-000004" / "meta.json").read_text())
    record["piece"]["line"] += 1
    (folder / "part-000004" / "meta.json").write_text(json.dumps(record))
    (folder / "part-000005" / "meta.json").write_text("[]")
    made = []
    call = large._Worker.__call__
    monkeypatch.setattr(large._Worker, "__call__", lambda s, n, p: (made.append(n), call(s, n, p)))
    load(shards)
    assert made == [2, 4, 5]
    assert bytes_of(tmp_path / "cache") == bytes_of(tmp_path / "whole")


@pytest.mark.fault
def test_a_damaged_shard_is_one_line_and_what_was_before_it_is_kept(load, shards, tmp_path, capsys):
    path = shards / "shard-1.parquet"
    good = path.read_bytes()
    place = parquet.read_metadata(path).row_group(2).column(1)
    bad = bytearray(good)
    bad[(place.dictionary_page_offset or place.data_page_offset) + place.total_compressed_size - 3] ^= 1
    path.write_bytes(bad)
    line = rf"^{path}: row group 2 \(rows 11 to 15\) cannot be read: "
    for _ in range(2):
        with pytest.raises(UserError, match=line):
            load(shards)
    assert f"{GROUPS + 2} of {2 * GROUPS} pieces are there already" in capsys.readouterr().err
    path.write_bytes(good)
    assert len(load(shards).samples) == 2 * GROUPS * ROWS_OF_A_GROUP


@pytest.mark.fault
def test_a_bad_line_is_named_and_leaves_no_cache(load, jsonl, tmp_path):
    path = jsonl(*[{"messages": chat(number)} for number in range(20)], "{", *["["] * 3)
    with pytest.raises(UserError, match=rf"^{path}:21: not valid JSON"):
        load(path)
    assert not list((tmp_path / "cache").glob("tokens-*"))


@pytest.mark.fault
def test_a_file_that_changes_meanwhile_is_refused(load, shards, monkeypatch):
    def change(job, pieces):
        path = shards / "shard-0.parquet"
        os.utime(path, ns=(0, 0))

    monkeypatch.setattr(large, "_tokenise", change)
    with pytest.raises(UserError, match=r"shard-0.parquet: changed while it was read"):
        load(shards)


@pytest.mark.fault
def test_a_full_disk_is_one_line_and_what_is_finished_is_kept(load, shards, monkeypatch, tmp_path, capsys):
    put, left = parts.PartWriter._put, [30]

    def full(self, name, values):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        put(self, name, values)

    monkeypatch.setattr(parts.PartWriter, "_put", full)
    with pytest.raises(UserError, match=r"cannot write: No space left on device; what is finished is kept"):
        load(shards)
    monkeypatch.setattr(parts.PartWriter, "_put", put)
    load(shards)
    assert "1 of 8 pieces are there already" in capsys.readouterr().err
    load(shards, "whole")
    assert bytes_of(tmp_path / "cache") == bytes_of(tmp_path / "whole")


def test_who_wants_the_same_data_waits_and_finds_it(load, shards, tmp_path, monkeypatch, capsys):
    entered, leave, made = threading.Event(), threading.Event(), []
    call = large._Worker.__call__

    def slow(self, number, piece):
        entered.set()
        assert leave.wait(HANG_S)
        made.append(number)
        call(self, number, piece)

    monkeypatch.setattr(large._Worker, "__call__", slow)
    found: list[int] = []
    both = [threading.Thread(target=lambda: found.append(len(load(shards).samples))) for _ in range(2)]
    both[0].start()
    assert entered.wait(HANG_S)
    said = threading.Event()
    monkeypatch.setattr(large.sys, "stderr", _Saying(said))
    both[1].start()
    assert said.wait(HANG_S)
    leave.set()
    for one in both:
        one.join(HANG_S)
    assert found == [2 * GROUPS * ROWS_OF_A_GROUP] * 2
    assert sorted(made) == list(range(2 * GROUPS))


class _Saying:
    def __init__(self, said: threading.Event) -> None:
        self._said = said

    def write(self, text: str) -> int:
        if "another process tokenises this data" in text:
            self._said.set()
        return len(text)

    def flush(self) -> None: ...

    def isatty(self) -> bool:
        return False


# -- several processes ---------------------------------------------------------------------------------------


class OnePiece(ProcessPoolExecutor):
    """Its processes make the first piece, and then stand at others for ever."""

    def submit(self, work, number, piece):
        return super().submit(work, number, piece) if number == 0 else super().submit(signal.pause)


@pytest.mark.slow
def test_processes_give_the_same_bytes_and_a_killed_one_is_told(load, shards, tmp_path, monkeypatch):
    load(shards, "whole")
    load(shards, "processes", workers=2)
    assert bytes_of(tmp_path / "processes") == bytes_of(tmp_path / "whole")

    def kill(self, count=1):
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                if "resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", kill)
        patch.setattr(large, "ProcessPoolExecutor", OnePiece)
        with pytest.raises(UserError, match=r"was killed while tokenising .*the same command goes on"):
            load(shards, "killed", workers=2)
    load(shards, "killed", workers=2)
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")


def prepare(data: Path, cache: Path, tokenizer: Path) -> subprocess.Popen[bytes]:
    words = {"path": data, "cache": cache, "tokenizer": tokenizer, "workers": 2}
    settings = [part for key, value in words.items() for part in ("--set", f"data.{key}={value}")]
    program = (
        "import sys; from dflash.data import conversations, rows; conversations.LARGE_FROM_BYTES = 0; "
        "from dflash.cli import main; main(sys.argv[1:])"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, "prepare", *settings],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.thorough
@pytest.mark.fault
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_command_is_interrupted_and_goes_on(load, tmp_path, tokenizer, number):
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"messages": chat(n) * 40}) + "\n" for n in range(4000)]
    path.write_text("".join(lines))
    cache = tmp_path / "cache"
    process = prepare(path, cache, tmp_path / "tokenizer")
    wait_until(lambda: list(cache.glob(".tokens-*.parts/part-*")) or process.poll() is not None)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    if number == signal.SIGINT:  # as a terminal sends it: to all of them
        os.killpg(process.pid, number)
    else:
        process.kill()
    _, said = process.communicate(timeout=HANG_S)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL), said
    assert b"Traceback" not in said
    wait_until(lambda: not any(one.is_running() and one.status() != "zombie" for one in family))
    again = prepare(path, cache, tmp_path / "tokenizer")
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    assert b"pieces are there already" in said
    fresh = prepare(path, tmp_path / "fresh", tmp_path / "tokenizer")
    assert fresh.wait(300) == 0
    assert bytes_of(cache) == bytes_of(tmp_path / "fresh")


# -- progress ------------------------------------------------------------------------------------------------


def test_time_left_counts_only_what_this_run_has_done():
    progress = Progress("Tokenising", 1000, "bytes", done=900)
    progress._start = 0.0
    assert progress._line(50.0) == "Tokenising: 900 of 1,000 bytes, 50 s"
    progress.done += 50
    assert progress._line(50.0) == "Tokenising: 950 of 1,000 bytes, 50 s, about 50 s left"
    assert progress._line(4000.0).endswith("1:06:40, about 1:06:40 left")
