"""W&B: what reaches it, key by key, and that no fault of it costs the training side anything."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from dflash.config import ObserveConfig
from tests.observe.wandb_kit import run
from tests.observe.wandb_kit.reader import OfflineRun, read_file, read_run
from tests.observe.wandb_kit.server import FakeWandb, SilentServer, refusing_url

ROOT = Path(__file__).parents[2]
KEY = "0123456789" * 4
TIMEOUT_S = 1.0
EXCLUDE = ObserveConfig().wandb_exclude


@dataclass
class Outcome:
    measured: dict[str, Any]
    said: list[str]


def environment(folder: Path, url: str, key: str) -> dict[str, str]:
    """Without what this machine knows of W&B."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    variables |= {"HOME": str(folder), "NETRC": str(folder / "netrc"), "OMP_NUM_THREADS": "1"}
    return variables | ({"WANDB_BASE_URL": url} if url else {}) | ({"WANDB_API_KEY": key} if key else {})


@dataclass
class Launched:
    process: BaseProcess
    folder: Path

    def finish(self, timeout_s: float = 60.0) -> Outcome:
        """Wait for its end."""
        self.process.join(timeout_s)
        said = (self.folder / "err").read_text(encoding="utf-8").splitlines()
        assert self.process.exitcode == 0, said
        measured = json.loads((self.folder / "out").read_text(encoding="utf-8"))
        print(measured, said)
        return Outcome(measured, said)


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Launched]]:
    """Starts observed runs, each in a process of its own that need not import everything again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.observe.wandb_kit.run", "wandb", "wandb.sdk.launch", "requests", "yaml"])
    processes = []

    def start(folder: Path, mode: str, seconds: float, *, url: str = "", key: str = KEY) -> Launched:
        arguments = (folder, environment(folder, url, key), mode, seconds, TIMEOUT_S)
        processes.append(context.Process(target=run.child, args=arguments))
        processes[-1].start()
        return Launched(processes[-1], folder)

    yield start
    for process in processes:
        process.kill()


Launch = Callable[..., Launched]


def jsonl(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["kind"] == kind]


@pytest.fixture(scope="module")
def quiet(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The same run without W&B: the rate to keep."""
    return launch(tmp_path_factory.mktemp("quiet"), "off", 1.0).finish()


def assert_costs_nothing(outcome: Outcome, quiet: Outcome) -> None:
    """The calls a worker makes take as long as without W&B, and next to nothing of a step."""
    assert outcome.measured["median_calls_s"] < max(3 * quiet.measured["median_calls_s"], 50e-6)
    assert outcome.measured["median_step_s"] < 1.5 * quiet.measured["median_step_s"]
    assert outcome.measured["dropped"]["jsonl"] == 0


def assert_all_steps_in_jsonl(folder: Path, outcome: Outcome) -> None:
    assert [row["step"] for row in jsonl(folder, "train")] == list(range(1, outcome.measured["steps"] + 1))


# -- what reaches W&B -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offline(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, OfflineRun]:
    folder = tmp_path_factory.mktemp("offline")
    outcome = launch(folder, "offline", 2.5, key="").finish()
    return folder, outcome, read_run(folder)


def test_every_flush_window_arrives_key_by_key(offline: tuple[Path, Outcome, OfflineRun]) -> None:
    folder, _, run = offline
    rows = jsonl(folder, "metrics")
    arrived = [row for row in run.history if "train/step" not in row]
    assert len(arrived) == len(rows) >= 10
    for ours, theirs in zip(rows, arrived, strict=True):
        wanted = {key: value for key, value in ours["values"].items() if not any(fnmatch(key, one) for one in EXCLUDE)}
        assert 0 < len(wanted) < len(ours["values"]), "some keys are excluded"
        assert {key: value for key, value in theirs.items() if not key.startswith("_")} == {
            **wanted,
            "monitor/elapsed_s": pytest.approx(ours["elapsed_s"], abs=1e-6),
            "monitor/step": ours["step"],
        }


def test_training_scalars_arrive_with_their_own_step_at_most_one_a_second(offline: tuple[Path, Outcome, OfflineRun]) -> None:
    folder, outcome, run = offline
    ours = {row["step"]: row["values"] for row in jsonl(folder, "train")}
    arrived = [row for row in run.history if "train/step" in row]
    assert 2 <= len(arrived) <= 6 < outcome.measured["steps"]
    for row in arrived:
        assert {key: row[key] for key in ("train/loss", "train/lr")} == ours[row["train/step"]]
    assert arrived[-1]["train/step"] == outcome.measured["steps"]


def test_each_family_has_its_step_key(offline: tuple[Path, Outcome, OfflineRun]) -> None:
    _, _, run = offline
    families = ("profile", "gpu", "pipeline", "target", "drafter", "batch", "cuda", "monitor")
    assert {f"{family}/*": "monitor/elapsed_s" for family in families} | {"train/*": "train/step"} == {
        key: value for key, value in run.metrics.items() if "*" in key
    }


def test_summary_and_layout_arrive_and_wandb_samples_nothing_itself(offline: tuple[Path, Outcome, OfflineRun]) -> None:
    _, _, run = offline
    assert run.summary["run/bottleneck"].startswith("bottleneck: ")
    assert run.config["roles"] == {"targets": ["cpu"], "drafters": ["cpu"]}


def test_offline_costs_nothing(offline: tuple[Path, Outcome, OfflineRun], quiet: Outcome) -> None:
    folder, outcome, _ = offline
    assert outcome.said == []
    assert_costs_nothing(outcome, quiet)
    assert_all_steps_in_jsonl(folder, outcome)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_no_login_goes_offline_with_one_line(launch: Launch, tmp_path: Path, quiet: Outcome) -> None:
    outcome = launch(tmp_path, "online", 1.0, url=refusing_url(), key="").finish()
    assert outcome.said == [
        "wandb: offline, since there is no login (`wandb login`, or WANDB_API_KEY); `wandb sync` uploads later"
    ]
    assert_costs_nothing(outcome, quiet)
    assert_all_steps_in_jsonl(tmp_path, outcome)
    assert len(read_run(tmp_path).history) >= 5


def test_a_server_that_refuses(launch: Launch, tmp_path: Path, quiet: Outcome) -> None:
    outcome = launch(tmp_path, "online", 2.5, url=refusing_url()).finish()
    assert len(outcome.said) == 1
    assert outcome.said[0].startswith("wandb: offline, since ")
    assert_costs_nothing(outcome, quiet)
    assert_all_steps_in_jsonl(tmp_path, outcome)


def test_a_server_that_accepts_and_never_answers(launch: Launch, tmp_path: Path, quiet: Outcome) -> None:
    server = SilentServer()
    outcome = launch(tmp_path, "online", 2.5, url=server.url).finish()
    server.close()
    assert len(outcome.said) == 1
    assert outcome.said[0].startswith("wandb: offline, since ")
    assert outcome.measured["close_s"] < 2 * TIMEOUT_S + 15
    assert_costs_nothing(outcome, quiet)
    assert_all_steps_in_jsonl(tmp_path, outcome)


@pytest.fixture
def server() -> Iterator[FakeWandb]:
    made = FakeWandb()
    yield made
    made.die()


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "did not come to pass"
        time.sleep(0.02)


def test_a_server_that_works_gets_every_window(launch: Launch, tmp_path: Path, server: FakeWandb, quiet: Outcome) -> None:
    outcome = launch(tmp_path, "online", 2.0, url=server.url).finish()
    assert outcome.said == []
    posted = [row for row in server.rows if "train/step" not in row]
    assert [row["monitor/step"] for row in posted] == [row["step"] for row in jsonl(tmp_path, "metrics")]
    assert_costs_nothing(outcome, quiet)


def test_a_server_that_dies_in_the_middle(launch: Launch, tmp_path: Path, server: FakeWandb, quiet: Outcome) -> None:
    process = launch(tmp_path, "online", 2.5, url=server.url)
    wait_for(lambda: server.runs > 0)
    time.sleep(0.5)
    server.die()
    outcome = process.finish()
    assert outcome.measured["close_s"] < TIMEOUT_S + 3
    assert len(outcome.said) == 1
    assert "wandb sync" in outcome.said[0]
    assert_costs_nothing(outcome, quiet)
    assert_all_steps_in_jsonl(tmp_path, outcome)
    # Everything is in the run's folder, to be uploaded later.
    windows = [row for row in read_run(tmp_path).history if "train/step" not in row]
    assert [row["monitor/step"] for row in windows] == [row["step"] for row in jsonl(tmp_path, "metrics")]


def test_wandbs_own_process_dies(launch: Launch, tmp_path: Path, quiet: Outcome) -> None:
    process = launch(tmp_path, "offline", 3.5, key="")
    wait_for(lambda: bool(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))))
    time.sleep(0.5)
    (core,) = children(process.process.pid, "wandb-core")
    os.kill(core, signal.SIGKILL)
    outcome = process.finish()
    assert len(outcome.said) == 1
    assert "a new offline run takes over" in outcome.said[0]
    runs = [read_file(path) for path in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    assert len(runs) == 2
    # What the killed process had not yet put to disk is only in metrics.jsonl; the new run has all that came after.
    windows = [row["monitor/step"] for row in runs[1].history if "train/step" not in row]
    ours = [row["step"] for row in jsonl(tmp_path, "metrics")]
    assert len(windows) > 3
    assert windows == ours[-len(windows) :]
    assert_costs_nothing(outcome, quiet)
    assert_all_steps_in_jsonl(tmp_path, outcome)


def children(parent: int, name: str) -> list[int]:
    """Processes under `parent` whose program is `name`."""
    found: list[int] = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            if name in Path(f"/proc/{child}/comm").read_text():
                found.append(int(child))
            found += children(int(child), name)
    return found


def can_mount() -> bool:
    """Whether a small file system can be made for a test."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    return tried.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="cannot make a small file system to fill (unshare and mount)")
def test_a_disk_that_is_full(launch: Launch, tmp_path: Path, quiet: Outcome) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=128k none {small} && head -c 100k /dev/zero > {small}/filler; exec "$@"'
    program = [sys.executable, "-m", "tests.observe.wandb_kit.run", str(small), "offline", "2.0", str(TIMEOUT_S)]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *program],
        cwd=ROOT,
        env=environment(small, "", ""),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    outcome = Outcome(json.loads(done.stdout), done.stderr.splitlines())
    assert any(line.startswith("jsonl: rows are lost until it works again") for line in outcome.said)
    assert outcome.measured["median_step_s"] < 1.5 * quiet.measured["median_step_s"]
    assert outcome.measured["dropped"]["jsonl"] > 0
    assert outcome.measured["close_s"] < 2 * TIMEOUT_S + 15


# -- the reader -------------------------------------------------------------------------------------------------------


def test_the_reader_refuses_a_damaged_file(offline: tuple[Path, Outcome, OfflineRun], tmp_path: Path) -> None:
    (source,) = offline[0].glob("wandb/*run-*/run-*.wandb")
    data = bytearray(source.read_bytes())
    data[5000] ^= 0xFF
    damaged = tmp_path / "x.wandb"
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        read_file(damaged)
