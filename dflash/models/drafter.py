"""The drafter: Qwen3-shaped layers over blocks of mask tokens, with the target's features injected as keys
and values.

Reference 1.2 (architecture), 2.1 (tensor names), 1.7 (sliding layers). Paper section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dflash.config import DrafterConfig
from dflash.data.anchors import Limits
from dflash.models.attention import Attention, BlockLayout, prepare
from dflash.models.blocks import scored_slots, slot_positions
from dflash.models.target import TargetInfo
from steptime.errors import UserError


@dataclass(frozen=True, slots=True)
class DrafterShape:
    """Every size and id that a drafter's checkpoint depends on.

    The rotary embedding is plain Qwen3 over all of head_dim, whatever the target's own is (partial,
    multimodal).

    Attributes:
        sliding_layers: the first so many layers see a sliding window and are causal in their block.
        embedding_scale, logit_scale, logit_softcap: the target's (`TargetInfo`): the drafter reads the same
            vectors and its logits go the same way.
        attention, compile: how it is computed (not part of the checkpoint).
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    vocab_size: int
    mask_token_id: int
    target_layers: int
    target_layer_ids: tuple[int, ...]
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6
    sliding_window: int = 2048
    sliding_layers: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    attention: str = "auto"
    compile: bool | str = False

    @property
    def taps(self) -> int:
        return len(self.target_layer_ids)

    def window(self, layer: int) -> int | None:
        """Width of a layer's sliding window; None: full attention."""
        return self.sliding_window if layer < self.sliding_layers else None

    @staticmethod
    def resolve(config: DrafterConfig, info: TargetInfo, mask_token_id: int) -> DrafterShape:
        """Fill what the config leaves to the target.

        Raises:
            UserError: sizes that do not fit the target.
        """
        if config.hidden_size and config.hidden_size != info.hidden_size:
            raise UserError(
                f"drafter.hidden_size = {config.hidden_size}: target {info.model!r} has {info.hidden_size}; "
                "they share the embedding and the head, so they must be equal (0 takes the target's)"
            )
        intermediate = config.intermediate_size or info.intermediate_size
        if not intermediate:
            raise UserError(
                f"target {info.model!r} names no intermediate size: set drafter.intermediate_size"
            )
        if config.head_dim % 2:
            raise UserError(f"drafter.head_dim = {config.head_dim}: rotary embedding needs an even size")
        return DrafterShape(
            hidden_size=info.hidden_size,
            intermediate_size=intermediate,
            layers=config.layers,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_size=config.block_size,
            vocab_size=info.vocab_size,
            mask_token_id=mask_token_id,
            target_layers=info.layers,
            target_layer_ids=info.layer_ids,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            sliding_window=config.sliding_window,
            sliding_layers=config.sliding_layers,
            embedding_scale=info.embedding_scale,
            logit_scale=info.logit_scale,
            logit_softcap=info.logit_softcap,
            attention=config.attention,
            compile=config.compile,
        )


class Matrix(nn.Module):
    """A linear map without bias. Its weights are whatever the memory held until `Drafter.initialise` draws
    them."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves paired (neox): `x` `[..., d]`, `cos` and `sin` broadcast `[..., d]`, `sin`
    signed."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([x[..., half:], x[..., :half]], dim=-1) * sin


class Rotary(nn.Module):
    """Tables of cos and signed sin, grown on demand on the host, float32; no part of the checkpoint."""

    def __init__(self, head_dim: int, theta: float, positions: int = 0) -> None:
        super().__init__()
        self.head_dim, self.theta = head_dim, theta
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor
        if positions:
            self.grow(positions, torch.device("cpu"), torch.float32)

    def grow(self, positions: int, device: torch.device, dtype: torch.dtype) -> None:
        """Have at least so many positions. A host-to-device copy when it grows, nothing else."""
        if self.cos.shape[0] >= positions and self.cos.device == device and self.cos.dtype == dtype:
            return
        positions = max(1024, 1 << (positions - 1).bit_length())
        frequency = self.theta ** -(torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim)
        angle = torch.arange(positions, dtype=torch.float64)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()
        self.cos = torch.cat([cos, cos], dim=-1).to(device, dtype)
        self.sin = torch.cat([-sin, sin], dim=-1).to(device, dtype)


class SelfAttention(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = Matrix(shape.hidden_size, shape.heads * shape.head_dim)
        self.k_proj = Matrix(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.v_proj = Matrix(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.o_proj = Matrix(shape.heads * shape.head_dim, shape.hidden_size)
        self.q_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(shape.head_dim, shape.rms_norm_eps)

    def keys_values(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of context features or block states `[batch, n, H]` -> `[batch, kv_heads, n, d]` each."""
        batch, n, _ = x.shape
        key = self.k_norm(self.k_proj(x).view(batch, n, self.kv_heads, self.head_dim))
        value = self.v_proj(x).view(batch, n, self.kv_heads, self.head_dim)
        return rotate(key.transpose(1, 2), *rotary), value.transpose(1, 2)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
    ) -> torch.Tensor:
        batch, rows, _ = x.shape
        query = self.q_norm(self.q_proj(x).view(batch, rows, self.heads, self.head_dim)).transpose(1, 2)
        key, value = self.keys_values(x, rotary)
        out = attention(rotate(query, *rotary), key, value.contiguous(), *context)
        return self.o_proj(out.transpose(1, 2).reshape(batch, rows, -1))


class MLP(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.gate_proj = Matrix(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Matrix(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Matrix(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: DrafterShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(
        self,
        x: torch.Tensor,
        context: tuple[torch.Tensor, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotary, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


TrainingPass = Callable[[torch.Tensor, torch.Tensor, BlockLayout, Limits | None], torch.Tensor]
"""From features and block inputs to normed states; its backward adds the weights' gradients. See `stack`."""


class Drafter(nn.Module):
    """The trained model. Its state dict is the released checkpoint: 11 tensors a layer and 3 more.

    Attributes:
        stack: the written-out pass that trains it, set by whoever builds the run; None: the modules do.
    """

    def __init__(self, shape: DrafterShape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Matrix(shape.taps * shape.hidden_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layers: Any = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = Rotary(shape.head_dim, shape.rope_theta)
        self.stack: TrainingPass | None = None
        self.initialise(seed)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Matrices normal with deviation 0.02, norms 1; from the seed alone, whatever the device."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.device.type == "meta":
                continue
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
            else:
                parameter.fill_(1.0)

    def context_feature(self, features: torch.Tensor) -> torch.Tensor:
        """Tapped states `[batch, n, K*H]` -> the feature of each context token `[batch, n, H]`, the same for
        all layers."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self,
        features: torch.Tensor,
        input_ids: torch.Tensor,
        anchors: torch.Tensor,
        keep: torch.Tensor,
        document_start: torch.Tensor,
        embedding: torch.Tensor,
        limits: Limits | None = None,
    ) -> torch.Tensor:
        """Normed hidden states of the slots 1..B-1 (slot 0 is known, so it never meets the head).

        Args:
            features: `[batch, context, K*H]`, the taps side by side.
            input_ids: int64 `[batch, context]`.
            anchors, keep, document_start: `[batch, anchors]` as in `Batch`.
            embedding: `[V, H]`, the target's.
            limits: `anchors.context_limits` of the host's copy of the anchors; saves work, changes nothing.

        Returns:
            `[batch, anchors, B-1, H]` in the working dtype.
        """
        shape = self.shape
        batch, context, _ = features.shape
        count, size = anchors.shape[1], shape.block_size
        layout = BlockLayout(anchors, keep, document_start, context, size)
        if self.stack is not None and torch.is_grad_enabled():
            x = self.block_input(input_ids, anchors, embedding).flatten(0, 1)
            return self.stack(features, x, layout, limits)
        dtype = self.fc.weight.dtype
        kinds = {shape.window(i) for i in range(shape.layers)}
        attentions = {window: prepare(shape.attention, layout, window, dtype) for window in kinds}
        self.rotary.grow(context + size, features.device, dtype)
        cos, sin = self.rotary.cos, self.rotary.sin
        positions = slot_positions(anchors, size).view(batch, 1, count * size)
        rows_rotary = (cos[positions], sin[positions])
        context_rotary = (cos[:context], sin[:context])
        feature = self.context_feature(features)
        x = self.block_input(input_ids, anchors, embedding)
        for i, layer in enumerate(self.layers):
            keys_values = layer.self_attn.keys_values(feature, context_rotary)
            x = layer(x, keys_values, rows_rotary, attentions[shape.window(i)])
        return self.norm(scored_slots(x.view(batch, count, size, -1)))

    def block_input(
        self, input_ids: torch.Tensor, anchors: torch.Tensor, embedding: torch.Tensor
    ) -> torch.Tensor:
        """Embeddings `[batch, anchors*B, H]`: the anchor's token, then the mask token in every other slot."""
        batch, count = anchors.shape
        first = F.embedding(input_ids.gather(1, anchors), embedding)
        mask = embedding[self.shape.mask_token_id].expand(batch, count, self.shape.block_size - 1, -1)
        return torch.cat([first[:, :, None], mask], dim=2).flatten(1, 2).to(self.fc.weight.dtype)

    def load_state(self, tensors: Mapping[str, torch.Tensor], where: str = "checkpoint") -> None:
        """Copy a released drafter's tensors in, all of them and no others.

        Raises:
            UserError: naming the first tensor that is missing, extra or misshapen, with both shapes.
        """
        own = self.state_dict()
        for name in own:
            if name not in tensors:
                raise UserError(
                    f"{where}: tensor {name!r} is missing; the drafter has {len(own)}, the file "
                    f"{len(tensors)}"
                )
        for name, tensor in tensors.items():
            if name not in own:
                raise UserError(
                    f"{where}: tensor {name!r} is no part of this drafter of {self.shape.layers} layers"
                )
            if tensor.shape != own[name].shape:
                raise UserError(
                    f"{where}: tensor {name!r} has shape {list(tensor.shape)}, this drafter's is "
                    f"{list(own[name].shape)}"
                )
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
