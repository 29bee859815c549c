"""The worked examples of CONTRIBUTING.md run as they stand there, as the real things of their kinds do."""

from __future__ import annotations

import linecache
import random
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import bench.syncs.ways
from bench.subjects.registry import SUBJECTS
from bench.syncs.faults.fixture import try_fault
from bench.syncs.faults.planted import COUNTED, PLANTED
from dflash.commands.metrics_page import render
from dflash.config import Config, ObserveConfig
from dflash.observe.metric import MetricIndex
from dflash.observe.observer import Observer
from dflash.observe.registry import COLLECTORS, all_metrics
from dflash.observe.roles import RoleMap
from steptime.commands import overhead
from steptime.errors import UserError
from steptime.progress import Reporter
from steptime.records.pairs import PLACEBO
from steptime.records.receipt import Receipt
from steptime.subjects.injection import Injection
from steptime.subjects.protocol import INJECTED
from tests.clock import Clock

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
COLUMNS = 110


def example(name: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example whose docstring begins with `name`, as a module that stands in `file`."""
    (source,) = (one for one in EXAMPLES if one.startswith(f'"""{name}:'))
    made = ModuleType(f"example_{name.lower()}")
    made.__file__ = str(file)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setitem(
        linecache.cache, str(file), (len(source), None, source.splitlines(keepends=True), str(file))
    )
    exec(compile(source, str(file), "exec"), made.__dict__)
    return made


def test_every_example_is_run_and_narrow() -> None:
    assert [one[3:].partition(":")[0] for one in EXAMPLES] == ["pace", "Way", "matmul"]
    assert not [line for one in EXAMPLES for line in one.splitlines() if len(line) > COLUMNS]


def test_the_collector_is_registered_switched_and_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = example("pace", tmp_path / "pace.py", monkeypatch).PaceCollector
    monkeypatch.setitem(COLLECTORS.entries, build.name, build)
    assert "`pace/{worker}_boundaries`" in render()
    observer = Observer(ObserveConfig(collectors=("pace",)), tmp_path, RoleMap(("cpu",), ("cpu",)), sinks=())
    worker = observer.recorder("drafter", 0)
    observer.attach()
    pace = next(one for one in observer._collectors if one.name == "pace")
    assert pace.on
    assert pace.begin(0) == {}
    for _ in range(3):
        worker.step_boundary()
    found = pace.sample(1)
    assert found == {"pace/drafter-0_boundaries": 3}
    assert all(MetricIndex(all_metrics()).find(key) is not None for key in found)
    assert pace.instruments()[0] == 3
    observer.switch("pace", False)
    worker.step_boundary()
    assert pace.sample(2) == {"pace/drafter-0_boundaries": 0}
    assert worker.fault is None


@pytest.mark.fault
@pytest.mark.parametrize("name", COUNTED)
def test_the_way_finds_what_it_claims(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(bench.syncs.ways.__file__).with_name("item_calls.py")
    way = example("Way", file, monkeypatch).ItemWay()
    assert way.available() is None
    found = try_fault(way, PLANTED[name])
    assert bool(found.hits) == (name in way.claims), found.rows


class Machine(Clock):
    """Every reading of it is the end of a step that took 5 ms, give or take a little."""

    def __init__(self) -> None:
        super().__init__()
        self._chance = random.Random(7)

    def ns(self) -> int:
        self.now_ns += round(5e6 * self._chance.uniform(0.99, 1.01))
        return self.now_ns

    def lose(self, nanoseconds: int) -> int:
        self.now_ns += nanoseconds
        return nanoseconds


def measured(subject: Any, clock: Machine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Receipt:
    """A whole `overhead` of the subject in the machine's time."""
    monkeypatch.setattr("steptime.machine.state.unfit", lambda before, after: [])
    monkeypatch.setattr(overhead, "measure", partial(overhead.measure, clock=clock.seconds))
    options = overhead.Options(Config(), minutes=0.2, out=str(folder))
    return overhead.run_overhead(options, subject, Reporter(quiet=True))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small products wait for their threads where others work on the same cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_subject_is_made_by_name_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = example("matmul", tmp_path / "matmul.py", monkeypatch)
    monkeypatch.setitem(SUBJECTS.entries, "matmul", made.MatmulKind())
    subject, counter = overhead.make_subject(SUBJECTS["matmul"], Config(), injection=Injection(5.0))
    assert (subject.switches, counter) == (("idle", INJECTED, PLACEBO), None)
    with pytest.raises(UserError, match="--plant needs the trainer"):
        overhead.make_subject(SUBJECTS["matmul"], Config(), plant="item")

    clock = Machine()
    within = measured(
        made.MatmulSubject({"idle": 0.0}, clock.ns, clock.lose), clock, tmp_path / "within", monkeypatch
    )
    assert (within.verdict, within.losses_equal) == ("within", True)
    over = measured(
        made.MatmulSubject({"idle": 0.0, INJECTED: 0.05}, clock.ns, clock.lose),
        clock,
        tmp_path / "over",
        monkeypatch,
    )
    assert over.verdict == "over"
    assert {cost.name for cost in over.collectors if cost.verdict == "over"} == {INJECTED}
