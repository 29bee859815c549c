"""Things that the harness can measure, one file each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steptime.errors import UserError, nearest

if TYPE_CHECKING:
    from bench.subjects.protocol import Subject
    from bench.syncs.counting import Counter
    from dflash.config import Config

NAMES = ("trainer", "spin")


def make_subject(
    name: str, config: Config, *, inject_percent: float = 0.0, plant: str = "", time_stages: bool = False
) -> tuple[Subject, Counter | None]:
    """The subject of that name, and what counts exactly for it (None: it does no device work).

    Raises:
        UserError: no such subject, or no such planted collector.
    """
    from bench.subjects.protocol import INJECTED

    injected = {INJECTED: inject_percent / 100.0} if inject_percent else {}
    if name == "spin":
        from bench.subjects.spin import SpinSubject

        if plant:
            raise UserError("--plant needs the trainer: the spin subject has no device work to spoil")
        return SpinSubject({"idle": 0.0, "idler": 0.0} | injected), None
    if name == "trainer":
        from bench.subjects.trainer import TrainerSubject
        from bench.syncs.counting import ProcessCounter

        subject = TrainerSubject(config, injected=injected, plant=plant, time_stages=time_stages)
        return subject, ProcessCounter(subject.config.model_dump(mode="json"), plants=[plant] if plant else [])
    raise no_such(name)


def no_such(name: str, option: str = "--subject") -> UserError:
    """The complaint about a subject that there is not."""
    return UserError(f"{option} {name}: no such subject{nearest(name, NAMES)} (known: {', '.join(NAMES)})")
