"""JSONL on a bad disk, TensorBoard read back, the terminal at 80 columns."""

from __future__ import annotations

import io
import json
import logging
import math
import os
from pathlib import Path

import pytest
from rich.console import Console

from dflash.config import ObserveConfig
from dflash.observe.outbox import SinkThread
from dflash.observe.roles import RoleMap
from dflash.observe.screen import Screen, bar, clock
from dflash.observe.sinks.base import Row, Surroundings
from dflash.observe.sinks.jsonl import JsonlSink, to_line
from dflash.observe.sinks.terminal import TerminalSink
from tests.waiting import HANG_S, wait_until

# -- JSONL ---------------------------------------------------------------------------------------------------

GPUS = tuple(f"cuda:{index}" for index in range(8))
EIGHT = RoleMap(GPUS[:5], GPUS[5:], total_steps=20_000)


def surroundings(folder: Path, **settings: float) -> Surroundings:
    return Surroundings(ObserveConfig(**settings), folder, EIGHT)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_row_is_on_its_way_to_the_disk_when_write_returns(tmp_path: Path) -> None:
    sink = JsonlSink(surroundings(tmp_path))
    sink.open()
    sink.write([Row("train", 1.25, 7, {"train/loss": 2.0})])
    assert lines(sink.path) == [
        {"kind": "train", "elapsed_s": 1.25, "step": 7, "values": {"train/loss": 2.0}}
    ]
    sink.close()


def test_numbers_that_json_lacks_are_strings() -> None:
    row = Row("train", 0.0, 1, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0})
    assert json.loads(to_line(row))["values"] == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.0}


def test_a_line_cut_short_by_a_crash_is_ended_first(tmp_path: Path) -> None:
    sink = JsonlSink(surroundings(tmp_path))
    sink.path.write_text('{"kind": "metr', encoding="utf-8")
    sink.open()
    sink.write([Row("metrics", 1.0, 2, {})])
    sink.close()
    first, second = sink.path.read_text(encoding="utf-8").splitlines()
    assert first == '{"kind": "metr'
    assert json.loads(second)["step"] == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_loses_rows_says_so_once_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = JsonlSink(surroundings(tmp_path))
    sink.path.symlink_to("/dev/full")
    thread = SinkThread(sink)
    thread.start()
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            thread.outbox.put(Row("metrics", 0.0, step, {}))
            wait_until(lambda step=step: thread.dropped == step + 1)
        # There is room again: the file is a real one now.
        sink.path.unlink()
        real = os.open(sink.path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        assert sink._file is not None
        os.dup2(real, sink._file.fileno())
        os.close(real)
        thread.outbox.put(Row("metrics", 0.0, 9, {}))
        assert thread.close(HANG_S)
    assert thread.dropped == 3
    written = sink.path.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["step"] for line in written if line] == [9]
    assert (
        len([record for record in caplog.records if "rows are lost until it works again" in record.message])
        == 1
    )


# -- TensorBoard ---------------------------------------------------------------------------------------------


def test_tensorboard_files_hold_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the optional extra `tensorboard` is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from dflash.observe.sinks.tensorboard import TensorboardSink

    sink = TensorboardSink(surroundings(tmp_path))
    sink.open()
    sink.write([Row("train", 1.0, 5, {"train/loss": 2.5}), Row("metrics", 2.0, 6, {"batch/tokens": 100.0})])
    sink.write([Row("train", 3.0, 8, {"train/loss": 1.5}), Row("event", 3.0, 8, {"text": "loss is nan"})])
    sink.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("train/loss")] == [(5, 2.5), (8, 1.5)]
    assert [(event.step, event.value) for event in read.Scalars("batch/tokens")] == [(6, 100.0)]
    assert read.Tags()["tensors"] == ["event/text_summary"]


# -- terminal ------------------------------------------------------------------------------------------------


def values_of_eight() -> dict[str, float]:
    values = {
        "pipeline/prefetch_fill_ratio": 0.9,
        "pipeline/hs_queue_fill_ratio": 10 / 24,
        "pipeline/hs_queue_depth": 10.0,
        "pipeline/hs_ready_deficit": 2.0,
        "pipeline/hs_oldest_age_s": 123.4,
    }
    for label in [f"target/{i}" for i in range(5)] + [f"drafter/{i}" for i in range(3)]:
        busy = 0.95 if label.startswith("target") else 0.58
        values |= {
            f"{label}/busy_s": busy,
            f"{label}/wait_in_s": 0.98 - busy,
            f"{label}/wait_out_s": 0.02,
            f"{label}/tokens_per_second": 2840.0,
            f"{label}/capacity_tokens_per_second": 4120.5,
        }
    for gpu in range(8):
        values |= {f"gpu/{gpu}/util_pct": 100.0, f"gpu/{gpu}/mem_used_gb": 141.2, f"gpu/{gpu}/power_w": 540.0}
        values |= {f"gpu/{gpu}/temp_c": 64.0, f"gpu/{gpu}/throttle_power": 1.0}
    return values


def filled_screen() -> Screen:
    screen = Screen(EIGHT)
    screen.update(Row("live", 10.0, 100, values_of_eight(), 1.0))
    screen.update(Row("live", 3723.0, 1234, values_of_eight(), 1.0))
    screen.update(
        Row(
            "train",
            3723.0,
            1230,
            {"train/loss": 2.1345, "train/accept_length": 3.21, "train/grad_norm": 0.83},
        )
    )
    return screen


def drawn(screen: Screen, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=False).print(screen.render())
    return out.getvalue().splitlines()


def test_the_screen_of_eight_gpus_fits_80_columns() -> None:
    rows = drawn(filled_screen(), 80)
    text = "\n".join(rows)
    assert max(map(len, rows)) <= 80
    assert "…" not in text
    assert "step 1,235/20,000" in text
    assert "1:02:03 gone, 17:04:00 left" in text or "1:02:03 gone, 17:04:01 left" in text
    assert "8,520 tok/s" in text
    assert "bottleneck: target side, drafters idle 42%" in text
    assert sum(row.startswith(("target/", "drafter/")) for row in rows) == 8
    assert text.count("gpu ") == 8
    assert text.count("power cap") == 8
    assert len(rows) < 24


def test_the_screen_before_anything_is_known() -> None:
    text = "\n".join(drawn(Screen(EIGHT), 80))
    assert "no training scalars yet" in text
    assert "left" not in text


def test_a_plain_line_when_there_is_no_terminal() -> None:
    out = io.StringIO()
    sink = TerminalSink(surroundings(Path(), flush_s=1.0), Console(file=out, width=80))
    sink.open()
    sink.write([Row("live", 10.0, 100, values_of_eight(), 1.0)])
    assert out.getvalue() == ""
    sink.write(
        [Row("train", 11.0, 99, {"train/loss": 2.0}), Row("metrics", 20.0, 150, values_of_eight(), 1.0)]
    )
    sink.close()
    (line,) = out.getvalue().splitlines()
    assert line.startswith("step 151/20,000 | 8,520 tok/s | loss 2.0000 | queue 10 | bottleneck: target side")
    assert "\x1b" not in line


def test_the_last_plain_line_is_that_of_the_whole_run() -> None:
    """A run ends a moment after a flush: that moment's window has no step in it."""
    out = io.StringIO()
    sink = TerminalSink(surroundings(Path(), flush_s=1.0), Console(file=out, width=80))
    sink.open()
    sink.write([Row("metrics", 20.0, 199, values_of_eight(), 1.0)])
    sink.write([Row("metrics", 20.1, 199, {"drafter/0/tokens_per_second": 0.0}, 0.1)])
    sink.write([Row("summary", 20.1, 199, {"values": values_of_eight(), "elapsed_s": 1.0})])
    sink.close()
    first, last = out.getvalue().splitlines()
    assert first.startswith("step 200/20,000 | 8,520 tok/s")
    assert last.startswith("whole run, step 200/20,000 | 8,520 tok/s")


def test_a_live_screen_on_a_terminal() -> None:
    out = io.StringIO()
    sink = TerminalSink(surroundings(Path()), Console(file=out, width=80, force_terminal=True))
    sink.open()
    sink.write([Row("live", 10.0, 100, values_of_eight(), 1.0)])
    assert "\x1b[" in out.getvalue()
    assert "target/4" in out.getvalue()
    assert "whole run" not in out.getvalue()
    sink.write([Row("summary", 60.0, 200, {"values": values_of_eight(), "elapsed_s": 60.0})])
    sink.close()
    assert "whole run: " in out.getvalue()


@pytest.mark.parametrize(
    ("shares", "picture"),
    [
        ([], "··········"),
        ([(0.5, ("█", "green"))], "█████·····"),
        ([(0.5, ("█", "green")), (0.2, ("▒", "yellow"))], "█████▒▒···"),
        ([(0.9, ("█", "green")), (0.9, ("▒", "yellow"))], "█████████▒"),
        ([(1.7, ("█", "green")), (-0.3, ("▒", "yellow"))], "██████████"),
    ],
)
def test_bars(shares: list[tuple[float, tuple[str, str]]], picture: str) -> None:
    assert bar(shares, width=10).plain == picture


def test_clock() -> None:
    assert [clock(second) for second in (0, 59.6, 61, 3600, 36_061)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:00:00",
        "10:01:01",
    ]
