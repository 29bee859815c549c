"""The real trainer in pairs of segments, in miniature: equal work in both halves, losses that repeat, ticks
on demand, known costs where they belong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench.subjects.trainer.harness as shared
from bench.subjects.trainer import pairs
from bench.subjects.trainer.groups import GroupPlan
from bench.subjects.trainer.injected import Injected, InjectedSink, Later, Loss
from bench.subjects.trainer.pairs import PairTrainer
from dflash.config import ObserveConfig
from dflash.data.batch import BatchSpec
from dflash.device import Device, simulating
from dflash.observe.collectors.base import Sources
from dflash.observe.histogram import RING
from dflash.observe.recorder import WorkerRecorder
from dflash.observe.roles import RoleMap
from dflash.observe.sinks.base import Row
from steptime.records.pairs import CONTROL, PLACEBO, Layer, Pair, Question, Request, Segment
from steptime.subjects.group_losses import check_pair_losses
from steptime.subjects.injection import Injection, Place
from steptime.subjects.pairs import Round, Stretch, Wanted
from steptime.subjects.protocol import SubjectResult
from tests.clock import Clock
from tests.pipeline.run import small_config
from tests.waiting import HANG_S, wait_until

NONE: frozenset[str] = frozenset()
FIVE_BY_THREE = (
    f"target.devices={[f'cpu:{i}' for i in range(5)]}".replace("'", '"'),
    f"drafter.devices={[f'cpu:{i}' for i in range(3)]}".replace("'", '"'),
    "queue.capacity=12",
)


def run(subject: PairTrainer, wanted: Sequence[Wanted]) -> tuple[list[Segment], SubjectResult]:
    taken: list[Segment] = []
    try:
        subject.open()
        return taken, subject.run_pairs(iter(wanted), taken.append)
    finally:
        subject.close()


# -- the plan ------------------------------------------------------------------------------------------------


class Numbered:
    """A plan whose every batch is another one."""

    def spec(self, index: int) -> BatchSpec:
        return BatchSpec(index, 100 + index, (index,), 8)


@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 40), st.none() | st.integers(0, 5)), max_size=6),
)
def test_a_group_begins_at_a_whole_step_behind_all_that_was_built(
    groups: int, per_step: int, turns: list[tuple[int, int | None]]
) -> None:
    plan = GroupPlan(Numbered(), groups, per_step)
    built, first = 0, 0
    for batches, group in turns:
        for _ in range(batches):
            plan.spec(built)
            built += 1
        before = [plan.spec(index) for index in range(built)]
        group = None if group is None else group % groups
        first = plan.turn(group)
        assert first * per_step < built + per_step
        assert [plan.spec(index) for index in range(built)] == before, "what was built stays what it was"
        for index in range(first * per_step, (first + 2) * per_step):
            spec, step = plan.spec(index), index // per_step
            wanted = (step % groups if group is None else group) * per_step + index % per_step
            assert spec == replace(Numbered().spec(wanted), index=index), "with its anchors"
        built = max(built, (first + 2) * per_step)


# -- equal work ----------------------------------------------------------------------------------------------


class Worked:
    """What every stage has worked on, cut at the two ends of each segment."""

    def __init__(self, subject: PairTrainer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.segments: list[Counter[tuple[str, BatchSpec]]] = []
        self._now: Counter[tuple[str, BatchSpec]] = Counter()
        self._lock = threading.Lock()
        trainer = subject.trainer
        assert trainer is not None
        self._watch(monkeypatch, trainer.prefetcher, "_collate", "prefetcher", lambda spec: spec)
        for worker in trainer.target_workers:
            self._watch(monkeypatch, worker, "_run_target", "target", lambda batch: batch.spec)
        self._watch(monkeypatch, trainer.queue, "put", "queue", lambda item: item.batch.spec)
        for worker in trainer.drafter_workers:
            role = f"drafter/{worker.index}"
            self._watch(monkeypatch, worker, "_micro_step", role, lambda item: item.batch.spec)
        ready = subject.ready

        def cut(request: Request, step: int) -> None:
            ready(request, step)
            self._now = Counter()

        monkeypatch.setattr(subject, "ready", cut)

    def _watch(self, monkeypatch: pytest.MonkeyPatch, owner: Any, method: str, stage: str, spec: Any) -> None:
        inner = getattr(owner, method)

        def outer(first: Any, *rest: Any) -> Any:
            result = inner(first, *rest)
            with self._lock:
                self._now[stage, replace(spec(first), index=-1)] += 1
            return result

        monkeypatch.setattr(owner, method, outer)

    def end(self, segment: Segment) -> None:
        self.segments.append(self._now)
        self._now = Counter()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waiting", "settings"),
    [
        (1, ()),
        (2, ("train.accumulation=4", "data.prefetch=2")),
        (1, FIVE_BY_THREE),
        (2, (*FIVE_BY_THREE, "train.accumulation=2", "data.prefetch=2")),
    ],
    ids=["1x1", "1x1 accumulating, deep", "5x3", "5x3 accumulating, deep"],
)
def test_both_halves_of_a_pair_work_on_the_same_batches_in_every_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiting: int, settings: tuple[str, ...]
) -> None:
    monkeypatch.setattr(shared, "WAITING_PER_WORKER", {"cpu": waiting})
    subject = PairTrainer(small_config(tmp_path, *settings))
    everything = frozenset(subject.switches)
    wanted = [
        Request(on, steps, group, layer, number, half)
        for number, (group, steps, layer) in enumerate(
            [
                (2, 1, Layer.PATH),
                (2, 2, Layer.PATH),
                (0, 1, Layer.PATH),
                (0, 2, Layer.TICK),
                (1, 2, Layer.FLUSH),
            ]
        )
        for half, on in enumerate((everything, NONE) if number % 2 else (NONE, everything))
    ]
    taken: list[Segment] = []
    try:
        subject.open()
        worked = Worked(subject, monkeypatch)

        def on_segment(segment: Segment) -> None:
            worked.end(segment)
            taken.append(segment)

        result = subject.run_pairs(iter(wanted), on_segment)
    finally:
        subject.close()
    assert result.faults == ()
    per_step = subject.plan.per_step
    for request, segment, work in zip(wanted, taken, worked.segments, strict=True):
        specs = subject.plan._specs[request.group * per_step : (request.group + 1) * per_step]
        group = Counter({replace(spec, index=-1): request.steps for spec in specs})
        for stage in ("prefetcher", "target", "queue", "drafter"):
            found: Counter[BatchSpec] = Counter()
            for (where, spec), count in work.items():
                if where.startswith(stage):
                    found[spec] += count
            assert found == group, (request, stage)
        assert segment.tokens == request.steps * subject.tokens(request.group)
    for first, second in zip(worked.segments[::2], worked.segments[1::2], strict=True):
        drawn = [
            {key: n for key, n in one.items() if key[0].startswith("drafter")} for one in (first, second)
        ]
        assert drawn[0] == drawn[1], "each drafter by itself, too"
    layers = [request.layer for request in wanted[::2]]
    pairs = [
        Pair(number, layers[number], Question.TOGETHER, *taken[2 * number : 2 * number + 2])
        for number in range(len(layers))
    ]
    checked = check_pair_losses(pairs, result.losses)
    assert [pair.losses_equal for pair in checked.pairs] == [True] * len(pairs)
    assert (checked.difference, checked.missing) == ("", 0)


# -- switches, ticks and flushes -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_path_segment_has_its_switches_and_no_tick_and_a_tick_segment_one_with_all_instruments_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = PairTrainer(small_config(tmp_path), injections=[Injection(0.0, Place.SINK)])
    seen: list[tuple[set[str], int, int, bool]] = []
    one = frozenset({"batch", PLACEBO})
    wanted = [Request(one, 1, 0), Request(NONE, 2, 0, Layer.TICK), Request(one, 2, 0, Layer.FLUSH)]
    wanted += [Request(NONE, 1, 0), Request(one, 1, 0)]

    def state() -> tuple[set[str], int, int, bool]:
        observer = subject.observer
        assert observer is not None
        on = {name for name, is_on in observer.switches().items() if is_on}
        return on, observer._monitor.ticks, observer.flushes, observer.idle

    try:
        subject.open()
        subject.run_pairs(iter(wanted), lambda segment: seen.append(state()))
    finally:
        subject.close()
    every = set(subject.collectors)
    assert seen == [
        ({"batch"}, 0, 0, True),
        (every, 1, 0, True),
        (every, 2, 1, True),
        (set(), 2, 1, True),
        ({"batch"}, 2, 1, True),
    ]


@pytest.mark.slow
def test_a_flush_segment_writes_the_row_of_the_collectors_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Row] = []
    monkeypatch.setattr(InjectedSink, "write", lambda self, written: rows.extend(written))
    subject = PairTrainer(small_config(tmp_path), injections=[Injection(1.0, Place.SINK)])
    halves = [frozenset({"profile", "workers"}), frozenset({"batch", "injected@sink"})] * 3
    run(subject, [Request(on, 3, 0, Layer.FLUSH) for on in halves])
    found = [
        {key.partition("/")[0] for key in row.values} - {"monitor"}
        for row in rows
        if "monitor/dropped" in row.values
    ]
    assert found[:6] == [{"profile", "target", "drafter", "host"}, {"batch", "injected@sink"}] * 3
    spans = [row.values.get("profile/drafter.forward_count") for row in rows[:6]]
    worth = min(subject.periods[Layer.TICK] / subject._step_s, RING)
    assert spans[4] == pytest.approx(min(worth, subject.warmup + 5 + 4 * 3), abs=1), "a tick's worth"
    assert rows[1].values["injected@sink"] == pytest.approx(0.01 * subject.periods[Layer.FLUSH])


@pytest.mark.slow
def test_the_account_comes_from_a_stretch_by_the_monitors_own_clock(tmp_path: Path) -> None:
    config = small_config(tmp_path, "observe.tick_s=0.02", "observe.flush_s=0.1")
    subject = PairTrainer(config)
    taken, result = run(subject, [Request(NONE, 1, 1), Stretch(2), Request(NONE, 1, 1)])
    assert len(taken) == 2
    assert result.faults == ()
    accounted = result.accounted_percent
    assert accounted is not None
    assert set(accounted) == {*subject.collectors, "monitor", "all"}
    assert accounted["all"] == pytest.approx(sum(accounted.values()) - accounted["all"])
    assert 0.0 < accounted["workers"] < 100.0
    losses = dict(result.losses)
    assert losses[taken[0].first_step] == losses[taken[1].first_step]


def logs_of(subject: PairTrainer) -> set[Any]:
    """Whatever anything of the run would write spans to."""
    _, observer = subject._built()
    recorders = observer._sources.recorders
    timers = [timer for recorder in recorders for timer in recorder.timers.values()]
    pools = [recorder.pool for recorder in recorders if recorder.pool is not None]
    return {one.log for one in (*recorders, *timers, *pools)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices",
    [
        ('target.devices=["cpu","cpu"]', 'drafter.devices=["cpu","cpu"]'),
        ('target.devices=["sim:0"]', 'drafter.devices=["sim:1"]'),
    ],
)
def test_two_rounds_are_recorded_and_no_segment_is(tmp_path: Path, devices: tuple[str, ...]) -> None:
    subject = PairTrainer(small_config(tmp_path, *devices))
    everything = frozenset(subject.switches)
    taken: list[Segment] = []
    seen: list[tuple[set[Any], bool, set[bool]]] = []

    def on_segment(segment: Segment) -> None:
        taken.append(segment)
        recorders = subject._built()[1]._sources.recorders
        stages = {timer.on for recorder in recorders for timer in recorder.timers.values()}
        seen.append((logs_of(subject), any(recorder.count for recorder in recorders), stages))

    wanted = [
        Request(NONE, 1, 1),
        Round("off", NONE),
        Request(NONE, 1, 1),
        Round("all", everything),
        Request(NONE, 1, 1),
        Request(everything, 1, 1),
    ]
    with simulating(subject.devices):
        try:
            subject.open()
            result = subject.run_pairs(iter(wanted), on_segment)
        finally:
            subject.close()
    assert result.faults == ()
    off, on = ({None}, False, {False}), ({None}, True, {True})
    assert seen == [off, off, off, on]
    losses = dict(result.losses)
    assert len({losses[one.first_step] for one in taken}) == 1
    assert result.rounds is not None
    pictures = result.rounds.pictures
    assert list(pictures) == ["off", "all"]
    for shown in pictures.values():
        assert shown.begin_ns == 0
        assert len(shown.steps) == subject.groups
        assert shown.steps[0].number % subject.groups == 0
        names = {span.name for track in shown.tracks for span in track.spans}
        assert {"drafter.exchange", "target.wait_in", "prefetcher.collate"} <= names
        assert shown.flows
        if "sim" in devices[0]:  # its kernels take no time, so they all stand at the first moment
            assert {"target/0 stream", "drafter/0 stream"} <= {track.label for track in shown.tracks}
        else:
            stages = {"target.model_forward", "drafter.backward", "drafter.optimizer_step"}
            assert stages <= names & set(result.rounds.colours)


@pytest.mark.slow
def test_without_a_round_there_is_no_picture(tmp_path: Path) -> None:
    _, result = run(PairTrainer(small_config(tmp_path)), [Request(NONE, 1, 1)])
    assert result.rounds is None


@pytest.mark.slow
@pytest.mark.fault
def test_a_collector_that_changes_training_is_seen_in_the_losses_of_its_half(tmp_path: Path) -> None:
    subject = PairTrainer(small_config(tmp_path))
    taken: list[Segment] = []
    wanted = [
        Request(NONE, 2, 1),
        Request(NONE, 2, 1),
        Request(NONE, 2, 1),
        Request(frozenset({"batch"}), 2, 1),
    ]
    subject.open()
    try:
        assert subject.trainer is not None
        weights = next(subject.trainer.replicas[0].drafter.parameters())
        inner = subject._throw

        def throw(on: Any) -> None:
            inner(on)
            if "batch" in on:
                weights.data.add_(1e-3)

        subject._throw = throw  # type: ignore[method-assign]
        result = subject.run_pairs(iter(wanted), taken.append)
    finally:
        subject.close()
    pairs = [Pair(at, Layer.PATH, Question.TOGETHER, *taken[2 * at : 2 * at + 2]) for at in (0, 1)]
    found = check_pair_losses(pairs, result.losses)
    assert [pair.losses_equal for pair in found.pairs] == [True, False]
    assert "on: batch" in found.difference


@pytest.mark.slow
@pytest.mark.fault
def test_a_compile_in_a_measured_half_is_a_fault_of_the_run(tmp_path: Path) -> None:
    wanted = [Request(NONE, 2, 1), Request(frozenset({"compile"}), 2, 1)]
    _, result = run(PairTrainer(small_config(tmp_path), plants=("compile",)), wanted)
    (fault,) = result.faults
    assert fault.startswith("torch compiled planted (")


@pytest.mark.slow
@pytest.mark.fault
def test_a_tick_that_fails_is_a_fault_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = PairTrainer(small_config(tmp_path))
    subject.open()
    try:
        assert subject.observer is not None
        monkeypatch.setattr(subject.observer._monitor, "_self_report", lambda lateness: 1 / 0)
        result = subject.run_pairs(iter([Request(NONE, 2, 0, Layer.TICK)]), lambda segment: None)
    finally:
        subject.close()
    assert any("a tick of the monitor failed: ZeroDivisionError" in fault for fault in result.faults)


@pytest.mark.fault
def test_what_never_comes_to_rest_is_a_fault_and_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = PairTrainer(small_config(tmp_path), injections=[Injection(0.0, Place.THREAD)])
    monkeypatch.setattr(Later, "pending", 1)
    # Of this wait alone: the pipeline has all the time to drain.
    monkeypatch.setattr(pairs, "shared", SimpleNamespace(**{**vars(shared), "BARRIER_S": 0.05}))
    with pytest.raises(RuntimeError, match="do not come to rest"):
        run(subject, [Request(NONE, 1, 0)])


# -- known costs ---------------------------------------------------------------------------------------------


def built(injection: Injection) -> Injected:
    config = ObserveConfig(tick_s=1.0, flush_s=10.0)
    return Injected(Sources(config, RoleMap(("cpu",), ("cpu",))), injection)


@pytest.mark.parametrize(
    ("place", "roles"), [(Place.STEP, ("target", "drafter")), (Place.TARGET, ("target",))]
)
def test_a_share_of_the_workers_own_time_is_lost_in_its_stages_alone(
    clock: Clock, place: Place, roles: tuple[str, ...]
) -> None:
    injected = built(Injection(20.0, place))
    recorders = [WorkerRecorder(role, 0, Device("cpu")) for role in ("prefetcher", "target", "drafter")]  # type: ignore[arg-type]
    for recorder in recorders:
        injected.equip(recorder)
    assert tuple(loss.role for loss in injected.losses) == roles
    clock.step_ns = 500_000
    for loss in injected.losses:
        recorder = next(one for one in recorders if one.role == loss.role)
        recorder.step_boundary()
        for on in (False, True, True):
            injected.switch(on)
            clock.advance(0.8)  # the worker's own work
            before_ns = clock.now_ns
            recorder.step_boundary()
            lost_s = (clock.now_ns - before_ns) / 1e9
            assert lost_s == pytest.approx(0.2 if on else 0.0, abs=3e-3), "a fifth of the time is lost"
        injected.switch(True)
        clock.advance(5.0)  # not a step's work
        loss.restart()
        clock.advance(0.4)
        before_ns = clock.now_ns
        recorder.step_boundary()
        assert (clock.now_ns - before_ns) / 1e9 == pytest.approx(0.1, abs=3e-3)


@pytest.mark.parametrize(
    ("place", "tick_s", "flush_s"), [(Place.TICK, 0.02, 0.0), (Place.FLUSH, 0.0, 0.2), (Place.SINK, 0.0, 0.2)]
)
def test_a_tick_or_a_flush_loses_its_seconds(
    clock: Clock, place: Place, tick_s: float, flush_s: float
) -> None:
    injection = Injection(2.0, place)
    injected = built(injection)
    sink = InjectedSink([injection])
    clock.step_ns = 1000

    def lasts(call: Any) -> float:
        before_ns = clock.now_ns
        call()
        return (clock.now_ns - before_ns) / 1e9

    assert lasts(lambda: injected.sample(0)) == pytest.approx(tick_s, abs=1e-4)

    def flush() -> None:
        sink.write([Row("metrics", 0.0, 0, {"x": 1.0} | injected.flush())])

    assert lasts(flush) == pytest.approx(flush_s, abs=1e-4)


def test_the_lock_is_held_for_its_seconds(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    import bench.subjects.trainer.injected as module

    held: list[int] = []
    monkeypatch.setattr(module, "held_length", lambda seconds: round(1e6 * seconds))
    monkeypatch.setattr(module, "hold_lock", held.append)
    injected = built(Injection(2.0, Place.LOCK))
    injected.sample(0)
    injected.flush()
    assert held == [20_000]


def test_later_work_is_pending_until_it_is_done() -> None:
    gate, done = threading.Event(), []

    def work() -> None:
        assert gate.wait(HANG_S)
        done.append(1)

    later = Later(work, delay_s=0.0)
    assert not later.pending
    later.start()
    later.start()
    assert later.pending == 2
    gate.set()
    wait_until(lambda: not later.pending)
    assert len(done) == 2
    later.close()


@pytest.mark.slow
def test_injected_costs_are_paid_by_the_real_workers(tmp_path: Path) -> None:
    subject = PairTrainer(small_config(tmp_path), injections=[Injection(10.0), Injection(10.0, Place.TARGET)])
    paid: dict[str, list[dict[str, int]]] = {"injected": [], "injected@target": []}

    def requests() -> Iterator[Wanted]:
        for name in ("injected", "injected@target"):
            yield Request(frozenset({name}), 4, 0)
            yield Request(NONE, 4, 0)

    def on_segment(segment: Segment) -> None:
        for one in subject._injected:
            paid[one.name].append({loss.owner: loss.paid_ns for loss in one.losses})

    subject.open()
    try:
        subject.run_pairs(requests(), on_segment)
    finally:
        subject.close()
    both, target = paid["injected"], paid["injected@target"]
    assert all(one > 0 for one in both[0].values())
    assert set(both[0]) == {"target/0", "drafter/0"}
    assert both[0] == both[1] == both[3], "nothing while it is off"
    assert set(target[2]) == {"target/0"}
    assert target[0]["target/0"] == target[1]["target/0"] == 0
    assert target[2]["target/0"] > 0


@pytest.mark.slow
def test_the_control_is_paid_by_every_worker_in_its_segments_alone_and_in_no_account(tmp_path: Path) -> None:
    subject = PairTrainer(small_config(tmp_path, "observe.tick_s=0.02", "observe.flush_s=0.1"))
    on = frozenset({CONTROL, "batch"})
    wanted = [Stretch(1), Request(on, 4, 0), Request(NONE, 4, 0), Request(on, 2, 1)]
    wanted += [Request(frozenset({"batch"}), 2, 1, Layer.TICK), Request(on, 1, 1)]
    taken, result = run(subject, wanted)
    on_s = {wait.role: wait.turn_ns * 1e-9 * 2 / 98 for wait in subject.controls.waits}
    assert set(on_s) == {"target", "drafter"}
    least_s = min(on_s.values())
    assert [segment.control_s > 0 for segment in taken] == [True, False, True, False, True]
    for segment in taken:
        assert segment.control_s == 0 or segment.control_s >= segment.steps * least_s
        assert segment.control_s < segment.seconds
    assert subject.controlled
    assert CONTROL not in (*subject.switches, *subject.collectors)
    assert result.accounted_percent is not None
    assert CONTROL not in result.accounted_percent
    assert result.faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [(), ("train.accumulation=3", 'target.devices=["cpu:0", "cpu:1"]')])
def test_a_cost_in_one_stage_alone_is_paid_as_often_in_each_step_whatever_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    injection = Injection(1.0, Place.TARGET)
    subject = PairTrainer(small_config(tmp_path, *settings), injections=[injection])
    paid: Counter[str] = Counter()
    inner, lock = Loss.run, threading.Lock()

    def counted(self: Loss) -> None:
        inner(self)
        with lock:
            paid[self.role] += self.active

    monkeypatch.setattr(Loss, "run", counted)
    lengths = (1, 1, 2, 4, 1, 3)
    found: list[Counter[str]] = []

    def on_segment(segment: Segment) -> None:
        found.append(Counter(paid))

    try:
        subject.open()
        wanted = [Request(on, steps, 1) for steps in lengths for on in (frozenset({injection.name}), NONE)]
        subject.run_pairs(iter(wanted), on_segment)
    finally:
        subject.close()
    each = [
        after["target"] - before["target"] for before, after in zip([Counter(), *found], found, strict=False)
    ]
    per_step = subject.plan.per_step
    assert each == [count for steps in lengths for count in (steps * per_step, 0)]
    assert set(paid) == {"target"}
