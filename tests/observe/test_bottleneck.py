"""The line that names the slow side, from the numbers of a dashboard."""

from __future__ import annotations

import pytest

from dflash.observe.bottleneck import find_bottleneck


def values(
    targets: list[tuple[float, float, float]], drafters: list[tuple[float, float, float]], prefetch: float
) -> dict[str, float]:
    """(busy, wait in, wait out) of each worker over one second."""
    found = {"pipeline/prefetch_fill_ratio": prefetch}
    for role, workers in (("target", targets), ("drafter", drafters)):
        for index, parts in enumerate(workers):
            names = zip(("busy_s", "wait_in_s", "wait_out_s"), parts, strict=True)
            found |= {f"{role}/{index}/{name}": value for name, value in names}
    return found


@pytest.mark.parametrize(
    ("targets", "drafters", "prefetch", "text"),
    [
        ([(0.99, 0.01, 0.0)], [(0.59, 0.41, 0.0)], 1.0, "bottleneck: target side, drafters idle 41%"),
        ([(0.3, 0.0, 0.7)], [(0.99, 0.01, 0.0)], 1.0, "bottleneck: drafter side, targets idle 70%"),
        (
            [(0.2, 0.8, 0.0)],
            [(0.1, 0.9, 0.0)],
            0.0,
            "bottleneck: data side (prefetcher), targets idle 80%, drafters idle 90%",
        ),
        (
            [(0.6, 0.0, 0.4)],
            [(0.6, 0.4, 0.0)],
            1.0,
            "bottleneck: hand-over, targets idle 40%, drafters idle 40%",
        ),
        ([(0.97, 0.0, 0.03)], [(0.95, 0.05, 0.0)], 1.0, "no bottleneck, targets idle 3%, drafters idle 5%"),
        # Several workers: the mean of a side.
        (
            [(1.0, 0.0, 0.0)] * 5,
            [(0.5, 0.5, 0.0), (0.7, 0.3, 0.0)],
            1.0,
            "bottleneck: target side, drafters idle 40%",
        ),
        # Busy targets and an empty prefetcher: the targets are slow, whatever the prefetcher's level says.
        ([(0.96, 0.04, 0.0)], [(0.5, 0.5, 0.0)], 0.0, "bottleneck: target side, drafters idle 50%"),
    ],
)
def test_names_the_slow_side(
    targets: list[tuple[float, float, float]],
    drafters: list[tuple[float, float, float]],
    prefetch: float,
    text: str,
) -> None:
    assert find_bottleneck(values(targets, drafters, prefetch), 1.0).text == text


def test_waits_serve_where_busy_time_is_not_known() -> None:
    known = values([(0.9, 0.0, 0.1)], [(0.5, 0.5, 0.0)], 1.0)
    without = {key: value for key, value in known.items() if not key.endswith("busy_s")}
    assert find_bottleneck(without, 1.0).text == "bottleneck: target side, drafters idle 50%"


def test_is_scaled_by_the_window() -> None:
    known = {key: value * 10 for key, value in values([(0.99, 0.0, 0.0)], [(0.6, 0.4, 0.0)], 0.1).items()}
    assert find_bottleneck(known, 10.0).text == "bottleneck: target side, drafters idle 40%"


def test_is_unknown_without_the_workers_collector() -> None:
    assert find_bottleneck({"pipeline/prefetch_fill_ratio": 1.0}, 1.0).side == "unknown"
    assert find_bottleneck({}, 0.0).side == "unknown"


def staged(side: str, **stages: float) -> dict[str, float]:
    """Two targets and a drafter over 10 s, one side waiting; each stage with so many ms, 100 spans."""
    busy = {"target": (0.99, 0.5), "drafter": (0.5, 0.99)}[side]
    found = {
        "target/0/busy_s": 10 * busy[0],
        "target/1/busy_s": 10 * busy[0],
        "drafter/0/busy_s": 10 * busy[1],
    }
    for name, mean_ms in stages.items():
        stage = name.replace("__", ".")
        found |= {f"profile/{stage}_ms": mean_ms, f"profile/{stage}_count": 100.0}
    return found


@pytest.mark.parametrize(
    ("side", "stages", "text"),
    [
        # 142 ms x 100 spans over the 2 x 10 s of two targets.
        ("target", {"target__pack_hidden": 142.0, "target__model_forward": 40.0}, "target.pack_hidden, 71%"),
        ("target", {"target__model_forward": 140.0, "drafter__backward": 190.0}, "target.model_forward, 70%"),
        # 99% busy, 20% of it in a stage: what is slow stands between them.
        ("target", {"target__model_forward": 40.0}, "target, outside its stages, 79%"),
        ("drafter", {"drafter__backward": 60.0, "drafter__forward": 30.0}, "drafter.backward, 60%"),
        ("drafter", {"drafter__queue_get": 90.0, "drafter__forward": 80.0}, "drafter.forward, 80%"),
    ],
)
def test_the_stage_that_sets_the_pace_is_named(side: str, stages: dict[str, float], text: str) -> None:
    assert find_bottleneck(staged(side, **stages), 10.0).text.endswith(f"; {text}")


def test_without_the_profile_no_stage_is_named() -> None:
    assert ";" not in find_bottleneck(staged("target"), 10.0).text


def test_a_look_at_tau_makes_nobody_idle() -> None:
    """A window of two seconds, one of which a look took."""
    found = values([(0.97, 0.0, 1.03)], [(0.95, 0.05, 0.0)], 1.0)
    assert find_bottleneck(found, 2.0).text.startswith("bottleneck: hand-over, targets idle 52%")
    looked = found | {"host/standing_s": 1.0}
    assert find_bottleneck(looked, 2.0).text == "no bottleneck, targets idle 3%, drafters idle 5%"
    assert find_bottleneck(looked, 1.0).side == "unknown"
