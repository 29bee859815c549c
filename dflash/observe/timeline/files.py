"""The timeline's two files in a run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from dflash.observe.timeline.log import Timeline
from dflash.observe.timeline.picture import COLOURS, picture
from dflash.observe.timeline.trace_event import trace
from steptime.errors import UserError
from steptime.files import atomic_text
from steptime.timeline.svg import draw


def write_timeline(timeline: Timeline, run_dir: Path, name: str) -> str:
    """Write `timeline.json` and `timeline.svg`, when the workers have ended; what became of it, in a line."""
    shown = picture({log.label: log.spans() for log in timeline.logs}, timeline.steps)
    steps = len(shown.steps)
    try:
        with atomic_text(run_dir / "timeline.json") as file:
            json.dump(trace(shown, name), file)
        with atomic_text(run_dir / "timeline.svg") as file:
            file.write(draw(shown, f"{name}: the last {steps} steps", COLOURS))
    except (UserError, OSError) as error:
        return f"the timeline could not be written: {error}"
    return (
        f"timeline of the last {steps} steps: {run_dir}/timeline.svg, and timeline.json for ui.perfetto.dev"
    )
