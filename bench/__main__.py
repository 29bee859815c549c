"""The command line: `python -m bench`."""

import signal
import sys

from bench.cli import main
from steptime.__main__ import interrupt

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
