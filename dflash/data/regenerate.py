"""Answers rewritten by the target itself: a drafter learns what its target would say, not what somebody else
said.

Every conversation keeps its questions; the assistant's turns are generated one after the other, each from the
history with the new answers in it. Turns with tool calls stay as they are, since the tool's result that
follows belongs to them.

Finished conversations are appended to a `.part` file whose name holds a digest of input and settings. When
all are there it becomes the output in one rename; until then the same command goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dflash.data.messages import conversation_of, normalise
from dflash.data.progress import Progress
from dflash.data.rows import data_files, read_rows
from dflash.data.skeleton import Message
from dflash.data.template import BadSample, has_text
from dflash.data.thoughts import answer_text
from steptime.errors import UserError
from steptime.files import atomic_text, sync


@dataclass(frozen=True, slots=True)
class Answer:
    """One generated turn.

    Attributes:
        text: without the token that ended it; with `<think>` if the model thought.
        finished: false when it ran into the token limit.
        prompt_ids, ids: what the model read and wrote (with the stop token), when known.
        exact: the text, tokenised again, gives the same ids.
    """

    text: str
    finished: bool
    prompt_ids: tuple[int, ...] = ()
    ids: tuple[int, ...] = ()
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """A history that ends with someone else's turn."""

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] | None = None
    origin: str = ""


class Generator(Protocol):
    """Answers many prompts; `batch` is how many it likes at a time."""

    batch: int

    def __call__(self, prompts: Sequence[Prompt], done: Callable[[int, Answer], None]) -> None:
        """Calls `done(index, answer)` for each prompt, in any order, from the calling thread."""
        ...


@dataclass
class Task:
    """A conversation on its way.

    Attributes:
        index: place in the input.
        messages: the old conversation.
        new: the new one so far, each answer in place.
        answers: the generated turns so far.
    """

    index: int
    origin: str
    messages: list[Message]
    tools: list[Any] | None
    new: list[Message] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    failed: bool = False

    def advance(self) -> bool:
        """Copy turns up to the next one to generate; false when there is none."""
        while not self.failed and len(self.new) < len(self.messages):
            message = self.messages[len(self.new)]
            if message["role"] == "assistant" and not message.get("tool_calls") and has_text(message):
                return True
            self.new.append(message)
        return False

    def take(self, answer: Answer) -> None:
        """Put an answer in the place of the old turn. A thought that never ended is no answer, nor is text
        that UTF-8 cannot write: the task has failed."""
        try:
            message = normalise({"role": "assistant", "content": answer.text}, len(self.new) + 1)
        except BadSample:  # an endpoint sent half of a character
            self.failed = True
            return
        text = answer_text(message["content"]).lstrip()
        self.failed = not text or text.startswith("<think>")
        if self.failed:
            return
        self.answers.append(answer)
        self.new.append(message)
        if not answer.finished:  # nothing can follow a turn that was cut
            self.messages = self.messages[: len(self.new)]


@dataclass
class Report:
    """What came of it.

    Attributes:
        written, resumed: conversations in the output, and how many of them were there before.
        cut: answers that ran into the token limit.
        empty: conversations left out: nothing but a thought came, or the prompt left no room for an answer.
        inexact: answers whose text gives other ids when tokenised again.
    """

    out: Path
    written: int = 0
    resumed: int = 0
    cut: int = 0
    empty: int = 0
    inexact: int = 0
    skipped: list[tuple[str, str]] = field(default_factory=list)


def read_tasks(
    source: Path, limit: int | None, skip_bad: bool, cache: str | Path
) -> tuple[list[Task], list[tuple[str, str]]]:
    """The conversations of a chat file; each must have an assistant's turn to rewrite.

    Raises:
        UserError: a bad line (unless `skip_bad`), or nothing to do.
    """
    tasks: list[Task] = []
    skipped: list[tuple[str, str]] = []
    for file in data_files(source):
        for row in read_rows(file):
            if limit is not None and len(tasks) >= limit:
                break
            origin = f"{file}:{row.line}"
            try:
                found = conversation_of(row.value) if isinstance(row.value, dict) else None
                if found is None:
                    raise BadSample(row.reason or "no conversation; only chat files can be regenerated")
                task = Task(len(tasks), origin, *found)
                if not task.advance():
                    raise BadSample("no assistant text")
            except BadSample as error:
                if not skip_bad:
                    raise UserError(f"{origin}: {error}") from None
                skipped.append((origin, str(error)))
                continue
            tasks.append(task)
    if not tasks:
        raise UserError(f"{source}: the data set is empty")
    return tasks, skipped


class PartFile:
    """Finished conversations, one line each: `[index, row or null]`. A line torn by a crash is cut off.

    Args:
        out: the output; the part lies beside it.
        digest: of everything that the rows depend on; another digest is another part.
    """

    def __init__(self, out: Path, digest: str) -> None:
        self.path = out.with_name(f"{out.name}.{digest}.part")
        self.rows: dict[int, list[dict] | None] = {}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._read()
            self._file = self.path.open("r+b" if self.path.exists() else "w+b")
        except OSError as error:
            raise UserError(f"{self.path}: cannot write: {error.strerror}") from None
        self._file.truncate(whole)
        self._file.seek(whole)

    def _read(self) -> int:
        whole = 0
        if self.path.exists():
            with self.path.open("rb") as file:
                for line in file:
                    found = _part_line(line)
                    if found is None:
                        break
                    index, rows = found
                    self.rows[index] = rows
                    whole += len(line)
        return whole

    def add(self, index: int, rows: list[dict] | None) -> None:
        self.rows[index] = rows
        self._file.write(json.dumps([index, rows], ensure_ascii=False).encode() + b"\n")

    def flush(self) -> None:
        sync(self._file)

    def close(self) -> None:
        self._file.close()

    def finish(self, out: Path) -> int:
        """Write the output in input order and remove the part; the number of rows."""
        written = 0
        with atomic_text(out) as sink:
            for index in sorted(self.rows):
                for row in self.rows[index] or ():
                    sink.write(json.dumps(row, ensure_ascii=False) + "\n")
                    written += 1
        self.close()
        self.path.unlink(missing_ok=True)
        return written


def _part_line(line: bytes) -> tuple[int, list[dict] | None] | None:
    """What a whole line of a part says; None for a torn or foreign one."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not line.endswith(b"\n") or not isinstance(found, list) or len(found) != 2:
        return None
    index, rows = found
    if type(index) is not int or not (rows is None or isinstance(rows, list)):
        return None
    if rows is not None and not all(isinstance(row, dict) for row in rows):
        return None
    if b"\\ud" in line.lower():  # escapes of half characters, which the output could not hold
        try:
            json.dumps(rows, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            return None
    return index, rows


def regenerate(
    tasks: Sequence[Task], generator: Generator, out: Path, settings: dict[str, Any], as_tokens: bool = False
) -> Report:
    """Rewrite the answers of `tasks` into `out`.

    Args:
        tasks: from `read_tasks`.
        generator: the target, here or behind an endpoint.
        out: chat JSONL, or with `as_tokens` one `{"input_ids", "loss_mask"}` for every generated turn:
            exactly the ids that the target read and wrote.
        settings: all that the answers depend on besides the conversations; part of the digest.

    Raises:
        UserError: from the generator, or `out` cannot be written. What is finished stays in the part file.
    """
    content = [[task.messages, task.tools] for task in tasks]
    text = json.dumps([content, settings, as_tokens], sort_keys=True, default=str)
    part = PartFile(out, hashlib.sha256(text.encode()).hexdigest()[:12])
    report = Report(out, resumed=len(part.rows))
    left = [task for task in tasks if task.index not in part.rows]
    chunk = generator.batch * 8  # enough to put prompts of like length together, little to lose
    try:
        with Progress("Regenerating", len(tasks), "conversations") as progress:
            progress.advance(report.resumed)
            for start in range(0, len(left), chunk):
                _run_chunk(left[start : start + chunk], generator, part, report, as_tokens, progress)
                part.flush()
        if not any(part.rows.values()):
            raise UserError(f"{out}: the target gave no answer to any of {len(tasks)} conversations")
        report.written = part.finish(out)
    finally:
        part.close()
    return report


def _run_chunk(
    tasks: list[Task],
    generator: Generator,
    part: PartFile,
    report: Report,
    as_tokens: bool,
    progress: Progress,
) -> None:
    waiting = [task for task in tasks if task.advance()]
    while waiting:
        current, waiting = waiting, []

        def done(
            index: int, answer: Answer, current: list[Task] = current, waiting: list[Task] = waiting
        ) -> None:
            task = current[index]
            task.take(answer)
            report.cut += not answer.finished
            report.inexact += not answer.exact
            if task.advance():
                waiting.append(task)
                return
            part.add(task.index, _rows(task, as_tokens))
            report.empty += task.failed
            progress.advance()

        prompts = [
            Prompt(tuple(task.new), tuple(task.tools) if task.tools else None, task.origin)
            for task in current
        ]
        generator(prompts, done)


def _rows(task: Task, as_tokens: bool) -> list[dict] | None:
    if task.failed:
        return None
    if as_tokens:
        return [
            {
                "input_ids": [*answer.prompt_ids, *answer.ids],
                "loss_mask": [0] * len(answer.prompt_ids) + [1] * len(answer.ids),
            }
            for answer in task.answers
        ]
    row: dict[str, Any] = {"conversations": task.new}
    if task.tools:
        row["tools"] = task.tools
    if not task.answers[-1].finished:
        row["finished"] = False
    return [row]


class ParallelGenerator:
    """Asks one question at a time, `batch` of them at once: for endpoints, which batch by themselves."""

    def __init__(self, ask: Callable[[Prompt], Answer], batch: int) -> None:
        self._ask = ask
        self.batch = batch

    def __call__(self, prompts: Sequence[Prompt], done: Callable[[int, Answer], None]) -> None:
        with ThreadPoolExecutor(self.batch, thread_name_prefix="endpoint") as pool:
            futures: dict[Future[Answer], int] = {
                pool.submit(self._ask, prompt): place for place, prompt in enumerate(prompts)
            }
            try:
                for future in as_completed(futures):
                    done(futures[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
