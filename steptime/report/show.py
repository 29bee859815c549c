"""Where a finished report goes: the terminal, and a pointer to the files."""

from __future__ import annotations

import sys
from pathlib import Path

from steptime.records.receipt import Receipt
from steptime.report import terminal


def show(receipt: Receipt, folder: Path) -> None:
    """The report on stdout, coloured only on a terminal; where the files are on stderr."""
    sys.stdout.write(terminal.render(receipt, color=sys.stdout.isatty()))
    sys.stdout.flush()
    print(f"{folder}/receipt.json, report.md, report.html", file=sys.stderr)
