"""`baseline record | compare | list`: stored figures, one session being one fresh launch of
`overhead`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from tabulate import tabulate

from steptime import arguments, run_files
from steptime.arguments import option, to_minutes, to_natural
from steptime.baselines import comparing, recording, store
from steptime.commandline import make_app
from steptime.errors import UserError
from steptime.machine import identity
from steptime.machine.commit import ROOT, git, read_commit
from steptime.machine.sentinel import Sentinel
from steptime.progress import Reporter
from steptime.records.receipt import Receipt
from steptime.records.types import ConfigRef, ExitCode, Machine, Verdict
from steptime.statistics.judging import CODES
from steptime.subjects.protocol import Settings, SubjectKind

Sessions = Annotated[int, option("--sessions N", "fresh launches (default 3, compare 1)", to_natural)]
Minutes = Annotated[float | None, option("--minutes M", "time for measuring in each session", to_minutes)]
Receipts = Annotated[list[str] | None, option("--receipt FILE", "use a finished session; repeatable")]
Yes = Annotated[bool, option("--yes", "replace a stored figure that differs")]
Note = Annotated[str, option("--note TEXT", "kept with the figure")]
HELP = "Stored tokens per second of this machine: record (by hand, on a clean tree), compare, list."


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asks for.

    Attributes:
        words: options that say what is measured, handed on to each session.
        script: `--hf -- SCRIPT ARGS` or `--lightning -- SCRIPT ARGS`, behind all other options.
        sessions: fresh launches to make.
        receipts: finished sessions to use instead.
    """

    config: Settings
    kind: SubjectKind
    words: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    sessions: int = 3
    minutes: float | None = None
    receipts: tuple[str, ...] = ()
    note: str = ""
    yes: bool = False


def register(app: typer.Typer) -> None:
    """Add the command with its three actions."""
    actions = make_app(help=HELP)
    recorded = "measure several sessions and write baselines/<machine>/<config>.json"
    script = {"allow_extra_args": True}
    actions.command("record", help=recorded, short_help="store a figure", context_settings=script)(
        _action(run_record, 3)
    )
    compared = "hold new sessions against the stored figure"
    actions.command("compare", help=compared, context_settings=script)(_action(run_compare, 1))
    actions.command("list", help="what is stored")(_list)
    app.add_typer(actions, name="baseline")


def _action(run: Callable[[Options, Reporter], int], launches: int) -> Callable[..., int]:
    """`record` and `compare` take the same options; only their number of sessions differs."""

    def action(
        context: typer.Context,
        config: arguments.Config = None,
        settings: arguments.Settings = None,
        sessions: Sessions = launches,
        minutes: Minutes = None,
        receipts: Receipts = None,
        note: Note = "",
        yes: Yes = False,
        subject: arguments.Subject = None,
        hf: arguments.Hf = False,
        lightning: arguments.Lightning = False,
    ) -> int:
        from steptime.subjects.registry import find  # heavy: torch

        arguments.one_process()
        framework = arguments.framework(context, hf, lightning)
        kind = find(framework or subject, context.args)
        words = [word for one in settings or () for word in ("--set", one)]
        words += [] if config is None else ["--config", config]
        words += [] if subject is None else ["--subject", subject]
        options = Options(
            config=kind.settings(config, settings or ()),
            kind=kind,
            words=tuple(words),
            script=(f"--{framework}", "--", *context.args) if framework else (),
            sessions=max(1, sessions),
            minutes=minutes,
            receipts=tuple(receipts or ()),
            note=note,
            yes=yes,
        )
        return run(options, Reporter())

    return action


def _list(subject: arguments.Subject = None) -> int:
    from steptime.subjects.registry import PROVIDERS, find
    from steptime.subjects.steps.kind import tree_of

    if subject is not None:
        return run_list(find(subject).root)
    return run_list() if PROVIDERS else run_list(tree_of(Path.cwd()))


def run_list(root: Path = ROOT) -> int:
    """Print what is stored, and whether it belongs to this machine."""
    stored = store.read_all(store.folder(root))
    this = identity.identify()
    print(f"this machine: {this.key}")
    print(
        tabulate(comparing.table(stored, this), headers="keys", disable_numparse=True)
        if stored
        else "nothing is stored"
    )
    return int(ExitCode.WITHIN)


def run_record(options: Options, reporter: Reporter) -> int:
    """Measure several sessions and write the file. By hand, on a clean tree; the file is reviewed like code.

    Raises:
        UserError: a dirty tree, CI, too few or unusable sessions.
    """
    commit = read_commit(options.kind.root)
    recording.refuse_recording(dirty=commit.dirty)
    if not options.receipts and options.sessions < store.MIN_SESSIONS:
        raise UserError(
            f"baseline record: --sessions {options.sessions}: at least {store.MIN_SESSIONS} are needed"
        )
    this, config = _machine(options), _reference(options)
    receipts = _sessions(options, reporter)
    for where, receipt in receipts:
        reasons = [*recording.unusable(receipt, this, config, commit, options.kind.name), *_moved(receipt)]
        reasons += [missing] if (missing := recording.empty(receipt)) else []
        if reasons:
            raise UserError(f"baseline record: {where}: {'; '.join(reasons)}")
    sessions = [recording.session_of(receipt) for _, receipt in receipts]
    stored = recording.build(this, config, sessions, commit.id, options.note)
    _ask_before_replacing(stored, this, config, options)
    path = recording.write(stored, store.folder(options.kind.root))
    print(
        f"{path}: {stored.value:,.1f} tokens/s over {len(sessions)} sessions, spread "
        f"{stored.between_session_spread_percent:.2f}%"
    )
    print(git("diff", "--no-color", "--", str(path), cwd=options.kind.root) or "review it, and commit it")
    return int(ExitCode.WITHIN)


def run_compare(options: Options, reporter: Reporter) -> int:
    """Hold new sessions against the stored figure. Refuses before measuring when there is none for this
    machine and config.

    Raises:
        UserError: a broken file or receipt.
    """
    this, config = _machine(options), _reference(options)
    found = comparing.match(store.read_all(store.folder(options.kind.root)), this, config)
    if found.exit_code is not ExitCode.WITHIN or found.baseline is None:
        _tell(
            f"{Verdict.NO_BASELINE.value.upper() if found.exit_code is ExitCode.INCOMPLETE else 'INVALID'}: "
            f"{found.message}"
        )
        return int(found.exit_code)
    receipts = _sessions(options, reporter)
    commit = read_commit(options.kind.root)
    for where, receipt in receipts:
        # Uncommitted changes may be held against a baseline, as long as they are those that are here now;
        # recorded they are not.
        clean = replace(receipt, commit=replace(receipt.commit, dirty=False))
        reasons = [*recording.unusable(clean, this, config, commit, options.kind.name), *_moved(receipt)]
        if reasons:
            _tell(f"INVALID: {where}: {'; '.join(reasons)}")
            return int(ExitCode.INVALID)
    for where, receipt in receipts:
        if missing := recording.empty(receipt):
            _tell(f"{Verdict.NO_BASELINE.value.upper()}: {where}: {missing}")
            return int(ExitCode.INCOMPLETE)
    moved = comparing.machine_moved(
        found.baseline, [recording.session_of(receipt) for _, receipt in receipts]
    )
    if moved:
        _tell(f"INVALID: {moved}")
        return int(ExitCode.INVALID)
    figures = [receipt.throughput for _, receipt in receipts if receipt.throughput is not None]
    compared = comparing.compare(found.baseline, figures)
    for text in (
        identity.differences(found.baseline.versions, this.versions) if found.baseline.versions else ()
    ):
        _tell(f"since it was recorded: {text}")
    _tell(f"{compared.verdict.value.upper()}: {compared.message}")
    return int(CODES[compared.verdict])


def _ask_before_replacing(new: store.Baseline, this: Machine, config: ConfigRef, options: Options) -> None:
    """Raises UserError where a figure of this machine and config would be replaced by one that differs, and
    nobody said yes."""
    found = comparing.match(store.read_all(store.folder(options.kind.root)), this, config)
    stored = found.baseline
    if found.status is not comparing.Status.MATCH or stored is None or stored.origin != "measured":
        return
    change = recording.change_percent(stored, new)
    text = f"{found.path} holds {stored.value:,.1f} tokens/s; the new figure is {change:+.2f}% against it"
    if abs(change) > stored.tolerance_percent and not options.yes:
        raise UserError(f"baseline record: {text}; --yes replaces it")
    print(text)


def _tell(text: str) -> None:
    print(text)
    run_files.post_summary(f"Baseline: {text}\n")


def _reference(options: Options) -> ConfigRef:
    return ConfigRef(options.config.name, options.config.digest())


def _machine(options: Options) -> Machine:
    return identity.identify(options.kind.devices(options.config))


def _moved(receipt: Receipt) -> list[str]:
    sentinel = receipt.sentinel
    if sentinel is None:
        return []
    text = Sentinel(sentinel.before_s, sentinel.after_s).moved()
    return [text] if text else []


def _sessions(options: Options, reporter: Reporter) -> Sequence[tuple[str, Receipt]]:
    """The receipts given, or those of as many fresh launches as were asked for."""
    if options.receipts:
        given = [(path, Receipt.read(path)) for path in options.receipts]
        again = recording.repeated(given)
        if again:
            raise UserError(f"--receipt: {'; '.join(again)}")
        return given
    found = []
    with tempfile.TemporaryDirectory(prefix="dflash-sessions-") as folder:
        for number in range(options.sessions):
            reporter.say(f"session {number + 1} of {options.sessions}")
            out = Path(folder) / str(number)
            command = [sys.executable, "-m", options.kind.doors.command, "overhead", *options.words]
            command += ["--out", str(out), "--seed", str(number)]
            command += ["--minutes", str(options.minutes)] if options.minutes else []
            command += options.script
            done = subprocess.run(
                command, stdout=subprocess.PIPE, text=True, env=run_files.child_environment()
            )
            receipt = out / "receipt.json"
            if not receipt.exists():
                raise UserError(
                    f"baseline: session {number + 1} left no receipt (exit code {done.returncode})"
                )
            found.append((f"session {number + 1}", Receipt.read(receipt)))
            reporter.say(
                f"session {number + 1}: "
                f"{done.stdout.strip().splitlines()[-1] if done.stdout.strip() else 'no report'}"
            )
    return found
