"""Stage: the tests that need a GPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from xml.etree import ElementTree

from bench.gpu_check.stage import Found
from steptime.child_process import Ended, run_python

LIMIT_S = 37.0
MOST_LINES = 20


class GpuTestsStage:
    """`pytest -m gpu`."""

    name = "tests"
    asks = "Do the tests that need a GPU pass?"
    seconds = 40

    def look(self) -> Found:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tests.xml"
            words = ["-m", "pytest", "-m", "gpu", "tests", "-p", "no:cacheprovider", f"--junitxml={path}"]
            ended = run_python(words, limit_s=LIMIT_S)
            report = path.read_text(encoding="utf-8") if path.is_file() else None
        return read(ended, report)


def read(ended: Ended, report: str | None) -> Found:
    """What pytest says, by its report in JUnit's form. Pure. A skipped test has shown nothing."""
    problems = []
    if ended.code is None:
        problems.append(f"not finished after {LIMIT_S:g} s")
    elif ended.code != 0:
        problems.append(f"exit code {ended.code}")
    if report is None:
        return Found(0, "tests passed", (*problems, "no report"))
    passed = 0
    for case in ElementTree.fromstring(report).iter("testcase"):
        bad = [one.tag for one in case if one.tag in ("failure", "error", "skipped")]
        passed += not bad
        problems += [f"{tag}: {case.get('classname')}.{case.get('name')}" for tag in bad]
    if len(problems) > MOST_LINES:
        problems = [*problems[:MOST_LINES], f"and {len(problems) - MOST_LINES} more"]
    return Found(passed, "tests passed", tuple(problems))
