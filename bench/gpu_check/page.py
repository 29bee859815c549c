"""docs/gpu-check.md of what the stages found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tabulate import tabulate

from bench.gpu_check.stage import Outcome
from steptime.records.types import Commit, Machine

HEAD = """# The check of a GPU

Written by `python -m bench gpu-check`. Each stage runs in a process of its own and is killed past its time. A
stage is red where something is not as claimed, and also where nothing was counted, a way of counting could
not be armed, or the stage did not end.
"""


@dataclass(frozen=True, slots=True)
class Heading:
    """Where and when."""

    date: str
    machine: Machine
    commit: Commit


def page(heading: Heading, outcomes: Sequence[Outcome], *, part: bool = False) -> str:
    """The whole page. `part`: only some stages were asked for."""
    red = [outcome for outcome in outcomes if outcome.red]
    verdict = f"**Red**: {', '.join(outcome.stage for outcome in red)}." if red else "Everything as claimed."
    if part:
        verdict += " Only a part of the stages was asked for."
    rows = [(one.stage, one.asks, one.state, f"{one.seconds:.0f}", _looked(one)) for one in outcomes]
    headers = ("stage", "what it asks", "outcome", "s", "looked at")
    parts = [
        HEAD,
        _facts(heading),
        verdict + "\n",
        tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True),
        *(_section(outcome) for outcome in outcomes),
    ]
    return "\n".join(parts) + "\n"


def _facts(heading: Heading) -> str:
    machine, commit = heading.machine, heading.commit
    gpus = ", ".join(model for model, _ in machine.gpus) or "none"
    changed = f", with uncommitted changes {commit.diff_hash}" if commit.dirty else ""
    facts: Mapping[str, str] = {
        "date": heading.date,
        "machine": f"`{machine.key}`",
        "GPUs in use": gpus,
        "CPU": f"{machine.cpu_model}, {machine.cpus} cores",
        "commit": f"`{commit.id or 'unknown'}`{changed}",
        "versions": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
    }
    return "\n".join(f"- {name}: {text}" for name, text in facts.items()) + "\n"


def _looked(outcome: Outcome) -> str:
    found = outcome.found
    return f"{found.looked_at} {found.unit}" if found else "-"


def _section(outcome: Outcome) -> str:
    lines = [f"\n## {outcome.stage}\n", f"{outcome.asks}\n"]
    lines += [f"- **{line}**" for line in outcome.problems]
    found = outcome.found
    if found is None:
        return "\n".join(lines)
    lines += [f"- {note}" for note in found.notes]
    for table in found.tables:
        body = tabulate(table.rows, headers=table.headers, tablefmt="github", disable_numparse=True)
        lines += [f"\n{table.title}:\n", body]
    return "\n".join(lines)
