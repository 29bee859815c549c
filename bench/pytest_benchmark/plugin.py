"""pytest-benchmark, stricter: `pytest bench/ --benchmark-compare` works as its users expect, and nothing
passes in silence.

The harness measures once (or `--bench-receipt` brings what it measured before); each test replays the
segments of one setting. A baseline of another machine, a missing one, or one that nothing would be compared
with stops the session before any test."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.logger import PytestBenchmarkWarning

from bench.pytest_benchmark import replay
from dflash.config import Config, load_config
from steptime.baselines import recording, store
from steptime.errors import UserError
from steptime.machine import commit, identity
from steptime.records.pairs import ALL, PLACEBO
from steptime.records.receipt import Receipt
from steptime.records.types import OFF, ConfigRef, Machine

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


BENCH = pytest.StashKey[BenchSession]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("bench", "throughput of the trainer")
    group.addoption(
        "--bench-config", default="configs/cpu-tiny.toml", metavar="FILE", help="TOML of what is trained"
    )
    group.addoption(
        "--bench-set", action="append", default=[], metavar="KEY=VALUE", help="lay a setting over the config"
    )
    group.addoption(
        "--bench-subject", default="trainer", metavar="NAME", help="trainer, or spin: light, of known speed"
    )
    group.addoption(
        "--bench-minutes", type=float, default=None, metavar="M", help="time for measuring (default 0.75)"
    )
    group.addoption("--bench-seed", type=int, default=0, metavar="N", help="which pairs are drawn")
    group.addoption(
        "--bench-receipt", default=None, metavar="FILE", help="judge this receipt instead of measuring"
    )
    group.addoption(
        "--bench-baselines",
        default=None,
        metavar="DIR",
        help="folder of the stored baselines (default baselines/)",
    )
    group.addoption(
        "--bench-strict", action="store_true", help="not resolved is a failure, not an expected one"
    )
    group.addoption(
        "--allow-machine-mismatch",
        action="store_true",
        help="show another machine's figures beside these, unjudged",
    )
    group.addoption("--allow-incomplete", action="store_true", help="let tests of the baseline go unmeasured")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Before the plugin's own: find the baseline, take over the judging, refuse what would be judged by
    nobody."""
    if not hasattr(config.option, "bench_config"):
        raise pytest.UsageError("the benchmarks need bench/ named on the command line: pytest bench/")
    try:
        config.stash[BENCH] = _prepare(config)
    except UserError as error:
        raise pytest.UsageError(str(error)) from None


def _prepare(config: pytest.Config) -> BenchSession:
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
    found = store.match(store.read_all(root), known.machine, known.config_ref)
    if found.status is not store.Status.MATCH or found.baseline is None:
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
        found = store.match({given: baseline}, known.machine, known.config_ref)
        if found.status is not store.Status.MATCH:
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


def pytest_sessionstart(session: pytest.Session) -> None:
    """The plugin only warns when it found nothing to compare with."""
    known = session.config.stash[BENCH]
    if known.comparing and not _compared(session.config):
        raise pytest.UsageError(
            f"--benchmark-compare={session.config.option.benchmark_compare}: no such run; "
            f"save one with --benchmark-autosave, or {store.record_command(known.config.name)}"
        )


def _compared(config: pytest.Config) -> dict[str, dict[str, Any]]:
    """Path of each compared file -> node id -> its entry."""
    plugin: Any = config.pluginmanager.get_plugin("pytest-benchmark")
    return dict(getattr(plugin, "compared_mapping", None) or {})


def _expected(config: pytest.Config) -> set[str]:
    """Node ids that the compared files hold."""
    return {node for entries in _compared(config).values() for node in entries}


def unmeasured(config: pytest.Config) -> list[str]:
    """Node ids of the compared files that have no figures in this session."""
    plugin: Any = config.pluginmanager.get_plugin("pytest-benchmark")
    return sorted(_expected(config) - {found.fullname for found in plugin.benchmarks})


def pytest_collection_finish(session: pytest.Session) -> None:
    """A renamed or deselected test would go unjudged."""
    known = session.config.stash[BENCH]
    collected = {item.nodeid for item in session.items}
    missing = sorted(_expected(session.config) - collected)
    if missing and not known.incomplete_allowed:
        raise pytest.UsageError(
            f"incomplete: {', '.join(missing)} of the baseline would not be measured (deselected or "
            "renamed); --allow-incomplete lets that pass"
        )


def pytest_deselected(items: list[pytest.Item]) -> None:
    gpu = [item.nodeid for item in items if item.get_closest_marker("gpu")]
    if gpu and os.environ.get(REQUIRE_CUDA) == "1":
        raise pytest.UsageError(f"{REQUIRE_CUDA}=1, but GPU benchmarks are deselected: {', '.join(gpu)}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Every benchmark that passed is held against the compared files by the user's own expressions."""
    result = yield
    benchmark: Any = getattr(item, "funcargs", {}).get("benchmark")
    known = item.config.stash[BENCH]
    if benchmark is None or benchmark.stats is None or not known.checks:
        return result
    for path, entries in _compared(item.config).items():
        before = entries.get(item.nodeid, {}).get("stats")
        if before is not None:
            table = replay.failed_checks(known.checks, benchmark.stats, before, str(path))
            if table:
                pytest.fail(table, pytrace=False)
        elif not known.incomplete_allowed:
            pytest.fail(f"{path} holds nothing to compare this test with; record it anew", pytrace=False)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A skipped GPU benchmark is an error where a GPU is required."""
    report: Any = yield
    if (
        report.skipped
        and item.get_closest_marker("gpu")
        and os.environ.get(REQUIRE_CUDA) == "1"
        and not hasattr(report, "wasxfail")
    ):
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome, report.longrepr = "failed", f"{REQUIRE_CUDA}=1: {why}"
    return report  # type: ignore[return-value]


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same as test_complete, for when that is not run: a session that left a baseline's test unmeasured
    is not green."""
    known = session.config.stash[BENCH]
    missing = unmeasured(session.config)
    if missing and not known.incomplete_allowed and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        known.notes.append(f"incomplete: {', '.join(missing)} of the baseline were not measured")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Notes above the table; in the summary because -q leaves out the header."""
    known = config.stash[BENCH]
    lines = [
        f"{known.config.name} on {known.machine.key}; in test_tokens OPS is tokens per second, times are "
        "seconds per token"
    ]
    if known.baseline is not None:
        lines.append(
            f"baseline {known.baseline_path}: {known.baseline.value:,.0f} tokens/s, {known.baseline.origin}"
        )
    terminalreporter.ensure_newline()
    for line in (*lines, *known.notes):
        terminalreporter.write_line(f"bench: {line}", yellow=line in known.notes)


def pytest_benchmark_generate_machine_info(config: pytest.Config) -> dict[str, Any]:
    """Short and stable: the default holds the live clock and never compares equal."""
    return replay.machine_info(config.stash[BENCH].machine)


def pytest_benchmark_compare_machine_info(
    config: pytest.Config, machine_info: dict[str, Any], compared_benchmark: dict[str, Any]
) -> None:
    """Another machine's figures, or another config's, stop the session before any test."""
    known = config.stash[BENCH]
    why = replay.refusal(compared_benchmark, known.machine, known.config_ref.name, known.config_ref.hash)
    if why and not config.option.allow_machine_mismatch:
        raise pytest.UsageError(f"--benchmark-compare: {why}; --allow-machine-mismatch shows it unjudged")
    if why:
        known.checks, known.baseline, known.incomplete_allowed = [], None, True
        known.notes.append(f"compared file shown, not judged: {why}")
    versions = compared_benchmark.get(replay.BLOCK, {}).get("versions", {})
    changed = identity.differences(versions, known.machine.versions) if versions else []
    if changed:
        known.notes.append(f"versions differ from the compared run: {', '.join(changed)}")


def pytest_benchmark_update_commit_info(config: pytest.Config, commit_info: dict[str, Any]) -> None:
    found = commit.read_commit()
    commit_info |= {"dirty": found.dirty, "diff_hash": found.diff_hash}


def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    known = config.stash[BENCH]
    output_json[replay.BLOCK] = replay.block(
        known.machine, known.config_ref.name, known.config_ref.hash, known.receipt, "measured"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_group_stats(
    config: pytest.Config, benchmarks: list[dict[str, Any]], group_by: str
) -> list[tuple[str | None, list[dict[str, Any]]]] | None:
    """`--benchmark-group-by=collector` (or param:collector): each collector beside `off`."""
    return replay.group_by_collector(benchmarks) if group_by in ("collector", "param:collector") else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "collector" in metafunc.fixturenames:
        known = metafunc.config.stash[BENCH]
        marks = [pytest.mark.gpu] if known.needs_cuda else []
        metafunc.parametrize(
            "collector", [pytest.param(name, marks=marks) for name in (OFF, *known.collectors)]
        )


@pytest.fixture(scope="session")
def known(request: pytest.FixtureRequest) -> BenchSession:
    """What the session knows."""
    return request.config.stash[BENCH]


@pytest.fixture
def missing(request: pytest.FixtureRequest) -> list[str]:
    """Tests of the compared files without figures so far."""
    return unmeasured(request.config)


@pytest.fixture(scope="session")
def receipt(
    known: BenchSession, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Receipt:
    """The one measurement of the session, or the receipt that was given."""
    if known.given is None and known.needs_cuda:
        import torch

        if not torch.cuda.is_available():
            pytest.skip(f"config {known.config.name} needs CUDA, which is not available")
    known.receipt = known.given or _measure(known, request.config, tmp_path_factory.mktemp("bench"))
    return known.receipt


def _measure(known: BenchSession, config: pytest.Config, folder: Path) -> Receipt:
    from steptime.commands import overhead
    from steptime.measure.run import INTERRUPTED
    from steptime.progress import Reporter
    from steptime.subjects.registry import find

    option = config.option
    options = overhead.Options(
        config=known.config,
        quick=True,
        minutes=option.bench_minutes,
        seed=option.bench_seed,
        out=str(folder / "out"),
    )
    subject, counter = overhead.make_subject(find(option.bench_subject), known.config)
    capture: Any = config.pluginmanager.get_plugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled():
            receipt = overhead.run_overhead(options, subject, Reporter(), count=counter)
    except UserError as error:
        pytest.fail(str(error), pytrace=False)
    if receipt.options["stopped"] == INTERRUPTED:
        raise KeyboardInterrupt
    return receipt
