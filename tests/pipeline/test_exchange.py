"""Gradients of several drafters: the sum of all, in one order, on every drafter."""

from __future__ import annotations

import threading

import pytest
import torch

from dflash.device import Device
from dflash.pipeline.exchange import ExchangeClosed, GradientExchange, Share
from tests.waiting import HANG_S, wait_until


def run_drafters(count: int, size: int, steps: int):
    exchange = GradientExchange(count)
    generator = torch.Generator().manual_seed(count)
    given = torch.randn(steps, count, size, generator=generator)
    results = [[] for _ in range(count)]

    def work(drafter: int) -> None:
        flat = torch.empty(size)
        exchange.join(drafter, flat, Device("cpu"))
        for step in range(steps):
            flat.copy_(given[step, drafter])
            if (drafter + step) % count == 0:  # whoever comes last changes nothing
                wait_until(lambda: exchange._barrier.n_waiting == count - 1)
            total = exchange.sum(drafter, Share(1.0 + drafter, 10 * drafter, stop=drafter == 1 and step == 1))
            results[drafter].append((flat.clone(), total))

    threads = [threading.Thread(target=work, args=(drafter,), daemon=True) for drafter in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()
    return given, results


@pytest.mark.parametrize(("count", "size"), [(1, 5), (2, 7), (3, 7), (3, 2), (4, 64)])
def test_everybody_gets_the_ordered_sum_bit_for_bit(count, size):
    steps = 3
    given, results = run_drafters(count, size, steps)
    for step in range(steps):
        expected = given[step, 0].clone()
        for other in range(1, count):
            expected += given[step, other]
        for drafter in range(count):
            flat, total = results[drafter][step]
            assert torch.equal(flat, expected)
            assert total.weight == sum(1.0 + d for d in range(count))
            assert total.tokens == sum(10 * d for d in range(count))
            assert total.stop == (step == 1 and count > 1)


def test_close_frees_a_drafter_that_waits_for_the_others():
    exchange = GradientExchange(2)
    caught = []

    def work() -> None:
        try:
            exchange.join(0, torch.empty(4), Device("cpu"))
        except ExchangeClosed as error:
            caught.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wait_until(lambda: exchange._barrier.n_waiting == 1)
    exchange.close()
    thread.join(HANG_S)
    assert not thread.is_alive()
    assert caught
