"""Host syncs of the other DFlash trainers' steps, counted as ours are.

    pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors    (nox -s peers does)
    python -m bench.peers.syncs [--json FILE]

Each step is taken twice: the drafter's alone (forward, backward, clip, optimizer), and as that project's own
trainer takes it, with its reporting at the default settings. Small random weights on the CPU, where the
strict rules of `docs/syncs.md` say what would wait on a GPU. Batches lie where the peer finds them at best:
pinned for speculators, on the device already for SpecForge."""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tabulate import tabulate

from steptime.counting.count import count_syncs
from steptime.counting.difference import Counts
from steptime.host_memory import staged
from steptime.syncs.scopes import WORK

STEPS, WARMUP = 4, 2
HIDDEN, VOCAB, BATCH, CONTEXT, BLOCK, TAPS = 64, 256, 2, 64, 8, 4
DEVICE = "cpu:0"


@dataclass(frozen=True)
class PeerStep:
    """One way that a peer takes a step.

    Attributes:
        run: takes so many optimizer steps.
    """

    name: str
    what: str
    run: Callable[[int], object]


@dataclass(frozen=True)
class Counted:
    """Host syncs of whole steps behind the warm-up."""

    name: str
    what: str
    steps: int
    counts: Counts

    @property
    def per_step(self) -> float:
        return sum(self.counts.values()) / self.steps


def count(step: PeerStep) -> Counted:
    """Run a peer's step and count.

    Raises:
        RuntimeError: it took another number of steps than asked for.
    """
    with count_syncs(device=DEVICE, warmup=WARMUP, role=step.name) as syncs:
        step.run(WARMUP + STEPS)
    if syncs.steps != STEPS:
        raise RuntimeError(f"{step.name}: {syncs.finished} optimizer steps instead of {WARMUP + STEPS}")
    return Counted(
        step.name, step.what, syncs.steps, {key: n for key, n in syncs.counts.items() if key[1] not in WORK}
    )


def qwen3_config() -> Any:
    """A small Qwen3, which both peers build their drafters from."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    config = Qwen3Config(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
    )
    config._attn_implementation = "sdpa"
    return config


def alone(parameters: Sequence[torch.nn.Parameter], loss_of: Callable[[], torch.Tensor], steps: int) -> None:
    """The drafter's step without a trainer around it."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    for _ in range(steps):
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _tensors() -> SimpleNamespace:
    generator = torch.Generator().manual_seed(0)
    return SimpleNamespace(
        ids=torch.randint(0, VOCAB - 1, (BATCH, CONTEXT), generator=generator),
        taps=torch.randn(BATCH, CONTEXT, TAPS * HIDDEN, generator=generator),
        last=torch.randn(BATCH, CONTEXT, HIDDEN, generator=generator),
        mask=torch.ones(BATCH, CONTEXT),
    )


# -- SpecForge -----------------------------------------------------------------------------------------------


def specforge() -> Iterator[PeerStep]:
    """Its trainer's core: strategy, single-process backend and mixed-precision optimizer."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel
    from specforge.optimizer import BF16Optimizer
    from specforge.runtime.contracts import TrainBatch
    from specforge.training.backend import FSDPTrainingBackend, ParallelConfig
    from specforge.training.controller import TrainerCore
    from specforge.training.strategies.base import DFlashTrainStrategy

    config = qwen3_config()
    config.num_target_layers, config.block_size = 12, BLOCK
    config.dflash_config = {"mask_token_id": VOCAB - 1, "target_layer_ids": list(range(1, 1 + TAPS))}
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False).requires_grad_(False)
    embedding = torch.nn.Embedding(VOCAB, HIDDEN).requires_grad_(False)
    drafter = DFlashDraftModel(config)
    model = OnlineDFlashModel(
        drafter,
        head,
        embedding,
        VOCAB - 1,
        BLOCK,
        attention_backend="sdpa",
        num_anchors=8,
        loss_decay_gamma=4.0,
    )
    backend = FSDPTrainingBackend(
        ParallelConfig(), optimizer_factory=lambda target: BF16Optimizer(target, lr=1e-4)
    )
    backend.prepare_model(model, wrap=False, optimizer_target=drafter)
    core = TrainerCore(DFlashTrainStrategy(model), backend)
    found = _tensors()
    tensors = {"input_ids": found.ids, "hidden_states": found.taps, "loss_mask": found.mask}
    batch = TrainBatch(sample_ids=["0", "1"], strategy="dflash", tensors=tensors)

    def run(steps: int) -> None:
        for _ in range(steps):
            core.train_step(batch)

    name, trained = f"SpecForge {importlib.metadata.version('specforge')}", list(drafter.parameters())
    yield PeerStep(name, "drafter alone", lambda steps: alone(trained, lambda: model(**tensors)[0], steps))
    yield PeerStep(name, "TrainerCore.train_step", run)


# -- speculators ---------------------------------------------------------------------------------------------


class _Loader:
    """Batches of the shape that its data loader gives, in pinned memory."""

    batch_sampler = None

    def __init__(self, batch: dict[str, Any], steps: int) -> None:
        self._batch, self._steps = batch, steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _ in range(self._steps):
            yield dict(self._batch)


def speculators() -> Iterator[PeerStep]:
    """Its `Trainer.train_epoch`, which reports each step by default, and with reports far apart."""
    import speculators.models.dflash.core as core
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.config import DFlashSpeculatorConfig

    core.resolve_verifier_norm_class = lambda config: core.Qwen3RMSNorm  # no verifier on disk to ask
    model = core.DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=qwen3_config(),
            draft_vocab_size=VOCAB,
            block_size=BLOCK,
            aux_hidden_state_layer_ids=list(range(1, 1 + TAPS)),
            mask_token_id=VOCAB - 1,
        )
    )
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        if key.startswith(("embed_tokens", "lm_head", "verifier")):
            parameter.requires_grad_(False)
    found, total = _tensors(), BATCH * CONTEXT
    batch = {
        "hidden_states": found.taps.reshape(1, total, -1),
        "input_ids": found.ids.reshape(1, -1),
        "loss_mask": found.mask.reshape(1, -1),
        "verifier_last_hidden_states": found.last.reshape(1, total, -1),
        "document_ids": torch.arange(BATCH).repeat_interleave(CONTEXT)[None],
        "position_ids": torch.arange(CONTEXT).repeat(BATCH)[None],
    }
    pinned = {key: staged(tensor.clone(), pin=True) for key, tensor in batch.items()}
    options = {"loss_config": resolve_loss_config("ce", "eager"), "gamma": 4.0, "max_anchors": 16}
    name = f"speculators {importlib.metadata.version('speculators')}"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    yield PeerStep(
        name, "drafter alone", lambda steps: alone(trained, lambda: model(**batch, **options)[1], steps)
    )
    for log_freq, words in ((1, "log_freq=1 (default)"), (1000, "no report due")):
        yield PeerStep(
            name,
            f"Trainer.train_epoch, {words}",
            functools.partial(_epoch, model, pinned, options, log_freq),
        )


def _epoch(model: Any, batch: dict[str, Any], options: dict[str, Any], log_freq: int, steps: int) -> None:
    from speculators.train.trainer import Trainer, TrainerConfig

    logging.getLogger("speculators").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainerConfig(
            lr=1e-4,
            num_epochs=1,
            save_path=folder,
            train_call_kwargs=options,
            log_freq=log_freq,
            scheduler_total_steps=steps,
        )
        # Its constructor asks for an accelerator and for ranks; the loop itself is what is counted.
        trainer = Trainer.__new__(Trainer)
        trainer.model, trainer.config, trainer.train_loader = (
            model,
            config,
            _Loader(_with_records(batch), steps),
        )
        trainer.local_rank, trainer.rank, trainer.is_distributed, trainer.device_type = (
            DEVICE,
            1,
            False,
            "cpu",
        )
        trainer.resume_from_checkpoint, trainer.current_epoch = False, 0
        trainer.global_step = 1 if log_freq > 1 else 0  # step 0 is always reported
        trainer._resume_local_step = 0
        trainer.setup_optimizer()
        trainer.train_epoch(0)


def _with_records(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "error_records": 0.0}


# -- ours ----------------------------------------------------------------------------------------------------


def ours() -> list[Counted]:
    """The drafter's and the target's steps of the whole trainer, metrics off and all on."""
    from bench.subjects.trainer.counts import OFF, count_arms
    from bench.subjects.trainer.harness import harness_config
    from dflash.config import load_config
    from dflash.observe.registry import COLLECTORS

    config = harness_config(load_config(Path(__file__).parents[2] / "configs" / "cpu-tiny.toml"))
    arms: dict[str, Sequence[str]] = {OFF: (), "all": [collector.name for collector in COLLECTORS]}
    proof = count_arms(config, arms)
    found = []
    for arm, words in ((OFF, "metrics off"), ("all", "all metrics on")):
        for role in ("drafter/0", "target/0"):
            counts = {key: n for key, n in proof.counts[arm].items() if key[0] == role and key[1] not in WORK}
            found.append(Counted("dflash-harness", f"{role}, {words}", proof.steps, counts))
    return found


def summary(rows: Sequence[Counted]) -> str:
    """Syncs per step of each."""
    body = [(row.name, row.what, f"{row.per_step:g}") for row in rows]
    return tabulate(
        body, headers=("trainer", "step", "host syncs per step"), tablefmt="github", disable_numparse=True
    )


def places(rows: Sequence[Counted]) -> str:
    """Every line that waits."""
    body = [
        (row.name, row.what, kind, f"`{place.where}`", place.function, f"{n / row.steps:g}")
        for row in rows
        for (_, kind, place), n in sorted(row.counts.items(), key=lambda item: (item[0][2], item[0][1]))
    ]
    headers = ("trainer", "step", "kind", "line", "function", "per step")
    return tabulate(body, headers=headers, tablefmt="github", disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.syncs", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write the counts")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    rows = ours()
    for peer in (specforge, speculators):
        try:
            rows.extend(count(step) for step in peer())
        except ImportError as error:
            print(
                f"error: {peer.__name__} is not installed: {error} (nox -s peers installs it)",
                file=sys.stderr,
            )
            return 2
    print(summary(rows), places(rows), sep="\n\n")
    if options.json:
        tree = [
            {
                "trainer": row.name,
                "step": row.what,
                "per_step": row.per_step,
                "counts": [
                    {"kind": kind, "where": str(place), "count": n}
                    for (_, kind, place), n in sorted(row.counts.items())
                ],
            }
            for row in rows
        ]
        Path(options.json).write_text(
            json.dumps({"schema": "dflash-peers-syncs/1", "rows": tree}, indent=1), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
