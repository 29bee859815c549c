"""GPU tests are skipped where there is no CUDA device, and their number is printed, so that nobody takes them
for passed."""

from __future__ import annotations

import pytest
import torch

from tests.clock import Clock

_skipped = 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that only the test moves, in the place of all clocks of the code under test."""
    made = Clock()
    made.install(monkeypatch)
    return made


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    global _skipped
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
            _skipped += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped:
        terminalreporter.write_line(f"{_skipped} GPU tests skipped: no CUDA device here")
