"""What every run leaves in its folder, whatever the verdict: receipt.json, report.md, report.html."""

from __future__ import annotations

import sys
from pathlib import Path

from steptime.baselines import comparing, store
from steptime.errors import UserError
from steptime.records.receipt import Receipt
from steptime.report import html, markdown
from steptime.run_files import post_summary, write


def write_all(receipt: Receipt, folder: Path) -> None:
    """Write the three files; the receipt first, since the reports can be made from it again."""
    write(folder / "receipt.json", receipt.to_json() + "\n")
    text = markdown.render(receipt)
    write(folder / "report.md", text)
    write(folder / "report.html", html.render(receipt, history_of(receipt)))
    post_summary(text)


def history_of(receipt: Receipt) -> list[tuple[str, float]]:
    """(date, tokens/s) of the stored sessions of this machine and config, oldest first; empty when there are
    none.

    A broken file is told on stderr and costs the report its history, nothing else: a gate needs no baseline.
    """
    try:
        found = comparing.match(store.read_all(), receipt.machine, receipt.config)
    except UserError as error:
        print(f"no history in the report: {error}", file=sys.stderr)
        return []
    if found.status is not comparing.Status.MATCH or found.baseline is None:
        return []
    return sorted((session.date, session.tokens_per_second) for session in found.baseline.sessions)
