"""A message for a user is one line, whatever it quotes."""

from __future__ import annotations

import pytest

from steptime.errors import LONGEST_MESSAGE, UserError


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("schön", "schön"),
        ("two\nlines", "two lines"),
        ("half \ud83d", "half \\ud83d"),
        ("bell \x07 and \u2028", "bell \\x07 and "),
        ("tab\tbed", "tab\\tbed"),
    ],
)
def test_one_line(message, shown):
    assert str(UserError(message)) == shown


def test_a_long_message_keeps_both_ends():
    text = str(UserError("begin " + "x" * 10_000 + " end"))
    assert len(text) < LONGEST_MESSAGE
    assert text.startswith("begin x")
    assert text.endswith("x end")
