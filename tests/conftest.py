"""GPU tests are skipped where there is no CUDA device, and their number is printed, so that nobody takes them
for passed."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis
import pytest
import torch

from tests.clock import Clock
from tests.waiting import HANG_S

_skipped = _left_out = 0

NO_CLOCK = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("whole", **NO_CLOCK)
hypothesis.settings.register_profile("daily", max_examples=25, **NO_CLOCK)

DAILY = "not slow"
"""The `-m` of a quick run, in which hypothesis tries fewer examples."""

GIVES_UP = (
    ("dflash.pipeline.trainer", "_JOIN_S"),
    ("dflash.pipeline.saving", "_SETTLE_S"),
    ("dflash.observe.sinks.base", "Sink.close_timeout_s"),
    ("steptime.counting.ways.allocator", "TURN_S"),
    ("bench.subjects.trainer.harness", "BARRIER_S"),
)
"""Where a run goes on without a thread that has kept it waiting for some seconds. A thread of a busy machine
may take as long; a test of the giving up sets its own."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="also the tests that take many seconds each")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test is imported: it takes its settings then."""
    hypothesis.settings.load_profile("daily" if config.getoption("markexpr") == DAILY else "whole")


@pytest.fixture(autouse=True)
def own_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test puts on the path of modules ends with it."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody gives up on a thread that is slow only because the machine is."""
    for module, name in GIVES_UP:
        if module in sys.modules:
            monkeypatch.setattr(f"{module}.{name}", HANG_S)
    if (monitor := sys.modules.get("dflash.observe.monitor")) is not None:
        monkeypatch.setattr(monitor.Monitor.stop, "__defaults__", (HANG_S,))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only the test moves, in the place of all clocks of the code under test."""
    made = Clock()
    made.install(monkeypatch)
    return made


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    global _skipped, _left_out
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
                _skipped += 1
    if config.getoption("--thorough"):
        return
    long = [item for item in items if "thorough" in item.keywords]
    if long and len(long) < len(items):  # named alone on the command line, they run
        items[:] = [item for item in items if "thorough" not in item.keywords]
        config.hook.pytest_deselected(items=long)
        _left_out = len(long)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # each process of xdist collects all tests
        session.config.workeroutput["not_run"] = (_skipped, _left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    global _skipped, _left_out
    _skipped, _left_out = getattr(node, "workeroutput", {}).get("not_run", (_skipped, _left_out))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped:
        terminalreporter.write_line(f"{_skipped} GPU tests skipped: no CUDA device here")
    if _left_out:
        terminalreporter.write_line(
            f"{_left_out} thorough tests left out, many seconds each: nox -s thorough runs them"
        )
