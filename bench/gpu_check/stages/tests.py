"""Stage: the tests that need a GPU."""

from __future__ import annotations

import re

from bench.child_process import Ended, run_python
from bench.gpu_check.stage import Found

LIMIT_S = 37.0


class GpuTestsStage:
    """`pytest -m gpu`."""

    name = "tests"
    asks = "Do the tests that need a GPU pass?"
    seconds = 40

    def look(self) -> Found:
        words = ["-m", "pytest", "-m", "gpu", "-q", "tests", "-p", "no:cacheprovider"]
        return read(run_python(words, limit_s=LIMIT_S))


def read(ended: Ended) -> Found:
    """What pytest says. Pure. A skipped test has shown nothing."""
    counts = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|skipped|error)", ended.out)}
    problems = []
    if ended.code is None:
        problems.append(f"not finished after {LIMIT_S:g} s")
    elif ended.code != 0:
        problems.append(f"exit code {ended.code}")
    problems += [line for line in ended.out.splitlines() if line.startswith(("FAILED ", "ERROR "))][:20]
    if counts.get("skipped"):
        problems.append(f"{counts['skipped']} tests were skipped")
    summary = ", ".join(f"{n} {word}" for word, n in counts.items()) or "no summary"
    return Found(counts.get("passed", 0), "tests passed", tuple(problems), (summary,))
