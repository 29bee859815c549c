"""`python -m bench.counting FILE`: the counting process. Gates against other commits knock at this name.

    parent  {"subject": "trainer", "config": {...}, "plants": [...], "arms": {"off": [], ...},
    "all_collectors": false}

on stdin; exact counts by arm, as JSON, to FILE.
"""

import json
import sys
from pathlib import Path

from bench.subjects.registry import SUBJECTS
from steptime.counting.counting import COUNTS
from steptime.run_files import write


def main(answer_path: str) -> int:
    """Count what stdin asks for."""
    request = json.load(sys.stdin)
    counts = SUBJECTS[request["subject"]].count(request)
    write(Path(answer_path), COUNTS.dump_json(dict(counts)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
