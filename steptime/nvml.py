"""NVML, the driver's library: opened for a moment, and which of its GPUs are those that CUDA calls 0, 1, ...

NVML counts GPUs by PCI bus and knows nothing of `CUDA_VISIBLE_DEVICES`; CUDA counts those that the variable
leaves, the fastest first unless told otherwise. So a GPU is found by its UUID. Nothing here starts CUDA.

`nvidia-ml-py` is imported when it is asked for: where it is missing there is no NVML."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in use.

    Attributes:
        index: CUDA's.
        handle: NVML's.
    """

    index: int
    handle: Any


@contextlib.contextmanager
def opened(stand_in: ModuleType | Any | None = None) -> Iterator[Any | None]:
    """NVML ready to be asked, or None where there is none. `stand_in`: in pynvml's place, for tests."""
    api: Any = stand_in
    if api is None:
        try:
            api = importlib.import_module("pynvml")
        except ImportError:
            yield None
            return
    try:
        api.nvmlInit()
    except Exception:
        yield None
        return
    try:
        yield api
    finally:
        with contextlib.suppress(Exception):
            api.nvmlShutdown()


def ask(read: Any, *arguments: Any) -> Any:
    """What `read` returns, or None where it raises."""
    with contextlib.suppress(Exception):
        return read(*arguments)
    return None


def as_text(value: bytes | str) -> str:
    """Older drivers' bindings return bytes."""
    return value.decode() if isinstance(value, bytes) else value


def cuda_indexes(devices: Sequence[str]) -> tuple[int, ...]:
    """CUDA indexes among device names such as `cuda:1`, `cuda` and `cpu`, ascending."""
    return tuple(sorted({int(name.partition(":")[2] or 0) for name in devices if name.startswith("cuda")}))


def in_use(
    api: Any, devices: Sequence[str] | None, environment: Mapping[str, str] = os.environ
) -> tuple[list[Gpu], list[str]]:
    """The GPUs that a process uses, and a line for each that NVML does not reach.

    Args:
        devices: names such as `cuda:1`; None: every GPU that `CUDA_VISIBLE_DEVICES` leaves.
    """
    if devices is not None:
        indexes: Sequence[int] = cuda_indexes(devices)
    elif environment.get("CUDA_VISIBLE_DEVICES") is None:
        # All there are: in which order CUDA counts them does not matter.
        return _every_gpu(api)
    else:
        indexes = range(_visible_count(environment["CUDA_VISIBLE_DEVICES"], api.nvmlDeviceGetCount()))
    handles, problems = find_handles(api, indexes, known_to_cuda(indexes), environment)
    return [Gpu(index, handle) for index, handle in handles.items()], problems


def _every_gpu(api: Any) -> tuple[list[Gpu], list[str]]:
    found, problems = [], []
    for index in range(api.nvmlDeviceGetCount()):
        try:
            handle = api.nvmlDeviceGetHandleByIndex(index)
            api.nvmlDeviceGetUUID(handle)
        except Exception as error:
            problems.append(f"gpu {index}: not reached: {error}")
        else:
            found.append(Gpu(index, handle))
    return found, problems


def _visible_count(visible: str, there: int) -> int:
    """GPUs that a value of `CUDA_VISIBLE_DEVICES` leaves: the first entry that names none ends the list."""
    entries = [part.strip() for part in visible.split(",")]
    for count, entry in enumerate(entries):
        if not (entry.startswith(("GPU-", "MIG-")) or (entry.isdigit() and int(entry) < there)):
            return count
    return len(entries)


def known_to_cuda(indexes: Sequence[int]) -> dict[int, str]:
    """UUIDs by CUDA index where this process has started CUDA already: CUDA itself knows its order."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    found = {index: cuda_uuid(index) for index in indexes if index < torch.cuda.device_count()}
    return {index: uuid for index, uuid in found.items() if uuid}


def cuda_uuid(index: int) -> str | None:
    """The UUID of a CUDA device as CUDA tells it, `GPU-...` or `MIG-...`; starts CUDA."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is None:
        return None
    text = str(uuid)
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def find_handles(
    api: Any, indexes: Sequence[int], known: Mapping[int, str], environment: Mapping[str, str]
) -> tuple[dict[int, Any], list[str]]:
    """NVML's handles of CUDA devices, by CUDA index, and a line for each that was not found. NVML must be
    initialised.

    Args:
        known: UUIDs that CUDA itself has told. Where it has told none, `CUDA_VISIBLE_DEVICES` is read as CUDA
            reads it.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    uuids: dict[int, str | None] = {index: mig_entry(visible, index) or known.get(index) for index in indexes}
    if None in uuids.values():
        listed = visible_uuids(visible, _physical(api, environment))
        uuids = {
            index: uuid or (listed[index] if index < len(listed) else None) for index, uuid in uuids.items()
        }
    handles, problems = {}, []
    for index, uuid in uuids.items():
        if uuid is None:
            problems.append(f"gpu {index}: not observed: {_untold(visible, environment)}")
            continue
        if not uuid:
            problems.append(f"gpu {index}: not observed: NVML does not reach it: the GPU is lost")
            continue
        try:
            handles[index] = _handle_of(api, uuid)
        except Exception as error:
            problems.append(f"gpu {index}: not observed: NVML has no {uuid}: {error}")
    return handles, problems


def _untold(visible: str | None, environment: Mapping[str, str]) -> str:
    text = f"cannot tell which GPU it is (CUDA_VISIBLE_DEVICES={visible})"
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        text += "; CUDA_DEVICE_ORDER=PCI_BUS_ID makes CUDA count as NVML does"
    return text


def _handle_of(api: Any, uuid: str) -> Any:
    try:
        return api.nvmlDeviceGetHandleByUUID(uuid)
    except Exception:
        if not uuid.startswith("GPU-"):
            raise
        try:
            # CUDA gives a MIG instance's UUID without saying that it is one.
            return api.nvmlDeviceGetHandleByUUID(uuid.replace("GPU-", "MIG-", 1))
        except Exception:
            pass
        raise


def _physical(api: Any, environment: Mapping[str, str]) -> list[str]:
    """UUIDs in the order of CUDA's indexes; empty when that order cannot be known. A GPU that NVML does not
    reach has a place and no UUID.

    CUDA counts the fastest first unless told to count by PCI bus as NVML does; among equal GPUs both orders
    are the same."""
    handles = [ask(api.nvmlDeviceGetHandleByIndex, index) for index in range(api.nvmlDeviceGetCount())]
    reached = [handle for handle in handles if handle is not None]
    if (
        environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
        and len({ask(api.nvmlDeviceGetName, one) for one in reached}) > 1
    ):
        return []
    uuids = [None if handle is None else ask(api.nvmlDeviceGetUUID, handle) for handle in handles]
    return ["" if uuid is None else as_text(uuid) for uuid in uuids]


def mig_entry(visible: str | None, index: int) -> str | None:
    """The MIG id at a CUDA index of `CUDA_VISIBLE_DEVICES`, if there is one: CUDA may tell its parent's UUID
    instead."""
    entries = [] if visible is None else [part.strip() for part in visible.split(",")]
    return entries[index] if index < len(entries) and entries[index].startswith("MIG-") else None


def visible_uuids(visible: str | None, physical: Sequence[str]) -> list[str]:
    """UUIDs by CUDA index under a value of `CUDA_VISIBLE_DEVICES`.

    Entries are indexes, UUIDs or their unique beginnings, or MIG ids. As in CUDA, the first entry that names
    no device ends the list.

    Args:
        visible: the variable; None when unset.
        physical: UUIDs in CUDA's order without the variable.
    """
    if visible is None:
        return list(physical)
    found: list[str] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.startswith("MIG-"):
            found.append(entry)
            continue
        if entry.isdigit():
            matches = list(physical[int(entry) : int(entry) + 1])
        else:
            matches = [uuid for uuid in physical if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found.append(matches[0])
    return found
