"""The ways to run the project; each session installs what it needs, pinned by constraints.txt.

    nox -s tests | bench | gate | selfcheck | interop | acceptance | peers | faults | lint

Arguments after `--` go through to the command of the session.
"""

from __future__ import annotations

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints.txt")
SOURCES = ("dflash", "bench", "tests", "noxfile.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def install(session: nox.Session, *extra: str) -> None:
    """The project with its bench extra, and what else the session needs."""
    session.install(*CONSTRAINTS, "-e", ".[bench]", *extra)
    session.env.update(OFFLINE)


@nox.session
def tests(session: nox.Session) -> None:
    """Linter, type checker, then every test that needs no GPU and no network."""
    install(session, "hypothesis", "pytest-timeout", "prometheus_client", "opentelemetry-sdk", "tensorboard", "ruff", "mypy")
    check_source(session)
    session.run("python", "-m", "pytest", *(session.posargs or ["tests"]))


@nox.session
def lint(session: nox.Session) -> None:
    """Linter and type checker alone."""
    install(session, "ruff", "mypy")
    check_source(session)


def check_source(session: nox.Session) -> None:
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("mypy")


@nox.session
def bench(session: nox.Session) -> None:
    """What does each collector cost? The overhead report of the real trainer."""
    install(session)
    session.run("python", "-m", "bench", "overhead", *session.posargs, success_codes=[0])


@nox.session
def gate(session: nox.Session) -> None:
    """Is this commit slower than another one, on this machine, now?  nox -s gate -- --base REF"""
    install(session)
    session.run("python", "-m", "bench", "gate", *session.posargs)


@nox.session
def selfcheck(session: nox.Session) -> None:
    """How often is the harness itself wrong?"""
    install(session)
    session.run("python", "-m", "bench", "selfcheck", *session.posargs)


@nox.session
def faults(session: nox.Session) -> None:
    """Only the tests that plant a fault and expect it to be found."""
    install(session, "hypothesis", "pytest-timeout")
    session.run("python", "-m", "pytest", "tests", "-m", "fault", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """One training step of SpecForge and speculators beside ours: time and host syncs."""
    install(session, "loguru", "pydantic-settings", "aiohttp", "openai", "accelerate", "psutil")
    session.install("--no-deps", "specforge==0.2.0", "speculators==0.9.0", "hs-connectors")
    session.run("python", "-m", "bench.peers", *session.posargs)
    session.run("python", "-m", "bench.peers_syncs")


@nox.session
def interop(session: nox.Session) -> None:
    """Number-for-number parity with SpecForge, and the field's loaders on our export."""
    install(session, "pytest-timeout", "loguru", "pydantic-settings", "aiohttp", "openai", "accelerate", "psutil")
    session.install("--no-deps", "specforge==0.2.0", "speculators==0.9.0", "hs-connectors")
    session.run("python", "-m", "pytest", "interop", *session.posargs)


@nox.session
def acceptance(session: nox.Session) -> None:
    """Train a target, regenerate answers, train a drafter, measure acceptance on held-out prompts."""
    install(session)
    session.run("python", "-m", "bench.acceptance", *session.posargs)
