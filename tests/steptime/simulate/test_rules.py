"""What CUDA refuses or waits for, on simulated devices."""

from __future__ import annotations

import threading

import pytest
import torch

from steptime.host_memory import staging
from steptime.simulate import Misuse, Simulation, current
from steptime.syncs.scopes import allowed_sync
from tests.steptime.simulate.parts import CPU_0, CPU_1, settled


@pytest.fixture
def simulation():
    with Simulation().open() as opened:
        yield opened


def waits(simulation: Simulation) -> list[str]:
    return [kind for _, kind, _ in simulation.counts.waits_of_hosts]


def test_one_simulation_at_a_time_and_nothing_is_left_behind():
    before = threading.Lock, threading.RLock, threading.Thread.start
    with Simulation().open() as opened:
        assert current() is opened
        assert threading.Lock is not before[0]
        with pytest.raises(RuntimeError, match="open in this process already"), Simulation().open():
            pass
        assert current() is opened
    assert current() is None
    assert (threading.Lock, threading.RLock, threading.Thread.start) == before
    assert torch.zeros(2, device="cpu:1").device == torch.device("cpu")


class TestWhereMemoryLives:
    def test_factories_follow_their_device_and_results_their_operands(self, simulation):
        x = torch.arange(6, device=CPU_1).view(2, 3)
        assert x.device == CPU_1
        made = (x + 1, x.t(), x.new_zeros(3), torch.zeros_like(x), x.float().softmax(-1), x[:, 1:].clone())
        assert {one.device for one in made} == {CPU_1}
        assert torch.zeros(3).device == torch.device("cpu")
        assert torch.empty_like(x, device="cpu").device == torch.device("cpu")
        assert torch.tensor([1, 2], device=CPU_1).device == CPU_1
        assert torch.nn.functional.one_hot(x, 8).device == CPU_1

    def test_a_device_context_says_where_values_go(self, simulation):
        with torch.device("meta"):
            assert torch.tensor([1.0]).is_meta
            assert torch.zeros(2).is_meta
        with torch.device(CPU_1):
            assert torch.tensor([1.0]).device == CPU_1
            assert torch.zeros(2).device == CPU_1
            assert torch.tensor([1.0], device="cpu").device == torch.device("cpu")
        assert torch.tensor([1.0]).device == torch.device("cpu")

    def test_a_copy_has_memory_of_its_own_and_the_same_place_gives_the_same_tensor(self, simulation):
        x = torch.ones(3, device=CPU_0)
        assert x.to(CPU_0) is x
        there = x.to(CPU_1)
        host = x.cpu()
        x.add_(1)
        assert there.device == CPU_1
        assert host.device == torch.device("cpu")
        assert (there.tolist(), host.tolist()) == ([1.0] * 3, [1.0] * 3)

    def test_a_module_moves_trains_and_keeps_its_gradients_on_its_device(self, simulation):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 1)).to(CPU_1)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        model(torch.randn(5, 3, device=CPU_1)).square().mean().backward()
        optimizer.step()
        assert {p.device for p in model.parameters()} == {CPU_1}
        assert {p.grad.device for p in model.parameters()} == {CPU_1}

    def test_a_gradient_comes_back_over_a_copy_between_devices(self, simulation):
        x = torch.ones(3, device=CPU_0, requires_grad=True)
        (x.to(CPU_1, torch.float64) * 2).sum().backward()
        assert x.grad.device == CPU_0
        assert x.grad.tolist() == [2.0] * 3

    def test_numbers_are_the_cpus_own(self):
        def work(device):
            torch.manual_seed(0)
            model = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).to(device)
            loss = model(torch.randn(2, 5, 8).to(device)).square().mean()
            loss.backward()
            return [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

        plain = work("cpu")
        with Simulation().open():
            simulated = work(CPU_1)
        assert all(map(torch.equal, plain, simulated))


class TestOperands:
    def test_of_two_devices_are_refused_with_the_place(self, simulation):
        with pytest.raises(
            Misuse, match=r"found sim:0 and sim:1: aten::add by MainThread .*test_rules\.py:\d+"
        ):
            torch.ones(2, device=CPU_0) + torch.ones(2, device=CPU_1)
        assert len(simulation.faults) == 1

    def test_of_a_device_and_the_host_are_refused_but_scalars_go_anywhere(self, simulation):
        x = torch.ones(2, device=CPU_0)
        assert (x * torch.tensor(2.0)).device == CPU_0
        with pytest.raises(Misuse, match="found the host and sim:0"):
            x * torch.ones(2)

    def test_an_index_on_the_host_waits(self, simulation):
        x = torch.arange(4, device=CPU_0)
        assert waits(simulation) == []
        assert x[torch.tensor([1, 2])].tolist() == [1, 2]
        assert waits(simulation)[0] == "index on the host"


class TestCopies:
    def test_between_pinned_memory_and_a_device_only_blocking_ones_wait(self, simulation):
        pinned = staging((3,), torch.float32, pin=True).fill_(1)
        x = pinned.to(CPU_0, non_blocking=True)
        pinned.copy_(x, non_blocking=True)
        assert waits(simulation) == []
        x.copy_(pinned)
        assert waits(simulation) == ["blocking copy to device"]

    def test_an_async_copy_of_pageable_memory_is_a_wait(self, simulation):
        x = torch.ones(3).to(CPU_0, non_blocking=True)
        torch.empty(3).copy_(x, non_blocking=True)
        assert waits(simulation) == ["pageable copy", "pageable copy"]

    def test_reads_of_a_device_wait_unless_they_are_declared(self, simulation):
        x = torch.ones(3, device=CPU_0)
        with allowed_sync("a test"):
            x.sum().item()
        assert waits(simulation) == []
        for read in (lambda: x.sum().item(), x.tolist, x.nonzero, lambda: bool(x[0]), lambda: x[x > 0]):
            read()
        assert waits(simulation) == ["item()", "tolist()", "nonzero", "truth test", "read by mask"]

    def test_between_devices_they_run_on_the_sources_stream_and_are_counted(self, simulation):
        x = settled(simulation, 4)
        to, origin = simulation.stream(1, "to"), simulation.stream(0, "origin")
        with origin.active(), to.active():
            x.to(CPU_1, non_blocking=True)
        assert simulation.counts.copies == {"device to device": [1, 16]}
        assert simulation.counts.ordered == {("to", "origin"), ("origin", "to")}


class TestEvents:
    def test_an_event_belongs_to_the_device_of_its_first_record(self, simulation):
        event, first, other = simulation.event(), simulation.stream(0), simulation.stream(1)
        event.record(first)
        other.wait_event(event)
        event.record(simulation.stream(0))
        with pytest.raises(
            Misuse, match="Event device 0 does not match recording stream's device 1"
        ) as caught:
            event.record(other)
        assert "test_rules.py" in str(caught.value)

    def test_one_never_recorded_is_passed_at_once(self, simulation):
        event = simulation.event()
        event.wait(simulation.stream(0))
        assert event.query()
        assert simulation.counts.void_waits == 1

    def test_the_current_stream_is_the_threads_own_on_each_device(self, simulation):
        a, b = simulation.stream(0), simulation.stream(1)
        host = simulation.host()
        with a.active(), b.active():
            assert (host.device, simulation.current_stream(host, 0)) == (1, a)
            assert simulation.current_stream(host, 1) is b
        assert simulation.current_stream(host, 0) is simulation.default_stream(0)

    def test_elapsed_time_wants_timing_completion_and_one_device(self, simulation):
        a, b = simulation.stream(0), simulation.stream(1)
        start, end, plain, other = (simulation.event(timing) for timing in (True, True, False, True))
        for event, stream in ((start, a), (end, a), (plain, a), (other, b)):
            event.record(stream)
        with pytest.raises(Misuse, match="must be completed"):
            start.elapsed_time(end)
        assert end.query()
        assert start.elapsed_time(end) == 0.0
        with pytest.raises(Misuse, match="made with timing"):
            start.elapsed_time(plain)
        assert other.query()
        with pytest.raises(Misuse, match="of devices 0 and 1"):
            start.elapsed_time(other)

    def test_virtual_time_is_what_operations_are_told_and_streams_overlap(self):
        with Simulation(cost=lambda name, stream: 3.0 if name == "aten::mm" else 0.0).open() as simulation:
            x = settled(simulation, 2, 2)
            a, b = simulation.stream(0), simulation.stream(0)
            start, end, other = (simulation.event(timing=True) for _ in range(3))
            start.record(a)
            for stream, times in ((a, 2), (b, 5)):
                with stream.active():
                    for _ in range(times):
                        x @ x
            end.record(a)
            other.record(b)
            simulation.synchronize(0)
            assert start.elapsed_time(end) == 6.0
            assert start.elapsed_time(other) == 15.0

    def test_with_a_seed_an_event_fires_late_but_fires(self):
        with Simulation(seed=0).open() as simulation:
            asked = []
            for _ in range(20):
                event = simulation.event()
                event.record(simulation.default_stream(0))
                asked.append(1)
                while not event.query():
                    asked[-1] += 1
            assert set(asked) == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_function_runs_as_single_operators_each_under_the_rules(simulation, whole):
    def add(x, y):
        return (x + 1) * y

    function = torch.compile(add, backend="inductor", fullgraph=whole)
    x = torch.ones(2, device=CPU_0)
    made = function(x, x)
    assert made.device == CPU_0
    assert made.tolist() == [2.0, 2.0]
    with pytest.raises(Misuse, match="sim:0 and sim:1"):
        function(x, torch.ones(2, device=CPU_1))
    made.add_(1)
    assert made.tolist() == [3.0, 3.0]
