"""`--hf -- train.py ARGS`, `--lightning -- train.py ARGS`: a script that needs no change. It runs up to where
it trains; there the framework's trainer is caught, and its own loop is measured."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from steptime.errors import UserError
from steptime.subjects.protocol import Settings, refuse_settings
from steptime.subjects.steps.kind import LoopKind, tree_of
from steptime.subjects.steps.loop import Loop


class Framework(NamedTuple):
    """Where its trainer is, and what makes a loop of one."""

    trainers: tuple[str, ...]
    method: str
    adapter: str


FRAMEWORKS = {
    "hf": Framework(("transformers:Trainer",), "train", "steptime.subjects.steps.hf:HfLoop"),
    "lightning": Framework(
        ("lightning.pytorch:Trainer", "pytorch_lightning:Trainer"),
        "fit",
        "steptime.subjects.steps.lit:LightningLoop",
    ),
}


class Caught(BaseException):
    """Leaves a script at the call that trains."""

    def __init__(self, trainer: Any, original: Callable[..., Any], named: Mapping[str, Any]) -> None:
        super().__init__()
        self.trainer, self.original, self.named = trainer, original, named


@dataclass(frozen=True)
class ScriptSettings:
    """A script and its arguments; the name and the digest are theirs."""

    words: tuple[str, ...]
    name: str

    def digest(self) -> str:
        found = hashlib.sha256("\0".join(self.words).encode())
        found.update(Path(self.words[0]).read_bytes())
        return found.hexdigest()[:12]


class ScriptKind(LoopKind):
    """Args: words: the script and its arguments; empty in another process, whose settings bring them."""

    def __init__(self, name: str, words: Sequence[str] = ()) -> None:
        self.name, self._words = name, tuple(words)
        self.root = tree_of(Path(words[0]).resolve().parent if words else Path.cwd())

    @property
    def place(self) -> str:
        return self._words[0]

    def in_tree(self) -> ScriptKind:
        self.settings(None, ())
        place = Path(self.place).resolve().relative_to(self.root).as_posix()
        os.chdir(self.root)
        return ScriptKind(self.name, (place, *self._words[1:]))

    def settings(self, config: str | None, changes: Sequence[str]) -> Settings:
        refuse_settings(f"--{self.name}", config, changes)
        if not self._words:
            raise UserError(f"--{self.name}: SCRIPT is missing: --{self.name} -- train.py ARGS")
        if not Path(self._words[0]).is_file():
            raise UserError(f"--{self.name}: no such script: {self._words[0]}")
        return ScriptSettings(self._words, f"{self.name}-{Path(self._words[0]).stem}")

    def counted_as(self, settings: ScriptSettings) -> Mapping[str, Any]:
        return {"words": list(settings.words)}

    def from_order(self, order: Mapping[str, Any]) -> ScriptSettings:
        words = tuple(order["words"])
        return ScriptSettings(words, f"{self.name}-{Path(words[0]).stem}")

    def build(self, settings: ScriptSettings) -> Loop:
        framework = FRAMEWORKS[self.name]
        caught = self._catch(settings.words, framework)
        module, _, name = framework.adapter.partition(":")
        loop: Loop = getattr(importlib.import_module(module), name)(caught)
        return loop

    def _catch(self, words: Sequence[str], framework: Framework) -> Caught:
        """Run the script until its trainer trains."""
        patched: list[tuple[Any, Any]] = []
        for place in framework.trainers:
            module, _, name = place.partition(":")
            try:
                trainer = getattr(importlib.import_module(module), name)
            except ImportError:
                continue
            original = getattr(trainer, framework.method)
            patched.append((trainer, original))
            setattr(trainer, framework.method, _catcher(original))
        if not patched:
            raise UserError(f"--{self.name}: {framework.trainers[0].partition(':')[0]} is not installed here")
        argv, path = sys.argv, list(sys.path)
        sys.argv, sys.path[0:0] = list(words), [os.path.dirname(os.path.abspath(words[0]))]
        try:
            runpy.run_path(words[0], run_name="__main__")
        except Caught as caught:
            return caught
        except SystemExit as error:
            raise UserError(f"{words[0]} ended with exit code {error.code} before it trained") from None
        except Exception as error:
            traceback.print_exc()
            raise UserError(f"{words[0]}: {type(error).__name__}: {error}") from error
        finally:
            sys.argv, sys.path[:] = argv, path
            for trainer, original in patched:
                setattr(trainer, framework.method, original)
        raise UserError(f"{words[0]} ended and never called {framework.trainers[0]}.{framework.method}")


def _catcher(original: Callable[..., Any]) -> Callable[..., Any]:
    def catch(trainer: Any, *words: Any, **named: Any) -> None:
        names = inspect.signature(original).bind(trainer, *words, **named).arguments
        raise Caught(trainer, original, names)

    return catch


def unique(names: Sequence[str]) -> list[str]:
    """The second of a name is `name-2`."""
    return [name if (n := names[: i + 1].count(name)) == 1 else f"{name}-{n}" for i, name in enumerate(names)]


class Enough(BaseException):
    """Leaves a framework's loop at the end of a step."""
