"""The command line: `python -m steptime`, and the console script `steptime`."""

import signal
import sys
from types import FrameType

from steptime.cli import main


def interrupt(number: int, frame: FrameType | None) -> None:
    """A job that is cancelled gets SIGTERM: what Ctrl-C keeps and cleans up is kept and cleaned up then,
    too."""
    raise KeyboardInterrupt


def run() -> int:
    """The console script."""
    signal.signal(signal.SIGTERM, interrupt)
    return main()


if __name__ == "__main__":
    sys.exit(run())
