"""`python -m steptime.count_worker FILE`: the counting process.

    parent  {"subject": ..., "config": {...}, "plants": [...], "arms": {"off": [], ...},
             "all_collectors": false}

on stdin; exact counts by arm, as JSON, to FILE."""

import json
import sys
from pathlib import Path

from steptime.counting.counting import COUNTS
from steptime.errors import UserError
from steptime.run_files import write
from steptime.subjects.registry import find


def main(answer_path: str) -> int:
    """Count what stdin asks for."""
    request = json.load(sys.stdin)
    try:
        counts = find(request["subject"]).count(request)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write(Path(answer_path), COUNTS.dump_json(dict(counts)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
