"""A registry's messages; and that what a test registers is picked up by all who ask, without a change elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from dflash.registry import Registry
from steptime.errors import UserError


@dataclass(frozen=True)
class Thing:
    name: str


BIG, SMALL = Thing("big"), Thing("small")
THINGS = Registry("thing", BIG, SMALL)


def test_things_come_in_the_order_of_their_registration():
    assert (tuple(THINGS), THINGS.names, len(THINGS)) == ((BIG, SMALL), ("big", "small"), 2)
    assert THINGS["small"] is SMALL


def test_an_unknown_name_gets_the_nearest_one_in_one_line():
    with pytest.raises(UserError) as caught:
        THINGS["smal"]
    assert str(caught.value) == "unknown thing 'smal'; did you mean 'small'? (known: big, small)"


def test_all_stands_for_every_one():
    assert THINGS.chosen(["all"]) == (BIG, SMALL)
    assert THINGS.chosen(["small"]) == (SMALL,)
    assert THINGS.chosen([]) == ()
    with pytest.raises(UserError, match="unknown thing 'none'"):
        THINGS.chosen(["small", "none"])


def test_two_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two things of one name"):
        Registry("thing", BIG, Thing("big"))
