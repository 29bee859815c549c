"""The ways to run the project; each session installs what it needs, pinned by constraints.txt.

    nox -s tests | bench | gate | selfcheck | interop | acceptance | peers | faults | fuzz | lint

Arguments after `--` go through to the command of the session.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import nox

nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True

CONSTRAINTS = ("-c", "constraints.txt")
SOURCES = ("steptime", "dflash", "bench", "tests", "noxfile.py")
LINTERS = ("ruff", "mypy", "import-linter")
PATIENT = {"interrupt_timeout": 60.0, "terminate_timeout": 30.0}
"""Seconds that a command gets after Ctrl-C: nox would kill it after half of one, with worktrees and workers
left behind."""
PARALLEL = ("-n", "logical", "--maxprocesses", "8", "--dist", "loadfile")
"""A process for each core; `-- -n 0 tests/...` runs them in one, for a debugger."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
OFFLINE = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline"}


def install(session: nox.Session, *libraries: str) -> None:
    """The project with its bench extra, those that DFLASH_EXTRAS names (`cuda`, on a GPU), and what else the
    session needs."""
    extras = ",".join(["bench", *os.environ.get("DFLASH_EXTRAS", "").split()])
    session.install(*CONSTRAINTS, "-e", f".[{extras}]", *libraries)
    session.env.update(OFFLINE)


@nox.session
def tests(session: nox.Session) -> None:
    """Linter, type checker, arrows between rooms, then every test that needs no GPU and no network. The
    thorough ones are left out, and counted."""
    install_tests(session, *LINTERS)
    check_source(session)
    session.run("python", "-m", "pytest", *PARALLEL, *(session.posargs or ["tests"]), env=ONE_THREAD)


@nox.session
def thorough(session: nox.Session) -> None:
    """Every test, those that take many seconds each too."""
    install_tests(session)
    words = ("--thorough", *(session.posargs or ["tests"]))
    session.run("python", "-m", "pytest", *PARALLEL, *words, env=ONE_THREAD)


def install_tests(session: nox.Session, *linters: str) -> None:
    """What the tests need."""
    plugins = ("pytest-timeout", "pytest-xdist")
    sinks = ("prometheus_client", "opentelemetry-sdk", "tensorboard")
    install(session, "hypothesis", *plugins, *sinks, "check-jsonschema", *linters)
    # Its templates of released models are read, nothing of it runs.
    session.install("--no-deps", "trl==1.16.0")
    # Quantised targets are read with these; bitsandbytes is larger, and its rows are skipped where it is not.
    session.install(
        "--no-deps", "torchao==0.18.0", "accelerate==1.15.0", "compressed-tensors==0.20.1", "loguru==0.7.3"
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Linter, type checker and the arrows between rooms, alone."""
    install(session, *LINTERS)
    check_source(session)


def check_source(session: nox.Session) -> None:
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)
    session.run("mypy")
    session.run("lint-imports")


@nox.session
def bench(session: nox.Session) -> None:
    """What does each collector cost? The overhead report of the real trainer.

    On a machine too noisy to resolve the budget the report says so (exit code 3), and by hand that is a
    warning: the exact counts and the losses were still compared. In CI, and with `python -m bench overhead`,
    it stays red."""
    install(session)
    out = Path("bench-out") / "nox"
    arguments = list(session.posargs)
    if "--out" not in arguments:
        arguments += ["--out", str(out)]
    receipt = Path(arguments[arguments.index("--out") + 1]) / "receipt.json"
    receipt.unlink(missing_ok=True)
    by_hand = not os.environ.get("CI")
    session.run(
        "python", "-m", "bench", "overhead", *arguments, success_codes=[0, 3] if by_hand else [0], **PATIENT
    )
    verdict = json.loads(receipt.read_text(encoding="utf-8"))["verdict"] if receipt.exists() else "invalid"
    if verdict in ("unresolved", "slower"):
        session.warn(
            f"{verdict}: this run could not resolve the budget; a quieter machine or `-- --minutes 15` may"
        )
    elif verdict != "within" and "--help" not in arguments:
        session.error(f"verdict: {verdict}")


@nox.session
def gate(session: nox.Session) -> None:
    """Is this commit slower than another one, on this machine, now?  nox -s gate -- --base REF"""
    install(session)
    session.run("python", "-m", "bench", "gate", *session.posargs, **PATIENT)


@nox.session
def selfcheck(session: nox.Session) -> None:
    """How often is the harness itself wrong?"""
    install(session)
    session.run("python", "-m", "bench", "selfcheck", *session.posargs, **PATIENT)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill, stop, hang, fill, spoil: what does a run survive? Makes docs/reliability.md."""
    install(session)
    session.run("python", "-m", "bench.reliability", *session.posargs, **PATIENT)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Every reader of files and settings against inputs of every shape.  nox -s fuzz -- --minutes M"""
    install(session, "hypothesis", "pytest")
    session.run("python", "-m", "tests.fuzz", *session.posargs)


@nox.session
def peers(session: nox.Session) -> None:
    """One training step of SpecForge and speculators beside ours, over several shapes: time, peak memory,
    operations, host syncs. Arguments after `--` go to bench.peers.shapes."""
    install(session, "loguru", "pydantic-settings", "aiohttp", "openai", "accelerate", "psutil")
    session.install("--no-deps", "specforge==0.2.0", "speculators==0.9.0", "hs-connectors")
    session.run("python", "-m", "bench.peers.shapes", *session.posargs)
    session.run("python", "-m", "bench.peers.syncs")


@nox.session
def interop(session: nox.Session) -> None:
    """Number-for-number parity with SpecForge, and the field's loaders on our export.

    z-lab's package is called `dflash` too, and pins another transformers: it gets an environment of its own.
    """
    install(
        session, "pytest-timeout", "loguru", "pydantic-settings", "aiohttp", "openai", "accelerate", "psutil"
    )
    session.install("--no-deps", "specforge==0.2.0", "speculators==0.9.0", "hs-connectors")
    zlab = Path(session.virtualenv.location).resolve() / "zlab"
    if not zlab.exists():
        session.run("python", "-m", "venv", str(zlab))
    python = str(zlab / "bin" / "python")
    session.run(python, "-m", "pip", "install", "--quiet", "dflash[local]==0.1.0", external=True)
    session.env["ZLAB_PYTHON"] = python
    session.run("python", "-m", "pytest", "interop", *session.posargs)


@nox.session
def acceptance(session: nox.Session) -> None:
    """Train a target, regenerate answers, train a drafter, measure acceptance on held-out prompts."""
    install(session)
    session.run("python", "-m", "bench.acceptance", *session.posargs)


@nox.session
def frameworks(session: nox.Session) -> None:
    """Whole runs of other people's frameworks under the counter; `tests` skips those that are not there."""
    install_tests(session)
    session.install("accelerate==1.15.*", "lightning==2.6.*", "torchmetrics==1.9.*")
    session.install("diffusers==0.42.*", "peft==0.21.*", "sentence-transformers==6.2.*")
    places = ("counting", "subjects/test_frameworks.py", "gate/test_anywhere.py")
    words = session.posargs or ["--thorough", *(f"tests/steptime/{place}" for place in places)]
    session.run("python", "-m", "pytest", *PARALLEL, *words, env=ONE_THREAD)
