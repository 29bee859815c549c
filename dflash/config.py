"""One typed tree of settings: TOML in, `--set key=value` over it, unknown keys refused with the nearest known
one."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steptime.errors import UserError, nearest

Dtype = Literal["auto", "float32", "bfloat16"]
Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Effect(StrEnum):
    """What a setting may do to a run that goes on from a checkpoint."""

    TRAINING = "changes what is learnt"
    PLACE = "changes where and how the same is learnt"
    OBSERVING = "only observes"


_T = TypeVar("_T")
Trains = Annotated[_T, Effect.TRAINING]
"""A resumed run must have it as it was."""
Places = Annotated[_T, Effect.PLACE]
"""A resumed run may have another one."""
Observes = Annotated[_T, Effect.OBSERVING]
"""A resumed run may have another one."""


LOCAL_PATHS = (
    ("data", "path"),
    ("data", "heldout"),
    ("data", "tokenizer"),
    ("target", "model"),
    ("drafter", "init"),
)
"""Settings that may name a file or folder on this machine."""
BUILT_IN = ("stdlib", "tiny-hybrid")
"""Their values that name none."""


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, a docstring under each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class DataConfig(Section):
    """Where the conversations come from and how they become batches."""

    path: Places[str] = "stdlib"
    """JSONL or Parquet file of conversations or token ids; `stdlib` builds the corpus of Python's standard
    library. A resumed run compares the samples, not the path."""
    tokenizer: Places[str] = ""
    """Folder or id of a Hugging Face tokenizer. Empty: the target's own, or the one trained with the `stdlib`
    corpus."""
    cache: Places[str] = "cache"
    """Folder for what `dflash prepare` builds."""
    workers: Places[NonNegative] = 0
    """Processes that tokenise a large data set; 0: one for each core."""
    max_length: Trains[Positive] = 512
    """Longest sample, tokens; longer ones are cut."""
    buckets: Trains[tuple[Positive, ...]] = (128, 256, 512)
    """Padded lengths, tokens, ascending; the last one must be max_length."""
    batch_size: Trains[Positive] = 4
    """Samples in a batch (one micro-batch of one drafter)."""
    heldout: Places[str] = ""
    """File as `path`, of samples that are not trained on: the drafter's loss on them is measured while it
    trains."""
    heldout_batches: Places[Positive] = 4
    """Batches of them that are looked at."""
    prefetch: Places[Positive] = 4
    """Batches built ahead of the target workers."""
    seed: Trains[NonNegative] = 0
    """Order of the samples and place of the anchors."""
    skip_bad: Trains[bool] = False
    """Count and list bad lines instead of refusing the file."""
    reasoning: Trains[Literal["train", "mask"]] = "train"
    """Reasoning text in assistant turns: trained on, or masked out of the loss."""
    turns: Trains[Literal["all", "last"]] = "all"
    """Which assistant turns are supervised."""
    pack: Trains[bool] = False
    """Several short samples in one row, no block across documents."""


class TinyTarget(Section):
    """Shape of the built-in target `tiny-hybrid`: a Qwen3.5 text model (gated delta net + full attention)
    from a seed."""

    hidden_size: Trains[Positive] = 128
    intermediate_size: Trains[Positive] = 384
    layers: Trains[Positive] = 8
    heads: Trains[Positive] = 4
    kv_heads: Trains[Positive] = 2
    head_dim: Trains[Positive] = 32
    linear_heads: Trains[Positive] = 4
    linear_head_dim: Trains[Positive] = 32
    full_attention_interval: Trains[Positive] = 4
    vocab_size: Trains[Positive] = 4096
    seed: Trains[NonNegative] = 0


class TargetConfig(Section):
    """The frozen model being drafted for."""

    model: Trains[str] = "tiny-hybrid"
    """Folder or id of a Hugging Face causal language model, or the built-in `tiny-hybrid`."""
    devices: Places[tuple[str, ...]] = ("cpu",)
    """One worker thread for each, e.g. `["cuda:0", "cuda:1"]`."""
    dtype: Trains[Dtype] = "float32"
    """`auto`: bfloat16 where the devices compute in it at full speed, else float32."""
    taps: Trains[Positive] = 5
    """Number of tapped layers when layer_ids is empty."""
    layer_ids: Trains[tuple[NonNegative, ...]] = ()
    """Tapped decoder layers; id j is the output of layer j. Empty: evenly from layer 1 to layer L-3."""
    tiny: TinyTarget = TinyTarget()


class DrafterConfig(Section):
    """The model trained: Qwen3-shaped layers over blocks of mask tokens."""

    devices: Places[tuple[str, ...]] = ("cpu",)
    dtype: Trains[Dtype] = "float32"
    """Type of the working weights; masters and moments are float32. `auto` as for the target."""
    layers: Trains[Positive] = 5
    heads: Trains[Positive] = 32
    kv_heads: Trains[Positive] = 8
    head_dim: Trains[Positive] = 128
    hidden_size: Trains[NonNegative] = 0
    """Must equal the target's; 0 takes it from there."""
    intermediate_size: Trains[NonNegative] = 0
    """0: the target's."""
    block_size: Trains[Annotated[int, Field(ge=2)]] = 16
    anchors: Trains[Positive] = 512
    """Blocks in each conversation; constant, so that shapes never change. With `data.pack` a row has as many
    as its fullest row needs."""
    mask_token_id: Trains[int | None] = None
    """Row of the target's embedding used for mask slots. None: the tokenizer's `<|MASK|>`, or the known id of
    the family."""
    mask_in_data: Places[bool] = False
    """Allow a mask token that the data also holds."""
    rope_theta: Trains[float] = 1e6
    rms_norm_eps: Trains[float] = 1e-6
    sliding_window: Trains[Positive] = 2048
    sliding_layers: Trains[NonNegative] = 0
    """How many of the first layers use sliding-window attention."""
    attention: Places[Literal["auto", "split", "dense", "flex"]] = "auto"
    compile: Places[bool | Literal["auto"]] = False
    """One compiled kernel for each elementwise operation. `auto`: on CUDA where there is Triton; on the CPU
    the written-out operations are faster (docs/performance.md). The warm-up compiles, never a worker."""
    init: Trains[str] = ""
    """Folder of a released drafter to start from."""


class ObjectiveConfig(Section):
    """What the drafter minimises."""

    kind: Trains[str] = "ce"
    """Name of an objective: `ce`, `dpace`, `kd`; each is a file in `dflash/models/objectives/`."""
    gamma: Trains[float] = 0.0
    """Decay of the slot weights exp(-(k-1)/gamma). 0: 7, 5 or 4 by block size 16, 10 or 8."""
    dpace_alpha: Trains[Fraction] = 0.5
    kd_weight: Trains[Fraction] = 0.5
    """Share of the distillation term when kind is `kd`."""
    chunk_slots: Places[Positive] = 2048
    """Slots whose logits exist at one time."""


class QueueConfig(Section):
    """The shared queue of hidden states."""

    capacity: Places[Positive] = 24
    """Batches that may wait."""
    hs_min_ready: Places[NonNegative] = 10
    """A drafter draws only when so many wait (or no more will come)."""
    ordered: Trains[bool] = False
    """Batches reach the drafters in the order of the plan, so that one seed gives the same losses bit for
    bit. Several drafters are then slower where lengths differ: mixed order gives them equal work."""
    hand_over: Places[Literal["auto", "peer", "pinned"]] = "auto"
    """How hidden states come to another GPU: copied between the two (`peer`), or through pinned host memory
    (`pinned`). `auto`: peer where the two can reach each other."""


class TrainConfig(Section):
    """Optimizer, schedule, checkpoints."""

    steps: Trains[Positive] = 1000
    lr: Trains[Annotated[float, Field(ge=0.0)]] = 6e-4
    min_lr_ratio: Trains[Fraction] = 0.0
    warmup: Trains[Fraction] = 0.04
    """Share of the steps with a rising rate."""
    schedule: Trains[Literal["planned", "extend"]] = "planned"
    """The rate of a resumed run that gets more steps. `planned`: as if so many had been planned from the
    start; `extend`: the steps done keep the rate they had, and the added ones rise and fall once more."""
    legs: Trains[tuple[Positive, ...]] = ()
    """Steps at which the rate ends a fall and rises anew; `schedule = "extend"` writes them."""
    betas: Trains[tuple[float, float]] = (0.9, 0.999)
    eps: Trains[float] = 1e-8
    weight_decay: Trains[Annotated[float, Field(ge=0.0)]] = 0.0
    clip: Trains[Annotated[float, Field(gt=0.0)]] = 1.0
    accumulation: Trains[Positive] = 1
    """Batches each drafter takes for one optimizer step."""
    seed: Trains[NonNegative] = 0
    """Initial weights of the drafter."""
    checkpoint_every: Places[NonNegative] = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_checkpoints: Places[Positive] = 2
    """The newest so many stay; the one with the best held-out loss stays too."""
    heldout_every: Places[NonNegative] = 0
    """Steps between two looks at the held-out loss; 0: as often as checkpoints. Needs `data.heldout`."""
    tau_prompts: Places[NonNegative] = 4
    """Held-out prompts that are decoded at each such look, for `train/tau`; 0: none. Training stands still
    meanwhile."""
    tau_tokens: Places[Annotated[int, Field(ge=2)]] = 64
    """Longest of their answers."""
    rank_timeout_s: Places[Annotated[float, Field(gt=0.0)]] = 60.0
    """Several ranks (torchrun): how long to wait for the others at the start, and for a sign of life of one;
    then the run ends on all ranks, with a checkpoint."""
    hang_s: Places[Annotated[float, Field(ge=0.0)]] = 300.0
    """A worker that stands in one place for so long has hung: the run ends, and its state is saved. 0: it
    never does."""
    threads_per_worker: Places[NonNegative] = 0
    """CPU threads of each worker; 0: the cores shared out evenly."""


class ObserveConfig(Section):
    """Collectors, monitor and sinks."""

    collectors: Observes[tuple[str, ...]] = ("all",)
    """Names of the collectors that are on at the start; `all` stands for every one."""
    tick_s: Observes[Annotated[float, Field(gt=0.0)]] = 1.0
    flush_s: Observes[Annotated[float, Field(gt=0.0)]] = 10.0
    terminal: Observes[Literal["auto", "live", "plain", "off"]] = "auto"
    wandb: Observes[Literal["off", "offline", "online"]] = "offline"
    wandb_project: Observes[str] = "dflash"
    wandb_timeout_s: Observes[Annotated[float, Field(gt=0.0)]] = 10.0
    wandb_exclude: Observes[tuple[str, ...]] = (
        *("*/*/samples", "*/*/batches", "*/*/step", "*/*/busy_s", "*/*/host_s", "profile/*_count"),
        *("profile/*_p95", "host/process_s", "host/prefetcher_s", "host/lock_wakes"),
        *("cuda/*/device_allocs", "cuda/*/max_reserved_gb", "gpu/*/throttle_power_brake_hw"),
        *("rank*/batch/*", "rank*/cuda/*", "rank*/host/*", "rank*/monitor/*", "rank*/profile/*"),
    )
    """Shell patterns of keys that W&B does not get: eight GPUs have 281 keys, and it copes well with 200. The
    other sinks get every key. A pattern holds for the keys of the other ranks too (`rank1/...`)."""
    tensorboard: Observes[bool] = False
    sinks: Observes[tuple[str, ...]] = ()
    """Names of further sinks, those that have no key of their own."""
    ring: Observes[Positive] = 64
    """Pending GPU event pairs of a stage and late scalars of a drafter; more are dropped and counted."""


class Config(Section):
    """Everything a run depends on."""

    name: Observes[str] = "default"
    data: DataConfig = DataConfig()
    target: TargetConfig = TargetConfig()
    drafter: DrafterConfig = DrafterConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    queue: QueueConfig = QueueConfig()
    train: TrainConfig = TrainConfig()
    observe: ObserveConfig = ObserveConfig()

    def anchored(self, folder: Path) -> Config:
        """The same with every local path that exists below `folder` made absolute, for a process that runs
        elsewhere."""
        tree = self.model_dump()
        for section, key in LOCAL_PATHS:
            value = tree[section][key]
            if value and value not in BUILT_IN and (folder / value).exists():
                tree[section][key] = str((folder / value).absolute())
        return Config.model_validate(tree)

    def leaves(self) -> dict[str, Any]:
        """Every setting by its full key (`train.lr`), as JSON has it."""
        return dict(_leaves(self.model_dump(mode="json"), type(self), ""))

    def digest(self) -> str:
        """Sixteen hex digits over every setting; a config's identity in receipts and baselines."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _leaves(tree: dict[str, Any], section: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        inner = _section(section, name)
        if inner is None:
            yield prefix + name, value
        else:
            yield from _leaves(value, inner, f"{prefix}{name}.")


def _section(parent: type[BaseModel], name: str) -> type[BaseModel] | None:
    annotation = parent.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def effects(section: type[BaseModel] = Config, prefix: str = "") -> dict[str, Effect]:
    """What each setting does to a run that goes on, by its full key."""
    found: dict[str, Effect] = {}
    for name, field in section.model_fields.items():
        inner = _section(section, name)
        if inner is None:
            (found[prefix + name],) = (part for part in field.metadata if isinstance(part, Effect))
        else:
            found |= effects(inner, f"{prefix}{name}.")
    return found


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file, or the config.json that a run left (None: all defaults), and lay `key.sub=value`
    settings over it.

    Raises:
        UserError: missing or broken file, unknown key, value of the wrong type, settings that contradict each
            other.
    """
    tree: dict[str, Any] = {}
    where = "defaults"
    if path is not None:
        where = str(path)
        try:
            text = Path(path).read_text(encoding="utf-8")
            tree = json.loads(text) if Path(path).suffix == ".json" else tomllib.loads(text)
        except OSError as error:
            raise UserError(f"{where}: cannot read the config: {error.strerror}") from None
        except (
            ValueError,
            RecursionError,
        ) as error:  # what tomllib and json raise, and bytes that are no text
            kind = "JSON" if Path(path).suffix == ".json" else "TOML"
            raise UserError(f"{where}: not valid {kind}: {error}") from None
        if not isinstance(tree, dict):
            raise UserError(f"{where}: holds a {type(tree).__name__}, not settings")
        tree.setdefault("name", Path(path).stem)
    for setting in overrides:
        _override(tree, setting)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error)}") from None
    check(config, where)
    return config


def _override(tree: dict[str, Any], text: str) -> None:
    key, separator, raw = text.partition("=")
    if not separator or not key.strip():
        raise UserError(f"--set {text}: expected key=value, e.g. --set train.steps=100")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except (ValueError, RecursionError):
        value = raw
    *parents, leaf = key.strip().split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise UserError(f"--set {text}: {parent!r} is a value, not a section")
        node = child
    node[leaf] = value


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] = Config
        for part in first["loc"][:-1]:
            annotation = section.model_fields[str(part)].annotation
            assert isinstance(annotation, type)
            section = annotation
        leaf = str(first["loc"][-1])
        return f"unknown key {key!r}{nearest(leaf, section.model_fields)}"
    return f"{key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def check(config: Config, where: str) -> None:
    """Refuse settings that contradict each other, before anything is loaded."""
    data, queue, drafter = config.data, config.queue, config.drafter
    if list(data.buckets) != sorted(set(data.buckets)):
        raise UserError(f"{where}: data.buckets = {list(data.buckets)}: must be ascending without repeats")
    if data.buckets[-1] != data.max_length:
        raise UserError(
            f"{where}: data.buckets ends at {data.buckets[-1]}, data.max_length is {data.max_length}: must "
            "agree"
        )
    if queue.hs_min_ready > queue.capacity:
        raise UserError(
            f"{where}: queue.hs_min_ready = {queue.hs_min_ready} is over queue.capacity = {queue.capacity}"
        )
    legs, steps = config.train.legs, config.train.steps
    if list(legs) != sorted(set(legs)) or (legs and legs[-1] >= steps):
        raise UserError(f"{where}: train.legs = {list(legs)}: must ascend, all below train.steps = {steps}")
    if config.train.heldout_every and not data.heldout:
        raise UserError(f"{where}: train.heldout_every needs data.heldout, a file of samples to look at")
    if drafter.heads % drafter.kv_heads:
        raise UserError(
            f"{where}: drafter.heads = {drafter.heads} is no multiple of drafter.kv_heads = "
            f"{drafter.kv_heads}"
        )
    if drafter.sliding_layers > drafter.layers:
        raise UserError(
            f"{where}: drafter.sliding_layers = {drafter.sliding_layers} is over drafter.layers = "
            f"{drafter.layers}"
        )
    if not config.target.devices or not drafter.devices:
        raise UserError(f"{where}: target.devices and drafter.devices need at least one device each")
    for device in (*config.target.devices, *drafter.devices):
        kind, _, index = device.partition(":")
        if kind not in ("cpu", "cuda", "sim") or (index and not index.isdigit()):
            raise UserError(
                f"{where}: device {device!r}: must be 'cpu', 'cpu:N', 'cuda', 'cuda:N' or 'sim:N'"
            )
