"""`python -m bench.gate_worker`: the door of a gate's process, kept in one place for gates against other
commits."""

import importlib
import sys

from steptime.gate.worker import main

if __name__ == "__main__":
    sys.exit(main(lambda: importlib.import_module("bench.subjects.registry")))
