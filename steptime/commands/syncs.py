"""`syncs -- SCRIPT ARGS`: run any PyTorch program and print the host syncs of its steps."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steptime.arguments import option, to_natural
from steptime.errors import UserError

if TYPE_CHECKING:
    from steptime.subjects.steps.loop import Loop


def register(app: typer.Typer) -> None:
    """Add the command. The options end at the script: what follows it is the script's own."""
    own = {"allow_extra_args": True, "ignore_unknown_options": False, "allow_interspersed_args": False}
    usage = "[OPTIONS] -- SCRIPT|(-m MODULE)|(--subject S) [ARGS]..."
    app.command("syncs", options_metavar=usage, context_settings=own)(syncs)


def _as(given: str) -> str:
    if given not in ("cuda", "cpu", "cpu:0"):
        raise typer.BadParameter(f"{given!r} is none of cuda, cpu and cpu:0")
    return given


def _format(given: str) -> str:
    from steptime.counting.sync_report import FORMATS

    if given not in FORMATS:
        raise typer.BadParameter(f"{given!r} is none of {', '.join(FORMATS)}")
    return given


def syncs(
    context: typer.Context,
    warmup: Annotated[int, option("--warmup N", "optimizer steps not counted (default 2)", to_natural)] = 2,
    steps: Annotated[int | None, option("--steps N", "stop after N counted steps", to_natural)] = None,
    device: Annotated[
        str,
        option(
            "--as D",
            "cuda (default; simulated where there is none), cpu: take the program's CPU for its device, or "
            "cpu:0 for a program that calls its device so",
            _as,
        ),
    ] = "cuda",
    module: Annotated[str | None, option("-m MODULE", "run a module instead of a script")] = None,
    subject: Annotated[
        str | None, option("--subject S", "FILE_OR_MODULE[:ATTR]: steps of its cycle, with all switches on")
    ] = None,
    work: Annotated[bool, option("--work", "also list operations, allocations and copies")] = False,
    format: Annotated[
        str, option("--format F", "text (default), markdown, json, sarif or github annotations", _format)
    ] = "text",
    json: Annotated[Path | None, option("--json FILE", "write the counts")] = None,
    sarif: Annotated[Path | None, option("--sarif FILE", "write SARIF for code scanning")] = None,
    accepted: Annotated[Path | None, option("--accepted FILE", "TOML of accepted places")] = None,
    write: Annotated[bool, option("--write", "write every place that was found into --accepted")] = False,
    fail: Annotated[bool, option("--fail", "exit code 1 when a new host sync was counted")] = False,
) -> int:
    """Runs a PyTorch program and counts the places where the host waits for a GPU, by role, kind and line.
    A step is a round of its loop, as its optimizers tell; without one the whole run counts. Without a GPU the
    program is told that it has one, which lives in CPU memory.
    """
    from steptime.counting import accepted as places
    from steptime.counting import run_script, sync_report

    words = list(context.args)
    if subject is not None and (words or module is not None):
        raise UserError("syncs: --subject takes no script beside it")
    if write and accepted is None:
        raise UserError("syncs: --write needs --accepted FILE")
    known = places.read(accepted) if accepted is not None and (accepted.exists() or not write) else ()
    if subject is not None:
        from steptime.subjects.steps.counts import count_steps

        loop = _loop_of(subject)
        code, counted = count_steps(loop, device=device, warmup=warmup, steps=steps, work=work)
    else:
        code, counted = run_script.run(
            _program(words) if module is None else module,
            words,
            device=device,
            warmup=warmup,
            work=work,
            steps=steps,
            module=module is not None,
        )
    missing = sync_report.nothing_counted(counted)
    if missing:
        print(f"error: {missing}", file=sys.stderr)
        return code or 2
    found = sync_report.rows(counted, known)
    print(sync_report.rendered(format, counted, found, work=work))
    if json:
        _of_rank(json).write_text(sync_report.as_json(counted, found), encoding="utf-8")
    if sarif:
        _of_rank(sarif).write_text(sync_report.as_sarif(counted, found), encoding="utf-8")
    if write and accepted is not None:
        places.write(accepted, [(row.kind, row.place) for row in found if row.accepted is None], known)
        return code
    return code or int(fail and any(row.accepted is None for row in found))


def _program(words: list[str]) -> str:
    """The script, which is taken off its arguments."""
    if not words:
        raise UserError("syncs: SCRIPT is missing (see syncs --help)")
    program = words.pop(0)
    if not Path(program).is_file():
        raise UserError(f"syncs: no such script: {program}")
    return program


def _loop_of(subject: str) -> Callable[[], Loop]:
    """What makes the loop of a subject."""
    from steptime.subjects.registry import find
    from steptime.subjects.steps.kind import StepsKind

    kind = find(subject)
    if not isinstance(kind, StepsKind):
        raise UserError(f"syncs --subject {subject}: only FILE_OR_MODULE[:ATTR] has steps to count by place")
    settings = kind.settings(None, ())
    return lambda: kind.build(settings)


def _of_rank(path: Path) -> Path:
    """Each rank's file of its own."""
    from steptime.counting.run_script import rank

    number = rank()
    return path if number is None else path.with_name(f"{path.stem}.rank{number}{path.suffix}")
