from __future__ import annotations

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from dflash.data import rows
from dflash.data.rows import pieces_of, read_piece, read_rows
from steptime.errors import UserError

LINES = st.lists(
    st.one_of(
        st.just(b""), st.just(b"  "), st.integers(0, 10**9).map(lambda n: str(n).encode()), st.just(b"{bad")
    ),
    max_size=40,
)


@pytest.fixture
def table(tmp_path):
    """Write a Parquet file of whole numbers."""

    def write(count: int, of_a_group: int, **options: object) -> Path:
        path = tmp_path / "data.parquet"
        parquet.write_table(pa.table({"n": list(range(count))}), path, row_group_size=of_a_group, **options)
        return path

    return write


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, st.booleans(), st.integers(1, 30), st.integers(1, 30))
def test_the_pieces_of_a_jsonl_are_its_rows(tmp_path, monkeypatch, lines, ended, piece, block):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n" * ended)
    monkeypatch.setattr(rows, "PIECE_BYTES", piece)
    monkeypatch.setattr(rows, "_BUFFER", block)
    pieces = pieces_of(path)
    assert [row for part in pieces for row in read_piece(part)] == list(read_rows(path))
    assert sum(part.bytes for part in pieces) == path.stat().st_size
    assert all(part.stop == after.start for part, after in itertools.pairwise(pieces))


@pytest.mark.parametrize(
    ("count", "group", "piece"), [(0, 5, 3), (1, 5, 3), (23, 5, 3), (23, 30, 4), (9, 3, 3)]
)
def test_the_pieces_of_a_parquet_are_its_rows(table, monkeypatch, count, group, piece):
    monkeypatch.setattr(rows, "PIECE_ROWS", piece)
    monkeypatch.setattr(rows, "BATCH_ROWS", 2)
    path = table(count, group)
    pieces = pieces_of(path)
    assert all(part.stop - part.start <= piece for part in pieces)
    found = [row for part in pieces for row in read_piece(part)]
    assert [row.value["n"] for row in found] == list(range(count))
    assert [row.line for row in found] == list(range(1, count + 1))
    whole = list(read_rows(path))
    assert [(row.line, row.value) for row in whole] == [(row.line, row.value) for row in found]


def test_a_row_group_is_not_cut_into_more_pieces_than_pay(table, monkeypatch):
    monkeypatch.setattr(rows, "PIECE_ROWS", 2)
    assert len(pieces_of(table(1000, 1000))) == rows.PIECES_OF_A_GROUP


def test_an_array_is_one_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "PIECE_BYTES", 4)
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"a": 1}, {"a": 2}]))
    assert len(pieces_of(path)) == 1
    assert [row.value for row in read_piece(pieces_of(path)[0])] == [{"a": 1}, {"a": 2}]


def test_a_row_group_is_never_held_as_a_whole(tmp_path):
    """Counts what Arrow has allocated, row by row."""
    path = tmp_path / "data.parquet"
    texts = [f"{number:06}" * 200 for number in range(20_000)]
    parquet.write_table(
        pa.table({"text": texts}), path, compression="none", use_dictionary=False, data_page_size=1 << 16
    )
    assert parquet.read_metadata(path).num_row_groups == 1
    assert path.stat().st_size > 20_000_000
    before, most = pa.total_allocated_bytes(), 0
    for number, row in enumerate(read_rows(path)):
        assert row.value == {"text": texts[number]}
        most = max(most, pa.total_allocated_bytes() - before)
    assert 0 < most < 4_000_000


def spoil(path: Path, group: int, how: str) -> None:
    place = parquet.read_metadata(path).row_group(group).column(0)
    start = place.dictionary_page_offset or place.data_page_offset
    raw = bytearray(path.read_bytes())
    if how == "a bit":
        raw[start + place.total_compressed_size - 3] ^= 1
    else:
        raw[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
    path.write_bytes(raw)


@pytest.mark.fault
@pytest.mark.parametrize("how", ["a bit", "all of it"])
def test_a_damaged_row_group_is_one_line_that_names_it(table, how):
    path = table(30, 10, write_page_checksum=True)
    spoil(path, 1, how)
    seen = []
    line = rf"^{path}: row group 1 \(rows 11 to 20\) cannot be read: .+"
    with pytest.raises(UserError, match=line):
        seen.extend(row.value["n"] for row in read_rows(path))
    assert seen == list(range(10))


@pytest.mark.fault
def test_a_cut_file_and_one_that_vanished(table, tmp_path):
    path = table(30, 10)
    (piece, *_) = pieces_of(path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=rf"^{path}: not a readable Parquet file: "):
        list(read_rows(path))
    path.unlink()
    for read in (lambda: list(read_rows(path)), lambda: list(read_piece(piece))):
        with pytest.raises(UserError, match=rf"^{path}: .*cannot be read: .*No such file"):
            read()
