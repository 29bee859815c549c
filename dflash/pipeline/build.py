"""From settings to the parts of a run, every mistake found before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash.config import Config
from dflash.data.anchors import BlockGeometry
from dflash.data.conversations import data_files, load_samples, load_tokenizer, read_rows, unknown_format
from dflash.data.dataset import Dataset
from dflash.device import Device, check_devices, torch_dtype
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.objectives import OBJECTIVES, make_objective
from dflash.models.target import TargetInfo, inspect_target, load_target, resolve_mask_token
from dflash.observe.registry import COLLECTORS, chosen_sinks
from dflash.release.released import check_same, load_released, warm_start
from steptime.errors import UserError

if TYPE_CHECKING:
    from dflash.models.target import Target
    from dflash.pipeline.drafter_worker import Replica


@dataclass(frozen=True)
class Inputs:
    """What is known of a run before any weight is loaded."""

    config: Config
    info: TargetInfo
    shape: DrafterShape
    geometry: BlockGeometry
    tokenizer: Any
    dataset: Dataset


def prepare_inputs(config: Config, *, skip_devices: bool = False) -> Inputs:
    """Look at the target's config, the tokenizer, the data; refuse what does not fit.

    Raises:
        UserError: one line for the first mistake found.
    """
    check_names(config)
    if not skip_devices:
        check_devices((*config.target.devices, *config.drafter.devices))
    info = inspect_target(config.target)
    # What needs no tokenizer is refused before one is built.
    if config.drafter.mask_token_id is not None:
        resolve_mask_token(config.drafter, info)
    DrafterShape.resolve(config.drafter, info, 0)
    tokenizer = None if brings_token_ids(config) else load_tokenizer(config)
    if tokenizer is not None and len(tokenizer) > info.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary {info.vocab_size}: they do "
            "not belong together"
        )
    shape = DrafterShape.resolve(config.drafter, info, resolve_mask_token(config.drafter, info, tokenizer))
    if config.drafter.init:
        check_same(load_released(config.drafter.init)[0], shape, f"drafter.init = {config.drafter.init!r}")
    geometry = geometry_of(config)
    dataset = load_samples(config.data, tokenizer, vocab_size=info.vocab_size)
    return Inputs(config, info, shape, geometry, tokenizer, dataset)


def check_names(config: Config) -> None:
    """Refuse the name of an objective, a collector or a sink that there is not.

    Raises:
        UserError: with the nearest known name.
    """
    OBJECTIVES[config.objective.kind]
    COLLECTORS.chosen(config.observe.collectors)
    chosen_sinks(config.observe)


def brings_token_ids(config: Config) -> bool:
    """Whether the data is pre-tokenised and no tokenizer was named, so that none is needed. Looks at the
    first row only.

    Raises:
        UserError: there is no such file, nothing in it, or nothing of a known format.
    """
    if config.data.path == "stdlib":
        return False
    file = data_files(Path(config.data.path))[0]
    row = next(read_rows(file, config.data.cache), None)
    if row is None:
        raise UserError(f"{file}: the data set is empty")
    if not isinstance(row.value, dict) or config.data.skip_bad:
        return False
    if row.value.get("input_ids") is not None:
        return not config.data.tokenizer
    if not {"messages", "conversations", "conversation"} & row.value.keys():
        raise UserError(f"{file}:{row.line}: {unknown_format(file, row.value)}")
    return False


def geometry_of(config: Config) -> BlockGeometry:
    """Anchors, block size and decay of a run."""
    return BlockGeometry(config.drafter.anchors, config.drafter.block_size, config.objective.gamma)


def load_targets(config: Config) -> tuple[list[Device], list[Target]]:
    """One frozen target on each of `target.devices`."""
    devices = [Device(name) for name in config.target.devices]
    return devices, [load_target(config.target, device) for device in devices]


def build_replica(config: Config, shape: DrafterShape, target: Target, index: int) -> Replica:
    """Drafter number `index`: same seed, same weights as every other."""
    from dflash.models.optimizer import FlatAdamW, FlatParameters
    from dflash.models.stack import Stack
    from dflash.pipeline.drafter_worker import Replica

    settings, train = config.drafter, config.train
    device = Device(settings.devices[index])
    dtype = torch_dtype(settings.dtype)
    drafter = Drafter(shape, train.seed)
    flat = FlatParameters(drafter, device.torch, dtype)
    drafter.stack = Stack(drafter, flat)
    if settings.init:
        warm_start(flat, settings.init, shape)
    optimizer = FlatAdamW(
        flat, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, clip=train.clip
    )
    geometry = geometry_of(config)
    return Replica(
        index=index,
        device=device,
        drafter=drafter,
        objective=make_objective(config.objective),
        flat=flat,
        optimizer=optimizer,
        embedding=target.embedding.to(device.torch, dtype),
        head=target.head.to(device.torch, dtype),
        nominal_weight=float(config.data.batch_size * geometry.anchors * geometry.decay.sum()),
    )


def threads_per_worker(config: Config) -> int:
    """CPU threads of each worker: as set, or the cores shared out evenly."""
    workers = len(config.target.devices) + len(config.drafter.devices)
    return config.train.threads_per_worker or max(1, torch.get_num_threads() // workers)
