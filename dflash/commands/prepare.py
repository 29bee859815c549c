"""`dflash prepare`: files made ready for training."""

from __future__ import annotations

import contextlib
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dflash.config import Config, load_config
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.data.regenerate import Generator
    from dflash.device import Device


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="prepare")(prepare)


def prepare(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file; see configs/.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting over the file's.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="JSONL, JSON array or Parquet to convert.")
    ] = None,
    user: Annotated[
        list[str] | None, typer.Option("--user", metavar="FIELD", help="Its question; may be given twice.")
    ] = None,
    assistant: Annotated[str | None, typer.Option("--assistant", metavar="FIELD", help="Its answer.")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="FIELD", help="Its system text.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="The chat JSONL to write.")
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count and list bad lines instead of refusing the file.")
    ] = False,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Rewrite the answers with the target; resumes.")
    ] = False,
    split: Annotated[
        str, typer.Option("--split", help="train or heldout, of the built-in corpus.")
    ] = "train",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Only the first so many conversations.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Longest new answer.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Answers generated at a time.")] = 16,
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="Ask the template for it.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Write the target's own token ids, not text.")
    ] = False,
    endpoint: Annotated[
        str | None, typer.Option("--endpoint", metavar="URL", help="A server with OpenAI's interface.")
    ] = None,
    endpoint_model: Annotated[str, typer.Option("--endpoint-model", help="Its name there.")] = "",
) -> int:
    """Make data ready: build the built-in corpus, convert a file to conversations, rewrite answers with the
    target.

    Without --from or --regenerate it reads the data set of the config and says what training would see.
    """
    loaded = load_config(config, settings or ())
    if skip_bad:
        loaded = loaded.model_copy(update={"data": loaded.data.model_copy(update={"skip_bad": True})})
    if split not in ("train", "heldout"):
        raise UserError(f"--split {split}: must be train or heldout")
    if regenerate:
        if user or assistant or system:
            raise UserError(
                "--regenerate reads conversations; convert with --from, --user and --assistant first"
            )
        if tokens and endpoint:
            raise UserError("--tokens: an endpoint gives text only; leave out one of the two")
        if out is None:
            raise UserError("--regenerate: say where the answers go with --out FILE")
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "thinking": thinking}
        return _regenerate(
            loaded, source, split, out, limit, batch, tokens, endpoint, endpoint_model, options
        )
    if source is not None:
        return _convert(loaded, source, user or [], assistant, system, out)
    if user or assistant or system or out:
        raise UserError("--user, --assistant, --system and --out belong to --from FILE")
    return _look(loaded, split, limit)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _say_skipped(skipped: list[tuple[str, str]]) -> None:
    from dflash.data.prepare import list_skipped

    if skipped:
        _say("\n".join([f"{len(skipped):,} lines left out:", *list_skipped(skipped)]))


def _convert(
    config: Config, source: Path, user: list[str], assistant: str | None, system: str | None, out: Path | None
) -> int:
    from dflash.data.prepare import Fields, convert

    if not user or assistant is None or out is None:
        missing = [
            name
            for name, value in (("--user FIELD", user), ("--assistant FIELD", assistant), ("--out FILE", out))
            if not value
        ]
        raise UserError(f"--from {source}: also needs {', '.join(missing)}")
    result = convert(
        source, Fields(tuple(user), assistant, system), out, config.data.skip_bad, config.data.cache
    )
    _say(f"{out}: {result.written:,} conversations")
    _say_skipped(result.skipped)
    _say(f"train on it with: dflash train --set data.path={out}")
    return 0


def _look(config: Config, split: str, limit: int | None) -> int:
    from dflash.data.conversations import open_data

    dataset = open_data(config, split, limit)
    lengths, samples = dataset.lengths, dataset.samples
    supervised = sum(int(sample.loss_mask.sum()) for sample in samples)
    _say(f"{config.data.path}: {dataset.summary()}")
    _say(f"supervised: {supervised:,} tokens, {100 * supervised / lengths.sum():.0f}%")
    edges = [0, *config.data.buckets]
    for low, high in itertools.pairwise(edges):
        count = int(((lengths > low) & (lengths <= high)).sum())
        _say(f"  {low + 1:>6} to {high:>6} tokens: {count:,} samples")
    _say_skipped(dataset.skipped)
    return 0


def _regenerate(
    config: Config,
    source: Path | None,
    split: str,
    out: Path,
    limit: int | None,
    batch: int,
    tokens: bool,
    endpoint: str | None,
    endpoint_model: str,
    options: dict[str, Any],
) -> int:
    from dflash.data.conversations import load_tokenizer, stdlib_file
    from dflash.data.regenerate import ParallelGenerator, read_tasks, regenerate

    data = config.data
    if source is None:
        source = (
            stdlib_file(data, load_tokenizer(config), split) if data.path == "stdlib" else Path(data.path)
        )
    tasks, skipped = read_tasks(source, limit, data.skip_bad, data.cache)
    generator: Generator
    settings = dict(options)
    with contextlib.ExitStack() as stack:
        if endpoint:
            from dflash.data.generators import Endpoint

            server = Endpoint(endpoint, endpoint_model, **options)
            settings |= {"endpoint": endpoint, "model": server.model}
            generator = ParallelGenerator(server, batch)
        else:
            from dflash.device import one_device

            settings |= {"target": config.target.model_dump(mode="json"), "tokenizer": data.tokenizer}
            device = stack.enter_context(one_device(config.target.devices[0]))
            generator = _target_generator(config, device, batch, options)
        report = regenerate(tasks, generator, out, settings, tokens)
    _say(
        f"{out}: {report.written:,} {'rows of tokens' if tokens else 'conversations'}"
        + (f", {report.resumed:,} from before" if report.resumed else "")
    )
    if report.cut:
        _say(
            f"{report.cut:,} answers ran into --max-new-tokens {options['max_new_tokens']}; their end is not "
            "trained on"
        )
    if report.empty:
        _say(
            f"{report.empty:,} conversations left out: no answer within the limit, only a thought, or a "
            "prompt too long"
        )
    if report.inexact and not tokens:
        _say(
            f"{report.inexact:,} answers tokenise differently when read again; --tokens keeps the target's "
            "own ids"
        )
    _say_skipped(skipped)
    return 0


def _target_generator(config: Config, device: Device, batch: int, options: dict[str, Any]) -> Generator:
    from dflash.data.conversations import load_tokenizer
    from dflash.data.generators import TargetGenerator
    from dflash.models.target import inspect_target, load_target

    info = inspect_target(config.target)
    tokenizer = load_tokenizer(config)
    sys.stderr.write(f"dflash: loading {config.target.model} on {config.target.devices[0]}\n")
    target = load_target(config.target, device, info)
    known = getattr(getattr(target.model, "generation_config", None), "eos_token_id", None)
    stops = {tokenizer.eos_token_id, *info.eos_ids, *(known if isinstance(known, list) else [known])} - {None}
    if not stops:
        raise UserError(
            f"target {config.target.model!r}: neither its config nor its tokenizer names a token that ends a "
            "turn"
        )
    return TargetGenerator(
        target.model,
        tokenizer,
        sorted(stops),
        batch=batch,
        context=info.max_positions,
        seed=config.data.seed,
        **options,
    )
