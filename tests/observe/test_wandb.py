"""W&B: what reaches it, key by key, and that no fault of it reaches the training side.

That no call of W&B costs a worker anything is shown by who calls it: its sink's thread alone, to whose outbox
the others hand their rows without waiting. What handing over costs is judged in `bench/test_hot_path.py`.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.config import ObserveConfig
from dflash.observe.roles import RoleMap
from dflash.observe.sinks.base import Row, Surroundings
from dflash.observe.sinks.wandb import ID_FILE, Leg, WandbSink, next_leg
from tests.observe.wandb_kit import run
from tests.observe.wandb_kit.reader import HEADER, OfflineRun, read_file, read_run
from tests.observe.wandb_kit.server import FakeWandb, SilentServer, refusing_url
from tests.waiting import HANG_S, wait_until

ROOT = Path(__file__).parents[2]
KEY = "0123456789" * 4
SHORT_S = 1.0
"""A time-out of W&B's that will be over in any case."""
EXCLUDE = ObserveConfig().wandb_exclude
WINDOWS_AND_LAST = run.WINDOWS + 1
"""The run's windows, and what is flushed at its end."""


pytestmark = [pytest.mark.timeout(5 * HANG_S), pytest.mark.slow]


@dataclass
class Outcome:
    found: dict[str, Any]
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

    def finish(self) -> Outcome:
        """Wait for its end."""
        self.process.join(3 * HANG_S)
        said = (self.folder / "err").read_text(encoding="utf-8").splitlines()
        assert self.process.exitcode == 0, said
        found = json.loads((self.folder / "out").read_text(encoding="utf-8"))
        print(found, said)
        return Outcome(found, said)

    def wait_for_the_pause(self) -> None:
        wait_until(lambda: self.process.exitcode is not None or (self.folder / "paused").exists())

    def go_on(self, how: str = "") -> None:
        (self.folder / "how").write_text(how, encoding="utf-8")
        (self.folder / "how").rename(self.folder / "go")


@pytest.fixture(scope="module")
def launch() -> Iterator[Callable[..., Launched]]:
    """Starts observed runs, each in a process of its own that need not import everything again."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.observe.wandb_kit.run", "wandb", "wandb.sdk.launch", "requests", "yaml"]
    )
    processes = []

    def start(
        folder: Path,
        mode: str,
        *,
        url: str = "",
        key: str = KEY,
        init_s: float = HANG_S,
        finish_s: float = HANG_S,
        pause_after: int = 0,
    ) -> Launched:
        arguments = (folder, environment(folder, url, key), mode, init_s, finish_s, pause_after)
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


def assert_training_never_touches_it(outcome: Outcome) -> None:
    """No thread but the sink's own asks anything of W&B, and its waits are bounded as the config says."""
    assert outcome.found["threads"] == ["sink-wandb"]
    assert outcome.found["limits"] == [run.LIMIT_S]


def assert_all_steps_in_jsonl(folder: Path, outcome: Outcome) -> None:
    assert outcome.found["dropped"]["jsonl"] == 0
    assert [row["step"] for row in jsonl(folder, "train")] == list(range(1, outcome.found["steps"] + 1))


# -- what reaches W&B ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def offline(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, OfflineRun]:
    folder = tmp_path_factory.mktemp("offline")
    outcome = launch(folder, "offline", key="").finish()
    return folder, outcome, read_run(folder)


def test_every_flush_window_arrives_key_by_key(offline: tuple[Path, Outcome, OfflineRun]) -> None:
    folder, _, run = offline
    rows = jsonl(folder, "metrics")
    arrived = [row for row in run.history if "train/step" not in row]
    assert len(arrived) == len(rows) == WINDOWS_AND_LAST
    for ours, theirs in zip(rows, arrived, strict=True):
        wanted = {
            key: value
            for key, value in ours["values"].items()
            if not any(fnmatch(key, one) for one in EXCLUDE)
        }
        assert 0 < len(wanted) < len(ours["values"]), "some keys are excluded"
        assert {key: value for key, value in theirs.items() if not key.startswith("_")} == {
            **wanted,
            "monitor/elapsed_s": pytest.approx(ours["elapsed_s"], abs=1e-6),
            "monitor/step": ours["step"],
        }


def test_training_scalars_arrive_with_their_own_step_at_most_one_a_second(
    offline: tuple[Path, Outcome, OfflineRun],
) -> None:
    folder, outcome, run = offline
    rows = jsonl(folder, "train")
    ours = {row["step"]: row["values"] for row in rows}
    arrived = [row for row in run.history if "train/step" in row]
    due: list[dict[str, Any]] = []
    for row in rows:
        if not due or row["elapsed_s"] - due[-1]["elapsed_s"] >= 1.0:
            due.append(row)
    assert len(due) == 6
    assert [row["train/step"] for row in arrived] == [*(row["step"] for row in due), outcome.found["steps"]]
    for row in arrived:
        assert {key: row[key] for key in ("train/loss", "train/lr")} == ours[row["train/step"]]


def test_each_family_has_its_step_key(offline: tuple[Path, Outcome, OfflineRun]) -> None:
    _, _, run = offline
    families = ("profile", "gpu", "pipeline", "target", "drafter", "batch", "cuda", "host", "monitor")
    by_step = {"train/*": "train/step", "heldout/*": "train/step"}
    assert {f"{family}/*": "monitor/elapsed_s" for family in families} | by_step == {
        key: value for key, value in run.metrics.items() if "*" in key
    }


def test_summary_and_layout_arrive_and_wandb_samples_nothing_itself(
    offline: tuple[Path, Outcome, OfflineRun],
) -> None:
    _, _, run = offline
    assert run.summary["run/bottleneck"].startswith("bottleneck: ")
    assert run.config["roles"] == {"targets": ["cpu"], "drafters": ["cpu"]}


def test_offline_reaches_no_worker(offline: tuple[Path, Outcome, OfflineRun]) -> None:
    folder, outcome, _ = offline
    assert outcome.said == []
    assert_training_never_touches_it(outcome)
    assert_all_steps_in_jsonl(folder, outcome)


def test_all_legs_of_a_run_are_one_run_on_wandb(launch: Launch, tmp_path: Path) -> None:
    """Two starts in one folder: `wandb sync` uploads files with one id in the order of their start times."""
    for _ in range(2):
        launch(tmp_path, "offline", key=KEY).finish()
        (tmp_path / "out").unlink()
    secret = KEY.encode()
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and secret in file.read_bytes()]
    files = sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    first, second = (read_file(path) for path in files)
    assert first.run_id == second.run_id != ""
    assert first.history
    assert second.history
    steps = first.steps + second.steps
    assert steps == sorted(set(steps)), "W&B drops a row whose step is not over the last one's"


def test_a_damaged_id_file_makes_a_new_run(tmp_path: Path) -> None:
    first = next_leg(tmp_path)
    assert first.number == 0
    assert next_leg(tmp_path) == Leg(first.run_id, 1)
    (tmp_path / ID_FILE).write_text("{")
    other = next_leg(tmp_path)
    assert other.number == 0
    assert other.run_id != first.run_id


# -- faults --------------------------------------------------------------------------------------------------


def test_no_login_goes_offline_with_one_line(launch: Launch, tmp_path: Path) -> None:
    outcome = launch(tmp_path, "online", url=refusing_url(), key="").finish()
    assert outcome.said == [
        "wandb: offline, since there is no login (`wandb login`, or WANDB_API_KEY); `wandb sync` uploads "
        "later"
    ]
    assert_training_never_touches_it(outcome)
    assert_all_steps_in_jsonl(tmp_path, outcome)
    assert len(read_run(tmp_path).history) > WINDOWS_AND_LAST


def test_a_server_that_refuses(launch: Launch, tmp_path: Path) -> None:
    outcome = launch(tmp_path, "online", url=refusing_url(), init_s=SHORT_S).finish()
    assert len(outcome.said) == 1
    assert outcome.said[0].startswith("wandb: offline, since ")
    assert_training_never_touches_it(outcome)
    assert_all_steps_in_jsonl(tmp_path, outcome)


def test_a_server_that_accepts_and_never_answers(launch: Launch, tmp_path: Path) -> None:
    server = SilentServer()
    outcome = launch(tmp_path, "online", url=server.url, init_s=SHORT_S).finish()
    server.close()
    assert len(outcome.said) == 1
    assert outcome.said[0].startswith("wandb: offline, since ")
    assert_training_never_touches_it(outcome)
    assert_all_steps_in_jsonl(tmp_path, outcome)


@pytest.fixture
def server() -> Iterator[FakeWandb]:
    made = FakeWandb()
    yield made
    made.die()


def test_a_server_that_works_gets_every_window(launch: Launch, tmp_path: Path, server: FakeWandb) -> None:
    outcome = launch(tmp_path, "online", url=server.url).finish()
    assert outcome.said == []
    posted = [row for row in server.rows if "train/step" not in row]
    assert [row["monitor/step"] for row in posted] == [row["step"] for row in jsonl(tmp_path, "metrics")]
    assert_training_never_touches_it(outcome)


def test_a_server_that_dies_in_the_middle(launch: Launch, tmp_path: Path, server: FakeWandb) -> None:
    process = launch(tmp_path, "online", url=server.url, finish_s=SHORT_S, pause_after=run.WINDOWS // 2)
    process.wait_for_the_pause()
    wait_until(lambda: server.runs > 0)
    server.die()
    process.go_on()
    outcome = process.finish()
    assert len(outcome.said) == 1
    assert "wandb sync" in outcome.said[0]
    assert_training_never_touches_it(outcome)
    assert_all_steps_in_jsonl(tmp_path, outcome)
    # Everything is in the run's folder, to be uploaded later.
    windows = [row for row in read_run(tmp_path).history if "train/step" not in row]
    assert [row["monitor/step"] for row in windows] == [row["step"] for row in jsonl(tmp_path, "metrics")]


def test_wandbs_own_process_dies(launch: Launch, tmp_path: Path) -> None:
    process = launch(tmp_path, "offline", key="", pause_after=run.WINDOWS // 2)
    process.wait_for_the_pause()
    wait_until(lambda: list(tmp_path.glob("wandb/offline-run-*/run-*.wandb")))
    (killed,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    cores = children(process.process.pid, "wandb-core")
    assert cores
    for core in cores:  # it may be starting a process of its own, which still has its name
        with contextlib.suppress(ProcessLookupError):
            os.kill(core, signal.SIGKILL)
    process.go_on("until there is a new run")
    outcome = process.finish()
    assert len(outcome.said) == 1
    assert "a new offline run takes over" in outcome.said[0]
    # Their folders are named by the second, so the names do not tell which was first.
    (new,) = set(tmp_path.glob("wandb/offline-run-*/run-*.wandb")) - {killed}
    # What the killed process had not yet put to disk is only in metrics.jsonl; the new run has all that came
    # after.
    windows = [row["monitor/step"] for row in read_file(new).history if "train/step" not in row]
    ours = [row["step"] for row in jsonl(tmp_path, "metrics")]
    assert len(windows) >= run.WINDOWS // 2
    assert windows == ours[-len(windows) :]
    assert_training_never_touches_it(outcome)
    assert_all_steps_in_jsonl(tmp_path, outcome)


@pytest.mark.fault
@pytest.mark.parametrize(
    "row",
    [
        Row("run", 0.0, 0, {"targets": ["cpu"]}),
        Row("metrics", 1.0, 5, {"workers/a": 1.0}),
        Row("event", 1.0, 5, {"text": "something"}),
        Row("summary", 1.0, 5, {"ticks": 3}),
    ],
    ids=lambda row: row.kind,
)
def test_whatever_row_finds_wandbs_process_gone_a_new_run_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    def gone(*arguments: object, **named: object) -> None:
        raise ConnectionResetError("Connection lost")

    def kept(*arguments: object, **named: object) -> None:
        taken.append(arguments)

    def a_run(call: object) -> SimpleNamespace:
        part = SimpleNamespace(update=call)
        return SimpleNamespace(log=call, config=part, summary=part)

    taken: list[object] = []
    config = ObserveConfig(wandb="offline")
    sink = WandbSink(Surroundings(config, tmp_path, RoleMap(("cpu",), ("cpu",))))
    sink._run = a_run(gone)
    monkeypatch.setattr(sink, "_wandb", SimpleNamespace(teardown=lambda: None))
    monkeypatch.setattr(sink, "_init", lambda mode: a_run(kept))
    sink.write([row])
    assert len(taken) == 1


def children(parent: int, name: str) -> list[int]:
    """Processes under `parent` whose program is `name`."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # a process or a thread that has ended meanwhile
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
    tried = subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
    )
    return tried.returncode == 0


@pytest.mark.skipif(not can_mount(), reason="cannot make a small file system to fill (unshare and mount)")
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    script = f'mount -t tmpfs -o size=128k none {small} && head -c 100k /dev/zero > {small}/filler; exec "$@"'
    program = [sys.executable, "-m", "tests.observe.wandb_kit.run", str(small), "offline"]
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", *program],
        cwd=ROOT,
        env=environment(small, "", ""),
        capture_output=True,
        text=True,
        timeout=3 * HANG_S,
        check=True,
    )
    outcome = Outcome(json.loads(done.stdout), done.stderr.splitlines())
    assert any(line.startswith("jsonl: rows are lost until it works again") for line in outcome.said)
    assert outcome.found["dropped"]["jsonl"] > 0
    assert outcome.found["steps"] == run.WINDOWS * run.STEPS
    assert_training_never_touches_it(outcome)


# -- the reader ----------------------------------------------------------------------------------------------


def test_the_reader_refuses_a_damaged_file(offline: tuple[Path, Outcome, OfflineRun], tmp_path: Path) -> None:
    (source,) = offline[0].glob("wandb/*run-*/run-*.wandb")
    data = bytearray(source.read_bytes())
    data[2 * HEADER + 1] ^= 0xFF  # of the first chunk's data, behind the file's header and the chunk's
    damaged = tmp_path / "x.wandb"
    damaged.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        read_file(damaged)
