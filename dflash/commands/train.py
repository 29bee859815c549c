"""`dflash train`: conversations in, a drafter checkpoint out."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from dflash.config import Config, load_config
from steptime.errors import UserError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="train")(train)


def train(
    config: Annotated[Path | None, typer.Option("--config", help="TOML file; see configs/.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting over the file's.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Run folder. An unfinished run there is resumed.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan (devices, sizes, memory, steps) and stop.")
    ] = False,
    sync_guard: Annotated[
        str,
        typer.Option(
            "--sync-guard", metavar="allow|log|disallow", help="What happens at a host sync in a worker."
        ),
    ] = "allow",
) -> int:
    """Train a drafter. Ctrl-C finishes the step, writes a checkpoint and ends; the same command goes on from
    there."""
    loaded = load_config(config, settings or ())
    if sync_guard not in ("allow", "log", "disallow"):
        raise UserError(f"--sync-guard {sync_guard}: must be allow, log or disallow")
    if dry_run:
        from dflash.pipeline.dry_run import print_plan

        print_plan(loaded)
        return 0
    run_dir = out or Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return _run(loaded, run_dir, sync_guard)


def _run(config: Config, run_dir: Path, sync_guard: str) -> int:
    from dflash.data.prepare import list_skipped
    from dflash.observe.observer import Observer
    from dflash.observe.roles import RoleMap
    from dflash.observe.syncs import NO_SCOPES, Scopes
    from dflash.observe.syncs.guard import GuardScopes
    from dflash.pipeline import summary
    from dflash.pipeline.build import prepare_inputs
    from dflash.pipeline.supervisor import WorkerFailed
    from dflash.pipeline.trainer import Trainer, resume_state

    inputs = prepare_inputs(config)
    config = inputs.config
    sys.stderr.write(f"{config.data.path}: {inputs.dataset.summary()}\n")
    if config.data.skip_bad:
        sys.stderr.writelines(f"{line}\n" for line in list_skipped(inputs.dataset.skipped))
    resume = resume_state(run_dir, config)
    if resume is not None and resume.progress.step >= config.train.steps:
        sys.stderr.write(f"dflash: {run_dir} is finished: {resume.progress.step} steps done\n")
        return 0
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.json").write_text(config.model_dump_json(indent=1), encoding="utf-8")
    scopes: Scopes = (
        NO_SCOPES if sync_guard == "allow" else GuardScopes("log" if sync_guard == "log" else "disallow")
    )
    observer = Observer(config.observe, run_dir, RoleMap.from_config(config))
    trainer = Trainer(inputs, run_dir, observer, scopes=scopes, resume=resume)
    caught: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        sys.stderr.write("\ndflash: stopping after this step, with a checkpoint; once more to stop at once\n")
        trainer.request_stop()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        result = trainer.run()
    except WorkerFailed as error:
        sys.stderr.write(error.failure.text())
        sys.stderr.write(
            f"dflash: {error.failure.role} failed; the run is stopped, its checkpoints are in {run_dir}\n"
        )
        return 1
    finally:
        seen = observer.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if isinstance(scopes, GuardScopes):
        sys.stderr.writelines(
            f"sync guard: {line}\n" for line in scopes.summary() or ["no host sync in a worker"]
        )
    summary.write(run_dir, config, result, seen.bottleneck)
    sys.stdout.write(summary.text(config, result, run_dir, seen.bottleneck))
    return 128 + caught[0] if caught and not result.finished else 0
