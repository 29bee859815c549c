"""`python -m bench.syncs.counting FILE`: the door of the counting process, kept in one place for gates against other commits."""

import sys

from bench.syncs.counting import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
