"""The machine's matmul rate: measured once per piece of hardware, and never for long."""

from __future__ import annotations

import os

import pytest
import torch

from dflash.device import rate
from dflash.device.rate import hardware, matmul_rate, matmul_rates
from dflash.observe.roles import RoleMap
from tests.clock import Clock


def test_workers_on_one_cpu_share_its_rate_and_simulated_ones_have_none(monkeypatch):
    asked = []
    monkeypatch.setattr(rate, "matmul_rate", lambda size, dtype, name: asked.append((size, name)) or 1e12)
    assert matmul_rates(("cpu", "cpu:1", "sim:0", "cuda:99"), torch.float32, 1) == (("cpu", 1e12),)
    assert asked == [(256, "cpu"), (512, "cpu"), (1024, "cpu")]
    assert [hardware(name) for name in ("cpu:3", "cuda", "cuda:1")] == ["cpu", "cuda:0", "cuda:1"]


def test_a_slow_type_is_not_asked_for_large_products(monkeypatch):
    asked = []
    monkeypatch.setattr(rate, "matmul_rate", lambda size, dtype, name: asked.append(size) or 6e7)
    assert matmul_rates(("cpu",), torch.bfloat16, 1) == (("cpu", 6e7),)
    assert asked == [256]


def test_the_rate_is_the_best_of_some_products(monkeypatch):
    clock = Clock(step_ns=1_000_000)  # each product takes a millisecond
    clock.install(monkeypatch)
    assert matmul_rate(8, torch.float32, "cpu") == pytest.approx(2 * 8**3 / 1e-3)
    assert clock.readings == 2 * rate.REPEATS


def test_one_product_that_takes_long_is_the_last(monkeypatch):
    clock = Clock(step_ns=60_000_000_000)
    clock.install(monkeypatch)
    matmul_rate(8, torch.float32, "cpu")
    assert clock.readings == 2


def test_the_threads_of_the_process_stay_as_they_were(monkeypatch):
    before, inside = torch.get_num_threads(), []
    monkeypatch.setattr(rate, "matmul_rate", lambda *_: inside.append(torch.get_num_threads()) or 1e13)
    matmul_rates(("cpu",), torch.float32, 2)
    assert torch.get_num_threads() == before
    assert set(inside) == {min(2, os.cpu_count() or 1)}


def test_a_role_has_the_rate_of_its_own_hardware():
    rates = (("cuda:0", 1.0), ("cuda:1", 2.0))
    roles = RoleMap(("cuda:0",), ("cuda:0", "cuda:1"), rates=rates)
    assert (roles.rate("target"), roles.rate("drafter"), roles.rate()) == (1.0, 3.0, 3.0)
    assert RoleMap(("cuda:0", "cuda:2"), ("cuda:1",), rates=rates).rate("target") == 0.0
    assert RoleMap(("cpu",), ("cpu",)).rate() == 0.0
