"""What a pull request's text lets through."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import cli
from steptime.errors import UserError
from steptime.gate.accept import WORD, parse_text
from steptime.statistics.intended import Numerics

TEXT = """Reads the gradient norm.

Bench-Accept: syncs: drafter/0 drafter_worker.py _micro_step +1 -- the norm is read for the log
  bench-accept: numerics close -- another order of summation
Not one: Bench-Accept is a word here.
"""


def test_each_line_is_an_allowance_with_its_own_reason() -> None:
    found = parse_text(TEXT)
    assert (found.numerics, found.reason) == (Numerics.CLOSE, "another order of summation")
    (one,) = found.allowances
    assert (one.kind, one.role, one.most, one.reason) == (
        "syncs",
        "drafter/0",
        1,
        "the norm is read for the log",
    )
    assert len(found.lines) == 2


@given(st.text())
def test_prose_allows_nothing(text: str) -> None:
    prose = text.replace(WORD[:5], "").replace(WORD[:5].lower(), "").replace(WORD[:5].upper(), "")
    if WORD.lower() not in prose.lower():
        assert parse_text(prose).lines == ()


@pytest.mark.fault
@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Bench-Accept: syncs: drafter/0 x.py f +1", "no reason"),
        ("Bench-Accept: syncs: drafter/0 x.py f +1 -- ", "no reason"),
        ("Bench-Accept: everything -- because", "KIND: ROLE PLACE +N"),
        ("Bench-Accept: sinks: drafter/0 x.py f +1 -- because", "no such kind"),
        ("Bench-Accept: numerics same -- because", "no such mode"),
        ("Bench-Accept: numerics close -- a\nBench-Accept: numerics changed -- b", "accepted twice"),
    ],
)
def test_a_line_of_another_form_is_refused(line: str, said: str) -> None:
    with pytest.raises(UserError, match=said.replace("+", r"\+")) as refused:
        parse_text(line)
    assert "\n" not in str(refused.value)


@pytest.mark.fault
def test_the_gate_reads_the_text_before_it_measures(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "pull-request.txt"
    text.write_text("Bench-Accept: all of it\n")
    with pytest.raises(UserError, match="no reason"):
        cli.call(["gate", "--base", "HEAD", "--accept-from", str(text)])
    with pytest.raises(UserError, match=r"--accept-from .*gone"):
        cli.call(["gate", "--base", "HEAD", "--accept-from", str(tmp_path / "gone")])
    text.write_text(TEXT)
    with pytest.raises(UserError, match="both say"):
        cli.call(["gate", "--base", "HEAD", "--numerics", "close", "--accept-from", str(text)])
    asked = []
    monkeypatch.setattr("steptime.commands.gate.run_gate", lambda options, _: asked.append(options) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.call(["gate", "--base", "HEAD", "--accept-from", str(text)])
    assert asked[0].numerics is Numerics.CLOSE
    assert [one.reason for one in asked[0].allowances] == ["the norm is read for the log"]
