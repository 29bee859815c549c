"""`python -m tests.fuzz --minutes M`: every reader in turn, with fresh inputs until the time is over.

    python -m tests.fuzz --minutes 10 [--only NAME] [--seed N]

Exit code 1: a reader broke; the smallest input that breaks it is printed, with the seed that finds it again.
An input that takes a minute ends the program with the stack of where it hangs."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.readers import READERS, Reader

EXAMPLES = 500
"""Inputs of a reader before the next one's turn."""
HANG_S = 60.0


@dataclass(frozen=True)
class Fault:
    """A reader that broke.

    Attributes:
        seed: finds it again: `--only READER --seed SEED`.
        text: the exception, and the smallest input.
    """

    reader: str
    seed: int
    text: str


@dataclass
class Found:
    """What came of it."""

    inputs: int = 0
    faults: list[Fault] = field(default_factory=list)
    by_reader: dict[str, int] = field(default_factory=dict)


def fuzz(
    readers: Sequence[Reader],
    seconds: float,
    examples: int = EXAMPLES,
    rounds: int | None = None,
    first_seed: int = 0,
    hang_s: float = 0.0,
) -> Found:
    """Try the readers in turn; one that broke is not tried again.

    Args:
        seconds: no reader's turn begins after so many.
        rounds: most turns of each reader; None: as the time allows.
        hang_s: an input that takes longer ends the process; 0: no watch.
    """
    found, began, number = Found(), time.monotonic(), first_seed
    left = list(readers)
    while left and (rounds is None or number < first_seed + rounds):
        for reader in list(left):
            if time.monotonic() - began > seconds:
                return found
            fault = _turn(reader, number, examples, found, hang_s)
            if fault is not None:
                found.faults.append(fault)
                left.remove(reader)
        number += 1
    return found


def _turn(reader: Reader, number: int, examples: int, found: Found, hang_s: float) -> Fault | None:
    last: list[Any] = []

    def check(value: Any) -> None:
        found.inputs += 1
        found.by_reader[reader.name] = found.by_reader.get(reader.name, 0) + 1
        last[:] = [value]
        if hang_s:
            faulthandler.dump_traceback_later(hang_s, exit=True)
        reader.check(value)

    phases = (Phase.generate, Phase.shrink)
    tried = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    try:
        seed(number)(tried(given(reader.given)(check)))()
    except Exception as error:
        return Fault(reader.name, number, f"{type(error).__name__}: {error}\n  input: {last[0]!r:.2000}")
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", choices=[reader.name for reader in READERS])
    parser.add_argument("--seed", type=int, default=int(time.time()))
    given_ = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    readers = [reader for reader in READERS if given_.only in (None, reader.name)]
    began = time.monotonic()
    found = fuzz(readers, 60.0 * given_.minutes, first_seed=given_.seed, hang_s=HANG_S)
    for name, count in found.by_reader.items():
        print(f"{name:<18}{count:>9,} inputs")
    print(f"{found.inputs:,} inputs in {time.monotonic() - began:.0f} s, {len(found.faults)} faults")
    for fault in found.faults:
        print(f"\n{fault.reader}: --only {fault.reader!r} --seed {fault.seed}\n{fault.text}")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
