"""A picture of the last steps: spans of every thread and stream, from the recorders' own clocks.

`log` is what workers write, `picture` makes tracks, counters and flows of it, `trace_event` and `svg` write
those."""
