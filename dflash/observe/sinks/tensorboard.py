"""TensorBoard event files in the run's folder; the optional extra `tensorboard`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import time
from typing import TYPE_CHECKING, Any, ClassVar

from dflash.observe.sinks.base import Row, RowKind, Sink, Surroundings
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.observe.state import State


class TensorboardSink(Sink):
    """Flush windows and training scalars over the optimizer step.

    Raises:
        UserError: the package is not installed.
    """

    name: ClassVar[str] = "tensorboard"
    kinds: frozenset[RowKind] = frozenset({"metrics", "rank", "train", "event"})
    switch: ClassVar[str] = "tensorboard"
    off: ClassVar[Any] = False

    def __init__(self, run: Surroundings) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise UserError(
                "observe.tensorboard needs the package: pip install 'dflash-harness[tensorboard]'"
            )
        # A slow import that holds the interpreter's lock: before the workers start.
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = run.run_dir / "tensorboard"
        self._writer: Any = None
        self._started_s = time.time()

    @classmethod
    def examine(cls) -> tuple[State, str]:
        if importlib.util.find_spec("tensorboard") is None:
            return "absent", "not installed; pip install 'dflash-harness[tensorboard]'"
        return "ok", f"tensorboard {importlib.metadata.version('tensorboard')}"

    def open(self) -> None:
        self._writer = self._make(str(self._folder), max_queue=1000, flush_secs=60)

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            if row.kind == "event":
                walltime = self._started_s + row.elapsed_s
                self._writer.add_text("event", str(row.values.get("text", "")), row.step, walltime=walltime)
                continue
            for key, value in row.values.items():
                self._writer.add_scalar(key, value, row.step, walltime=self._started_s + row.elapsed_s)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
