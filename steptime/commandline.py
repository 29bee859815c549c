"""Typer command lines. A mistake in the words is one line, a `UserError`, and names the nearest word."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from steptime.errors import UserError, nearest

# Typer carries a copy of click in some releases and uses the package in others.
_ClickException: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


class Group(TyperGroup):
    """Several commands. A word that is none of them names the nearest."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            raise UserError(f"no such command {args[0]!r}{nearest(args[0], self.commands)} ({_listed(self)})")
        return super().resolve_command(ctx, args)


def make_app(**settings: Any) -> typer.Typer:
    """An app without shell completion. Tracebacks stay Python's own."""
    return typer.Typer(cls=Group, add_completion=False, pretty_exceptions_enable=False, **settings)


def call(app: typer.Typer, words: Sequence[str], program: str) -> int:
    """Run a command line; its exit code. Where a command is missing it prints the help, and the code is 2.

    Typer's own entry is not used. It ends Ctrl-C in silence, and a closed pipe with code 1, a verdict.

    Raises:
        UserError: no such command or option, or a value that does not fit.
    """
    command = typer.main.get_command(app)
    nothing = isinstance(command, Group) and not words
    try:
        with command.make_context(program, ["--help"] if nothing else list(words)) as context:
            result = command.invoke(context)
    except typer.Exit as leave:
        return 2 if nothing else leave.exit_code
    except _ClickException as error:
        raise UserError(_complaint(error)) from None
    return result if isinstance(result, int) else 0


def _complaint(error: Any) -> str:
    """Click's error in one line, and where the help is."""
    context: Any = getattr(error, "ctx", None)
    kind, text = type(error).__name__, error.format_message()
    if kind == "NoSuchOption":
        options = [one for one in context.command.get_params(context) if one.param_type_name == "option"]
        near = nearest(error.option_name, [word for one in options for word in one.opts + one.secondary_opts])
        text = f"no such option {error.option_name}{near}"
    elif kind == "BadParameter" and error.param:
        text = f"argument {'/'.join(error.param.opts)}: {error.message}"
    elif kind == "UsageError" and isinstance(context.command, Group):
        text = f"{text.rstrip('.')} ({_listed(context.command)})"
    text = " ".join(text.split()).rstrip(".")
    return text[:1].lower() + text[1:] + (f" (see {context.command_path} --help)" if context else "")


def _listed(group: Group) -> str:
    return f"there are {', '.join(group.commands)}"
