"""Who does what on which device: fixed before the workers start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dflash.config import Config
from dflash.device.rate import hardware
from steptime.nvml import cuda_indexes, cuda_uuid

Role = Literal["target", "drafter", "prefetcher"]


@dataclass(frozen=True)
class RoleMap:
    """Devices of the workers, one entry for each worker: `cpu`, `cpu:1`, `cuda:0`, ...

    Attributes:
        gpu_uuids: UUID by CUDA index (`GPU-...` or `MIG-...`), read once by the trainer, which uses CUDA
            anyway; empty without CUDA. The monitor finds the GPUs by them and never calls CUDA itself.
        total_steps: optimizer steps of the run, for the time left; None when it has no end.
        rates: FLOPs per second of a matrix product by hardware (`device.rate`), measured once before the
            workers start; empty where nobody measured.
        ranks: of the run; the devices are this one's.
    """

    targets: tuple[str, ...]
    drafters: tuple[str, ...]
    gpu_uuids: tuple[tuple[int, str], ...] = ()
    total_steps: int | None = None
    rates: tuple[tuple[str, float], ...] = ()
    ranks: int = 1

    @classmethod
    def from_config(
        cls, config: Config, rates: tuple[tuple[str, float], ...] = (), ranks: int = 1
    ) -> RoleMap:
        """The layout of a run; reads the UUIDs when a worker is on CUDA (this starts CUDA)."""
        indexes = cuda_indexes((*config.target.devices, *config.drafter.devices))
        uuids = tuple((index, uuid) for index in indexes if (uuid := cuda_uuid(index)))
        return cls(config.target.devices, config.drafter.devices, uuids, config.train.steps, rates, ranks)

    def rate(self, role: Role | None = None) -> float:
        """FLOPs per second of all the hardware that one role has, or any; 0 where it is not known."""
        known = dict(self.rates)
        names = {"target": self.targets, "drafter": self.drafters}.get(
            role or "", (*self.targets, *self.drafters)
        )
        rates = [known.get(name, 0.0) for name in dict.fromkeys(map(hardware, names))]
        return sum(rates) if all(rates) else 0.0

    def cuda_indexes(self, role: Role | None = None) -> tuple[int, ...]:
        """CUDA indexes in use, ascending, by one role or by any."""
        names = {"target": self.targets, "drafter": self.drafters}.get(
            role or "", (*self.targets, *self.drafters)
        )
        return cuda_indexes(names)
