"""Way: reading the source. Calls that a collector must not make, found without running it.

Crude on purpose: it knows names, not types. A line that is right may say `# sync: ok, <why>`.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from steptime.counting.difference import Counts
from steptime.syncs.scopes import Place

ROLE = "source"
METHODS = {
    "item": "item()",
    "tolist": "tolist()",
    "cpu": "cpu()",
    "numpy": "numpy()",
    "nonzero": "nonzero",
    "synchronize": "synchronize",
    "empty_cache": "empty_cache",
    "mem_get_info": "device memory query",
    "memory_allocated": "device memory query",
    "max_memory_allocated": "device memory query",
    "utilization": "NVML through torch",
    "temperature": "NVML through torch",
    "power_draw": "NVML through torch",
    "pin_memory": "pinned malloc",
    "masked_select": "masked_select",
    "unique": "unique",
    "bincount": "bincount",
}
NEEDS_OWNER = {
    "bincount",
    "max_memory_allocated",
    "memory_allocated",
    "nonzero",
    "power_draw",
    "temperature",
    "unique",
    "utilization",
}
"""Names that others use too: counted on `torch` and `torch.cuda` only."""
PASS = "# sync: ok"


@dataclass(frozen=True, order=True)
class Finding:
    """One forbidden call."""

    file: str
    line: int
    function: str
    kind: str


def lint_text(text: str, file: str) -> list[Finding]:
    """Findings in a module's source, in order.

    Raises:
        SyntaxError: it is not Python.
    """
    lines = text.splitlines()
    visitor = _Visitor(file)
    visitor.visit(ast.parse(text, file))
    return sorted(finding for finding in visitor.findings if PASS not in lines[finding.line - 1])


def lint_file(path: Path) -> list[Finding]:
    """Findings in a file."""
    return lint_text(path.read_text(encoding="utf-8"), str(path))


def collector_sources(root: Path | None = None) -> list[Path]:
    """What must be clean: the collectors, the recorder, the late scalars, the monitor."""
    dflash = (root or Path(__file__).parents[3]) / "dflash"
    observe = dflash / "observe"
    single = [observe / name for name in ("recorder.py", "monitor.py", "observer.py", "histogram.py")]
    return [*sorted((observe / "collectors").glob("*.py")), *single, dflash / "pipeline" / "scalars.py"]


class LintWay:
    """Reads files; nothing runs, so whoever would be to blame is called `source`."""

    name = "lint"
    sees = (
        "forbidden calls by name (item, tolist, cpu, numpy, synchronize, empty_cache, ...) in the source of "
        "the collectors"
    )
    does_not_see = "types, so float(), truth tests, masks and plain kernels; what other files do"
    every_step = False
    claims = frozenset({"item", "device_sync", "event_sync", "empty_cache", "backward_sync", "flush_sync"})
    device = "source"

    def __init__(self, paths: Sequence[Path] | None = None) -> None:
        self.paths = list(paths) if paths is not None else collector_sources()

    def available(self) -> str | None:
        missing = [str(path) for path in self.paths if not path.is_file()]
        if missing or not self.paths:
            return f"no such source: {missing[0] if missing else '(none named)'}"
        return None

    def arm(self, role: str) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def counts(self) -> Counts:
        found: Counts = {}
        for path in self.paths:
            for finding in lint_file(path):
                key = (ROLE, finding.kind, Place(finding.file, finding.line, finding.function))
                found[key] = found.get(key, 0) + 1
        return found


class _Visitor(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self._file = file
        self._functions: list[str] = []
        self.findings: list[Finding] = []

    def _within(self, name: str, visit: Callable[[], None]) -> None:
        self._functions.append(name)
        visit()
        self._functions.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._within(node.name, lambda: self.generic_visit(node))

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._within(node.name, lambda: self.generic_visit(node))

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute):
            kind = METHODS.get(node.func.attr)
            if kind is not None and (node.func.attr not in NEEDS_OWNER or _owner(node.func) in _TORCH):
                self.findings.append(
                    Finding(self._file, node.lineno, ".".join(self._functions) or "<module>", kind)
                )
        self.generic_visit(node)


_TORCH = {"torch", "torch.cuda", "torch.cuda.memory", "cuda"}


def _owner(attribute: ast.Attribute) -> str:
    names: list[str] = []
    node: ast.expr = attribute.value
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name):
        names.append(node.id)
    return ".".join(reversed(names))
