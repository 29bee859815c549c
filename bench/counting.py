"""`python -m bench.counting FILE`: the counting process. Gates against other commits knock at this name."""

import sys

from bench.subjects import registry
from steptime.count_worker import main

__all__ = ["main", "registry"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
