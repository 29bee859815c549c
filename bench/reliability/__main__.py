"""Faults of a run, tried on real runs of the command line: `python -m bench.reliability` makes
docs/reliability.md.

Each trial is `dflash train` in a process of its own, which meets its fault and is started again with the same
command. What is compared is the uninterrupted run: the bytes of its last checkpoint, and a row for each
step."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from bench.reliability.kinds import Kind, all_kinds
from bench.reliability.trials import Trials

_HEAD = """\
# What a run survives

Made by `python -m bench.reliability` (`nox -s faults`): each line was tried on real runs of `dflash train`,
in {minutes:.0f} minutes on {cores} CPU cores, seed {seed}. A trial is lost when the run that goes on does not
end with the bytes of the uninterrupted run's last checkpoint (in mixed order: with every
batch of the plan trained on once), when a step has no row in `metrics.jsonl`, or when the exit code is not
the promised one.

"""


def page(kinds: list[Kind], minutes: float, seed: int) -> str:
    """The table in Markdown."""
    head = _HEAD.format(minutes=max(1.0, minutes), cores=os.cpu_count(), seed=seed)
    lines = ["| fault | tried | promised | seen | lost |", "|---|---|---|---|---|"]
    for kind in kinds:
        seen = ", ".join(sorted(kind.seen))
        lines.append(f"| {kind.name} | {kind.tried} | {kind.promised} | {seen} | {kind.lost or 'nothing'} |")
    total = sum(kind.tried for kind in kinds)
    return head + "\n".join(lines) + f"\n\n{total} trials of {len(kinds)} kinds.\n"


def main() -> int:
    """Exit code 1 when anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m bench.reliability", description=__doc__)
    parser.add_argument("--kills", type=int, default=51, help="SIGKILLs, over all layouts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/reliability.md"))
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dflash-faults-") as folder:
        kinds = all_kinds(Trials(Path(folder)), options.kills, options.seed)
    text = page(kinds, (time.monotonic() - began) / 60, options.seed)
    options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return int(any(kind.lost for kind in kinds))


if __name__ == "__main__":
    sys.exit(main())
