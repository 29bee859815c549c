"""`python -m bench gate --base REF`: is this commit slower than that one, on this machine, now?"""

from __future__ import annotations

import time
from pathlib import Path

from bench import files
from bench.gate.session import gather
from bench.gate.verdict import GateEvidence, Options, make_receipt
from bench.gate.worktrees import NoHarness, checked_out
from bench.machine.commit import read_commit
from bench.progress import Reporter
from bench.records.receipt import Receipt
from bench.records.types import Commit
from bench.report.files import write_all
from bench.report.show import show


def run_gate(options: Options, reporter: Reporter, root: Path | None = None) -> Receipt:
    """Measure both commits, judge, write the three files, print the report.

    Raises:
        UserError: no such base, or a config that is wrong.
    """
    folder = files.choose_folder(options.out, "gate")
    places = {} if root is None else {"root": root}
    started = time.monotonic()
    try:
        with checked_out(options.base, reporter.say, **places) as (base, head):
            evidence = gather(options, base, head, reporter)
            receipt = make_receipt(options, evidence, base.commit, head.commit, time.monotonic() - started)
            if head.commit.dirty and read_commit(head.root) != head.commit:
                evidence.incomplete.append("the uncommitted changes changed while they were measured")
                receipt = make_receipt(
                    options, evidence, base.commit, head.commit, time.monotonic() - started
                )
    except NoHarness as error:
        evidence = GateEvidence(incomplete=[str(error)])
        receipt = make_receipt(
            options, evidence, Commit(""), read_commit(**places), time.monotonic() - started
        )
    write_all(receipt, folder)
    show(receipt, folder)
    return receipt
