"""One process holds a run's folder, whatever became of the one before it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dflash.pipeline.run_folder import LOCK, hold
from steptime.errors import UserError
from tests.waiting import HANG_S

pytestmark = pytest.mark.fault

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.truncate(0)
file.write('{"pid": 4711, "host": "there"}')
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


def one_line(path: Path) -> str:
    with pytest.raises(UserError) as caught, hold(path):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_second_one_is_refused_and_told_who_holds_it(tmp_path):
    with hold(tmp_path / "run"):
        text = one_line(tmp_path / "run")
    assert f"process {os.getpid()} on " in text
    assert "use another --out" in text
    with hold(tmp_path / "run"):
        pass


def test_the_lock_of_a_killed_process_holds_nobody_up(tmp_path):
    lock = tmp_path / LOCK
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    assert "process 4711 on there trains there already" in one_line(tmp_path)
    process.kill()
    process.communicate(timeout=HANG_S)
    assert lock.exists()
    with hold(tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_a_folder_that_stays_empty_is_removed_again(tmp_path):
    with hold(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert list(tmp_path.iterdir()) == []
    with hold(tmp_path / "a" / "b") as folder:
        folder.write_config("{}")
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["config.json"]


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    left = tmp_path / "checkpoints" / ".step-00000040.99"
    left.mkdir(parents=True)
    (left / "state.safetensors").write_bytes(b"half")
    with hold(tmp_path) as folder:
        assert folder.leftovers == [left.name]
    assert not left.exists()


def test_an_impossible_folder_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert "a file is in the way" in one_line(tmp_path / "file")
    assert "a file is in the way" in one_line(tmp_path / "file" / "below")
    assert "cannot be a run folder" in one_line(Path("/proc/run"))
    assert "cannot be a run folder" in one_line(tmp_path / ("x" * 300))
