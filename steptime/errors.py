"""The one exception for a user's mistake: one line that says what, where and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input or configuration. The command line prints the message in one line and exits with code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of `known`, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
