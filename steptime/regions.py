"""Functions compiled by `torch.compile` that never fall back to eager in silence."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

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
    compiler: Any = torch.compile  # Its overloads leave `recompile_limit` out.
    return cast(
        F, compiler(own, fullgraph=True, dynamic=dynamic, backend=backend, recompile_limit=MOST_FORMS)
    )
