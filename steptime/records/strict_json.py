"""Reading back what was stored as JSON: strictly, and with a complaint that names file, line and key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from steptime.errors import UserError, nearest

T = TypeVar("T")


def parse(adapter: TypeAdapter[T], text: str, schema: str, where: str, known: Iterable[str]) -> T:
    """The value in `text`, whose key "schema" must be `schema`. `known`: keys to suggest for a misspelt one.

    Raises:
        UserError: `where:line` and what is wrong: broken JSON, another schema, unknown or missing keys, a bad
            value.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}:{error.lineno}: not valid JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or nested too deeply
        raise UserError(f"{where}: not valid JSON: {str(error).partition(chr(10))[0]}") from None
    if not isinstance(tree, dict) or tree.get("schema") != schema:
        found = tree.get("schema") if isinstance(tree, dict) else type(tree).__name__
        raise UserError(f"{where}:{line_of(text, 'schema')}: schema {found!r} is not {schema!r}")
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        leaf = str((error.errors()[0]["loc"] or ("",))[-1])
        raise UserError(f"{where}:{line_of(text, leaf)}: {explain(error, known)}") from None


def line_of(text: str, key: str) -> int:
    """Line on which `key` first stands; 1 when it does not."""
    found = re.search(rf'"{re.escape(key)}"\s*:', text)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def explain(error: ValidationError, known: Iterable[str] = ()) -> str:
    """One line for the first thing wrong in a stored file, with the key's path."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    kind = first["type"]
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown key {key!r}{nearest(key, known)}"
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return f"missing key {key!r}"
    return f"{key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
