"""The command line: `python -m bench`."""

import signal
import sys
from types import FrameType

from bench.cli import main


def interrupt(number: int, frame: FrameType | None) -> None:
    """A job that is cancelled gets SIGTERM: what Ctrl-C keeps and cleans up is kept and cleaned up then,
    too."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
