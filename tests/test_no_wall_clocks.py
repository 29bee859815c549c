"""No test judges a wall clock: a busy machine, or one of another make, would fail it with nothing wrong.

A test that needs time to pass moves a clock (`tests/clock.py`); one that needs another thread to have done
something waits for that (`tests/waiting.py`), for as long as only a hang takes. What is about time itself is
in `bench/`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import HANG_S

ROOT = Path(__file__).parents[1]
CLOCKS = frozenset(
    f"{name}{unit}"
    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
) | {"sleep", "clock_gettime", "clock_gettime_ns"}

ALLOWED = {
    "tests/waiting.py": "the one loop that polls: it sleeps a millisecond, and its deadline is a hang",
    "tests/observe/layout.py": "measures for bench/test_hot_path.py; its test judges keys and bytes",
    "tests/fuzz/__main__.py": "a program that ends after its minutes; its tests give it rounds, and no end",
    "interop/zlab_peer.py": "gives another package a function in place of one that waits for a GPU",
}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each use of a clock or of `sleep`, and of each wait with a short limit."""
    nodes = list(ast.walk(ast.parse(source)))
    modules = {"time"}
    for node in nodes:
        if isinstance(node, ast.Import):
            modules.update(alias.asname for alias in node.names if alias.name == "time" and alias.asname)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            for alias in node.names:
                if alias.name in CLOCKS or alias.name == "*":
                    yield node.lineno, f"from time import {alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr in CLOCKS:
            if isinstance(node.value, ast.Name) and node.value.id in modules:
                yield node.lineno, f"time.{node.attr}"
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            limits = [one.value for one in node.keywords if one.arg in ("timeout", "timeout_s")]
            limits += node.args if name in ("wait", "join") and len(node.args) == 1 else []
            limits += node.args[1:2] if name == "wait_until" else []
            limits += node.args[:1] if name == "timeout" else []
            limits += [one.value for one in node.keywords if one.arg == "deadline"]
            for limit in limits:
                if (
                    isinstance(limit, ast.Constant)
                    and isinstance(limit.value, int | float)
                    and limit.value < HANG_S
                ):
                    yield node.lineno, f"{name} gives up after {limit.value:g} s"


def complaints(root: Path, allowed: dict[str, str]) -> list[str]:
    """`file:line: what` for each finding in a file that is not allowed any."""
    found = []
    for folder in ("tests", "interop"):
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if name not in allowed:
                lines = sorted(findings(path.read_text(encoding="utf-8")))
                found += [f"{name}:{line}: {what}" for line, what in lines]
    return found


def test_no_test_looks_at_a_clock() -> None:
    assert complaints(ROOT, ALLOWED) == [], "see this file's first lines"


def test_what_is_allowed_is_still_needed() -> None:
    needless = [name for name in ALLOWED if not list(findings((ROOT / name).read_text(encoding="utf-8")))]
    assert needless == []


@pytest.mark.fault
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("import time\n\nassert time.perf_counter() - 1 < 2\n", "3: time.perf_counter"),
        ("import time as t\nt.sleep(1)\n", "2: time.sleep"),
        ("from time import monotonic_ns as now\n", "1: from time import monotonic_ns"),
        ("def test():\n    from time import sleep\n", "2: from time import sleep"),
        ("import time\nfor clock in (time.thread_time,):\n    pass\n", "2: time.thread_time"),
        ("thread.join(2)\n", "1: join gives up after 2 s"),
        ("assert event.wait(timeout=0.5)\n", "1: wait gives up after 0.5 s"),
        ("wait_until(lambda: True, 5.0)\n", "1: wait_until gives up after 5 s"),
        ("process.communicate(timeout=20)\n", "1: communicate gives up after 20 s"),
        ("@pytest.mark.timeout(90)\ndef test(): ...\n", "1: timeout gives up after 90 s"),
        ("@settings(deadline=100)\ndef test(): ...\n", "1: settings gives up after 100 s"),
    ],
)
def test_a_planted_clock_is_found_with_its_place(tmp_path: Path, planted: str, said: str) -> None:
    (tmp_path / "tests/deep").mkdir(parents=True)
    (tmp_path / "tests/deep/test_planted.py").write_text(planted)
    (tmp_path / "tests/test_allowed.py").write_text(planted)
    found = complaints(tmp_path, {"tests/test_allowed.py": "for this test"})
    assert found == [f"tests/deep/test_planted.py:{said}"]


def test_what_judges_no_clock_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_good.py").write_text(
        f"import time\ntime.strftime('%Y')\nthread.join()\nthread.join({HANG_S})\n', "
        "'.join(names)\nclock.sleep(3)\n"
        f"subprocess.run(command, timeout={HANG_S})\nwait_until(lambda: True)\nclass Row:\n    time = 3\n"
    )
    assert complaints(tmp_path, {}) == []
