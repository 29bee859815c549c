"""`python -m bench.gpu_check.child MODULE:CLASS FILE`: one stage, in a process of its own; what it found goes
to FILE."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from bench.gpu_check.stage import FOUND
from steptime.run_files import write


def main(door: str, file: str) -> int:
    """Run the stage that stands at `door`."""
    module, _, name = door.partition(":")
    stage = getattr(importlib.import_module(module), name)()
    write(Path(file), FOUND.dump_json(stage.look()).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
