"""`dflash train --dry-run`: what a run would do and need, computed from sizes alone. Nothing is loaded; a
device that is here multiplies two matrices, which tells its rate."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from dflash.config import Config
from dflash.data.conversations import load_tokenizer
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.dtypes import settle_dtypes
from dflash.models.flops import drafter_flops, full_batch, target_flops
from dflash.models.objectives import OBJECTIVES
from dflash.models.target import (
    TINY,
    TargetInfo,
    count_parameters,
    count_weight_bytes,
    inspect_target,
    resolve_mask_token,
)
from dflash.observe.closing import flops_text
from dflash.observe.roles import RoleMap
from dflash.pipeline.build import check_names, measured_rates, prepare_inputs
from dflash.pipeline.hand_over import PLACES
from dflash.pipeline.known_targets import KNOWN_TARGETS
from steptime.errors import UserError

_BYTES = {"float32": 4, "bfloat16": 2}
_GB = 1e9


@dataclass(frozen=True)
class DevicePlan:
    """One worker's device. Memory in bytes, by what it is for."""

    role: str
    device: str
    memory_bytes: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(size for _, size in self.memory_bytes)


@dataclass(frozen=True)
class RunPlan:
    """Everything that `--dry-run` prints.

    Attributes:
        anchors: blocks in each row, and `anchor_share` the share of the places where a block may start that
            an epoch trains on; None where the data is not there.
        dtypes: of target and drafter.
        target_flops, drafter_flops: what a step asks of each side at most (`models.flops`).
    """

    info: TargetInfo
    target_parameters: int
    drafter_parameters: int
    mask_token_id: int
    anchors: int
    anchor_share: float | None
    dtypes: tuple[str, str]
    devices: tuple[DevicePlan, ...]
    tokens_per_step: int
    slots_per_step: int
    target_flops: int
    drafter_flops: int
    samples: int | None
    notes: tuple[str, ...]


def make_plan(config: Config) -> RunPlan:
    """Compute the plan of a run.

    Raises:
        UserError: settings that no run could use.
    """
    check_names(config)
    config = settle_dtypes(config)
    notes: list[str] = []
    samples, share, anchors = None, None, config.drafter.anchors
    teacher = OBJECTIVES[config.objective.kind].needs_teacher
    try:
        info = inspect_target(config.target)
        target_parameters = count_parameters(config.target)
        weight_bytes = count_weight_bytes(config.target, info, _BYTES[config.target.dtype])
        target = target_flops(config.target, info, to_the_end=teacher)
    except UserError:
        if config.target.model not in KNOWN_TARGETS:
            raise
        known = KNOWN_TARGETS[config.target.model]
        info, target_parameters = known.info(config.target), known.parameters
        weight_bytes = target_parameters * _BYTES[config.target.dtype]
        target = known.flops(info, to_the_end=teacher)
        notes.append(
            f"{config.target.model} is not on this machine: sizes from the built-in table of published models"
        )
    notes += _quantised_note(info, config.target.dtype)
    if config.target.model == TINY or Path(config.data.path).exists():
        inputs = prepare_inputs(config, skip_devices=True)
        shape, samples, anchors = inputs.shape, len(inputs.dataset.samples), inputs.geometry.anchors
        share = inputs.dataset.anchor_counts(config.drafter.anchors).share
    else:
        try:
            tokenizer = load_tokenizer(config)
        except UserError:
            tokenizer = None
        if not Path(config.data.path).exists():
            notes.append(f"{config.data.path} is not there yet: tokens are the most that a step can hold")
        shape = DrafterShape.resolve(
            config.drafter, info, resolve_mask_token(config.drafter, info, tokenizer)
        )
    with torch.device("meta"):
        drafter_parameters = sum(parameter.numel() for parameter in Drafter(shape).parameters())
    steps = len(config.drafter.devices) * config.train.accumulation
    batch = full_batch(shape, config.data.batch_size, config.data.max_length, anchors)
    return RunPlan(
        info=info,
        target_parameters=target_parameters,
        drafter_parameters=drafter_parameters,
        mask_token_id=shape.mask_token_id,
        anchors=anchors,
        anchor_share=share,
        dtypes=(config.target.dtype, config.drafter.dtype),
        devices=tuple(_devices(config, info, weight_bytes, drafter_parameters, anchors)),
        tokens_per_step=steps * config.data.batch_size * config.data.max_length,
        slots_per_step=steps * config.data.batch_size * anchors * (config.drafter.block_size - 1),
        target_flops=steps * target.of(batch),
        drafter_flops=steps * drafter_flops(shape, teacher=teacher).of(batch),
        samples=samples,
        notes=tuple(notes),
    )


def _quantised_note(info: TargetInfo, dtype: str) -> list[str]:
    stored = info.quantization
    if stored is None:
        return []
    why = f" ({stored.why})" if stored.why else ""
    if stored.bits is None:
        return [f"the target is quantised ({stored.method}): its weights are counted as {dtype}{why}"]
    return [f"the target is quantised ({stored.method}): {stored.bits:.3g} bits a quantised weight{why}"]


def _devices(
    config: Config, info: TargetInfo, weight_bytes: int, drafter_parameters: int, anchors: int
) -> list[DevicePlan]:
    target_bytes, drafter_bytes = _BYTES[config.target.dtype], _BYTES[config.drafter.dtype]
    drafters = len(config.drafter.devices)
    rows = config.data.batch_size * config.data.max_length
    features = rows * len(info.layer_ids) * info.hidden_size * drafter_bytes
    buffers = -(-config.queue.capacity // len(config.target.devices)) + 1 + drafters
    # One layer's activations of the target, generously: residual, attention inputs, two MLP halves.
    activations = rows * (4 * info.hidden_size + 3 * info.intermediate_size) * target_bytes
    decodes = config.data.heldout and config.train.tau_prompts
    decoding = [("drafter that decodes", drafter_parameters * target_bytes)] if decodes else []
    plans = [
        DevicePlan(
            f"target/{index}",
            name,
            (
                ("weights", weight_bytes),
                (f"{buffers} hidden-state buffers", buffers * features),
                ("activations", activations),
                *decoding[: 1 if index == 0 else 0],
            ),
        )
        for index, name in enumerate(config.target.devices)
    ]
    settings = config.drafter
    blocks = config.data.batch_size * anchors * settings.block_size
    width = settings.intermediate_size or info.intermediate_size
    heads = settings.heads * settings.head_dim
    per_layer = (
        blocks * (6 * info.hidden_size + 3 * width + 4 * heads)
        + 2 * rows * settings.kv_heads * settings.head_dim
    )
    narrow = settings.dtype != "float32"
    masters = 4 if narrow else 0
    sums = 4 if narrow and config.train.accumulation > 1 else 0
    plans += [
        DevicePlan(
            f"drafter/{index}",
            name,
            (
                ("weights and gradients", drafter_parameters * 2 * drafter_bytes),
                ("masters and moments", drafter_parameters * (8 + masters)),
                *([("sum of micro-batches' gradients", drafter_parameters * sums)] if sums else []),
                ("target's embedding and head", 2 * info.vocab_size * info.hidden_size * drafter_bytes),
                ("activations", per_layer * settings.layers * drafter_bytes),
                *(
                    [(f"{PLACES} batches that arrive", PLACES * features)]
                    if set(config.target.devices) != {name}
                    else []
                ),
                ("one chunk of logits", config.objective.chunk_slots * info.vocab_size * (4 + drafter_bytes)),
            ),
        )
        for index, name in enumerate(settings.devices)
    ]
    return plans


def print_plan(config: Config, ranks: int = 1) -> None:
    """Print the plan on stdout, within 80 columns.

    Args:
        ranks: of the run; all are planned like this one.
    """
    plan = make_plan(config)
    info, train, tokens = plan.info, config.train, ranks * plan.tokens_per_step
    lines = [
        f"{config.name}  (settings {config.digest()})",
        "",
        f"  target    {info.model}: {plan.target_parameters / 1e6:,.1f} M parameters,",
        f"            {info.layers} layers, hidden {info.hidden_size}, vocabulary {info.vocab_size:,}, "
        f"{plan.dtypes[0]}",
        f"            tapped layers {', '.join(map(str, info.layer_ids))}",
        f"  drafter   {plan.drafter_parameters / 1e6:,.1f} M parameters, {config.drafter.layers} layers, "
        f"{plan.dtypes[1]}",
        f"            blocks of {config.drafter.block_size}, {plan.anchors} anchors, mask token "
        f"{plan.mask_token_id}",
        f"  data      {config.data.path}"
        + (f": {plan.samples:,} samples" if plan.samples is not None else ""),
        *(
            [f"            blocks start at {plan.anchor_share:.0%} of the supervised places in an epoch"]
            if plan.anchor_share is not None
            else []
        ),
        f"  a step    at most {tokens:,} context tokens, {ranks * plan.slots_per_step:,} supervised slots",
        *([f"            shared evenly by {ranks} ranks; what follows is one rank's"] if ranks > 1 else []),
        *_flops_lines(plan, config),
        f"  the run   {train.steps:,} steps, at most {train.steps * tokens / 1e6:,.1f} M context tokens",
        "",
        "  worker       device    memory (GB)",
    ]
    for memory, group in groupby(
        plan.devices, key=lambda device: (device.role.partition("/")[0], device.memory_bytes)
    ):
        lines += _device_lines(list(group), memory[1])
    estimate = "memory is estimated from shapes; the allocator's overhead and kernels' workspaces come on top"
    lines.append("")
    for note in (estimate, *plan.notes):
        lines += textwrap.wrap(f"note: {note}", 78, initial_indent="  ", subsequent_indent="        ")
    sys.stdout.write("\n".join(lines) + "\n")


def _flops_lines(plan: RunPlan, config: Config) -> list[str]:
    """What a step asks for, and how long it takes at the matmul rate of the devices, where they are here."""
    sides = f"targets {flops_text(plan.target_flops)}, drafters {flops_text(plan.drafter_flops)}"
    lines = [f"            {sides}"]
    roles = RoleMap(
        config.target.devices, config.drafter.devices, rates=measured_rates(settle_dtypes(config))
    )
    if rate := roles.rate():
        seconds = (plan.drafter_flops + plan.target_flops) / rate
        lines.append(f"            {seconds:.3g} s at {flops_text(rate)}/s, the devices' own matmul rate")
    return lines


def _device_lines(group: list[DevicePlan], memory: tuple[tuple[str, int], ...]) -> list[str]:
    """Workers that need the same, in one entry."""
    first, last = group[0], group[-1]
    role, device = first.role, first.device
    if len(group) > 1:
        role += f"-{last.role.partition('/')[2]}"
        device += f"-{last.device.partition(':')[2]}"
    lines = [
        f"  {role:<12} {device:<9} {first.total_bytes / _GB:8.2f}" + ("  each" if len(group) > 1 else "")
    ]
    return lines + [f"  {'':<22} {size / _GB:8.2f}  {what}" for what, size in memory]
