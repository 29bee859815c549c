"""Into the run that torchrun has started, and out of it again."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from dflash.ranks.across import Across
from dflash.ranks.board import Board
from dflash.ranks.watch import RankWatch
from dflash.ranks.world import World
from steptime.errors import UserError

_LONGEST = timedelta(days=1)
"""A collective ends when a rank fails, by the watch; not by a time-out of its own: rank 0 may decode for
minutes."""


@dataclass(frozen=True)
class Seat:
    """What torchrun's environment says of this process."""

    rank: int
    ranks: int
    ranks_here: int


def seat(environment: Mapping[str, str] | None = None) -> Seat | None:
    """This process's place, or None when it trains alone.

    Raises:
        UserError: half of the variables, or no numbers.
    """
    environment = os.environ if environment is None else environment
    if "WORLD_SIZE" not in environment:
        return None
    numbers = {}
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        text = environment.get(name, "1" if name == "LOCAL_WORLD_SIZE" else "")
        if not text.isdigit():
            raise UserError(f"{name} = {text!r} in the environment: must be a number, as torchrun sets it")
        numbers[name] = int(text)
    ranks, rank = numbers["WORLD_SIZE"], numbers["RANK"]
    if ranks == 1:
        return None
    if not 0 <= rank < ranks:
        raise UserError(f"RANK = {rank} in the environment: must be below WORLD_SIZE = {ranks}")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in environment:
            raise UserError(f"WORLD_SIZE = {ranks} without {name} in the environment: start it with torchrun")
    return Seat(rank, ranks, numbers["LOCAL_WORLD_SIZE"])


def check_devices(seat: Seat, devices: Sequence[str]) -> str:
    """The backend for the gradients: `gloo` on the CPU, `nccl` on CUDA.

    Raises:
        UserError: devices that several ranks cannot have.
    """
    kinds = {name.partition(":")[0] for name in devices}
    if "sim" in kinds:
        raise UserError(f"sim:K devices are of one process; WORLD_SIZE = {seat.ranks} is set")
    if "cuda" in kinds and seat.ranks_here > 1:
        raise UserError(
            f"{seat.ranks_here} ranks on this machine would share its GPUs: start one a machine "
            "(torchrun --nproc-per-node 1), since one process drives all GPUs of a machine"
        )
    return "nccl" if "cuda" in kinds else "gloo"


@contextlib.contextmanager
def joined(
    seat: Seat, *, targets: Sequence[str], drafters: Sequence[str], timeout_s: float
) -> Iterator[World]:
    """Meet the other ranks; on the way out, wait for them, or tell them what went wrong here.

    Args:
        targets, drafters: devices of this rank.
        timeout_s: how long to wait for the others to come, and for a sign of life later.

    Raises:
        UserError: they did not come, or the devices cannot be had.
    """
    import torch.distributed as dist

    backend = check_devices(seat, (*targets, *drafters))
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise UserError(
            f"rank {seat.rank} of {seat.ranks} did not meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout_s:g} s: {first}"
        ) from None
    try:
        store = dist.PrefixStore("dflash", dist.distributed_c10d._get_default_store())
        watch = RankWatch(Board(store), seat.rank, seat.ranks, timeout_s)
        counts = [None] * seat.ranks
        dist.all_gather_object(counts, len(drafters))
        if len(set(counts)) > 1:
            raise UserError(f"drafter.devices: the ranks have {counts} drafters; each must have as many")
        host = dist.new_group(backend="gloo", timeout=_LONGEST)
        gradients = [dist.new_group(backend=backend, timeout=_LONGEST) for _ in drafters]
        across = Across(seat.rank, seat.ranks, host, gradients, polls=backend == "gloo", blame=watch.blame)
        world = World(seat.rank, seat.ranks, Board(store), across, watch, timeout_s)
        watch.start()
        try:
            yield world
        except BaseException as error:
            world.fail(f"{type(error).__name__}: {error}".partition("\n")[0])
            raise
        finally:
            world.leave()
    finally:
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
