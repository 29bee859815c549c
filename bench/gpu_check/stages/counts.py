"""Stage: the real trainer under every way of counting at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.gpu_check.stage import Found, Table, rows_of

if TYPE_CHECKING:
    from bench.subjects.trainer.counts import Proof


class CountsStage:
    """The modes, PyTorch's GPU trace, the copy wrappers and the allocator's counters, in one run."""

    name = "counts"
    asks = "Does a training step wait for its GPU, by every way of counting, with collectors off and on?"
    seconds = 75

    def look(self) -> Found:
        from bench.gpu_check.workload import trainer_config
        from bench.subjects.trainer.counts import OFF, count_arms
        from bench.subjects.trainer.harness import harness_config
        from dflash.observe.registry import COLLECTORS

        config = harness_config(trainer_config())
        return read(count_arms(config, {OFF: (), "all": COLLECTORS.names}), config.drafter.dtype)


def read(proof: Proof, dtype: str) -> Found:
    """What a count says. Pure."""
    from bench.subjects.trainer.counts import OFF
    from steptime.counting.cuda import category
    from steptime.counting.ways.gpu_trace import BLOCK, GpuTraceWay
    from steptime.statistics.traces import compare

    problems = [f"not armed: {way}" for way in proof.unavailable]
    off = proof.counts[OFF]
    kinds = sorted({kind for _, kind, _ in off})
    totals = {kind: sum(n for (_, one, _), n in off.items() if one == kind) for kind in kinds}
    operations = sum(n for kind, n in totals.items() if category(kind) == "operation")
    if not operations:
        problems.append("the modes counted no operation")
    if not proof.unavailable and not totals.get(f"{BLOCK} [{GpuTraceWay.name}]"):
        problems.append(f"{GpuTraceWay.name} counted no block of the allocator: it is not alive")
    problems += [
        f"{role} waits for its device, {n} x {kind} in {proof.steps} steps at {place}"
        for (role, kind, place), n in sorted(off.items(), key=str)
        if category(kind) == "sync"
    ]
    problems += [
        f"with all collectors on {row.role} does {row.on} instead of {row.off} x {row.kind} at {row.place}"
        for row in proof.difference("all")
        if category(row.kind) in ("sync", "operation", "copy", "bytes")
        or (category(row.kind) == "allocation" and " [" not in row.kind)
    ]
    losses = compare(proof.losses[OFF], proof.losses["all"], dtype)
    notes = [f"losses with collectors off and on: {losses.text}"]
    if losses.kind == "different":
        problems.append(f"losses with collectors off and on: {losses.text}")
    rows = rows_of(*((kind, category(kind), n) for kind, n in totals.items()))
    table = Table(f"What {proof.steps} steps of all workers did, collectors off", ("kind", "is", "n"), rows)
    return Found(operations, "operations", tuple(problems), tuple(notes), (table,))
