"""The step clock of pairs, and the light subject under it on a clock that only moves when told to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import pytest

from bench.subjects.registry import SUBJECTS
from steptime.errors import UserError
from steptime.records.pairs import CONTROL, PLACEBO, Layer, Request, Segment
from steptime.subjects.control import ControlLoss
from steptime.subjects.injection import LAYER, Injection, Place, parse_injection
from steptime.subjects.pairs import Round, Stretch, Wanted, covers, steps_to_cover
from steptime.subjects.spin import Noise
from steptime.subjects.spin_pairs import FLUSH_S, TICK_S, Cost, SpinPairs, cost_of
from tests.steptime.subjects.clock import Hand

QUIET = Noise(step=0.0, slow=0.0)


def run(subject: SpinPairs, wanted: Sequence[Wanted]) -> tuple[list[Segment], dict[str, float] | None]:
    taken: list[Segment] = []
    subject.open()
    result = subject.run_pairs(iter(wanted), taken.append)
    subject.close()
    return taken, result.accounted_percent  # type: ignore[return-value]


def effects(subject: SpinPairs, layer: Layer, steps: int, name: str, pairs: int = 4) -> float:
    """ln of seconds in the path, else seconds: what `name` costs, against its complement of nothing."""
    halves = [frozenset({name}), frozenset()] * pairs
    taken, _ = run(subject, [Request(on, steps, 2, layer, at // 2, at % 2) for at, on in enumerate(halves)])
    found = [
        math.log(a.seconds / b.seconds) if layer is Layer.PATH else a.seconds - b.seconds
        for a, b in zip(taken[::2], taken[1::2], strict=True)
    ]
    return fmean(found)


# -- the stepper ---------------------------------------------------------------------------------------------


def test_a_segment_is_what_lies_between_two_standstills() -> None:
    hand = Hand(lead=3, prepare=50, stand=7, step=100)
    taken = hand.run([Request(frozenset({"b", "a"}), 2, 5), Request(frozenset(), 1, 5)], warmup=4)
    first, second = taken
    assert (first.first_step, first.steps, first.group, first.on) == (4 + 3, 2, 5, ("a", "b"))
    assert first.seconds == pytest.approx((2 * 100 + 7) * 1e-9), "the standstill at its end is a part of it"
    assert first.step_seconds == pytest.approx((100e-9, 107e-9))
    assert first.tokens == 2 * 5000
    assert second.first_step == 4 + 3 + 2 + 3
    assert hand.told == ["stand", "turn", "stand", "ready", "stand", "turn", "stand", "ready", "stand"]


def test_what_the_control_lost_in_lead_in_steps_belongs_to_no_segment() -> None:
    hand = Hand(lead=2)
    lost = iter([9.0, 1.0, 9.0, 2.0])
    taken = hand.run([Request(frozenset(), 1, 5)] * 2, control_s=lambda: next(lost))
    assert [segment.control_s for segment in taken] == [1.0, 2.0]


def test_what_a_tick_starts_belongs_to_its_segment() -> None:
    hand = Hand(step=100, stand=5, tick=250)
    request = Request(frozenset({"a"}), 4, 0, Layer.TICK)
    (taken,) = hand.run([request])
    assert taken.tick_s == pytest.approx(300e-9), "seen at the first boundary after it was over"
    assert covers(taken)
    hand = Hand(step=100, stand=5, tick=1000)
    (taken,) = hand.run([request])
    assert taken.seconds == pytest.approx(1000e-9), "the end waits for it"
    assert taken.tick_s == pytest.approx(taken.seconds)
    assert not covers(taken), "but a wait is no time that it took from the steps"
    assert steps_to_cover(taken, 100e-9) == 17
    hand = Hand(step=100, stand=5, tick=90)
    (taken,) = hand.run([Request(frozenset(), 1, 0, Layer.FLUSH)])
    assert covers(taken)
    assert steps_to_cover(taken, 100e-9) == 1


def test_the_requests_may_look_at_the_segments_and_end_the_run() -> None:
    hand = Hand(step=100)
    seen: list[int] = []

    def requests() -> Iterator[Wanted]:
        for _ in range(3):
            yield Request(frozenset(), 2, 0)
            seen.append(len(hand.taken))

    assert len(hand.run(requests())) == 3
    assert seen == [1, 2, 3]
    assert hand.stepper.finished


def test_a_round_lasts_its_steps_from_standstill_to_standstill_and_gives_no_segment() -> None:
    rounds = [Round("off", frozenset()), Round("all", frozenset({"a"}))]
    hand = Hand(recorded=3)
    (taken,) = hand.run([*rounds, Request(frozenset(), 2, 0)])
    assert hand.told[:6] == ["stand", "record off from 1", "stand", "recorded", "record all from 4", "stand"]
    assert hand.told[6:] == ["recorded", "turn", "ready", "stand"]
    assert (taken.first_step, taken.steps) == (7, 2)


def test_what_records_nothing_goes_on_at_once() -> None:
    hand = Hand(recorded=0)
    (taken,) = hand.run([Round("off", frozenset()), Request(frozenset(), 2, 0)])
    assert taken.first_step == 1
    assert "recorded" not in hand.told
    segments, accounted = run(SpinPairs(noise=QUIET), [Round("off", frozenset()), Request(frozenset(), 1, 0)])
    assert len(segments) == 1
    assert accounted is None


def test_a_stretch_ends_two_steps_after_it_is_long_enough() -> None:
    hand = Hand(step=100, stretch=10)
    taken = hand.run([Stretch(3), Request(frozenset(), 1, 0)], warmup=2)
    # Boundary 1 begins it; at boundary 11 ten steps are done, and other drafters may be in step 12 by then.
    assert taken[0].first_step == 14
    assert hand.told.count("begin") == hand.told.count("end") == 1


# -- the light subject ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", list(Place))
def test_an_injected_cost_is_found_in_its_layer_at_its_size_and_in_no_other(place: Place) -> None:
    injection = Injection(2.0, place)
    for layer in Layer:
        subject = SpinPairs({"other": Cost(), injection.name: cost_of(injection)}, noise=QUIET)
        steps = 1 if layer is Layer.PATH else 200
        found = effects(subject, layer, steps, injection.name)
        if layer is injection.layer:
            truth = -math.log1p(-0.02) if layer is Layer.PATH else injection.seconds(TICK_S, FLUSH_S)
        elif layer is Layer.FLUSH and injection.layer is Layer.TICK:
            truth = injection.seconds(TICK_S, FLUSH_S)  # a flush is a tick as well
        else:
            truth = 0.0
        assert found == pytest.approx(truth, abs=1e-6), layer


def test_late_work_is_charged_to_the_half_that_started_it() -> None:
    name = "late"
    subject = SpinPairs({name: Cost(late_s=0.3)}, noise=QUIET, step_s=0.01)
    assert effects(subject, Layer.TICK, 200, name) == pytest.approx(0.3, abs=1e-6)
    short = SpinPairs({name: Cost(late_s=0.3)}, noise=QUIET, step_s=0.01)
    taken, _ = run(
        short, [Request(frozenset({name}), 1, 0, Layer.TICK), Request(frozenset(), 1, 0, Layer.TICK)]
    )
    assert not covers(taken[0])
    assert taken[1].seconds < 0.02


def test_the_account_of_a_stretch_is_what_was_lost_in_it() -> None:
    costs = {"path": Cost(path=0.03), "tick": Cost(tick_s=0.02), "flush": Cost(flush_s=0.1), "free": Cost()}
    subject = SpinPairs(costs, noise=QUIET)
    taken, accounted = run(subject, [Request(frozenset(), 3, 1), Stretch(3), Request(frozenset(), 3, 1)])
    assert accounted == pytest.approx(
        {"path": 2.91, "tick": 2.0, "flush": 1.0, "free": 0.0, "all": 5.91}, abs=0.05
    )
    assert taken[0].seconds == pytest.approx(taken[1].seconds), (
        "what was before and after is not changed by it"
    )


def test_groups_repeat_and_their_losses_too() -> None:
    subject = SpinPairs(noise=QUIET)
    taken: list[Segment] = []
    result = subject.run_pairs(iter([Request(frozenset(), 3, group) for group in (4, 4, 1, 4)]), taken.append)
    losses = dict(result.losses)
    each = [{losses[step] for step in range(one.first_step, one.first_step + 3)} for one in taken]
    assert [len(one) for one in each] == [1, 1, 1, 1]
    assert each[0] == each[1] == each[3] != each[2]
    assert len({one.seconds for one in taken}) == 2
    assert [one.tokens for one in taken] == [3 * subject.tokens(group) for group in (4, 4, 1, 4)]


def test_real_work_is_done_on_the_real_clock() -> None:
    subject = SUBJECTS["spin"].make_pairs(None, injections=[parse_injection("5")])
    assert subject.switches == ("idle", "idler", "injected", PLACEBO)
    assert subject.layers["injected"] == {Layer.PATH}
    assert subject.layers[PLACEBO] == frozenset()
    taken: list[Segment] = []
    subject.open()
    subject.run_pairs(iter([Request(frozenset({"injected"}), 2, 0)]), taken.append)
    subject.close()
    assert taken[0].seconds > 0
    assert subject.paid_ns["injected"] > 0  # type: ignore[attr-defined]


def test_the_control_loses_a_fiftieth_of_what_the_step_takes_with_all_else_that_is_on() -> None:
    subject = SpinPairs({"dear": Cost(path=0.5)}, noise=QUIET)
    off, on = (frozenset({"dear"}), frozenset({"dear", CONTROL}))
    plain, dear, idle = run(subject, [Request(one, 3, 2) for one in (off, on, off)])[0]
    assert plain.control_s == idle.control_s == 0.0
    assert dear.control_s == pytest.approx(0.02 * dear.seconds, rel=1e-4)
    assert dear.seconds - dear.control_s == pytest.approx(plain.seconds)


def test_keeping_busy_takes_as_long_as_asked_and_says_how_long() -> None:
    loss = ControlLoss()
    loss.lose(200_000)
    assert loss.take_s() >= 200e-6
    assert loss.take_s() == 0.0


@pytest.mark.fault
def test_a_planted_crash_is_raised() -> None:
    with pytest.raises(RuntimeError, match="planted crash with idle on"):
        run(SpinPairs(noise=QUIET, crash_with="idle"), [Request(frozenset({"idle"}), 1, 0)] * 2)


# -- what is asked for ---------------------------------------------------------------------------------------


def test_an_injection_is_a_percentage_and_a_place() -> None:
    assert parse_injection("5") == Injection(5.0, Place.STEP)
    assert parse_injection("2@tick") == Injection(2.0, Place.TICK)
    assert parse_injection("2@tick").name == "injected@tick"
    assert parse_injection("2@tick").seconds(1.0, 10.0) == pytest.approx(0.02)
    assert parse_injection("2@flush").seconds(1.0, 10.0) == pytest.approx(0.2)
    assert parse_injection("2").seconds(1.0, 10.0) == 0.0
    assert set(LAYER) == set(Place)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("much", "a percentage from 0 to below 100"),
        ("100", "a percentage from 0 to below 100"),
        ("nan", "a percentage from 0 to below 100"),
        ("2@tik", "no such place; did you mean 'tick'"),
        ("@tick", "a percentage"),
    ],
)
def test_a_bad_injection_is_one_line(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        parse_injection(text)
