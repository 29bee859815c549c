"""Host time of a target's forward and of a drafter's step, the interpreter lock in it, and the share of the
lock that eight workers take on GPUs: a prediction.

    python -m bench.peers.host [--layers N ...] [--looks N] [--workers TARGETS DRAFTERS]
                               [--gpu-ms TARGET DRAFTER] [--play SECONDS]

Models of no width (hidden 32, 8 tokens) leave the work of the host: Python, torch's dispatch, and kernels of
some microseconds in the place of a launch. One thread works; its CPU time is read from its clock, and the
share of it under the lock is sampled (`steptime/host_time.py`). Threads that hold the lock for a share that
they know show first how far that method errs. Last, as many threads as there would be workers run the model
of no width and sleep for the rest of the GPU's time: is the lock held as much as was predicted?"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate

from bench.peers.growth import Line, fit
from bench.peers.speed import Shape, make_step
from dflash.config import TargetConfig
from dflash.device import Device
from dflash.models.target import Target, load_target
from steptime.host_time import HeldShare, ThreadClock, held_share

LAYERS = (12, 24, 36)
WIDTH, TOKENS = 32, 8
GPU_MS = (122.0, 180.0)
"""Of a batch of one sequence of 3,072 tokens: an 8B target's forward (49 TFLOP) and its drafter's training
(72 TFLOP) at 400 TFLOP/s, as in docs/performance.md."""

LOOK_S = 0.02
"""Mean time between two looks."""

Work = Callable[[], object]


@dataclass(frozen=True)
class HostCost:
    """What one call takes of the host.

    Attributes:
        host_ms: CPU time of the thread.
        lock: looks at the lock while it worked.
    """

    host_ms: float
    lock: HeldShare

    @property
    def lock_ms(self) -> float:
        """CPU time under the lock. The kernel takes a thread off its core with and without the lock alike,
        so the share of its time is the share of its CPU time."""
        return self.host_ms * self.lock.share


@contextmanager
def repeated(works: Sequence[Work]) -> Iterator[list[ThreadClock]]:
    """One thread for each, which does it over and over meanwhile; an error in one ends it, and is raised at
    the end."""
    over, errors = threading.Event(), []
    clocks = [ThreadClock() for _ in works]

    def run(work: Work, clock: ThreadClock) -> None:
        try:
            with clock.running():
                while not over.is_set():
                    work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(works, clocks, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield clocks
    finally:
        over.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]


def cost_of(work: Work, looks: int) -> HostCost:
    """Measure one work in a thread of its own while this one looks at the lock."""
    calls = 0

    def counted() -> None:
        nonlocal calls
        work()
        calls += 1

    with repeated([counted]) as (clock,):
        found = held_share(looks, LOOK_S)
    return HostCost((clock.read_ns() or 0) / 1e6 / max(1, calls), found)


# -- what the method finds of shares that are known ----------------------------------------------------------


class KnownHolder:
    """Holds the lock for a share of its CPU time that it knows: Python code, then matrix products, which give
    it back.

    Attributes:
        held_ns, free_ns: its CPU time in either, so far.
    """

    def __init__(self, python: int, products: int) -> None:
        self.python, self.products = python, products
        self.held_ns = self.free_ns = 0
        self._matrix = torch.randn(512, 512)
        self._product = torch.empty(512, 512)  # a new one each time would be freed under the lock

    def __call__(self) -> None:
        began = time.thread_time_ns()
        for _ in range(self.python):
            sum(range(5000))
        between = time.thread_time_ns()
        for _ in range(self.products):
            torch.mm(self._matrix, self._matrix, out=self._product)
        self.held_ns += between - began
        self.free_ns += time.thread_time_ns() - between

    @property
    def share(self) -> float:
        return self.held_ns / max(1, self.held_ns + self.free_ns)


HOLDERS = ((1, 0), (120, 1), (48, 1), (16, 1), (0, 1))
"""Python loops and products of each known holder: from always to never."""


def known_shares(looks: int) -> list[tuple[float, HeldShare]]:
    """Share of the lock that a thread held, and what was found of it."""
    found = []
    for python, products in HOLDERS:
        holder = KnownHolder(python, products)
        with repeated([holder]):
            seen = held_share(looks, LOOK_S)
        found.append((holder.share, seen))
    return found


# -- what is predicted ---------------------------------------------------------------------------------------


def narrow_target(layers: int) -> Target:
    """A Qwen3 target of that depth and of no width, its taps where the real one has them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_hidden_layers": layers,
    }
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    config = Qwen3Config(**sizes)
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(config).save_pretrained(folder)
        return load_target(TargetConfig(model=folder), Device("cpu"))


def forward_of(layers: int) -> Work:
    """One forward of a narrow target, up to its last tap, in inference mode as in a target's worker."""
    target, ids = narrow_target(layers), torch.ones(1, TOKENS, dtype=torch.int64)

    def forward() -> object:
        with torch.inference_mode():
            return target.taps(ids)

    return forward


def drafter_step() -> Work:
    """One step of a narrow drafter of five layers: anchors, forward, loss, backward, clip, optimizer."""
    sizes: dict[str, Any] = {
        "hidden": WIDTH,
        "intermediate": WIDTH,
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 16,
        "vocab": 64,
    }
    return make_step(Shape(**sizes, layers=5, batch=1, context=TOKENS, anchors=2, block=4, taps=5))[0]


@dataclass(frozen=True)
class Prediction:
    """What workers take of the lock while each one's GPU is always busy.

    Attributes:
        lock: share of time for which the lock is held.
        host: cores that the workers' threads take.
    """

    lock: float
    host: float


def predict(costs: Sequence[HostCost], workers: Sequence[int], gpu_ms: Sequence[float]) -> Prediction:
    """Sum over the roles of workers x time of the host per batch / time of the GPU per batch.

    Args:
        costs: of a target's batch and of a drafter's.
        workers, gpu_ms: of each role.
    """
    roles = tuple(zip(costs, workers, gpu_ms, strict=True))
    return Prediction(
        sum(count * cost.lock_ms / gpu for cost, count, gpu in roles),
        sum(count * cost.host_ms / gpu for cost, count, gpu in roles),
    )


def paced(work: Work, gpu_ms: float) -> Work:
    """A work whose GPU is played by a sleep: it comes back when both the host and the GPU are done."""
    due = [time.perf_counter()]

    def once() -> None:
        work()
        due[0] = max(due[0] + gpu_ms / 1e3, time.perf_counter())
        time.sleep(max(0.0, due[0] - time.perf_counter()))

    return once


def play(
    works: Sequence[Callable[[], Work]], workers: Sequence[int], gpu_ms: Sequence[float], seconds: float
) -> HeldShare:
    """The lock under as many threads as workers, each at the pace of its GPU."""
    made = [
        paced(make(), gpu)
        for make, count, gpu in zip(works, workers, gpu_ms, strict=True)
        for _ in range(count)
    ]
    with repeated(made):
        return held_share(round(seconds / LOOK_S), LOOK_S)


# -- the page ------------------------------------------------------------------------------------------------


def share_text(found: HeldShare) -> str:
    """`23% (19 to 27%)`."""
    low, high = found.bounds
    return f"{found.share:.0%} ({100 * low:.0f} to {high:.0%})"


def method_table(found: Sequence[tuple[float, HeldShare]]) -> str:
    """Known shares beside what was found of them."""
    rows = [[f"{truth:.0%}", share_text(seen), str(seen.wakes)] for truth, seen in found]
    return tabulate(rows, ["lock held", "found (95%)", "looks"], "github", disable_numparse=True)


def cost_table(costs: Sequence[tuple[str, HostCost]]) -> str:
    """Host and lock of a batch."""
    rows = [
        [name, f"{cost.host_ms:.2f} ms", share_text(cost.lock), f"{cost.lock_ms:.2f} ms"]
        for name, cost in costs
    ]
    heads = ["batch of", "host's CPU", "of it under the lock (95%)", "lock"]
    return tabulate(rows, heads, "github", disable_numparse=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; exit code 0."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.host", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument(
        "--layers", type=int, nargs="+", default=list(LAYERS), help="depths of the target, three or more"
    )
    parser.add_argument("--looks", type=int, default=300, help="looks at the lock for each figure")
    parser.add_argument("--workers", type=int, nargs=2, default=(5, 3), metavar=("TARGETS", "DRAFTERS"))
    parser.add_argument("--gpu-ms", type=float, nargs=2, default=GPU_MS, metavar=("TARGET", "DRAFTER"))
    parser.add_argument(
        "--play", type=float, default=10.0, metavar="SECONDS", help="of the workers at the GPU's pace"
    )
    asked = parser.parse_args(arguments)
    if len(asked.layers) < 3:
        parser.error("--layers: a line needs three depths")
    told = sys.stdout.write
    told(f"The method on threads that know their share:\n\n{method_table(known_shares(asked.looks))}\n\n")
    depths = sorted(asked.layers)
    forwards = [cost_of(forward_of(depth), asked.looks) for depth in depths]
    drafter = cost_of(drafter_step(), asked.looks)
    named = [(f"target, {depth} layers", cost) for depth, cost in zip(depths, forwards, strict=True)]
    told(f"{cost_table([*named, ('drafter, 5 layers', drafter)])}\n\n")
    for name, line in (
        ("host", fit(depths, [cost.host_ms for cost in forwards])),
        ("lock", fit(depths, [cost.lock_ms for cost in forwards])),
    ):
        told(f"target's {name} time a batch: {line_text(line)}\n")
    costs = (forwards[-1], drafter)
    (targets, drafters), (target_ms, drafter_ms) = asked.workers, asked.gpu_ms
    predicted = predict(costs, asked.workers, asked.gpu_ms)
    told(
        f"\n{targets} targets of {depths[-1]} layers at {target_ms:g} ms a batch on the GPU, {drafters} "
        f"drafters at {drafter_ms:g} ms:\npredicted: lock held {predicted.lock:.0%} of the time, "
        f"{predicted.host:.2f} cores of host time\n"
    )
    if asked.play > 0:
        works = (lambda: forward_of(depths[-1]), drafter_step)
        seen = play(works, asked.workers, asked.gpu_ms, asked.play)
        told(f"played with sleeps as GPUs: lock held {share_text(seen)} of the time\n")
    return 0


def line_text(line: Line) -> str:
    return f"{line.c0:.2f} + {line.c1:.3f} L ms, largest miss {line.error:.0%}"


if __name__ == "__main__":
    sys.exit(main())
