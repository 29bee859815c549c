"""Stages that the conductor must tell apart; each runs in a process of its own, like a real one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.gpu_check.stage import Found, Table

CHILD_ENVIRONMENT = "STUB_CHILD_PID_FILE"


class Stub:
    """A stage that is as claimed."""

    name = "good"
    asks = "Is all well?"
    seconds = 60

    def look(self) -> Found:
        rows = (("a|b", "1"),)
        return Found(3, "things", notes=("a note",), tables=(Table("Rows", ("what", "n"), rows),))


class CountsNothing(Stub):
    name = "empty"

    def look(self) -> Found:
        return Found(0, "operations")


class FindsSomething(Stub):
    name = "problem"

    def look(self) -> Found:
        return Found(3, "things", ("drafter/0 waits",))


class Crashes(Stub):
    name = "crash"

    def look(self) -> Found:
        raise RuntimeError("planted: no kernel image")


class EndsWithoutAWord(Stub):
    name = "silent"

    def look(self) -> Found:
        os._exit(0)


class GivesNonsense(Stub):
    name = "nonsense"

    def look(self) -> Found:
        return {"looked_at": "many"}  # type: ignore[return-value]


class Hangs(Stub):
    """With a child of its own that holds its output open."""

    name = "hang"
    seconds = 5

    def look(self) -> Found:
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        path = Path(os.environ[CHILD_ENVIRONMENT])
        path.with_suffix(".part").write_text(str(child.pid))
        path.with_suffix(".part").rename(path)
        child.wait()
        return Found(1, "things")


class LooksOutside(Stub):
    """Says what its process may see of the job's summary, which belongs to the whole."""

    name = "outside"

    def look(self) -> Found:
        return Found(1, "things", notes=(os.environ.get("GITHUB_STEP_SUMMARY", "none"),))
