"""pytest-benchmark, stricter: `pytest bench/ --benchmark-compare` works as its users expect, and nothing
passes in silence.

The harness measures once (or `--bench-receipt` brings what it measured before); each test replays the
segments of one setting. A baseline of another machine, a missing one, or one that nothing would be compared
with stops the session before any test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.pytest_benchmark import replay
from bench.pytest_benchmark.session import REQUIRE_CUDA, BenchSession, prepare
from steptime.baselines import comparing
from steptime.errors import UserError
from steptime.machine import commit, identity
from steptime.records.receipt import Receipt
from steptime.records.types import OFF

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
        config.stash[BENCH] = prepare(config)
    except UserError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_sessionstart(session: pytest.Session) -> None:
    """The plugin only warns when it found nothing to compare with."""
    known = session.config.stash[BENCH]
    if known.comparing and not _compared(session.config):
        raise pytest.UsageError(
            f"--benchmark-compare={session.config.option.benchmark_compare}: no such run; "
            f"save one with --benchmark-autosave, or {comparing.record_command(known.config.name)}"
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
