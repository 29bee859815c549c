"""`dflash eval`: acceptance length, speed-up and losslessness of a drafter on real prompts."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.config import Config, load_config
from steptime.errors import UserError

if TYPE_CHECKING:
    import torch

    from dflash.models.drafter import Drafter, DrafterShape
    from dflash.models.target import Target


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="eval")(evaluate)


def evaluate(
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file; default: the settings of the run.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting over the file's.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", metavar="DIR", help="A run's folder or a step-... one.")
    ] = None,
    drafter: Annotated[
        Path | None, typer.Option("--drafter", metavar="DIR", help="A released drafter, either form.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            help="JSONL or Parquet; default: the built-in corpus's held-out part.",
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Only the first so many prompts.")] = 32,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Longest answer.")] = 128,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 is greedy, and checked to be lossless.")
    ] = 0.0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="With a temperature: only the likeliest tokens.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the sampling.")] = 0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Prompts decoded together.")] = 1,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Ask the template for it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder for eval.json and slots.svg.")
    ] = None,
) -> int:
    """Decode prompts with the target alone and with the drafter's help, and say slot by slot what training
    promised. Exit code 1: a greedy text is not the target's own."""
    from dflash.decode import evaluate as evaluating
    from dflash.decode.between import table as between_table
    from dflash.decode.figures import summarise, table
    from dflash.decode.modes import modes_of
    from dflash.decode.prompts import read_prompts, stop_ids
    from dflash.decode.sampling import Sampler
    from dflash.device import one_device
    from dflash.models.target import inspect_target, load_target
    from dflash.release.released import check_against_target

    sampler = Sampler(temperature, top_p, seed)
    subject = _subject(config, settings or [], checkpoint, drafter)
    loaded, shape = subject.config, subject.shape
    with one_device(loaded.target.devices[0]) as device:
        info = inspect_target(loaded.target)
        check_against_target(shape, info, str(subject.where))
        tokenizer, file = _tokenizer_and_file(loaded, prompts)
        sizes: dict[str, Any] = {
            "limit": limit,
            "context": info.max_positions,
            "max_new_tokens": max_new_tokens,
        }
        rendering: dict[str, Any] = {"longest": loaded.data.max_length, "reasoning": loaded.data.reasoning}
        read = read_prompts(
            file, tokenizer, info.vocab_size, cache=loaded.data.cache, thinking=thinking, **sizes, **rendering
        )
        sys.stderr.write(f"dflash: loading {info.model} on {loaded.target.devices[0]}\n")
        target = load_target(loaded.target, device, info)
        model = build(target, shape, subject.tensors, str(subject.where))
        decoding: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "stop_ids": stop_ids(target, tokenizer),
        }
        results = evaluating.evaluate(target, model, read, sampler=sampler, batch=batch, **decoding)
        if not any(result.cycles for result in results):
            raise UserError(f"{file}: every answer ended with its first token, so nothing was drafted")
        figures = summarise(results, shape.block_size)
        trained = loaded if checkpoint is not None else None
        modes = modes_of(tokenizer, read, results, thinking, trained)
        between = evaluating.compare(target, model, read, results, figures, modes, subject.logged_tau)
    about = subject.about | {
        "name": loaded.name,
        "drafter": str(subject.where),
        "target": info.model,
        "prompts_file": str(file),
        "block_size": shape.block_size,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "batch": batch,
        "dtype": loaded.target.dtype,
        "device": loaded.target.devices[0],
    }
    folder = out or Path("runs") / f"eval-{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    written = evaluating.write(folder, figures, results, about, between)
    sys.stdout.write(table(figures, results))
    sys.stdout.write(between_table(between))
    sys.stdout.write("\n".join(f"wrote {path}" for path in written) + "\n")
    return 1 if figures.checked and not figures.lossless else 0


@dataclass(frozen=True)
class _Subject:
    config: Config
    shape: DrafterShape
    tensors: Mapping[str, torch.Tensor]
    where: Path
    about: dict[str, Any]
    logged_tau: float | None = None


def _subject(
    config: Path | None, settings: list[str], checkpoint: Path | None, drafter: Path | None
) -> _Subject:
    """The drafter to evaluate, and the settings it is evaluated under."""
    from dflash.commands.export import settings_of
    from dflash.pipeline.trained import load_trained
    from dflash.release.released import load_released

    if checkpoint is not None and drafter is None:
        trained = load_trained(checkpoint)
        loaded = load_config(config or settings_of(trained), settings)
        about, logged = {"step": trained.step}, trained.logged_tau
        found = _Subject(loaded, trained.shape, trained.tensors, trained.path, about, logged)
    elif drafter is not None and checkpoint is None:
        shape, tensors = load_released(drafter)
        found = _Subject(load_config(config, settings), shape, tensors, drafter, {})
    else:
        raise UserError(
            "give one of --checkpoint DIR (of a training run) and --drafter DIR (a released drafter)"
        )
    # The drafter knows which layers it was trained on; the config's taps are for training.
    target = found.config.target.model_copy(update={"layer_ids": found.shape.target_layer_ids})
    return replace(found, config=found.config.model_copy(update={"target": target}))


def build(target: Target, shape: DrafterShape, tensors: Mapping[str, torch.Tensor], where: str) -> Drafter:
    """A drafter beside the target: on its device and in its type."""
    from dflash.release.released import build_drafter

    return build_drafter(shape, tensors, target.device.torch, target.embedding.dtype, where)


def _tokenizer_and_file(config: Config, prompts: Path | None) -> tuple[Any, Path]:
    from dflash.data.conversations import load_tokenizer, stdlib_file
    from dflash.data.rows import data_files, read_rows

    if prompts is None:
        if config.data.path != "stdlib":
            raise UserError(
                "give --prompts FILE: the run was trained on a file of your own, which has no held-out part"
            )
        tokenizer = load_tokenizer(config)
        return tokenizer, stdlib_file(config.data, tokenizer, "heldout")
    first = next(iter(read_rows(data_files(prompts)[0])), None)
    if first is not None and isinstance(first.value, dict) and first.value.get("input_ids") is not None:
        try:
            return load_tokenizer(config), prompts
        except UserError:
            return None, prompts
    return load_tokenizer(config), prompts
