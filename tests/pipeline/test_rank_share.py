"""Which batches a rank takes, and the place of all ranks together: held to plain sets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.pipeline.progress import Progress, index_left, place_left, progress_after
from dflash.pipeline.rank_share import RankShare, merged


@given(ranks=st.integers(1, 5), drafters=st.integers(1, 4), numbers=st.integers(0, 200))
def test_shares_cover_the_plan_once(ranks, drafters, numbers):
    shares = [RankShare(rank, ranks, drafters) for rank in range(ranks)]
    turns = numbers // drafters + 1
    places = [share.place(number) for share in shares for number in range(turns * drafters)]
    assert sorted(places) == list(range(turns * drafters * ranks))
    assert all(share.number(share.place(number)) == number for share in shares for number in range(numbers))


@given(floor=st.integers(0, 20), taken=st.sets(st.integers(1, 30)), i=st.integers(0, 60))
def test_a_place_among_what_is_left_has_one_index(floor, taken, i):
    progress = Progress(0, floor, tuple(sorted(floor + one for one in taken)))
    assert place_left(progress, index_left(progress, i)) == i
    left = [index for index in range(200) if index >= floor and index not in progress.ahead]
    assert index_left(progress, i) == left[i]


@settings(max_examples=60)
@given(data=st.data(), ranks=st.integers(1, 4), drafters=st.integers(1, 3), steps=st.integers(1, 6))
def test_the_place_of_all_is_what_they_have_drawn(data, ranks, drafters, steps):
    """Each rank draws its own batches in any order near the plan's, behind any first leg."""
    base = Progress(5, 7, tuple(sorted(data.draw(st.sets(st.integers(8, 20), max_size=4)))))
    drawn, own = set(base.ahead), {}
    for rank in range(ranks):
        share = RankShare(rank, ranks, drafters)
        order = data.draw(st.permutations(range(steps * drafters + 4)))[: steps * drafters]
        drawn |= {index_left(base, share.place(number)) for number in order}
        own[rank] = progress_after(5 + steps, Progress(), order)
    found = merged(base, own, RankShare(0, ranks, drafters), 5 + steps)
    everything = set(range(found.floor)) | set(found.ahead)
    assert everything == drawn | set(range(base.floor))
    assert found.step == 5 + steps
    assert all(index > found.floor for index in found.ahead)
