"""Hugging Face `Trainer`: its own loop over its first batches, repeated. Each callback is a switch, and so is
each `report_to`, which is a callback too."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice, repeat
from typing import Any

import torch

from steptime.errors import UserError
from steptime.subjects.steps.script import Caught, Enough, unique
from steptime.subjects.steps.steps import Periodic, Switch

CYCLE = 4
ENDLESS = 1 << 30
NOTES = (
    "hf: the Trainer's own loop over its first batches, which are on the device already; it does not save or "
    "evaluate",
)


class _Replay:
    """In place of the train dataloader: only its length is looked at."""

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[None]:
        return repeat(None)


class HfLoop:
    """A caught `Trainer` as a loop; see `loop.Loop`.

    A log every so many steps is a tick: it happens in both halves of a pair, and a callback that is off does
    not get it. With `logging_steps=1` it is part of each step.
    """

    def __init__(self, caught: Caught) -> None:
        self._trainer, self._train = caught.trainer, caught.original
        trainer, arguments = self._trainer, self._trainer.args
        self._accumulate = int(arguments.gradient_accumulation_steps)
        loader = trainer.get_train_dataloader()
        if next(iter(loader), None) is None:
            raise UserError("--hf: the train dataset is empty")
        batches = list(islice(cycle(islice(loader, CYCLE * self._accumulate)), CYCLE * self._accumulate))
        self._groups = [batches[i * self._accumulate : (i + 1) * self._accumulate] for i in range(CYCLE)]
        self.cycle, self.warmup, self.hold = CYCLE, CYCLE, True
        self.tokens: int | Sequence[int] = [sum(map(_tokens, group)) for group in self._groups]
        device = arguments.device
        self.devices: Sequence[str] | None = (str(device) if device.type == "cuda" else "cpu",)
        self.accounted: Callable[[], Mapping[str, float]] | None = None
        self.tick: Callable[[], object] | None = self._log
        self.close: Callable[[], object] | None = None
        self.notes: Sequence[str] = NOTES
        self._losses: list[torch.Tensor] = []
        self._wanted = False
        self._hears: set[str] = set()
        self._every = int(arguments.logging_steps) if str(arguments.logging_strategy.value) == "steps" else 0
        self._own_callbacks = list(trainer.callback_handler.callbacks)
        self._names = unique([type(one).__name__ for one in self._own_callbacks])
        self.switches: Mapping[str, Switch | Periodic] = dict(self._switches())
        self._prepare()

    def _log(self) -> None:
        """A log comes at the end of the next step; nobody hears it yet."""
        self._wanted = self._every > 1
        self._hears.clear()

    def run(self, batch: Callable[[], int], boundary: Callable[[Any], bool]) -> None:
        """Train; a step ends where the next one asks for its batches, after its logging."""
        trainer, first = self._trainer, True

        def batches(_: Any, count: int, *more: Any) -> tuple[list[Any], Any]:
            nonlocal first
            if not first:
                losses, self._losses = tuple(self._losses), []
                if not boundary(losses):
                    raise Enough
            first, self._losses = False, []
            samples = list(self._groups[batch()])
            return samples, trainer._get_num_items_in_batch(samples, *more)

        trainer.get_batch_samples = batches
        with contextlib.suppress(Enough):
            self._train(trainer)

    def _switches(self) -> Iterator[tuple[str, Switch | Periodic]]:
        base = importlib.import_module("transformers").TrainerCallback
        handler = self._trainer.callback_handler
        off: set[str] = set()

        def thrown(name: str) -> Switch:
            def throw(on: bool) -> None:
                (off.discard if on else off.add)(name)
                own = zip(self._names, self._own_callbacks, strict=True)
                handler.callbacks[:] = [*(one for key, one in own if key not in off), self._flow]

            return throw

        self._flow = _flow(base, self)
        for name, callback in zip(self._names, self._own_callbacks, strict=True):
            if name == "DefaultFlowCallback":
                continue
            throw = thrown(name)
            if self._every > 1 and type(callback).on_log is not base.on_log:
                callback.on_log = self._heard(name, callback.on_log)
                yield name, Periodic(self._every, lambda name=name: self._hears.add(name), throw)  # type: ignore[misc]
            else:
                yield name, throw

    def _heard(self, name: str, on_log: Callable[..., Any]) -> Callable[..., Any]:
        def heard(*words: Any, **named: Any) -> Any:
            return on_log(*words, **named) if name in self._hears else None

        return heard

    def _prepare(self) -> None:
        trainer, arguments = self._trainer, self._trainer.args
        strategy = type(arguments.logging_strategy)
        arguments.max_steps = ENDLESS
        arguments.save_strategy = type(arguments.save_strategy)("no")
        arguments.eval_strategy = type(arguments.eval_strategy)("no")
        if self._every != 1:
            arguments.logging_strategy = strategy("no")
        arguments.load_best_model_at_end = False
        trainer.get_train_dataloader = _Replay
        training_step = trainer.training_step

        def kept(*words: Any, **named: Any) -> torch.Tensor:
            loss: torch.Tensor = training_step(*words, **named)
            self._losses.append(loss.detach())
            return loss

        trainer.training_step = kept

    def log_wanted(self) -> bool:
        """Whether the step that ends should log; asked once."""
        wanted, self._wanted = self._wanted, False
        return wanted


def _flow(base: Any, loop: HfLoop) -> Any:
    """A callback that asks for the logs."""

    class Flow(base):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
            if loop.log_wanted():
                control.should_log = True
            return control

    return Flow()


def _tokens(batch: Any) -> int:
    """Of a batch: its input ids, or its samples."""
    found = batch.get("input_ids") if hasattr(batch, "get") else None
    if isinstance(found, torch.Tensor):
        return int(found.numel())
    tensors = [one for one in getattr(batch, "values", lambda: ())() if isinstance(one, torch.Tensor)]
    return int(tensors[0].shape[0]) if tensors and tensors[0].ndim else 1
