"""A session of pytest-benchmark before its first test: what it measures, what it is compared with, and what
is refused because nobody would judge it."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.logger import PytestBenchmarkWarning

from bench.pytest_benchmark import replay
from dflash.config import Config, load_config
from steptime.baselines import comparing, recording, store
from steptime.errors import UserError
from steptime.machine import commit, identity
from steptime.records.pairs import ALL, PLACEBO
from steptime.records.receipt import Receipt
from steptime.records.types import ConfigRef, Machine

HERE = Path(__file__).parents[1]
REQUIRE_CUDA = "BENCH_REQUIRE_CUDA"
STORAGE = "file://./.benchmarks"
"""pytest-benchmark's default; ours is a folder below it for each machine."""


@dataclass(slots=True)
class BenchSession:
    """Everything this conftest knows about the session, under one stash key.

    Attributes:
        collectors: parameters of the tests after `off`.
        checks: expressions of --benchmark-compare-fail, judged with each benchmark.
        baseline, baseline_path: the stored figure that a bare --benchmark-compare found.
    """

    config: Config
    machine: Machine
    collectors: tuple[str, ...]
    given: Receipt | None = None
    checks: list[Any] = field(default_factory=list)
    baseline: store.Baseline | None = None
    baseline_path: Path | None = None
    comparing: bool = False
    incomplete_allowed: bool = False
    receipt: Receipt | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def needs_cuda(self) -> bool:
        return any(d.startswith("cuda") for d in (*self.config.target.devices, *self.config.drafter.devices))

    @property
    def config_ref(self) -> ConfigRef:
        return ConfigRef(self.config.name, self.config.digest())


def prepare(config: pytest.Config) -> BenchSession:
    """Lay our options over the plugin's. Raises UserError where nothing would be compared or judged."""
    option = config.option
    settings = load_config(option.bench_config, option.bench_set)
    devices = (*settings.target.devices, *settings.drafter.devices)
    known = BenchSession(settings, identity.identify(devices), ())
    if option.bench_receipt:
        known.given = Receipt.read(option.bench_receipt)
        reasons = recording.stale(known.given, known.machine, known.config_ref, commit.read_commit())
        if reasons:
            raise UserError(f"{option.bench_receipt}: {'; '.join(reasons)}")
    known.collectors = _collectors(option.bench_subject, settings, known.given)
    known.incomplete_allowed = option.allow_incomplete
    if os.environ.get(REQUIRE_CUDA) == "1" and not known.needs_cuda:
        raise UserError(
            f"{REQUIRE_CUDA}=1, but {option.bench_config} trains on the CPU: name a GPU config with "
            "--bench-config"
        )
    known.comparing = bool(option.benchmark_compare)
    known.checks = replay.checks_of(config.invocation_params.args, option.benchmark_compare_fail or [])
    if known.checks and not known.comparing:
        raise UserError("--benchmark-compare-fail needs --benchmark-compare")
    # The plugin warns that it found nothing to compare with. `-W error` would make an internal error of that;
    # `pytest_sessionstart` says it properly.
    warnings.filterwarnings("default", category=PytestBenchmarkWarning)
    if known.comparing and (
        option.benchmark_disable or option.benchmark_skip or option.collectonly or _xdist(config)
    ):
        raise UserError(
            "--benchmark-compare would compare nothing: benchmarks are disabled, skipped, or spread over "
            "processes"
        )
    # The plugin would raise from the terminal's summary, where no test fails and JUnit sees nothing. The
    # tests judge instead.
    option.benchmark_compare_fail = []
    if option.benchmark_storage == STORAGE:
        option.benchmark_storage = f"{STORAGE}/{known.machine.key}"
    if option.benchmark_columns is None:
        option.benchmark_columns = ["ops", "median", "iqr", "rounds"]
    if option.benchmark_compare is True:
        _find_baseline(config, known)
    elif known.comparing:
        _check_given(config, known)
    return known


def _collectors(subject: str, settings: Config, given: Receipt | None) -> tuple[str, ...]:
    if given is not None:
        return (*(cost.name for cost in given.collectors), ALL)
    from bench.subjects.registry import SUBJECTS

    switches = SUBJECTS[subject].make_pairs(settings).switches
    return (*(name for name in switches if name != PLACEBO), ALL)


def _xdist(config: pytest.Config) -> bool:
    return config.getoption("dist", "no") != "no" or "PYTEST_XDIST_WORKER" in os.environ


def _node(config: pytest.Config) -> str:
    """Node id of the test function, as pytest-benchmark will call it."""
    return f"{Path(os.path.relpath(HERE / 'test_throughput.py', config.rootpath)).as_posix()}::test_tokens"


def _find_baseline(config: pytest.Config, known: BenchSession) -> None:
    """Bare --benchmark-compare: baselines/<machine>/<config>.json, or a usage error with the command that
    records it."""
    root = Path(config.option.bench_baselines) if config.option.bench_baselines else store.ROOT
    found = comparing.match(store.read_all(root), known.machine, known.config_ref)
    if found.status is not comparing.Status.MATCH or found.baseline is None:
        raise UserError(f"--benchmark-compare: {found.message}")
    known.baseline, known.baseline_path = found.baseline, found.path
    _compare_with(config, known, found.baseline)


def _compare_with(config: pytest.Config, known: BenchSession, baseline: store.Baseline) -> None:
    """Lay the stored figure where the plugin can read it."""
    tree = replay.from_baseline(baseline, known.machine, _node(config), known.config_ref.hash)
    folder = Path(config.option.benchmark_storage.removeprefix("file://"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "baseline.json"
    path.write_text(json.dumps(tree, indent=1), encoding="utf-8")
    config.option.benchmark_compare = str(path)
    if not known.checks:
        known.notes.append(
            "judged by the limit of the stored sessions; --benchmark-compare-fail=mean:5% adds a check of "
            "your own"
        )


def _check_given(config: pytest.Config, known: BenchSession) -> None:
    """--benchmark-compare=X: a path, a number or a glob of the plugin's, or one of our own baselines."""
    given = Path(str(config.option.benchmark_compare))
    if given.is_dir():
        raise UserError(
            f"--benchmark-compare took {str(given)!r} as its value; put it last (pytest bench/ "
            "--benchmark-compare)"
        )
    if given.is_file() and f'"{store.SCHEMA}"' in given.read_text(encoding="utf-8", errors="replace"):
        baseline = store.read(given)
        found = comparing.match({given: baseline}, known.machine, known.config_ref)
        if found.status is not comparing.Status.MATCH:
            raise UserError(f"--benchmark-compare: {found.message}")
        known.baseline, known.baseline_path = baseline, given
        _compare_with(config, known, baseline)
        return
    if not given.is_file() and len(given.parts) == 1:
        # The plugin looks in the folder of this Python version only; another minor version is the same
        # machine.
        config.option.benchmark_compare = f"*/{given}"
    if not known.checks:
        known.notes.append("shown, not judged: add --benchmark-compare-fail=mean:5% to fail on a slowdown")
