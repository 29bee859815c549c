"""What a batch takes of the host and of the interpreter lock, and what eight workers take of it."""

from __future__ import annotations

import pytest

from bench.peers import host
from bench.peers.host import HostCost, KnownHolder, cost_of, paced, predict, repeated
from steptime.host_time import HeldShare


def test_workers_take_their_batches_host_time_over_the_gpus_time_of_the_lock():
    target, drafter = HostCost(20.0, HeldShare(50, 100)), HostCost(30.0, HeldShare(20, 100))
    found = predict((target, drafter), (5, 3), (100.0, 200.0))
    assert found.lock == pytest.approx(5 * 10 / 100 + 3 * 6 / 200)
    assert found.host == pytest.approx(5 * 20 / 100 + 3 * 30 / 200)


def test_a_work_is_measured_in_a_thread_of_its_own_and_its_error_is_raised():
    cost = cost_of(lambda: sum(range(5000)), looks=5)
    assert cost.host_ms > 0.0
    assert cost.lock.wakes <= 5

    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        cost_of(broken, looks=1)


def test_a_known_holder_knows_its_share():
    for python, products, low, high in ((3, 0, 0.9, 1.0), (0, 1, 0.0, 0.1), (60, 1, 0.05, 0.99)):
        holder = KnownHolder(python, products)
        for _ in range(3):
            holder()
        assert low <= holder.share <= high


def test_a_paced_work_comes_back_when_host_and_gpu_are_done(monkeypatch: pytest.MonkeyPatch):
    now, slept = [100.0], []

    class Time:
        @staticmethod
        def perf_counter() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            slept.append(seconds)
            now[0] += seconds

    monkeypatch.setattr(host, "time", Time)
    takes = iter([0.03, 0.25, 0.01])

    def work() -> None:
        now[0] += next(takes)

    once = paced(work, gpu_ms=100.0)
    for _ in range(3):
        once()
    # The GPU is the slower one; then the host is; then the GPU again, from when the host was late.
    assert slept == pytest.approx([0.07, 0.0, 0.09])


def test_the_narrow_models_run_and_a_deeper_target_has_more_layers():
    assert len(host.narrow_target(8).layers) == 8
    assert host.forward_of(8)()
    host.drafter_step()()


def test_every_work_has_a_thread():
    calls = [0, 0]

    def work(which: int) -> None:
        calls[which] += 1

    with repeated([lambda: work(0), lambda: work(1)]) as clocks:
        while not all(calls):
            pass
    assert all((clock.read_ns() or 0) > 0 for clock in clocks)


def test_a_line_needs_three_depths(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        host.main(["--layers", "12", "36"])
    assert ended.value.code == 2
    assert "three depths" in capsys.readouterr().err
