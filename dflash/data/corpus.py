"""Real text on any machine without a download: the Python standard library that runs the program.

Each function becomes a conversation: the user gives module, signature and docstring, the assistant answers
with the source. The split into training and held-out conversations depends only on module and name."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import shutil
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dflash.data.progress import Progress
from dflash.data.tokenizer import CHAT_TEMPLATE, train_tokenizer
from steptime.errors import UserError
from steptime.files import atomic_folder

FORMAT = 1
"""Raised when what is written changes, so that an older cache is not taken for the new one."""

SKIPPED_FOLDERS = frozenset(
    {
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "pydoc_data",
        "site-packages",
        "dist-packages",
    }
)
PARTS = ("train.jsonl", "heldout.jsonl", "tokenizer/tokenizer.json", "meta.json")
LEAST_LINES, MOST_LINES = 3, 120
HELDOUT_PERCENT = 4
LEAST_FUNCTIONS = 200


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the library.

    Attributes:
        module: dotted name.
        name: qualified inside the module, e.g. `Thread.join`.
        signature: from `def` to the colon, dedented.
        docstring: cleaned, may be empty.
        source: with decorators, dedented, no newline at the end.
    """

    module: str
    name: str
    signature: str
    docstring: str
    source: str

    @property
    def key(self) -> bytes:
        return hashlib.sha256(f"{self.module}:{self.name}".encode()).digest()

    @property
    def held_out(self) -> bool:
        return int.from_bytes(self.key[:4], "big") % 100 < HELDOUT_PERCENT

    def conversation(self) -> dict:
        """As one line of a chat JSONL."""
        asked = f"Write `{self.name}` of the Python module `{self.module}`.\n\n{self.signature}"
        if self.docstring:
            asked += f"\n\n{self.docstring}"
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": f"```python\n{self.source}\n```"},
        ]
        return {"id": f"{self.module}:{self.name}", "conversations": turns}


def functions_of(text: str, module: str) -> Iterator[Function]:
    """The functions and methods of a module's source that are between 3 and 120 lines long, in order."""
    lines = text.splitlines()

    def visit(body: Sequence[ast.AST], prefix: str) -> Iterator[Function]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from one(node, prefix)
            elif isinstance(node, ast.If | ast.Try):
                yield from visit([*node.body, *node.orelse], prefix)

    def one(node: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> Iterator[Function]:
        first = min([node.lineno, *(item.lineno for item in node.decorator_list)]) - 1
        last = node.end_lineno or node.lineno
        if not LEAST_LINES <= last - first <= MOST_LINES or node.body[0].lineno == node.lineno:
            return
        source = textwrap.dedent("\n".join(line.rstrip() for line in lines[first:last]))
        head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
        # A comment between the colon and the body is no part of the signature.
        signature = textwrap.dedent(head[: head.rindex(":") + 1] if ":" in head else head)
        yield Function(module, prefix + node.name, signature, ast.get_docstring(node) or "", source)

    yield from visit(ast.parse(text).body, "")


def read_library(root: Path | None = None) -> list[Function]:
    """Every function of the library once (equal sources count once), in an order that depends only on the
    names.

    Args:
        root: the library's folder; None is the running interpreter's.

    Raises:
        UserError: the interpreter comes without the library's source.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED_FOLDERS & set(path.relative_to(root).parts[:-1])
    ]
    found: list[Function] = []
    with Progress("Reading the standard library", len(paths)) as progress:
        for path in paths:
            parts = path.relative_to(root).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # old escapes in docstrings
                    found.extend(functions_of(path.read_text(encoding="utf-8"), module))
            except (SyntaxError, UnicodeDecodeError, RecursionError, OSError):
                pass  # bad on purpose, or in an older spelling
            progress.advance()
    if len(found) < LEAST_FUNCTIONS:
        raise UserError(
            f"data.path = 'stdlib': {root} holds the source of only {len(found)} functions; try --set "
            "data.path=FILE"
        )
    sources: set[str] = set()
    names: set[bytes] = set()
    unique = []
    for function in found:
        if function.source not in sources and function.key not in names:
            sources.add(function.source)
            names.add(function.key)
            unique.append(function)
    return sorted(unique, key=lambda function: function.key)


def stdlib_folder(cache: str | Path, vocab_size: int) -> Path:
    """Where the corpus and its tokenizer for this interpreter lie, whether built or not."""
    import tokenizers

    parameters = [
        FORMAT,
        vocab_size,
        HELDOUT_PERCENT,
        LEAST_LINES,
        MOST_LINES,
        tokenizers.__version__,
        platform.system(),
        CHAT_TEMPLATE,
    ]
    digest = hashlib.sha256(json.dumps(parameters).encode()).hexdigest()[:8]
    python = f"{platform.python_implementation().lower()}{platform.python_version()}"
    return Path(cache) / f"stdlib-{python}-{vocab_size}-{digest}"


def ensure_stdlib(cache: str | Path = "cache", vocab_size: int = 4096, root: Path | None = None) -> Path:
    """The folder with `train.jsonl`, `heldout.jsonl` and `tokenizer/`, built when it is not there yet (some
    seconds).

    The folder appears whole or not at all; its name holds the Python version and a digest of the parameters.

    Args:
        cache: where it goes.
        vocab_size: most tokens of the tokenizer, special ones included.
        root: another source tree than the running interpreter's library, for tests.

    Raises:
        UserError: no source, no room in the vocabulary, or a folder that cannot be written.
    """
    folder = stdlib_folder(cache, vocab_size)
    if all((folder / name).exists() for name in PARTS):
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # somebody took files out of it
    with atomic_folder(
        folder
    ) as temporary:  # first, so that a folder that cannot be written is found at once
        functions = read_library(root)
        conversations = [function.conversation() for function in functions]
        counts = {}
        for split, held_out in (("train", False), ("heldout", True)):
            chosen = [
                line
                for line, function in zip(conversations, functions, strict=True)
                if function.held_out is held_out
            ]
            counts[split] = len(chosen)
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in chosen)
            (temporary / f"{split}.jsonl").write_text(text, encoding="utf-8")
        with Progress("Training the tokenizer", len(functions)) as progress:
            tokenizer = train_tokenizer(_training_texts(conversations, functions, progress), vocab_size)
        tokenizer.save_pretrained(temporary / "tokenizer")
        meta = {
            "python": platform.python_version(),
            "vocab_size": vocab_size,
            "tokens": len(tokenizer),
            **counts,
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return folder


def _training_texts(
    conversations: list[dict], functions: list[Function], progress: Progress
) -> Iterator[str]:
    for conversation, function in zip(conversations, functions, strict=True):
        progress.advance()
        if not function.held_out:
            for turn in conversation["conversations"]:
                yield turn["content"]
