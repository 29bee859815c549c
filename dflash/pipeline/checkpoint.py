"""Checkpoints: written whole or not at all, checked when they are read, resumed exactly.

A checkpoint is a folder `step-00001234` with `state.safetensors` (the drafter's float32 masters and the
optimizer's moments), `state.json` (step, place in the plan, settings) and `SHA256SUMS` over both. It appears
under its name by a rename, after its files are on disk: what can be read was finished."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash.pipeline.progress import Progress
from steptime.errors import UserError
from steptime.files import sync_folder

SCHEMA = "dflash-checkpoint/2"
WEIGHTS, RECORD, SUMS = "state.safetensors", "state.json", "SHA256SUMS"
LATEST, BEST = "latest", "best"
_NAME = re.compile(r"step-(\d{8,})")
_DRAFT = re.compile(r"\.step-\d+\..*")
_MARGIN_BYTES = 1 << 20


@dataclass(frozen=True)
class State:
    """A checkpoint in memory.

    Attributes:
        settings: every setting of the run that wrote it, by its full key.
        samples: fingerprint of the samples trained on.
        history: what the whole run has done so far, see `history`.
    """

    progress: Progress
    tensors: dict[str, torch.Tensor]
    drafter_shape: dict[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    samples: str = ""
    history: dict[str, Any] = field(default_factory=dict)


class NotWritten(RuntimeError):
    """A checkpoint could not be written; one line with path, bytes and reason. Nothing is left of it."""


class Damaged(UserError):
    """A checkpoint on disk is not what was written."""


class _Place(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    step: int = Field(ge=0)
    floor: int = Field(ge=0)
    ahead: list[int]


class _Record(BaseModel):
    """`state.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    format: Literal["dflash-checkpoint/2"] = Field(alias="schema")
    progress: _Place
    drafter_shape: dict[str, Any]
    settings: dict[str, Any]
    samples: str
    history: dict[str, Any]


def flatten(tree: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """`{"master": {"fc.weight": t}}` as `{"master/fc.weight": t}`, in host memory."""
    flat: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}/{name}": tensor for name, tensor in flatten(value).items()}
        else:
            flat[key] = value.cpu()
    return flat


def unflatten(flat: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `flatten`."""
    tree: dict[str, Any] = {}
    for path, tensor in flat.items():
        head, _, rest = path.partition("/")
        if rest:
            tree.setdefault(head, {})[rest] = tensor
        else:
            tree[head] = tensor
    return tree


# -- writing -------------------------------------------------------------------------------------------------


def save(folder: Path, state: State, keep: int) -> Path:
    """Write `state` under `folder`, then remove all but the newest `keep` checkpoints. Returns its path.

    Raises:
        NotWritten: no room, or no right to write.
    """
    final = publish(write(folder, state))
    prune(folder, keep)
    return final


def write(folder: Path, state: State) -> Path:
    """All of a checkpoint but its name: a hidden folder, on disk, for `publish`.

    Raises:
        NotWritten: no room, or no right to write; what was written is removed.
    """
    final = folder / f"step-{state.progress.step:08d}"
    draft = folder / f".{final.name}.{os.getpid()}"
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        if shutil.disk_usage(folder).free < size + _MARGIN_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(state.tensors, draft / WEIGHTS)
        (draft / RECORD).write_text(json.dumps(_record(state), indent=1), encoding="utf-8")
        sums = "".join(f"{_sha256(draft / name)}  {name}\n" for name in (WEIGHTS, RECORD))
        (draft / SUMS).write_text(sums, encoding="utf-8")
        for path in (*draft.iterdir(), draft):
            _fsync(path)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise NotWritten(_no_room(final, size, error)) from error
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return draft


def publish(draft: Path) -> Path:
    """Give a written checkpoint its name: from here on it is one."""
    final = draft.parent / draft.name[1:].rpartition(".")[0]
    aside = draft.with_name(f"{draft.name}.old")
    try:
        if final.exists():
            final.rename(aside)
        draft.rename(final)
        mark(final, LATEST)
        sync_folder(final.parent)
    except OSError as error:
        raise NotWritten(f"{final}: cannot be named: {error.strerror}") from error
    shutil.rmtree(aside, ignore_errors=True)
    return final


def mark(final: Path, name: str) -> None:
    """Have the link `name` beside a checkpoint lead to it; on a file system without links there is none."""
    link, fresh = final.parent / name, final.parent / f".{name}.{os.getpid()}"
    with contextlib.suppress(OSError):
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(final.name)
        fresh.replace(link)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    best = folder / BEST
    kept = best.resolve().name if best.is_symlink() else ""
    for old in checkpoints(folder)[:-keep]:
        if old.name != kept:
            shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(folder: Path) -> list[str]:
    """Remove what a killed process left half written; the names. Only under the run folder's lock."""
    found = [path for path in folder.glob(".step-*") if _DRAFT.fullmatch(path.name)]
    for path in found:
        whole = folder / path.name[1:].partition(".")[0]
        if path.name.endswith(".old") and not whole.exists():
            path.rename(whole)  # killed between two renames: the old one is the whole one
        else:
            shutil.rmtree(path, ignore_errors=True)
    return sorted(path.name for path in found)


def _record(state: State) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "progress": asdict(state.progress),
        "drafter_shape": state.drafter_shape,
        "settings": state.settings,
        "samples": state.samples,
        "history": state.history,
    }


def _no_room(final: Path, size: int, error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    free = ""
    with contextlib.suppress(OSError):
        free = f" ({shutil.disk_usage(final.parent).free:,} bytes free)"
    return f"{final}: cannot write {size:,} bytes: {reason}{free}"


# -- reading -------------------------------------------------------------------------------------------------


def checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first.

    Raises:
        UserError: the folder cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserError(f"{folder}: cannot be read: {error.strerror}") from None
    return sorted(found, key=_step_of)


def newest(folder: Path) -> State | None:
    """The last checkpoint of a folder; None when it has none.

    Raises:
        UserError: it is damaged; the line names a whole one beside it and how to go on from there.
    """
    found = checkpoints(folder)
    if not found:
        return None
    try:
        return load(found[-1])
    except Damaged as error:
        whole = next((path for path in reversed(found[:-1]) if _is_whole(path)), None)
        advice = (
            "no whole one is beside it: use another --out"
            if whole is None
            else f"{whole.name} beside it is whole: after `rm -r {found[-1]}` the same command goes on there"
        )
        raise UserError(f"{error}; {advice}") from None


def load(path: Path) -> State:
    """Read one checkpoint.

    Raises:
        Damaged: none there, a file that is not as it was written, or not one of ours.
    """
    _check_sums(path)
    record = _read_record(path)
    if _NAME.fullmatch(path.name) and record.progress.step != _step_of(path):
        raise Damaged(f"{path / RECORD}: says step {record.progress.step}, its folder says {_step_of(path)}")
    try:
        tensors = load_file(path / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise Damaged(f"{path / WEIGHTS}: cannot be read: {_line(error)}") from None
    place = record.progress
    return State(
        Progress(place.step, place.floor, tuple(place.ahead)),
        tensors,
        record.drafter_shape,
        record.settings,
        record.samples,
        record.history,
    )


def heldout_of(path: Path) -> float | None:
    """The held-out loss of a checkpoint's weights; None when it has none, or there is no such checkpoint."""
    try:
        return _read_record(path).history.get("heldout")
    except UserError:
        return None


def check_fits(state: State, shapes: Mapping[str, Iterable[int]]) -> None:
    """Whether a checkpoint's tensors are those of this drafter.

    Args:
        shapes: of every tensor, by its name.

    Raises:
        UserError: the first that is missing, unknown or of another shape.
    """
    where = f"checkpoint of step {state.progress.step}"
    for name in sorted(shapes.keys() ^ state.tensors.keys()):
        raise UserError(f"{where}: tensor {name!r} is {'missing' if name in shapes else 'none of ours'}")
    for name, shape in shapes.items():
        if (found := tuple(state.tensors[name].shape)) != tuple(shape):
            raise UserError(f"{where}: tensor {name!r} is {found}, this drafter's {tuple(shape)}")


def _read_record(path: Path) -> _Record:
    file = path / RECORD
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(tree, dict) or tree.get("schema") != SCHEMA:
            found = tree.get("schema") if isinstance(tree, dict) else type(tree).__name__
            raise Damaged(f"{file}: schema {found!r}, this version reads {SCHEMA!r}")
        return _Record.model_validate(tree)
    except (OSError, ValidationError, ValueError, RecursionError) as error:
        raise Damaged(f"{file}: cannot be read: {_line(error)}") from None


def _check_sums(path: Path) -> None:
    if (path / RECORD).exists() and not (path / SUMS).exists():
        _read_record(path)  # one of another version has no sums, and says so itself
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise Damaged(f"{path / SUMS}: cannot be read: {_line(error)}") from None
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in (WEIGHTS, RECORD):
        try:
            found = _sha256(path / name)
        except OSError as error:
            raise Damaged(f"{path / name}: cannot be read: {error.strerror}") from None
        if sums.get(name) != found:
            raise Damaged(f"{path / name}: damaged: its SHA-256 is not the one in {SUMS}")


def _is_whole(path: Path) -> bool:
    try:
        _check_sums(path)
        _read_record(path)
    except UserError:
        return False
    return True


def _line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).partition("\n")[0]


def _step_of(path: Path) -> int:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    return int(found.group(1))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
