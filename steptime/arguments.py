"""The options of `python -m bench`: how a value is read, and those that several commands have."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any

import typer

from steptime.errors import UserError


def one_process() -> None:
    """Refuse to measure as one of several ranks: each would throw its own switches at its own time, and wait
    for the others in every step.

    Raises:
        UserError: torchrun has started several.
    """
    if (ranks := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UserError(f"WORLD_SIZE = {ranks} is set: one process is measured; start it without torchrun")


def to_percent(text: str) -> float:
    """`1%` or `1` as 1.0."""
    try:
        value = float(text.strip().removesuffix("%"))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a percentage such as 1% or 0.5%") from None
    if not 0.0 <= value < 100.0:
        raise typer.BadParameter(f"{text!r} is outside 0% to 100%")
    return value


def to_budget(text: str) -> float:
    """A percentage above 0: nothing can be shown to cost nothing at all."""
    value = to_percent(text)
    if value == 0.0:
        raise typer.BadParameter("a budget of 0% cannot be met by any measurement; try 0.1%")
    return value


def to_minutes(text: str) -> float:
    """Minutes above 0, at most a day."""
    try:
        value = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a number of minutes") from None
    if not 0.0 < value <= 1440.0:
        raise typer.BadParameter(f"{text!r} is not between 0 and 1440 minutes")
    return value


def to_natural(text: str) -> int:
    """An integer of at least 0."""
    if not text.isdigit():
        raise typer.BadParameter(f"{text!r} is not a whole number of at least 0")
    return int(text)


def to_names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def to_percents(text: str) -> tuple[float, ...]:
    """Comma-separated percentages."""
    return tuple(to_percent(part) for part in text.split(","))


def option(words: str, help: str, read: Callable[[str], Any] | None = None) -> Any:
    """An option such as `--seed N`. Its help says the default; `read` makes the value of what is typed."""
    name, _, metavar = words.partition(" ")

    def value(given: Any) -> Any:
        return read(given) if read and isinstance(given, str) else given  # a default is a value already

    return typer.Option(name, metavar=metavar or None, help=help, show_default=False, parser=read and value)


CONFIG = "configs/cpu-tiny.toml"

Config = Annotated[
    str | None, option("--config FILE", "settings of the subject, where it has a file of them")
]
Settings = Annotated[list[str] | None, option("--set KEY=VALUE", "lay a setting over the config")]
Seed = Annotated[int, option("--seed N", "order of the arms (default 0)", to_natural)]
Out = Annotated[str | None, option("--out DIR", "folder for receipt and reports (default: below bench-out/)")]
Hf = Annotated[bool, option("--hf", "measure a Hugging Face script: --hf -- train.py ARGS")]
Lightning = Annotated[bool, option("--lightning", "measure a Lightning script, likewise")]
Subject = Annotated[
    str | None,
    option("--subject S", "FILE_OR_MODULE[:ATTR], a trainer's name, or spin: light, of known speed"),
]


def framework(context: typer.Context, hf: bool, lightning: bool) -> str:
    """Name of the framework whose script the command line ends with; empty: none.

    Raises:
        UserError: words that no option takes.
    """
    if context.args and not (hf or lightning):
        told = f"got unexpected extra argument ({context.args[0]}) (see {context.command_path} --help)"
        raise UserError(told)
    return "hf" if hf else "lightning" if lightning else ""
