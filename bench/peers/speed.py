"""One training step of our drafter beside those of SpecForge and speculators, in turns.

    pip install --no-deps specforge==0.2.0 speculators==0.9.0 hs-connectors    (nox -s peers does)
    python -m bench.peers.speed [--dtype fp32|bf16 ...] [--rounds N] [--context N --anchors N --vocab N ...]
                                [--json FILE]

Same shapes, precision, anchors per sequence and block size; random weights. A step is forward, loss,
backward, clip and optimizer; each side draws its anchors in it. The three take turns inside every round, so
that a drifting machine slows them alike; what is reported is the ratio inside rounds, never a lone time.
speculators recomputes the target's logits for its labels, as it does in training."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate

from dflash.data.anchors import BlockGeometry, context_limits, sample_anchors, slot_labels
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.objectives.ce import CrossEntropy
from dflash.models.optimizer import FlatAdamW, FlatParameters
from dflash.models.stack import Stack
from steptime.host_memory import staged

Step = Callable[[], torch.Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """The work of one step; anchors are per sequence."""

    hidden: int = 256
    intermediate: int = 768
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    vocab: int = 2048
    batch: int = 2
    context: int = 512
    anchors: int = 32
    block: int = 16
    taps: int = 4
    dtype: str = "fp32"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


def drafter_shape(shape: Any, attention: str = "auto") -> DrafterShape:
    """Our drafter of that shape, which needs the attributes of `Shape`."""
    return DrafterShape(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        layers=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block,
        vocab_size=shape.vocab,
        mask_token_id=shape.vocab - 1,
        target_layers=12,
        target_layer_ids=tuple(range(1, 1 + shape.taps)),
        attention=attention,
    )


def make_step(
    shape: Any, device: str = "cpu", *, attention: str = "auto", compiled: str | None = None
) -> tuple[Step, int]:
    """Our step and the number of trained parameters. `shape` needs the attributes of `Shape`.

    Args:
        attention: as in `drafter.attention`.
        compiled: the drafter's modules through `torch.compile` with this backend, in place of the written-out
            pass.
    """
    dtype, place = shape.torch_dtype, torch.device(device)
    drafter = Drafter(drafter_shape(shape, attention))
    flat = FlatParameters(drafter, place, dtype)
    forward: Callable[..., torch.Tensor] = drafter
    if compiled is None:
        drafter.stack = Stack(drafter, flat)
    else:
        forward = torch.compile(drafter, backend=compiled)
    optimizer = FlatAdamW(flat, clip=1.0)
    objective = CrossEntropy()
    geometry = BlockGeometry(shape.anchors, shape.block)
    given = _inputs(shape, device)
    generator = torch.Generator().manual_seed(1)
    embedding = torch.randn(shape.vocab, shape.hidden, generator=generator).to(place, dtype)
    head = torch.randn(shape.vocab, shape.hidden, generator=generator) * shape.hidden**-0.5
    head = head.to(place, dtype)
    ids, mask = given["ids"].cpu().numpy(), np.ones((shape.batch, shape.context), bool)
    rng = np.random.default_rng(0)
    starts = np.zeros((shape.batch, shape.anchors), np.int64)

    def step() -> torch.Tensor:
        drawn = [sample_anchors(row, shape.anchors, rng) for row in mask]
        anchors, keep = (np.stack(parts) for parts in zip(*drawn, strict=True))
        labels, weights = slot_labels(ids, mask, anchors, keep, geometry)
        limits = context_limits(anchors, keep, starts, shape.context)
        places = (_moved(array, place) for array in (anchors, keep, starts))
        hidden = forward(given["tapped"], given["ids"], *places, embedding, limits)
        scale = 1.0 / float(weights.sum())
        wanted, shares = (_moved(array, place) for array in (labels, weights))
        loss, _ = objective(hidden, head, wanted, shares, scale)
        loss.backward()
        optimizer.step(1e-4)
        flat.zero_grad()
        return loss.detach()

    return step, sum(parameter.numel() for parameter in drafter.parameters())


def _moved(array: np.ndarray[Any, Any], place: torch.device) -> torch.Tensor:
    """On the device, by way of pinned memory, as the trainer's prefetcher does it."""
    return staged(torch.from_numpy(array), pin=True).to(place, non_blocking=True)


def _inputs(shape: Any, device: str = "cpu") -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    size = (shape.batch, shape.context)
    made = {
        "ids": torch.randint(0, shape.vocab - 1, size, generator=generator),
        "tapped": torch.randn(*size, shape.taps * shape.hidden, generator=generator).to(shape.torch_dtype),
        "last": torch.randn(*size, shape.hidden, generator=generator).to(shape.torch_dtype),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def _qwen3_config(shape: Shape) -> Any:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config

    config = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
    )
    config._attn_implementation = "sdpa"
    return config


def _plain_step(parameters: list[Any], loss_of: Callable[[], torch.Tensor]) -> tuple[Step, int]:
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, sum(parameter.numel() for parameter in parameters)


def specforge_step(shape: Shape, device: str = "cpu", backend: str = "sdpa") -> tuple[Step, int]:
    """SpecForge's drafter in its training wrapper, attention by SDPA (its flex path needs a GPU)."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    dtype, config = shape.torch_dtype, _qwen3_config(shape)
    config.num_target_layers, config.block_size = 12, shape.block
    config.dflash_config = {
        "mask_token_id": shape.vocab - 1,
        "target_layer_ids": list(range(1, 1 + shape.taps)),
    }
    head = torch.nn.Linear(shape.hidden, shape.vocab, bias=False).to(device, dtype).requires_grad_(False)
    embedding = torch.nn.Embedding(shape.vocab, shape.hidden).to(device, dtype).requires_grad_(False)
    drafter = DFlashDraftModel(config).to(device, dtype)
    model = OnlineDFlashModel(
        drafter,
        head,
        embedding,
        shape.vocab - 1,
        shape.block,
        attention_backend=backend,
        num_anchors=shape.anchors,
        loss_decay_gamma=7.0,
    )
    given, mask = _inputs(shape, device), torch.ones(shape.batch, shape.context, device=device)
    return _plain_step(list(drafter.parameters()), lambda: model(given["ids"], given["tapped"], mask)[0])


def speculators_step(shape: Shape) -> tuple[Step, int]:
    """speculators' drafter: the batch as one packed row, all its layers sliding as by its default."""
    import speculators.models.dflash.core as core
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.config import DFlashSpeculatorConfig

    core.resolve_verifier_norm_class = lambda config: core.Qwen3RMSNorm  # no verifier on disk to ask
    model: Any = core.DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=_qwen3_config(shape),
            draft_vocab_size=shape.vocab,
            block_size=shape.block,
            aux_hidden_state_layer_ids=list(range(1, 1 + shape.taps)),
            mask_token_id=shape.vocab - 1,
        )
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        if name.startswith(("embed_tokens", "lm_head", "verifier")):
            parameter.requires_grad_(False)
    model = model.to(shape.torch_dtype)
    given, total = _inputs(shape), shape.batch * shape.context
    arguments: dict[str, Any] = {
        "hidden_states": given["tapped"].reshape(1, total, -1),
        "input_ids": given["ids"].reshape(1, -1),
        "loss_mask": torch.ones(1, total),
        "verifier_last_hidden_states": given["last"].reshape(1, total, -1),
        "document_ids": torch.arange(shape.batch).repeat_interleave(shape.context)[None],
        "position_ids": torch.arange(shape.context).repeat(shape.batch)[None],
        "loss_config": resolve_loss_config("ce", "eager"),
        "gamma": 7.0,
        "max_anchors": shape.anchors * shape.batch,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _plain_step(trained, lambda: model(**arguments)[1])


MAKERS: dict[str, Callable[[Any], tuple[Step, int]]] = {
    "specforge": specforge_step,
    "speculators": speculators_step,
    "ours": make_step,
}


@dataclass(frozen=True)
class Compared:
    """Seconds of every step by round, and how many parameters each trains."""

    shape: Shape
    seconds: dict[str, list[float]]
    parameters: dict[str, int]

    def ratios(self) -> list[float]:
        """In each round, the faster peer's time over ours."""
        peers = [name for name in self.seconds if name != "ours"]
        faster = min(peers, key=lambda name: statistics.median(self.seconds[name]))
        return [peer / own for peer, own in zip(self.seconds[faster], self.seconds["ours"], strict=True)]


def compare(shape: Shape, rounds: int, warmup: int = 3) -> Compared:
    """Time the three, each round in another order."""
    torch.manual_seed(0)
    made = {name: make(shape) for name, make in MAKERS.items()}
    for step, _ in made.values():
        for _ in range(warmup):
            step()
    seconds = in_turns({name: step for name, (step, _) in made.items()}, rounds)
    return Compared(shape, seconds, {name: parameters for name, (_, parameters) in made.items()})


def in_turns(
    steps: Mapping[str, Step], rounds: int, wait: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of every step by round, each round in another order. `wait`: until the device is done."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            wait()
            began = time.perf_counter()
            steps[name]()
            wait()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def table(results: Sequence[Compared]) -> str:
    """One line for each precision and trainer."""
    rows = []
    for result in results:
        tokens = result.shape.batch * result.shape.context
        ratio, low, high = np.percentile(result.ratios(), [50, 25, 75])
        for name, seconds in result.seconds.items():
            middle = statistics.median(seconds)
            speed = f"{ratio:.2f} ({low:.2f} to {high:.2f})" if name == "ours" else ""
            millions = f"{result.parameters[name] / 1e6:.2f}"
            rows.append(
                (result.shape.dtype, name, f"{middle * 1e3:.1f}", f"{tokens / middle:.0f}", millions, speed)
            )
    headers = (
        "precision",
        "trainer",
        "ms/step",
        "context tok/s",
        "M trained",
        "faster peer's time / ours (quartiles)",
    )
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.speed", description=__doc__.partition("\n")[0]
    )
    for field in fields(Shape):
        if field.name != "dtype":
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, default=field.default)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="may be given twice; default: both")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="write shapes and seconds")
    options = vars(parser.parse_args(argv))
    rounds, json_path, dtypes = (
        options.pop("rounds"),
        options.pop("json"),
        options.pop("dtype") or list(DTYPES),
    )
    warnings.filterwarnings("ignore")
    results = []
    for dtype in dtypes:
        try:
            results.append(compare(replace(Shape(**options), dtype=dtype), rounds))
        except ImportError as error:
            print(f"error: a peer is not installed: {error} (nox -s peers installs them)", file=sys.stderr)
            return 2
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {rounds} rounds, {options}")
    print(table(results))
    if json_path:
        tree = [{"shape": asdict(r.shape), "parameters": r.parameters, "seconds": r.seconds} for r in results]
        Path(json_path).write_text(
            json.dumps({"schema": "dflash-peers/1", "results": tree}, indent=1), encoding="utf-8"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
