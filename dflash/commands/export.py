"""`dflash export`: a checkpoint in the form that z-lab, SGLang, vLLM or speculators load."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.config import Config, load_config
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.pipeline.trained import Trained


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="export")(export)


def export(
    checkpoint: Annotated[
        Path,
        typer.Option("--checkpoint", metavar="DIR", help="A run's folder, or one of its step-... folders."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not exist yet.")],
    format: Annotated[
        str, typer.Option("--format", metavar="zlab|speculators", help="zlab is also SGLang's and vLLM's.")
    ] = "zlab",
    auto_map: Annotated[
        bool, typer.Option("--auto-map", help="Name z-lab's class for remote code; not for SGLang.")
    ] = False,
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file; default: the settings of the run.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting over the file's.")
    ] = None,
) -> int:
    """Write a drafter for serving: every tensor and setting checked, read back and run before the folder
    appears."""
    from dflash.models.target import inspect_target
    from dflash.pipeline.trained import load_trained
    from dflash.release import export as exporting

    trained = load_trained(checkpoint)
    loaded = load_config(config or settings_of(trained), settings or ())
    info = inspect_target(loaded.target)
    done = exporting.export(
        trained.shape,
        trained.tensors,
        info,
        out,
        format=format,
        auto_map=auto_map,
        taken_ids=taken_ids(loaded),
    )
    sys.stdout.write(
        f"{done.path}: {done.format} form, step {trained.step}, {done.tensors} tensors, "
        f"{done.bytes / 1e6:,.1f} MB bfloat16\n  names, shapes, types read back; config held against "
        f"{info.model}; {done.probes:,} logits of the reloaded one equal\n"
    )
    return 0


def settings_of(trained: Trained) -> Path:
    """The settings that the run left in its folder.

    Raises:
        UserError: they are not there.
    """
    if trained.settings is None:
        raise UserError(f"{trained.path}: its run's config.json is not beside it; give --config FILE")
    return trained.settings


def taken_ids(config: Config) -> frozenset[int]:
    """The tokenizer's pad and end of text, where a tokenizer is at hand."""
    from dflash.data.conversations import load_tokenizer

    try:
        tokenizer = load_tokenizer(config)
    except UserError:  # token ids came ready; the target's config alone says what is taken
        return frozenset()
    return frozenset(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None)
