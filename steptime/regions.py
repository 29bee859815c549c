"""Functions compiled by `torch.compile` that never fall back to eager in silence, and compiles where none
should be."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

RECORDS = 1024
F = TypeVar("F", bound=Callable[..., Any])

MOST_FORMS = 256
"""Compiled forms that one region may have, torch's own last limit. A form is for a shape, or, of a dynamic
region, for a rank and a layout in memory."""


def compiled(function: F, name: str, *, dynamic: bool, backend: str | Callable[..., Any] = "inductor") -> F:
    """`function`, compiled by itself under a name of its own.

    torch keeps compiled forms by code object, eight at most, and runs a function past that limit eagerly. So
    each region has its own code object and room for all its shapes; past `MOST_FORMS`, and where the function
    does not compile whole, calling it raises.

    Args:
        name: an identifier; reports, logs and profiles show it.
        dynamic: one form for all sizes; False: a form for each shape.

    Returns:
        torch's own compiled function: nothing of this project's runs in a call. Make it once and keep it.
    """
    code = function.__code__  # type: ignore[attr-defined]
    own = types.FunctionType(
        code.replace(co_name=name, co_qualname=name),
        function.__globals__,  # type: ignore[attr-defined]
        name,
        function.__defaults__,  # type: ignore[attr-defined]
        function.__closure__,  # type: ignore[attr-defined]
    )
    own.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
    keep_records()
    compiler: Any = torch.compile  # Its overloads leave `recompile_limit` out.
    return cast(
        F, compiler(own, fullgraph=True, dynamic=dynamic, backend=backend, recompile_limit=MOST_FORMS)
    )


def keep_records() -> None:
    """Have torch keep `RECORDS` of its compiles. By itself it keeps 64: a large run has more shapes."""
    from torch._dynamo import utils

    if (utils._compilation_metrics.maxlen or RECORDS) < RECORDS:
        utils.set_compilation_metrics_limit(RECORDS)


class CompileWatch:
    """What torch compiled in this process since the watch was made, in any thread, by torch's own records.

    For a stretch that is timed and not counted: it costs nothing until it is asked. Of more compiles than
    torch keeps records of, the number is too low."""

    def __init__(self) -> None:
        self._before = {id(record): record for record in _records()}

    def told(self) -> list[str]:
        """One line for each function: where, how often, why the last time. Empty: nothing was compiled."""
        found: dict[str, list[Any]] = {}
        for record in _records():
            if id(record) not in self._before:
                found.setdefault(_place_of(record), []).append(record)
        return [
            f"torch compiled {place} {len(records)} x meanwhile"
            + (f": {reason}" if (reason := records[-1].recompile_reason) else "")
            for place, records in found.items()
        ]


def _place_of(record: Any) -> str:
    if record.co_name is None:
        return f"a backward (of compile {record.compile_id})"
    return f"{record.co_name} ({record.co_filename}:{record.co_firstlineno})"


def _records() -> list[Any]:
    # Importing the compiler takes seconds: where nobody has, nothing was compiled.
    compiler = sys.modules.get("torch._dynamo.utils")
    return [] if compiler is None else list(compiler.get_compilation_metrics())
