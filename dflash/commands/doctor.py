"""`dflash doctor`: one page on what this machine can run and observe, and why not."""

from __future__ import annotations

import sys

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="doctor")(doctor)


def doctor() -> int:
    """Say what this machine can run and observe, and why not. Exit code 1 when training cannot work here."""
    from dflash.commands.checks import examine, page

    findings = examine()
    sys.stdout.write(page(findings, colour=sys.stdout.isatty()))
    return 1 if any(finding.state == "broken" for finding in findings) else 0
