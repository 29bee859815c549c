"""A pytest fixture that counts the host syncs of a test. Needs torch alone.

def test_step(host_syncs):
    train_step(model.to("cuda"), batch)
    assert not host_syncs.new
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from steptime.counting.accepted import Accepted
    from steptime.counting.count import SyncCount
    from steptime.counting.sync_report import Row


class HostSyncs:
    """What the test's thread and those that it starts have waited for so far."""

    def __init__(self, counted: SyncCount, accepted: tuple[Accepted, ...]) -> None:
        self._counted, self._accepted = counted, accepted

    @property
    def all(self) -> list[Row]:
        """Every place.

        Raises:
            UserError: nothing was put on the device, so that no count would prove anything.
        """
        from steptime.counting.sync_report import UNUSED, rows
        from steptime.errors import UserError

        if self._counted.device_unused:
            told = f"{UNUSED}: move the model and the batch to cuda, or set host_syncs_as = cpu"
            raise UserError(told)
        return rows(self._counted, self._accepted)

    @property
    def new(self) -> list[Row]:
        """Places that nobody has accepted, by `# sync-ok: reason` or by the file `host_syncs_accepted`."""
        return [row for row in self.all if row.accepted is None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("host_syncs_as", "cuda (simulated where there is none), cpu or cpu:0", default="cuda")
    parser.addini("host_syncs_accepted", "TOML of accepted host syncs", default="")


@pytest.fixture
def host_syncs(request: pytest.FixtureRequest) -> Iterator[HostSyncs]:
    """Counts what happens in the test."""
    from steptime.counting import accepted
    from steptime.counting.count import count_syncs

    file = str(request.config.getini("host_syncs_accepted"))
    known = accepted.read(Path(request.config.rootpath) / file) if file else ()
    with count_syncs(device=str(request.config.getini("host_syncs_as")), by_steps=False) as counted:
        yield HostSyncs(counted, known)
