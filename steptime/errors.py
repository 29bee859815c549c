"""The one exception for a user's mistake: one line that says what, where and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_MESSAGE = 2000
"""Characters of a message that are shown; more are cut out of its middle."""


class UserError(Exception):
    """Bad input or configuration. The command line prints the message in one line and exits with code 2.

    Whatever a file or an argument holds, the message stays one line that any terminal shows: line feeds
    become spaces, other control characters and halves of characters are escaped, and the middle of a very
    long one is left out."""

    def __init__(self, message: str) -> None:
        text = " ".join(str(message).splitlines())
        if len(text) > LONGEST_MESSAGE:
            text = f"{text[: LONGEST_MESSAGE // 2]} ... {text[-LONGEST_MESSAGE // 4 :]}"
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest of `known`, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
