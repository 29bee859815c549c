"""Lightning's `Trainer.fit`: its own loop over its first batches, repeated. Each callback and each logger is
a switch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from typing import Any

import torch

from steptime.errors import UserError
from steptime.subjects.steps.script import Caught, Enough, unique
from steptime.subjects.steps.steps import Periodic, Switch

CYCLE = 4
ENDLESS = 1 << 30
NOTES = ("lightning: the Trainer's own loop over its first batches; it does not validate, and has one epoch",)


class _Replay:
    """In place of the train dataloader: a length (nothing is fetched ahead), and a batch when asked."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch

    def __len__(self) -> int:
        return ENDLESS

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._fetch()


class LightningLoop:
    """A caught `Trainer` as a loop; see `loop.Loop`.

    What loggers write every `log_every_n_steps` is a tick: a logger that is off does not get it. With 1 it is
    part of each step.
    """

    def __init__(self, caught: Caught) -> None:
        self._trainer, self._fit = caught.trainer, caught.original
        trainer, named = self._trainer, dict(caught.named)
        self._model, data = named["model"], named.get("datamodule")
        loader = named.get("train_dataloaders")
        if data is not None:
            data.prepare_data()
            data.setup("fit")
            loader = data.train_dataloader()
        loader = self._model.train_dataloader() if loader is None else loader
        self._batches = list(islice(cycle(islice(loader, CYCLE)), CYCLE))
        if not self._batches:
            raise UserError("--lightning: the train dataloader is empty")
        self.cycle, self.warmup, self.hold = CYCLE, CYCLE, True
        self.tokens: int | Sequence[int] = [_samples(batch) for batch in self._batches]
        device = trainer.strategy.root_device
        self.devices: Sequence[str] | None = (str(device) if device.type == "cuda" else "cpu",)
        self.accounted: Callable[[], Mapping[str, float]] | None = None
        self.close: Callable[[], object] | None = None
        self.tick: Callable[[], object] | None = self._log
        self.notes: Sequence[str] = NOTES
        self._loss: torch.Tensor | None = None
        self._every = int(trainer.log_every_n_steps)
        self._callbacks, self._loggers = list(trainer.callbacks), list(trainer.loggers)
        self._off: set[str] = set()
        self.switches: Mapping[str, Switch | Periodic] = dict(self._switches())
        self._prepare()

    def run(self, batch: Callable[[], int], boundary: Callable[[Any], bool]) -> None:
        """Fit; a step ends where the next one asks for its batch, after its logging."""
        first = True

        def fetch() -> Any:
            nonlocal first
            if not first:
                self._trainer.log_every_n_steps = self._every if self._every == 1 else ENDLESS
                if not boundary(self._loss):
                    raise Enough
            first = False
            return self._batches[batch()]

        with contextlib.suppress(Enough):
            self._fit(self._trainer, self._model, _Replay(fetch))

    def _log(self) -> None:
        """The next step logs, and nobody hears it yet."""
        if self._every != 1:
            self._trainer.log_every_n_steps = 1
            self._trainer.loggers = []

    def _switches(self) -> Iterator[tuple[str, Switch | Periodic]]:
        names = unique([type(one).__name__ for one in (*self._callbacks, *self._loggers)])
        self._callback_names = names[: len(self._callbacks)]
        self._logger_names = names[len(self._callbacks) :]
        for name in self._callback_names:
            yield name, lambda on, name=name: self._throw(name, on)  # type: ignore[misc]
        for name, logger in zip(self._logger_names, self._loggers, strict=True):
            if self._every == 1:
                yield name, lambda on, name=name: self._throw(name, on)  # type: ignore[misc]
            else:
                yield name, Periodic(self._every, lambda logger=logger: self._hear(logger))  # type: ignore[misc]

    def _hear(self, logger: Any) -> None:
        self._trainer.loggers = [*self._trainer.loggers, logger]

    def _throw(self, name: str, on: bool) -> None:
        (self._off.discard if on else self._off.add)(name)
        own = zip(self._callback_names, self._callbacks, strict=True)
        self._trainer.callbacks[:] = [one for key, one in own if key not in self._off]
        if self._every == 1:
            loggers = zip(self._logger_names, self._loggers, strict=True)
            self._trainer.loggers = [one for key, one in loggers if key not in self._off]

    def _prepare(self) -> None:
        trainer = self._trainer
        if self._every != 1:
            trainer.log_every_n_steps, trainer.loggers = ENDLESS, []
        trainer.limit_train_batches = trainer.fit_loop.epoch_loop.max_batches = ENDLESS
        trainer.limit_val_batches = trainer.num_sanity_val_steps = 0
        trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = 1, -1
        training_step = self._model.training_step

        def kept(*words: Any, **named: Any) -> Any:
            found = training_step(*words, **named)
            loss = found.get("loss") if isinstance(found, dict) else found
            self._loss = loss.detach() if isinstance(loss, torch.Tensor) else None
            return found

        self._model.training_step = kept


def _samples(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor."""
    if isinstance(batch, torch.Tensor):
        return int(batch.shape[0]) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((_samples(one) for one in parts), 1)
