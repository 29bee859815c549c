"""`--subject FILE_OR_MODULE[:ATTR]`: a function of the user's that makes `Steps`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steptime.errors import UserError
from steptime.machine.commit import git
from steptime.records.types import ExactCounts
from steptime.subjects.injection import Injection
from steptime.subjects.pairs import PairSubject
from steptime.subjects.protocol import Doors, Named, Settings, refuse_settings
from steptime.subjects.steps.steps import Steps

if TYPE_CHECKING:
    from steptime.subjects.steps.loop import Loop

ATTRIBUTE = "make"


def tree_of(folder: Path) -> Path:
    """The repository that a folder belongs to, or the folder."""
    return Path(git("rev-parse", "--show-toplevel", cwd=folder) or folder).resolve()


class LoopKind:
    """What subjects that are loops have in common. `build` makes the loop."""

    name = ""
    root = Path()
    doors = Doors()
    counted = True
    gate_launches: int | None = None

    def build(self, settings: Any) -> Loop:
        """Make the loop. Raises UserError."""
        raise NotImplementedError

    def settings(self, config: str | None, changes: Sequence[str]) -> Settings:
        """Name and digest of what is trained. Raises UserError: it is not there."""
        raise NotImplementedError

    @property
    def place(self) -> str:
        """The file or module that brings the loop, as it is named."""
        raise NotImplementedError

    def in_tree(self) -> LoopKind:
        """The same, its file named from the top of its repository, which becomes the current folder."""
        raise NotImplementedError

    def devices(self, settings: Any) -> Sequence[str]:
        """By the machine: the loop is not built for the asking."""
        from steptime.subjects.steps.loop import devices_of  # heavy: torch, as below

        return devices_of(Steps(step=lambda i: None))

    def make_pairs(
        self,
        settings: Any,
        *,
        injections: Sequence[Injection] = (),
        plant: str = "",
        time_stages: bool = False,
    ) -> PairSubject:
        if plant:
            raise UserError("--plant needs the trainer: nothing is planted into a loop of yours")
        from steptime.subjects.steps.loop import LoopPairs

        return LoopPairs(self.name, self.build(settings), injections)

    def counted_as(self, settings: Any) -> Mapping[str, Any]:
        return {}

    def from_order(self, order: Mapping[str, Any]) -> Any:
        return None

    def to_order(self, settings: Any, cache: Callable[[Path, str], Path]) -> dict[str, Any]:
        return dict(self.counted_as(settings))

    def count(self, request: Mapping[str, Any]) -> Mapping[str, ExactCounts]:
        from steptime.subjects.steps.counts import count

        settings = self.from_order(request["config"])
        return count(lambda: self.build(settings), request["arms"], request["all_collectors"])

    def trace(self, settings: Any, steps: int) -> list[tuple[int, float, float]]:
        """The first steps with the rate that the user set; the gradient norm is the loop's own affair."""
        from steptime.subjects.steps.hold import reset_random

        loop, rows = self.build(settings), list[tuple[int, float, float]]()

        def boundary(loss: Any) -> bool:
            parts = loss if isinstance(loss, tuple) else (loss,)
            value = 0.0 if loss is None else float(sum(float(part) for part in parts))
            rows.append((len(rows), value, 0.0))
            return len(rows) < steps

        def batch() -> int:
            reset_random(len(rows))
            return len(rows) % loop.cycle

        loop.run(batch, boundary)
        if loop.close is not None:
            loop.close()
        return rows


class StepsKind(LoopKind):
    """A subject of the user's.

    Args:
        reference: FILE_OR_MODULE[:ATTR]; a file's name is taken from the current folder.
    """

    def __init__(self, reference: str) -> None:
        self.name = reference
        place, _, self._attribute = reference.partition(":")
        self._place, file = place, Path(place)
        self.file = file.resolve() if file.suffix == ".py" else _origin(place)
        folder = self.file.parent if self.file is not None and self.file.parent.is_dir() else Path.cwd()
        self.root = tree_of(folder)

    @property
    def place(self) -> str:
        return self._place

    @staticmethod
    def means(text: str) -> bool:
        """Whether a name that no subject has is a file or a module."""
        place = text.partition(":")[0]
        return ":" in text or place.endswith(".py") or os.sep in place or _origin(place) is not None

    def in_tree(self) -> StepsKind:
        if self.file is None or Path(self._place).suffix != ".py":
            return self
        place = self.file.relative_to(self.root).as_posix()
        os.chdir(self.root)
        return StepsKind(f"{place}:{self._attribute}" if self._attribute else place)

    def settings(self, config: str | None, changes: Sequence[str]) -> Settings:
        refuse_settings(self.name, config, changes)
        if self.file is None or not self.file.is_file():
            raise UserError(f"--subject {self.name}: there is no file or module {self._place}")
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{self.file.stem}-{self._attribute}".rstrip("-"))
        where = os.path.relpath(self.file, self.root) + ":" + (self._attribute or ATTRIBUTE)
        digest = hashlib.sha256(where.encode() + b"\0" + self.file.read_bytes())
        return Named(name, digest.hexdigest()[:12])

    def build(self, settings: Any) -> Loop:
        from steptime.subjects.steps.hold import reset_random

        attribute = self._attribute or ATTRIBUTE
        try:
            reset_random(0)  # so that both sides of a gate begin alike
            module = self._import()
            made = getattr(module, attribute, None)
            if made is None:
                raise UserError(f"--subject {self.name}: {self.file} has no `{attribute}`")
            found = made() if callable(made) else made
        except UserError:
            raise
        except Exception as error:
            traceback.print_exc()
            raise UserError(f"--subject {self.name}: {type(error).__name__}: {error}") from error
        if not isinstance(found, Steps):
            raise UserError(f"--subject {self.name}: {attribute}() gives {type(found).__name__}, not Steps")
        if found.cycle < 1:
            raise UserError(f"--subject {self.name}: Steps(cycle={found.cycle}): at least 1")
        return found

    def _import(self) -> Any:
        if self.file is None or not self.file.is_file():
            raise UserError(f"--subject {self.name}: there is no file or module {self._place}")
        if Path(self._place).suffix != ".py":
            return importlib.import_module(self._place)
        sys.path.insert(0, str(self.file.parent))  # as `python FILE` does
        spec = importlib.util.spec_from_file_location(self.file.stem, self.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.file.stem] = module
        spec.loader.exec_module(module)
        return module


def _origin(module: str) -> Path | None:
    """The file of a module, which may lie in the current folder."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).resolve() if spec is not None and spec.origin and spec.has_location else None
