"""Weights & Biases: one thread owns the run; no fault of the network or the server reaches training.

`wandb.init` waits for the server, `log` can wait for W&B's own process, `finish` uploads: all of it happens
in the sink's thread, with time-outs. When the server cannot be had the run goes on offline, after one line in
the log; what was written is in the run's folder and `wandb sync` uploads it later."""

from __future__ import annotations

import contextlib
import fnmatch
import importlib.metadata
import importlib.util
import inspect
import json
import logging
import os
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from dflash.observe.sinks.base import Row, RowKind, Sink, Surroundings
from steptime.errors import UserError
from steptime.files import atomic_text

if TYPE_CHECKING:
    from dflash.observe.state import State

logger = logging.getLogger("dflash.observe")

ELAPSED, STEP, TRAIN_STEP = "monitor/elapsed_s", "monitor/step", "train/step"
TRAIN_EVERY_S = 1.0
"""Training scalars go to W&B at most this often, the latest first; metrics.jsonl has them all. W&B's limit is
100,000 points of a metric, and a call holds the interpreter's lock for about 0.3 ms."""


ID_FILE = "wandb-run.json"
STEPS_PER_LEG = 10_000_000
"""More than a leg logs. W&B's own step of a later leg begins at a multiple of it."""
EVENTS = 100
"""Events that the run's summary on W&B shows, the newest ones."""


class WandbSink(Sink):
    """Logs flush windows and training scalars, each family over its own step key; never passes `step=`.

    W&B's own sampling is off while ours of the GPUs is on, so that they are not asked twice.
    """

    name: ClassVar[str] = "wandb"
    kinds: frozenset[RowKind] = frozenset({"run", "metrics", "rank", "train", "event", "summary"})
    switch: ClassVar[str] = "wandb"

    def __init__(self, run: Surroundings) -> None:
        # Reporting W&B's own errors to the server is one more thing that waits for it.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        self._wandb = _import_wandb()
        self._run_dir, self._config, self._families = run.run_dir, run.config, run.families
        self._quiet_stats, self._timeout_s = "gpu" in run.sampled, run.config.wandb_timeout_s
        self._excluded = re.compile("|".join(map(fnmatch.translate, run.config.wandb_exclude)) or r"(?!)")
        self._wanted: dict[str, bool] = {}
        self._ranks = run.roles.ranks
        self._events: deque[str] = deque(maxlen=EVENTS)
        # An `init` under way with its grace period, and a `finish`.
        self.close_timeout_s = 2 * self._timeout_s + 15.0
        self._run: Any = None
        self._train: Row | None = None
        self._train_logged_s = float("-inf")

    @classmethod
    def examine(cls) -> tuple[State, str]:
        if importlib.util.find_spec("wandb") is None:
            return "absent", "wandb is not installed: rows go to metrics.jsonl only"
        version = importlib.metadata.version("wandb")
        host = os.environ.get("WANDB_BASE_URL", "api.wandb.ai").partition("://")[2] or "api.wandb.ai"
        netrc = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
        known = bool(os.environ.get("WANDB_API_KEY")) or (
            netrc.exists() and host.partition(":")[0] in netrc.read_text(errors="ignore")
        )
        login = "a key is set" if known else "no key: runs are kept offline (wandb login, or WANDB_API_KEY)"
        return ("ok" if known else "absent"), f"wandb {version}; {login}"

    # -- the sink's thread -----------------------------------------------------------------------------------

    def open(self) -> None:
        if self._config.wandb == "online":
            try:
                self._check_login()
                self._run = self._init("online")
                return
            except Exception as error:
                logger.warning("wandb: offline, since %s; `wandb sync` uploads later", _first_line(error))
                with contextlib.suppress(Exception):
                    self._wandb.teardown()  # its process still holds the run's id
        self._run = self._init("offline")

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            if row.kind in ("metrics", "rank"):
                values = self._without_excluded(row.values) | {ELAPSED: row.elapsed_s, STEP: row.step}
                if "train/mfu" in values:  # the one key of its family that comes in these rows
                    values[TRAIN_STEP] = row.step
                self._log(values)
            elif row.kind == "train" and "train/loss" not in row.values:  # measured between two steps
                self._log({**row.values, TRAIN_STEP: row.step, ELAPSED: row.elapsed_s})
            elif row.kind == "train":
                self._train = row
                if row.elapsed_s - self._train_logged_s >= TRAIN_EVERY_S:
                    self._log_train()
            elif row.kind == "event":
                self._events.append(f"step {row.step}: {row.values.get('text', '')}")
                self._summarise({"run/events": "\n".join(self._events)})
            elif row.kind == "run":
                settings = {"roles": row.values, **self._settings_of_run()}
                self._ask(partial(_set_config, settings))
            elif row.kind == "summary":
                self._log_train()
                self._summarise({f"run/{key}": value for key, value in row.values.items() if _plain(value)})

    def close(self) -> None:
        self._log_train()
        folder = Path(self._run.dir).parent
        try:
            self._run.finish()
        except Exception as error:
            logger.warning("wandb: not all uploaded: %s; later: wandb sync %s", _first_line(error), folder)

    # -- W&B -------------------------------------------------------------------------------------------------

    def _check_login(self) -> None:
        """Without credentials `init` would ask on the terminal. Looks only on this machine."""
        wandb = self._wandb
        if os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
            return
        if "prompt" in inspect.signature(wandb.login).parameters:
            found = wandb.login(prompt=False, verify=False)
        else:  # before 0.31
            found = bool(wandb.api.api_key)
        if not found:
            raise RuntimeError("there is no login (`wandb login`, or WANDB_API_KEY)")

    def _init(self, mode: Literal["offline", "online"]) -> Any:
        settings = self._wandb.Settings(
            init_timeout=self._timeout_s,
            finish_timeout=self._timeout_s,
            finish_timeout_raises=True,
            console="off",
            silent=True,
            save_code=False,
            disable_git=True,
            **self._experimental(
                {
                    "x_disable_stats": self._quiet_stats,
                    "x_service_wait": self._timeout_s,
                    # Listing the installed packages reads hundreds of files under the interpreter's lock.
                    "x_save_requirements": False,
                }
            ),
        )
        project, folder = self._config.wandb_project, str(self._run_dir)
        leg = next_leg(self._run_dir)
        run = self._wandb.init(
            project=project,
            dir=folder,
            mode=mode,
            settings=settings,
            reinit="create_new",
            id=leg.run_id,
            # Offline W&B takes no `resume`, and says so; the id alone makes it the same run.
            resume="allow" if mode == "online" else None,
        )
        if mode == "offline" and leg.number:
            # W&B drops rows whose own step is not over the last one, and knows no earlier leg here.
            run.log({}, step=leg.number * STEPS_PER_LEG)
        for family in self._families:
            step = TRAIN_STEP if family in ("train", "heldout") else ELAPSED
            run.define_metric(f"{family}/*", step_metric=step)
        for rank in range(1, self._ranks):
            run.define_metric(f"rank{rank}/*", step_metric=ELAPSED)
        return run

    def _experimental(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that a version of W&B may not have."""
        return {key: value for key, value in wanted.items() if key in self._wandb.Settings.model_fields}

    def _log_train(self) -> None:
        row, self._train = self._train, None
        if row is not None:
            self._train_logged_s = row.elapsed_s
            self._log({**row.values, TRAIN_STEP: row.step, ELAPSED: row.elapsed_s})

    def _log(self, values: Mapping[str, Any]) -> None:
        """Only host numbers: W&B would materialise a tensor, which waits for the GPU."""
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._ask(lambda run: run.log(numbers))

    def _summarise(self, values: Mapping[str, Any]) -> None:
        self._ask(lambda run: run.summary.update(values))

    def _ask(self, call: Callable[[Any], object]) -> None:
        """Every call goes to W&B's own process, and raises when that is gone."""
        try:
            call(self._run)
        except Exception as error:
            logger.warning(
                "wandb: its process is gone (%s); a new offline run takes over", _first_line(error)
            )
            with contextlib.suppress(Exception):
                self._wandb.teardown()
            self._run = self._init("offline")
            call(self._run)

    def _without_excluded(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The same keys come every time: each is matched once."""
        wanted = self._wanted
        for key in values.keys() - wanted.keys():
            own = re.sub(r"^rank\d+/", "", key)
            wanted[key] = not (self._excluded.match(key) or self._excluded.match(own))
        return {key: value for key, value in values.items() if wanted[key]}

    def _settings_of_run(self) -> dict[str, Any]:
        path = self._run_dir / "config.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@dataclass(frozen=True)
class Leg:
    """One start of a run. `number` counts from 0."""

    run_id: str
    number: int


def next_leg(run_dir: Path) -> Leg:
    """The run's W&B id, made at its first start and kept in its folder, and which start this is."""
    file = run_dir / ID_FILE
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        leg = Leg(str(before["id"]), int(before["leg"]) + 1)
    except (OSError, ValueError, KeyError, TypeError):
        leg = Leg(secrets.token_hex(4), 0)
    with contextlib.suppress(OSError, UserError), atomic_text(file) as stream:
        stream.write(json.dumps({"id": leg.run_id, "leg": leg.number}))
    return leg


def _import_wandb() -> Any:
    """All that holds the interpreter's lock for long, before the workers start: imports, also those that
    `init` and its reporting would do themselves (a second), and the start of W&B's own process."""
    import wandb

    for name in ("wandb.sdk.launch", "requests", "yaml"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(Exception):  # `open` meets the same fault again, and says so
        wandb.setup()
    return wandb


def _set_config(settings: Mapping[str, Any], run: Any) -> None:
    run.config.update(settings, allow_val_change=True)


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
