"""The ratios come from pairs and the harness's own test, and a peer that waits or a missing pair is seen."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.peers import shape_rows, shapes, speed
from steptime.errors import UserError
from steptime.records.types import MachineState

SMALL = speed.Shape(32, 64, 1, 2, 1, 16, 50, 1, 48, 4, 4, 2)


def test_a_ratio_is_the_peers_time_over_ours_whatever_the_order():
    signs = [1, -1, 1, 1, -1, -1, 1, -1]
    own = [1.0, 1.1, 0.9, 1.2, 1.0, 1.3, 0.8, 1.0]
    noise = [1.01, 0.99, 1.02, 0.98, 1.0, 1.0, 1.01, 0.99]
    theirs = [1.5 * seconds * factor for seconds, factor in zip(own, noise, strict=True)]
    found = shapes.ratio_of(theirs, own, signs)
    assert found.value == pytest.approx(1.5, rel=0.01)
    assert 1.4 < found.low < 1.5 < found.high < 1.6
    assert str(found).startswith("1.50 (1.4")


def test_a_peer_as_fast_as_ours_is_not_told_apart():
    signs = [1, -1, 1, 1, -1, -1, 1, -1]
    theirs = [math.exp(0.1 * (-1) ** index) for index in range(8)]
    found = shapes.ratio_of(theirs, [1.0] * 8, signs)
    assert found.low < 1.0 < found.high


def test_too_few_pairs_have_no_interval():
    with pytest.raises(ValueError, match="5 pairs: an interval needs 6"):
        shapes.ratio_of([1.0] * 5, [1.0] * 5, [1] * 5)
    with pytest.raises(SystemExit):
        shapes.main(["--pairs", "5"])


def test_pairs_remember_who_came_first():
    ran: list[str] = []
    _, _, signs = shapes.in_pairs(lambda: ran.append("peer"), lambda: ran.append("ours"), 12, seed=0)
    firsts = ran[::2]
    assert [1 if name == "peer" else -1 for name in firsts] == signs
    assert set(signs) == {1, -1}


def test_our_step_waits_nowhere_and_a_planted_read_is_counted():
    step, _ = speed.make_step(SMALL)
    operations, syncs = shapes.counts_of(step)
    assert operations > 50
    assert syncs == 0

    def reads() -> torch.Tensor:
        loss = step()
        loss.item()
        return loss

    assert shapes.counts_of(reads)[1] == 1


@pytest.mark.slow
def test_the_peak_holds_what_a_step_reads():
    """A process of its own: seconds of imports."""
    features = 65536 * SMALL.taps * SMALL.hidden * 4
    assert shapes.peak_bytes("ours", replace(SMALL, context=65536)) > features


@pytest.mark.parametrize(("flags", "fast"), [("avx2 fma", False), ("avx512_bf16", True), ("amx_bf16", True)])
def test_bf16_is_left_out_where_it_has_no_instructions(flags, fast):
    assert shapes.fast_bf16(lambda: f"flags : fpu {flags}") is fast


ORIGIN = shape_rows.Origin("a-machine", "torch 1, specforge 2", 1)


def made(shape: speed.Shape, pairs: int, origin: shape_rows.Origin) -> shape_rows.Line:
    ratio = shape_rows.Ratio(1.5, 1.4, 1.6)
    rows = tuple(
        shape_rows.Row(name, [0.5, 0.7], None if name == "ours" else ratio, 3 << 20, 700, 2.0)
        for name in speed.MAKERS
    )
    state = shape_rows.State(0.5, 0.25, 0.0, None)
    return shape_rows.Line(shape, origin, "0123456789", "2026-01-02T03:04:05Z", pairs, state, rows)


def test_a_sweep_that_is_cut_goes_on_with_what_is_missing(tmp_path):
    rows, sizes = tmp_path / "made" / "rows.jsonl", list(shapes.SHAPES.values())[:3]

    def dies(shape: speed.Shape, pairs: int, origin: shape_rows.Origin) -> shape_rows.Line:
        if shape == sizes[1]:
            raise KeyboardInterrupt
        return made(shape, pairs, origin)

    with pytest.raises(KeyboardInterrupt):
        list(shapes.sweep(sizes, 6, ORIGIN, rows, dies))
    assert [line.shape for line in shape_rows.read_lines(rows)] == sizes[:1]
    with rows.open("a", encoding="utf-8") as file:
        file.write('{"schema": "half a li')  # a kill in the middle of the write
    assert [now for _, now in shapes.sweep(sizes, 6, ORIGIN, rows, made)] == [False, True, True]
    assert shape_rows.read_lines(rows) == [made(size, 6, ORIGIN) for size in sizes]


@pytest.mark.parametrize(
    ("origin", "pairs"),
    [
        (replace(ORIGIN, machine="another"), 6),
        (replace(ORIGIN, versions="torch 2, specforge 2"), 6),
        (replace(ORIGIN, threads=2), 6),
        (ORIGIN, 7),
    ],
)
def test_what_another_run_would_find_is_measured_again(tmp_path, origin, pairs):
    rows, shape = tmp_path / "rows.jsonl", speed.Shape()
    assert [now for _, now in shapes.sweep([shape], 6, ORIGIN, rows, made)] == [True]
    assert [now for _, now in shapes.sweep([shape], pairs, origin, rows, made)] == [True]
    shown = shape_rows.latest(shape_rows.read_lines(rows))
    assert [line.pairs for line in shown] == ([7] if pairs == 7 else [6, 6])


@pytest.mark.parametrize("text", ["no json", '{"schema": "dflash-peers-shapes/1"}', '{"a": 1}', "[]"])
def test_a_file_that_holds_something_else_is_one_line(tmp_path, capsys, text):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text + "\n", encoding="utf-8")
    assert shapes.main(["--table", "--rows", str(rows)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {rows}:1: ")
    assert err.count("\n") == 1
    with pytest.raises(UserError, match="cannot write"):
        shape_rows.add_line(rows / "below", made(speed.Shape(), 6, ORIGIN))


def test_the_table_says_all_and_measures_nothing(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    shape_rows.add_line(rows, made(speed.Shape(context=2048, vocab=32768), 6, ORIGIN))
    assert shapes.main(["--table", "--rows", str(rows)]) == 0
    out = capsys.readouterr().out
    assert "| fp32 | 2,048 | 32 | 32,768 | 0.60 s | 1.50 (1.40 to 1.60) |" in " ".join(out.split())
    for part in ("0123456789", "torch 1, specforge 2", "load 0.5 to 0.5"):
        assert part in out
    assert shapes.main(["--table", "--rows", str(tmp_path / "none.jsonl")]) == 0
    assert "nothing measured yet" in capsys.readouterr().out


def test_the_sweep_has_both_ends_of_each_size():
    sizes = {(one.context, one.anchors, one.vocab) for one in shapes.SHAPES.values()}
    assert len(sizes) == 8
    assert [sorted(set(column)) for column in zip(*sizes, strict=True)] == [
        [512, 2048],
        [32, 128],
        [2048, 32768],
    ]


def test_the_state_tells_what_others_did():
    before = MachineState(0.0, 1.5, 2, 2, 0.0, 0.0, 0.0)
    after = MachineState(10.0, 1.0, 2, 2, 8.0, 13.0, 1.0, cpu_mhz=2400.0)
    assert shapes.state_between(before, after) == shape_rows.State(1.5, 0.25, 0.05, 2400.0)


def test_the_page_has_the_table_of_its_rows():
    docs = Path(__file__).parents[3] / "docs"
    lines = shape_rows.latest(shape_rows.read_lines(docs / "peers-shapes.jsonl"))
    page = (docs / "peers.md").read_text(encoding="utf-8")
    assert shape_rows.table(lines) in page
    assert all(json.loads(text)["state"] for text in (docs / "peers-shapes.jsonl").open(encoding="utf-8"))
