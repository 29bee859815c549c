"""What the harness can measure by name. A new subject is a file of its own and its line here; a trainer adds
its own to `SUBJECTS`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from steptime.errors import UserError
from steptime.registry import Registry
from steptime.subjects.protocol import SubjectKind
from steptime.subjects.spin import SpinKind

SUBJECTS: Registry[SubjectKind] = Registry("subject", SpinKind())
PROVIDERS: list[str] = []
"""Modules that add subjects when they are imported, which may take seconds: only when one is asked for."""
DEFAULT: list[str] = []
"""Name of the subject that is meant where none is named; empty: one must be named."""


def find(text: str | None, script: Sequence[str] = ()) -> SubjectKind:
    """The subject that `--subject` names: one of `SUBJECTS`, or FILE_OR_MODULE[:ATTR] of the user's.

    Args:
        script: of a framework, and its arguments.

    Raises:
        UserError: none is named, or there is none of that name.
    """
    for module in PROVIDERS:
        importlib.import_module(module)
    name = text or next(iter(DEFAULT), "")
    if not name:
        raise UserError(
            "--subject is missing: FILE.py or MODULE, with :ATTR where the function is not called `make` "
            "(`spin` tries the harness itself)"
        )
    if name not in SUBJECTS.names:
        from steptime.subjects.steps.kind import StepsKind  # heavy: torch
        from steptime.subjects.steps.script import FRAMEWORKS, ScriptKind

        if name in FRAMEWORKS:
            return ScriptKind(name, script)

        if StepsKind.means(name):
            return StepsKind(name)
    return SUBJECTS[name]
