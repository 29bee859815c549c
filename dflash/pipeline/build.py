"""From settings to the parts of a run, every mistake found before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dflash.config import Config
from dflash.data.conversations import Dataset, load_samples
from dflash.data.tokenizer import load_tokenizer
from dflash.device import Device, check_devices, torch_dtype
from dflash.errors import UserError
from dflash.models.blocks import BlockGeometry
from dflash.models.target import TargetInfo, inspect_target, load_target, resolve_mask_token

if TYPE_CHECKING:
    from dflash.models.drafter import DrafterShape
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
    if not skip_devices:
        check_devices((*config.target.devices, *config.drafter.devices))
    info = inspect_target(config.target)
    tokenizer = load_tokenizer(config)
    if len(tokenizer) > info.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer)} tokens, the target's vocabulary {info.vocab_size}: they do not belong together"
        )
    shape = drafter_shape(config, info, tokenizer)
    geometry = geometry_of(config)
    dataset = load_samples(config.data, tokenizer, vocab_size=info.vocab_size)
    return Inputs(config, info, shape, geometry, tokenizer, dataset)


def geometry_of(config: Config) -> BlockGeometry:
    """Anchors, block size and decay of a run."""
    return BlockGeometry(config.drafter.anchors, config.drafter.block_size, config.objective.gamma)


def drafter_shape(config: Config, info: TargetInfo, tokenizer: Any) -> DrafterShape:
    """Every size of the drafter: its own settings, the target's width and vocabulary.

    Raises:
        UserError: a hidden size that is not the target's, a mask token outside the vocabulary.
    """
    from dflash.models.drafter import DrafterShape

    drafter = config.drafter
    if drafter.hidden_size not in (0, info.hidden_size):
        raise UserError(
            f"drafter.hidden_size = {drafter.hidden_size}, the target {config.target.model!r} has {info.hidden_size}: "
            "they share embedding and head, so they must agree; leave it out"
        )
    layer_types = ("sliding_attention",) * drafter.sliding_layers
    layer_types += ("full_attention",) * (drafter.layers - drafter.sliding_layers)
    return DrafterShape(
        hidden_size=info.hidden_size,
        intermediate_size=drafter.intermediate_size or info.intermediate_size,
        layers=drafter.layers,
        heads=drafter.heads,
        kv_heads=drafter.kv_heads,
        head_dim=drafter.head_dim,
        vocab_size=info.vocab_size,
        taps=len(info.layer_ids),
        block_size=drafter.block_size,
        mask_token_id=resolve_mask_token(drafter.mask_token_id, info, tokenizer),
        target_layer_ids=info.layer_ids,
        num_target_layers=info.layers,
        layer_types=layer_types,
        sliding_window=drafter.sliding_window,
        rope_theta=drafter.rope_theta,
        rms_norm_eps=drafter.rms_norm_eps,
    )


def load_targets(config: Config) -> tuple[list[Device], list[Target]]:
    """One frozen target on each of `target.devices`."""
    devices = [Device(name) for name in config.target.devices]
    return devices, [load_target(config.target, device) for device in devices]


def build_replica(config: Config, shape: DrafterShape, target: Target, index: int) -> Replica:
    """Drafter number `index`: same seed, same weights as every other."""
    from dflash.models.drafter import Drafter
    from dflash.models.objective import BlockObjective
    from dflash.models.optimizer import FlatAdamW, FlatParameters
    from dflash.pipeline.drafter_worker import Replica

    settings, train = config.drafter, config.train
    device = Device(settings.devices[index])
    dtype = torch_dtype(settings.dtype)
    drafter = Drafter(shape, seed=train.seed, attention=settings.attention, device=device)
    flat = FlatParameters(drafter, device.torch, dtype)
    optimizer = FlatAdamW(flat, betas=train.betas, eps=train.eps, weight_decay=train.weight_decay, clip=train.clip)
    geometry = geometry_of(config)
    return Replica(
        index=index,
        device=device,
        drafter=drafter,
        objective=BlockObjective.from_config(config.objective, geometry),
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
