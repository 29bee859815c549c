"""From settings to the parts of a run, every mistake found before a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dflash.config import Config
from dflash.data.anchors import BlockGeometry
from dflash.data.batch import BatchWork
from dflash.data.conversations import load_samples, load_tokenizer
from dflash.data.dataset import Dataset
from dflash.data.rows import data_files, read_rows
from dflash.data.samples import unknown_format
from dflash.device import Device, check_devices, torch_dtype
from dflash.device.rate import matmul_rates
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.dtypes import settle_dtypes
from dflash.models.flops import drafter_flops, target_flops
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
    config = settle_dtypes(config)
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
    dataset = load_samples(config.data, tokenizer, vocab_size=info.vocab_size)
    check_mask_unused(config, shape.mask_token_id, dataset)
    geometry = geometry_of(config, dataset)
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
    row = next(read_rows(file), None)
    if row is None:
        raise UserError(f"{file}: the data set is empty")
    if not isinstance(row.value, dict) or config.data.skip_bad:
        return False
    if row.value.get("input_ids") is not None:
        return not config.data.tokenizer
    if not {"messages", "conversations", "conversation"} & row.value.keys():
        raise UserError(f"{file}:{row.line}: {unknown_format(file, row.value)}")
    return False


def geometry_of(config: Config, dataset: Dataset) -> BlockGeometry:
    """Anchors, block size and decay of a run.

    A packed row gets the blocks that its conversations would get alone, so packing trains on the same share
    of the tokens; the fullest row says how many."""
    anchors, size, gamma = config.drafter.anchors, config.drafter.block_size, config.objective.gamma
    if not config.data.pack:
        return BlockGeometry(anchors, size, gamma)
    return BlockGeometry(max(1, dataset.anchor_counts(anchors).fullest_row), size, gamma, anchors)


def check_mask_unused(config: Config, mask_token_id: int, dataset: Dataset) -> None:
    """Refuse a mask token that stands in the data: the drafter would meet it with two meanings.

    Raises:
        UserError: saying how often, unless `drafter.mask_in_data` allows it.
    """
    count = dataset.count_token(mask_token_id)
    if count and not config.drafter.mask_in_data:
        share = count / int(dataset.lengths.sum())
        raise UserError(
            f"drafter.mask_token_id = {mask_token_id}: it stands {count:,} time{'s' * (count > 1)} in the "
            f"data ({share:.2%} of the tokens), so a mask would also mean that token; choose a row that no "
            "text uses, or allow it with drafter.mask_in_data = true"
        )


def load_targets(config: Config) -> tuple[list[Device], list[Target]]:
    """One frozen target on each of `target.devices`."""
    devices = [Device(name) for name in config.target.devices]
    targets = [load_target(config.target, device) for device in devices]
    if OBJECTIVES[config.objective.kind].needs_teacher and targets[0].head_has_bias:
        raise UserError(
            f"objective.kind = {config.objective.kind}: the head of target {config.target.model!r} has a "
            "bias, which the drafter does without, so it cannot be taught the target's distribution; choose "
            "ce"
        )
    return devices, targets


def build_replica(inputs: Inputs, target: Target, index: int) -> Replica:
    """Drafter number `index`: same seed, same weights as every other."""
    from dflash.models.optimizer import FlatAdamW, FlatParameters
    from dflash.models.stack import Stack
    from dflash.pipeline.drafter_worker import Replica

    config, shape, geometry = inputs.config, inputs.shape, inputs.geometry
    settings, train = config.drafter, config.train
    device = Device(settings.devices[index])
    dtype = torch_dtype(settings.dtype)
    # On the streams that will train: memory goes back to the stream that asked for it.
    with target.device.active(), device.active():
        drafter = Drafter(shape, train.seed)
        flat = FlatParameters(drafter, device.torch, dtype)
        if config.train.accumulation > 1:
            flat.sum_wide()
        drafter.stack = Stack(drafter, flat)
        if settings.init:
            warm_start(flat, settings.init, shape)
        optimizer = FlatAdamW(
            flat, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, clip=train.clip
        )
        embedding = target.embedding.to(device.torch, dtype)
        head = target.head.to(device.torch, dtype)
    return Replica(
        index=index,
        device=device,
        drafter=drafter,
        objective=make_objective(config.objective, shape.logit_softcap),
        flat=flat,
        optimizer=optimizer,
        embedding=embedding,
        head=head,
        nominal_weight=float(config.data.batch_size * geometry.anchors * geometry.decay.sum()),
    )


def flops_of(inputs: Inputs) -> Callable[[BatchWork], tuple[int, int]]:
    """What a batch of the run asks of a target and of a drafter, FLOPs."""
    teacher = OBJECTIVES[inputs.config.objective.kind].needs_teacher
    target = target_flops(inputs.config.target, inputs.info, to_the_end=teacher)
    drafter = drafter_flops(inputs.shape, teacher=teacher)
    return lambda work: (target.of(work), drafter.of(work))


def measured_rates(config: Config) -> tuple[tuple[str, float], ...]:
    """Matmul rates of the hardware that the workers have, in the drafter's type. Waits for the devices; call
    it before the workers start."""
    names = (*config.target.devices, *config.drafter.devices)
    return matmul_rates(names, torch_dtype(config.drafter.dtype), threads_per_worker(config) * len(names))


def threads_per_worker(config: Config) -> int:
    """CPU threads of each worker: as set, or the cores shared out evenly."""
    workers = len(config.target.devices) + len(config.drafter.devices)
    return config.train.threads_per_worker or max(1, torch.get_num_threads() // workers)
