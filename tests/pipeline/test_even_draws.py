"""Mixed draws: equal work for the drafters of a step, lengths mixed, no batch left behind."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from dflash.pipeline.even_draws import EvenDraws

SIZES = (512, 1024, 1536, 2048, 2560, 3072)


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 1000))
def test_drafters_of_a_step_get_equal_work_where_there_is_enough_of_each_length(
    drafters: int, per_step: int, seed: int
) -> None:
    draws = EvenDraws(drafters, per_step, seed)
    waiting = list(SIZES) * drafters
    order = random.Random(seed)
    for _ in range(3):
        work = [0] * drafters
        turns = [drafter for drafter in range(drafters) for _ in range(per_step)]
        order.shuffle(turns)  # whatever the threads do
        for drafter in turns:
            place = draws.choose(drafter, waiting)
            work[drafter] += waiting[place]
        assert len(set(work)) == 1


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_any_waiting_batches_will_do(data: st.DataObject, drafters: int, per_step: int) -> None:
    draws = EvenDraws(drafters, per_step, seed=0)
    for _ in range(3 * per_step):
        for drafter in data.draw(st.permutations(range(drafters))):
            sizes = data.draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=12))
            assert 0 <= draws.choose(drafter, sizes) < len(sizes)
    assert not draws._first  # nothing is remembered of draws that all have made


def test_later_draws_of_a_step_make_up_for_earlier_ones() -> None:
    draws = EvenDraws(2, per_step=2, seed=0)
    assert draws.choose(0, [3072]) == 0
    assert draws.choose(1, [512]) == 0  # nothing longer was there
    assert draws.choose(0, [1024]) == 0
    assert draws.choose(1, [512, 1024, 3584, 2048]) == 2  # 4096 each
    assert draws.choose(1, [512]) == 0  # a new step begins with nothing
    assert draws.choose(0, [3072, 512]) == 1


def test_lengths_mix_and_of_equal_ones_the_oldest_is_drawn() -> None:
    draws = EvenDraws(1, per_step=1, seed=3)
    places = [draws.choose(0, [8, 8, 16, 16, 24]) for _ in range(60)]
    assert set(places) == {0, 2, 4}


def test_a_length_that_not_all_can_have_waits_until_it_is_overdue() -> None:
    draws = EvenDraws(2, per_step=1, seed=0)
    waiting = [4096, 512, 512, 512]
    for _ in range(20):
        assert {draws.choose(drafter, waiting) for drafter in (0, 1)} == {1}
    assert draws.choose(0, waiting, overdue=True) == 0
    assert draws.choose(1, waiting, overdue=True) == 0  # the nearest to the first one's, not the oldest
