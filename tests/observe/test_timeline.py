"""The picture of the last steps: of a real run, of a fake GPU, and of nothing."""

from __future__ import annotations

import copy
import json
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from dflash.observe.recorder import CudaStageTimer, WorkerRecorder
from dflash.observe.timeline.files import write_timeline
from dflash.observe.timeline.log import DRAW, PUT, QUEUE, STEP, SpanLog, Timeline
from dflash.observe.timeline.picture import COLOURS, picture
from dflash.observe.timeline.trace_event import trace
from dflash.pipeline.saver import Order
from dflash.pipeline.trainer import Trainer
from steptime.timeline.picture import Picture, Span
from steptime.timeline.svg import draw
from tests.clock import Clock
from tests.observe.parts import FakeDevice
from tests.pipeline.run import Hooks, small_trainer
from tests.waiting import HANG_S

SCHEMA = json.loads(Path(__file__).with_name("trace_event.schema.json").read_text(encoding="utf-8"))
CHECK = jsonschema.Draft202012Validator(SCHEMA)
STEPS, SHOWN = 8, 3


# -- a real run ----------------------------------------------------------------------------------------------


class UntilItIsBegun(Hooks):
    """The last step waits for the writer, whose checkpoint then begins while workers work."""

    def watch(self, trainer: Trainer) -> None:
        self.begun = threading.Event()
        assert trainer.saving is not None
        assert trainer.saving.saver is not None
        save = trainer.saving.saver._save

        def begins(order: Order) -> None:
            self.begun.set()
            save(order)

        trainer.saving.saver._save = begins  # type: ignore[method-assign]

    def after_step(self, step: int, tokens: int) -> bool:
        assert step < STEPS - 1 or self.begun.wait(HANG_S)
        return True


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Picture, dict[str, Any], str]:
    """Two targets, two drafters, checkpoints: the picture, the trace as it was written, the SVG."""
    folder = tmp_path_factory.mktemp("timeline")
    timeline = Timeline(SHOWN, batches=2, ahead=8)
    two = ('target.devices=["cpu","cpu"]', 'drafter.devices=["cpu","cpu"]', "observe.tick_s=0.01")
    settings = (f"train.steps={STEPS}", "train.checkpoint_every=7", *two)
    hooks = UntilItIsBegun()
    trainer = small_trainer(folder, *settings, timeline=timeline, hooks=hooks)
    hooks.watch(trainer)
    trainer.run()
    trainer.observer.close()
    said = write_timeline(timeline, trainer.run_dir, "a < b")
    assert said.startswith(f"timeline of the last {SHOWN} steps: ")
    shown = picture({log.label: log.spans() for log in timeline.logs}, SHOWN)
    written = json.loads((trainer.run_dir / "timeline.json").read_text(encoding="utf-8"))
    return shown, written, (trainer.run_dir / "timeline.svg").read_text(encoding="utf-8")


def threads(written: dict[str, Any]) -> dict[str, int]:
    events = written["traceEvents"]
    return {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}


def spans(written: dict[str, Any], label: str) -> list[dict[str, Any]]:
    thread = threads(written)[label]
    return [event for event in written["traceEvents"] if event["ph"] == "X" and event["tid"] == thread]


def test_the_trace_keeps_the_formats_schema(run: Any) -> None:
    CHECK.validate(run[1])
    assert {event["ph"] for event in run[1]["traceEvents"]} == {"X", "M", "C", "s", "f"}


def test_every_worker_has_a_track_with_its_stages(run: Any) -> None:
    written = run[1]
    workers = ["prefetcher/0", "target/0", "target/1", "drafter/0", "drafter/1"]
    assert list(threads(written)) == [*workers, "checkpoint writer", "monitor"]
    names = {label: {span["name"] for span in spans(written, label)} for label in threads(written)}
    assert names["drafter/1"] == {
        STEP, "drafter.queue_get", "drafter.forward", "drafter.backward", "drafter.exchange",
        "drafter.optimizer_step",
    }  # fmt: skip
    assert names["checkpoint writer"] == {"checkpoint"}
    assert names["monitor"] <= {"tick"}
    targets = {
        "target.model_forward", "target.pack_hidden", "target.cpu_copy_enqueue", "target.batch",
        "target.wait_in", "target.wait_buffer", "target.wait_out",
    }  # fmt: skip
    assert names["target/0"] | names["target/1"] <= targets


def test_it_shows_the_last_steps_and_no_others(run: Any) -> None:
    shown, written, _ = run
    wanted = list(range(STEPS - SHOWN, STEPS))
    assert [step.number for step in shown.steps] == wanted
    for label in ("drafter/0", "drafter/1"):
        whole = [span for span in spans(written, label) if span["name"] == STEP]
        assert [span["args"]["number"] for span in whole][-SHOWN:] == wanted
    assert min(event["ts"] for event in written["traceEvents"] if "ts" in event) == 0


def test_spans_of_a_track_lie_inside_each_other_or_apart(run: Any) -> None:
    """The format nests by time: spans that overlap by half would be drawn wrongly."""
    for label in threads(run[1]):
        ends: list[float] = []
        for span in sorted(spans(run[1], label), key=lambda one: (one["ts"], -one["dur"])):
            while ends and span["ts"] >= ends[-1] - 1e-6:
                ends.pop()
            end = span["ts"] + span["dur"]
            assert not ends or end <= ends[-1] + 1e-6, (label, span)
            ends.append(end)


def test_a_flow_goes_from_a_targets_hand_over_to_the_draw_of_the_same_batch(run: Any) -> None:
    written = run[1]
    events = written["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    drawn = {(event["tid"], event["id"]) for event in ends.values()}
    # Every batch of these steps that was handed over in them; the plan's order gives each drafter its own.
    first = {threads(written)["drafter/0"]: 0, threads(written)["drafter/1"]: 1}
    assert all(batch % 2 == first[thread] for thread, batch in drawn)
    for batch, start in starts.items():
        assert start["ts"] <= ends[batch]["ts"]
        assert inside(written, start, "target.wait_out") == batch
        assert inside(written, ends[batch], "drafter.queue_get") is None  # it has no number, but it is there


def inside(written: dict[str, Any], event: dict[str, Any], name: str) -> Any:
    """The number of the span of that name around an event, to which the format binds it."""
    (found,) = [
        span
        for span in written["traceEvents"]
        if span["ph"] == "X"
        and (span["tid"], span["name"]) == (event["tid"], name)
        and span["ts"] - 1e-6 <= event["ts"] <= span["ts"] + span["dur"] + 1e-6
    ]
    return found.get("args", {}).get("number")


def test_the_depths_are_those_of_the_queues(run: Any) -> None:
    for name, most in (("batches in the queue", 4), ("batches prefetched", 4)):
        depths = [
            event["args"]["batches"]
            for event in run[1]["traceEvents"]
            if event["ph"] == "C" and event["name"] == name
        ]
        assert all(0 <= depth <= most for depth in depths)
    assert run[0].counters["batches in the queue"][-1][1] == 0  # the last batch has been drawn


def test_the_svg_is_one_and_shows_what_the_trace_does(run: Any) -> None:
    shown, _, text = run
    root = ET.fromstring(text)
    assert root.tag.endswith("svg")
    words = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert "a < b: the last 3 steps" in words
    for track in shown.tracks:
        assert track.label in words
    tips = [element.text or "" for element in root.iter() if element.tag.endswith("title")]
    assert sum(tip.startswith("drafter/0: drafter.forward") for tip in tips) == SHOWN
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for element in root.iter():
        if element.tag.endswith("rect"):
            left, top = float(element.get("x", 0)), float(element.get("y", 0))
            assert left + float(element.attrib["width"]) <= width + 0.01
            assert top + float(element.attrib["height"]) <= height + 0.01


# -- what the schema refuses ---------------------------------------------------------------------------------


def event_of(written: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(event for event in written["traceEvents"] if event["ph"] == kind)


FAULTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no events": lambda written: written["traceEvents"].clear(),
    "a span without a length": lambda written: event_of(written, "X").pop("dur"),
    "a span that ends before it begins": lambda written: event_of(written, "X").update(dur=-0.5),
    "a time as text": lambda written: event_of(written, "X").update(ts="12"),
    "a time before the first": lambda written: event_of(written, "s").update(ts=-1),
    "no thread": lambda written: event_of(written, "X").pop("tid"),
    "a thread by its name": lambda written: event_of(written, "X").update(tid="drafter/0"),
    "an unknown phase": lambda written: event_of(written, "X").update(ph="Q"),
    "a counter of text": lambda written: event_of(written, "C").update(args={"batches": "3"}),
    "a counter of nothing": lambda written: event_of(written, "C").update(args={}),
    "a flow without an id": lambda written: event_of(written, "s").pop("id"),
    "a flow's end that binds to the next span": lambda written: event_of(written, "f").pop("bp"),
    "a thread's name that is a number": lambda written: event_of(written, "M").update(args={"name": 3}),
    "a key that the format does not know": lambda written: event_of(written, "X").update(colour="red"),
}


@pytest.mark.fault
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_trace_is_refused(run: Any, fault: str) -> None:
    broken = copy.deepcopy(run[1])
    FAULTS[fault](broken)
    assert not CHECK.is_valid(broken), fault


# -- logs ----------------------------------------------------------------------------------------------------


def test_a_log_keeps_the_last_spans() -> None:
    log = SpanLog("target/0", room=5)
    for number in range(20):
        log.add("a", number, number + 1, number)
    assert [span.number for span in log.spans()] == list(range(12, 20))
    assert log.count == 20


def test_a_run_without_a_timeline_keeps_no_span_anywhere(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, "train.steps=2", save_checkpoints=False)
    recorders = trainer.observer._sources.recorders
    assert {recorder.log for recorder in recorders} == {None}
    assert {timer.log for recorder in recorders for timer in recorder.timers.values()} == {None}
    assert trainer.observer._monitor.log is None
    trainer.run()
    assert "timeline" not in trainer.observer.close().accounted_percent


def test_collectors_that_are_off_leave_the_timeline_on(tmp_path: Path) -> None:
    timeline = Timeline(2, 1)
    trainer = small_trainer(
        tmp_path, "train.steps=3", "observe.collectors=[]", save_checkpoints=False, timeline=timeline
    )
    trainer.run()
    summary = trainer.observer.close()
    names = {span.name for log in timeline.logs for span in log.spans()}
    assert {"target.model_forward", "drafter.backward", STEP, "target.wait_in", "prefetcher.collate"} <= names
    assert not [key for key in summary.values if not key.startswith("monitor/")]
    assert summary.accounted_percent["timeline"] > 0.0


def test_the_account_charges_each_span(clock: Clock) -> None:
    timeline = Timeline(1, 1)
    log = timeline.log("drafter/0")
    assert timeline.account(10.0).seconds == 0.0
    for _ in range(7):
        log.add("a", 0, 1)
    account = timeline.account(10.0)
    assert (account.name, account.calls, account.on_s) == ("timeline", 7, 10.0)


# -- the stream's track --------------------------------------------------------------------------------------


def on_stream(device: FakeDevice) -> tuple[WorkerRecorder, CudaStageTimer, Timeline]:
    timeline = Timeline(4, 1)
    recorder = WorkerRecorder("target", 0, device, 4, timeline)  # type: ignore[arg-type]
    timer = recorder.timer("target.model_forward", gpu=True)
    assert isinstance(timer, CudaStageTimer)
    recorder.warm()
    return recorder, timer, timeline


def test_a_gpu_stage_is_on_the_streams_track_at_the_streams_time(clock: Clock) -> None:
    """The fake GPU takes a millisecond for each operation; an event's record is one."""
    device = FakeDevice()
    recorder, timer, timeline = on_stream(device)
    began_ns, before = clock.now_ns, device.gpu.enqueued
    for _ in range(3):
        device.gpu.enqueued += 5
        timer.start()
        device.gpu.enqueued += 7
        timer.stop()
    recorder.step_boundary()  # nothing has passed yet, and nobody waits
    assert stream(timeline).spans() == []
    device.gpu.finish()
    clock.advance(3.0)
    recorder.step_boundary()
    millisecond = 1_000_000
    assert before == device.gpu.enqueued - 3 * (5 + 1 + 7 + 1)
    assert [(span.begin_ns - began_ns, span.end_ns - span.begin_ns) for span in stream(timeline).spans()] == [
        ((6 + 14 * number) * millisecond, 8 * millisecond) for number in range(3)
    ]
    assert [log.label for log in timeline.logs] == ["target/0", "target/0 stream"]


def stream(timeline: Timeline) -> SpanLog:
    return next(log for log in timeline.logs if log.label.endswith("stream"))


def test_far_from_the_first_moment_a_span_takes_its_place(clock: Clock) -> None:
    """CUDA's times between far events are coarse; no pair is lost when the moment moves on."""
    device = FakeDevice()
    recorder, timer, timeline = on_stream(device)
    began_ns = clock.now_ns
    for _ in range(50):
        device.gpu.enqueued += 3_000  # seconds
        timer.start()
        timer.stop()
        device.gpu.finish()
        recorder.step_boundary()
    assert recorder.pool is not None
    assert len(recorder.pool.free) == 3  # and one is the moment that times count from
    begins = [span.begin_ns - began_ns for span in stream(timeline).spans()]
    assert begins == [(3_001 + 3_002 * number) * 1_000_000 for number in range(50)]
    assert recorder.pool._anchor is not None
    assert recorder.pool._anchor[1] - began_ns > 100_000_000_000


def test_a_recording_that_begins_late_ends_and_gives_everything_back(clock: Clock) -> None:
    device = FakeDevice()
    recorder = WorkerRecorder("target", 0, device, 4)  # type: ignore[arg-type]
    timer, host = recorder.timer("target.model_forward", gpu=True), recorder.timer("target.cpu_copy_enqueue")
    recorder.warm()
    recorder.switch_timers(True)
    recorder.switch_counters(False)

    def stage() -> None:
        device.gpu.enqueued += 5
        for one in (timer, host):
            if one.on:
                one.start()
                device.gpu.enqueued += 7
                one.stop()

    stage()  # before it begins: timed, and in no picture
    device.gpu.finish()
    timeline = Timeline(4, 1)
    recorder.record(timeline)
    assert (recorder.count, recorder.log) == (True, timeline.logs[0])
    for _ in range(2):
        stage()
    device.gpu.finish()
    recorder.record(None)
    stage()
    device.gpu.finish()
    recorder.step_boundary()
    assert {log.label: len(log.spans()) for log in timeline.logs} == {"target/0": 2, "target/0 stream": 2}
    assert (recorder.count, recorder.log, timer.log, host.log) == (False, None, None, None)
    assert recorder.pool is not None
    assert (recorder.pool.log, len(recorder.pool.free)) == (None, 4)
    assert timer.count == 4
    recorder.switch_timers(False)
    assert not timer.on


# -- pictures of little --------------------------------------------------------------------------------------


def test_nothing_makes_an_empty_picture_that_can_be_drawn() -> None:
    shown = picture({"target/0": [], "drafter/0": []}, 5)
    assert shown.tracks == ()
    CHECK.validate(trace(shown, "empty"))
    ET.fromstring(draw(shown, "empty", COLOURS))


def test_a_run_that_died_before_its_first_step_shows_what_there_is() -> None:
    shown = picture({"target/0": [Span("target.batch", 5, 9, 0)], "drafter/0": [], "monitor": []}, 5)
    assert (shown.begin_ns, shown.end_ns, shown.steps) == (5, 9, ())
    CHECK.validate(trace(shown, "died"))
    ET.fromstring(draw(shown, "died", COLOURS))


def test_a_batch_handed_over_before_the_first_step_has_no_flow() -> None:
    logs = {
        "target/0": [Span(PUT, 5, 5, 3), Span(PUT, 25, 25, 4), Span(QUEUE, 26, 26, 2)],
        "drafter/0": [Span(DRAW, 21, 21, 3), Span(DRAW, 30, 30, 4), Span(STEP, 20, 40, 7)],
    }
    shown = picture(logs, 1)
    assert [(flow.batch, flow.source, flow.drain) for flow in shown.flows] == [(4, "target/0", "drafter/0")]
    assert shown.counters["batches in the queue"] == ((26, 2),)


def test_a_span_around_the_first_moment_is_cut_there() -> None:
    logs = {"target/0": [Span("target.batch", 0, 3000, 1)], "drafter/0": [Span(STEP, 1000, 5000, 0)]}
    (span,) = [
        event for event in trace(picture(logs, 1), "cut")["traceEvents"] if event.get("cat") == "target"
    ]
    assert (span["ts"], span["dur"]) == (0.0, 2.0)


def test_a_folder_that_cannot_be_written_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = write_timeline(Timeline(1, 1), tmp_path / "file" / "run", "x")
    assert said.startswith("the timeline could not be written: ")
    assert "\n" not in said


def test_the_order_of_tracks_is_that_of_the_data() -> None:
    labels = [
        "monitor",
        "drafter/1",
        "checkpoint writer",
        "target/0 stream",
        "drafter/0",
        "target/0",
        "prefetcher/0",
    ]
    logs = {label: [Span("x", 0, 1)] for label in labels}
    assert [track.label for track in picture(logs, 1).tracks] == [
        "prefetcher/0", "target/0", "target/0 stream", "drafter/0", "drafter/1", "checkpoint writer",
        "monitor",
    ]  # fmt: skip
