"""Stage: two launches of one training, loss by loss."""

from __future__ import annotations

import json
import sys

from bench.gpu_check.stage import Found, Table, rows_of
from steptime.child_process import Ended, run_python

STEPS = 8
LIMIT_S = 20.0


class BitsStage:
    """Real training (its learning rate and all) of the first steps, twice, under deterministic kernels."""

    name = "bits"
    asks = "Do two launches give the same losses, bit for bit, with deterministic kernels asked for?"
    seconds = 45

    def look(self) -> Found:
        from bench.gpu_check.workload import trainer_config

        launches = [run_python(["-m", __name__], limit_s=LIMIT_S) for _ in range(2)]
        return read(launches, trainer_config().drafter.dtype)


def read(launches: list[Ended], dtype: str) -> Found:
    """What two launches say. Pure."""
    from steptime.statistics.traces import compare

    problems, traces = [], []
    for number, ended in enumerate(launches, 1):
        if ended.code == 0:
            traces.append([float(loss) for loss in json.loads(ended.out)])
        else:
            why = f"exit code {ended.code}" if ended.code is not None else f"not finished in {LIMIT_S:g} s"
            problems.append(f"launch {number}: {why}: {ended.last_line}")
    if problems:
        return Found(0, "losses", tuple(problems))
    first, second = traces
    difference = compare(first, second, dtype)
    if difference.kind != "equal":
        problems.append(f"two launches: {difference.text}")
    rows = rows_of(*((step, *pair) for step, pair in enumerate(zip(first, second, strict=False))))
    table = Table("Losses", ("step", "first", "second"), rows)
    return Found(min(map(len, traces)), "losses", tuple(problems), (difference.text,), (table,))


def main() -> int:
    """One launch: its losses as JSON, each as the digits that make the same bits again."""
    from bench.gpu_check.workload import trainer_config
    from bench.subjects.trainer.kind import TrainerKind

    losses = [loss for _, loss, _ in TrainerKind().trace(trainer_config(), STEPS)]
    json.dump([repr(loss) for loss in losses], sys.stdout)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
