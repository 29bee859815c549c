"""`dflash train`: conversations in, a drafter checkpoint out."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dflash.config import Config, load_config
from dflash.pipeline.supervisor import Failure, WorkerFailed
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.observe.closing import Closing
    from dflash.observe.timeline.log import Timeline
    from dflash.pipeline.resume import Resumption
    from dflash.pipeline.run_folder import RunFolder
    from dflash.pipeline.trainer import Trainer
    from dflash.ranks.join import Seat
    from dflash.ranks.world import World


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
    simulate: Annotated[
        bool,
        typer.Option("--simulate", help="Try the layout on simulated devices, with a tiny target, and stop."),
    ] = False,
    sync_guard: Annotated[
        str,
        typer.Option(
            "--sync-guard", metavar="allow|log|disallow", help="What happens at a host sync in a worker."
        ),
    ] = "allow",
    timeline: Annotated[
        int,
        typer.Option(
            "--timeline",
            metavar="N",
            help="Write the last N steps as a picture: timeline.json (ui.perfetto.dev) and timeline.svg.",
        ),
    ] = 0,
    spare: Annotated[
        Path | None,
        typer.Option("--spare", help="Folder for the last checkpoint when the run folder's disk is full."),
    ] = None,
) -> int:
    """Train a drafter. Ctrl-C finishes the step, writes a checkpoint and ends; the same command goes on from
    there, also with more steps.

    Exit codes: 0 done, 1 a worker failed, 2 a mistake in the command or its files, 75 a worker hung (try
    again), 128 + the signal when stopped by one."""
    loaded = load_config(config, settings or ())
    if sync_guard not in ("allow", "log", "disallow"):
        raise UserError(f"--sync-guard {sync_guard}: must be allow, log or disallow")
    if timeline < 0:
        raise UserError(f"--timeline {timeline}: must be a number of steps, 0 for no picture")
    from dflash.ranks.join import check_devices, seat

    place = seat()
    devices = (*loaded.target.devices, *loaded.drafter.devices)
    if place is not None:
        check_devices(place, devices)
        if simulate:
            raise UserError(f"--simulate tries one process; WORLD_SIZE = {place.ranks} is set")
    if dry_run:
        from dflash.pipeline.dry_run import print_plan

        if place is None or place.rank == 0:
            print_plan(loaded, ranks=1 if place is None else place.ranks)
        return 0
    if simulate:
        from dflash.pipeline.simulate import simulate_layout

        return simulate_layout(loaded)
    run_dir = out or Path("runs") / f"{loaded.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    choices = Choices(sync_guard, spare, timeline)
    if place is not None:
        return _run_as_rank(loaded, run_dir, choices, place)
    from dflash.device import simulating

    with simulating(devices):
        return _run(loaded, run_dir, choices)


@dataclass(frozen=True)
class Choices:
    """What of the command is no setting of the run."""

    sync_guard: str
    spare: Path | None
    timeline: int


def _run_as_rank(config: Config, run_dir: Path, choices: Choices, place: Seat) -> int:
    from dflash.pipeline.rank_begin import check_settings, received
    from dflash.ranks.join import joined
    from dflash.ranks.watch import RankFailed

    try:
        with joined(
            place,
            targets=config.target.devices,
            drafters=config.drafter.devices,
            timeout_s=config.train.rank_timeout_s,
        ) as world:
            check_settings(world, config)
            if world.first:
                return _run(config, run_dir, choices, world)
            begin = received(world, config)
            return 0 if begin is None else _train(run_dir, begin, choices, world)
    except RankFailed as error:  # before the run began
        sys.stderr.write(f"dflash: {error}; rank {place.rank} ends\n")
        return 1


def _run(config: Config, run_dir: Path, choices: Choices, world: World | None = None) -> int:
    from dflash.pipeline import resume
    from dflash.pipeline.rank_begin import send
    from dflash.pipeline.run_folder import hold

    with hold(run_dir) as folder:
        if folder.leftovers:
            sys.stderr.write(f"dflash: {run_dir}: removed half-written {', '.join(folder.leftovers)}\n")
        begin = resume.find(run_dir, config, 1 if world is None else world.ranks)
        over = begin.steps_done >= begin.config.train.steps
        if world is not None:
            send(world, begin, over)
        if over:
            sys.stderr.write(f"dflash: {run_dir} is finished: {begin.steps_done} steps done\n")
            return 0
        sys.stderr.writelines(f"dflash: {note}\n" for note in begin.notes)
        return _train(run_dir, begin, choices, world, folder)


def _train(
    run_dir: Path,
    begin: Resumption,
    choices: Choices,
    world: World | None = None,
    folder: RunFolder | None = None,
) -> int:
    """The run of this process; it has the folder unless it is a rank over 0."""
    from dflash.data.prepare import list_skipped
    from dflash.observe.closing import closing
    from dflash.observe.observer import Observer
    from dflash.observe.roles import RoleMap
    from dflash.observe.syncs import NO_SCOPES, Scopes
    from dflash.observe.syncs.guard import GuardScopes
    from dflash.observe.timeline.files import write_timeline
    from dflash.pipeline import resume
    from dflash.pipeline.build import measured_rates, prepare_inputs
    from dflash.pipeline.rank_begin import check_samples
    from dflash.pipeline.rank_mail import RankSink
    from dflash.pipeline.trainer import Trainer

    inputs = prepare_inputs(begin.config)
    config = inputs.config
    if folder is not None:
        sys.stderr.write(f"{config.data.path}: {inputs.dataset.summary()}\n")
        if config.data.skip_bad:
            sys.stderr.writelines(f"{line}\n" for line in list_skipped(inputs.dataset.skipped))
        if begin.state is not None:
            resume.check_same_run(begin.state, inputs, str(run_dir))
        folder.write_config(config.model_dump_json(indent=1))
    if world is not None:
        check_samples(world, inputs)
    scopes: Scopes = (
        NO_SCOPES
        if choices.sync_guard == "allow"
        else GuardScopes("log" if choices.sync_guard == "log" else "disallow")
    )
    roles = RoleMap.from_config(config, measured_rates(config), 1 if world is None else world.ranks)
    observer = Observer(
        config.observe,
        run_dir,
        roles,
        sinks=None if world is None or world.first else [RankSink(world.post)],
        timeline=_timeline(config, choices.timeline) if folder is not None else None,
    )
    trainer = Trainer(
        inputs,
        run_dir,
        observer,
        scopes=scopes,
        resume=begin.state,
        keep_scalars=False,
        spare_dir=choices.spare,
        world=world,
    )
    caught: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        sys.stderr.write("\ndflash: stopping after this step, with a checkpoint; once more to stop at once\n")
        trainer.request_stop()

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    failure: Failure | None = None
    try:
        trainer.run()
    except WorkerFailed as error:
        failure = error.failure
    finally:
        if world is not None and world.first:
            world.others_left()
        seen = observer.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
    if isinstance(scopes, GuardScopes):
        sys.stderr.writelines(
            f"sync guard: {line}\n" for line in scopes.summary() or ["no host sync in a worker"]
        )
    if observer.timeline is not None:
        sys.stderr.write(f"{write_timeline(observer.timeline, run_dir, config.name)}\n")
    if folder is None:
        return _close_rank(trainer, failure, caught)
    said = closing(seen.bottleneck, seen.values, observer.roles)
    return _close(trainer, said, failure, caught)


def _timeline(config: Config, steps: int) -> Timeline | None:
    from dflash.observe.timeline.log import Timeline

    batches = config.train.accumulation * len(config.drafter.devices)
    return Timeline(steps, batches, ahead=config.queue.capacity + config.data.prefetch) if steps else None


def _close_rank(trainer: Trainer, failure: Failure | None, caught: list[int]) -> int:
    """The exit code of a rank over 0; rank 0 says the rest."""
    if failure is None or isinstance(failure.error, KeyboardInterrupt):
        return 128 + caught[0] if caught and not trainer.result.finished else 0
    from dflash.pipeline.watchdog import WorkerHung

    sys.stderr.write(f"{_told(failure)}dflash: {failure.line()}; this rank ends\n")
    return 75 if isinstance(failure.error, WorkerHung) else 1


def _told(failure: Failure) -> str:
    """What a user wants to see of a failure beside its line: the worker's stack, unless the line says it
    all."""
    from dflash.pipeline.reports import NonFiniteLoss
    from dflash.pipeline.watchdog import WorkerHung
    from dflash.ranks.watch import RankFailed

    if isinstance(failure.error, WorkerHung):
        return failure.error.stack
    return "" if isinstance(failure.error, NonFiniteLoss | RankFailed) else failure.text()


def _close(trainer: Trainer, said: Closing, failure: Failure | None, caught: list[int]) -> int:
    """The last words of a run, and its exit code."""
    from dflash.pipeline import summary
    from dflash.pipeline.checkpoint import checkpoints
    from dflash.pipeline.run_folder import CHECKPOINTS
    from dflash.pipeline.watchdog import WorkerHung

    config, run_dir, result = trainer.config, trainer.run_dir, trainer.result
    error = failure.error if failure else None
    stopped = isinstance(error, KeyboardInterrupt)
    try:
        told = "" if failure is None else "stopped at once" if stopped else failure.line()
        summary.write(run_dir, config, result, said, told)
    except OSError as problem:
        sys.stderr.write(f"dflash: {run_dir}: the summary could not be written: {problem.strerror}\n")
    if failure is None or stopped:
        sys.stdout.write(summary.text(config, result, run_dir, said))
        return 128 + caught[0] if caught and not result.finished else 0
    sys.stderr.write(_told(failure))
    found = checkpoints(run_dir / CHECKPOINTS)
    saved = f"its last checkpoint is {found[-1]}" if found else "there is no checkpoint of it"
    sys.stderr.write(f"dflash: {failure.line()}; the run is stopped, {saved}\n")
    return 75 if isinstance(error, WorkerHung) else 1
