"""`python -m steptime.gate_worker`: a process of a gate of any trainer."""

import sys

from steptime.gate.worker import main

if __name__ == "__main__":
    sys.exit(main())
