"""Simulated devices with CUDA's rules, and a race check, for any PyTorch program; needs torch alone.

    with Simulation().open() as simulation:
        stream = simulation.stream(0)
        with stream.active():
            x = torch.zeros(4, device="cpu:0")       # memory of simulated device 0, on that stream

Device K is called `cpu:K`; `cpu` without a number is the host. Every operation computes at once on the CPU,
and is checked against the order that streams, events and hand-overs between threads give it: `races`. What
is not modelled is listed in docs/simulate.md."""

from __future__ import annotations

from steptime.simulate.modes import entered
from steptime.simulate.races import Misuse, Race
from steptime.simulate.simulation import Counts, Simulation, current
from steptime.simulate.streams import Event, Stream

__all__ = ["Counts", "Event", "Misuse", "Race", "Simulation", "Stream", "current", "entered"]
