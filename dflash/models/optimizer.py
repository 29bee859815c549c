"""AdamW over one flat buffer: a handful of operations per step, whatever the number of tensors.

Working weights in bfloat16 keep float32 masters; float32 working weights are their own masters. Averaging the
gradients of several drafters is one operation on `FlatParameters.grad`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_ALIGN = 64  # elements: every tensor begins on a cache line and on a boundary that matrix kernels like
_PIECE = 1 << 26  # elements of a bfloat16 gradient whose float32 copy exists at one time


class FlatParameters:
    """A module's parameters as views of one buffer, their gradients as views of another.

    Attributes:
        working: `[n]` in the working dtype; the module computes with views of it.
        grad: `[n]` in the working dtype; `backward` adds into it.
        master: `[n]` float32; the same tensor as `working` when that is float32.
        wide_sum: `[n]` float32, where gradients of several micro-batches are added; None where `grad` is wide
            enough, or there is one micro-batch in a step (`sum_wide`).
    """

    def __init__(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
        named = [
            (name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad
        ]
        self.places: dict[str, tuple[int, torch.Size]] = {}
        size = 0
        for name, parameter in named:
            self.places[name] = (size, parameter.shape)
            size += -(-parameter.numel() // _ALIGN) * _ALIGN
        self.working = torch.zeros(size, dtype=dtype, device=device)
        self.grad = torch.zeros(size, dtype=dtype, device=device)
        self.wide_sum: torch.Tensor | None = None
        self.master = (
            self.working if dtype == torch.float32 else torch.zeros(size, dtype=torch.float32, device=device)
        )
        with torch.no_grad():
            for name, parameter in named:
                self.view(self.master, name).copy_(parameter)
                if self.master is not self.working:
                    self.view(self.working, name).copy_(parameter)
                parameter.data = self.view(self.working, name)
                parameter.grad = self.view(self.grad, name)

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The part of a flat buffer that belongs to a parameter."""
        start, shape = self.places[name]
        return flat[start : start + shape.numel()].view(shape)

    def joined(self, flat: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """The parts of several parameters that lie side by side and share their last size, as one matrix.

        Raises:
            ValueError: they do not lie side by side.
        """
        start, first = self.places[names[0]]
        end = start
        for name in names:
            place, shape = self.places[name]
            if place != end or shape[1:] != first[1:]:
                raise ValueError(f"{names}: do not lie side by side in the flat buffer")
            end += shape.numel()
        return flat[start:end].view(-1, *first[1:])

    def span(self, prefix: str) -> tuple[int, int]:
        """First element and end of the parameters whose names begin so; they lie side by side.

        Raises:
            ValueError: others lie between them, or there are none.
        """
        names = list(self.places)
        inside = [at for at, name in enumerate(names) if name.startswith(prefix)]
        if not inside or inside != list(range(inside[0], inside[-1] + 1)):
            raise ValueError(f"{prefix}*: do not lie side by side in the flat buffer")
        after = names[inside[-1] + 1 : inside[-1] + 2]
        end = self.places[after[0]][0] if after else self.grad.numel()
        return self.places[names[inside[0]]][0], end

    def named(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter's name with its part of a flat buffer."""
        for name in self.places:
            yield name, self.view(flat, name)

    def zero_grad(self) -> None:
        self.grad.zero_()
        if self.wide_sum is not None:
            self.wide_sum.zero_()

    def sum_wide(self) -> None:
        """From now on add micro-batches in float32: a bfloat16 sum of 16 has lost more than one rounding (the
        figures: docs/performance.md)."""
        if self.grad.dtype != torch.float32 and self.wide_sum is None:
            self.wide_sum = torch.zeros_like(self.grad, dtype=torch.float32)

    @torch.no_grad()
    def end_micro_batch(self, last: bool) -> None:
        """Behind each backward of a step of several: `grad` goes into the sum, and behind the last comes back
        as the sum, rounded once."""
        if self.wide_sum is None:
            return
        self.wide_sum.add_(self.grad)
        if last:
            self.grad.copy_(self.wide_sum)
        else:
            self.grad.zero_()

    @torch.no_grad()
    def refresh_working(self) -> None:
        """Round the masters into the working weights."""
        if self.master is not self.working:
            self.working.copy_(self.master)


class FlatAdamW:
    """AdamW with decoupled decay and clipping by the global norm; nothing is read on the host."""

    def __init__(
        self,
        flat: FlatParameters,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        clip: float = 1.0,
    ) -> None:
        self.flat, self.betas, self.eps, self.weight_decay, self.clip = flat, betas, eps, weight_decay, clip
        self.exp_avg = torch.zeros_like(flat.master)
        self.exp_avg_sq = torch.zeros_like(flat.master)
        self.steps = torch.zeros((), dtype=torch.float32, device=flat.master.device)
        size = flat.master.numel()
        self._wide = None if flat.grad.dtype == torch.float32 else flat.master.new_empty(min(size, _PIECE))
        step = size if self._wide is None else _PIECE
        self._pieces = [slice(first, min(first + step, size)) for first in range(0, size, step)]
        self._found_inf = torch.zeros((), dtype=torch.float32, device=flat.master.device)

    @torch.no_grad()
    def step(self, lr: float, grad_scale: float = 1.0) -> torch.Tensor:
        """Clip and step; the gradients are cleared by the caller.

        Args:
            lr: learning rate, a host float.
            grad_scale: factor on the gradients before clipping, e.g. 1 / drafters after they were summed.

        Returns:
            The norm of the scaled gradients before clipping, float32 scalar on the device.
        """
        only = self._widened(self._pieces[0]) if len(self._pieces) == 1 else None
        norms = [
            torch.linalg.vector_norm(self._widened(piece) if only is None else only) for piece in self._pieces
        ]
        norm = (norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))) * grad_scale
        # The fused kernel divides the gradients by this: clipping costs no pass of its own.
        divisor = ((norm + 1e-6) / self.clip).clamp_(min=1.0) / grad_scale
        self.steps += 1
        for piece in self._pieces:
            self._update(piece, self._widened(piece) if only is None else only, lr, divisor)
        self.flat.refresh_working()
        return norm

    @torch.no_grad()
    def warm(self) -> None:
        """Launch everything that a step launches and change nothing: the kernel leaves alone what `found_inf`
        marks."""
        self._found_inf.fill_(1.0)
        self.step(0.0)
        self._found_inf.zero_()
        self.steps -= 1

    def _widened(self, piece: slice) -> torch.Tensor:
        """A piece of the gradient in float32."""
        grad = self.flat.grad[piece]
        return grad if self._wide is None else self._wide[: grad.numel()].copy_(grad)

    def _update(self, piece: slice, grad: torch.Tensor, lr: float, divisor: torch.Tensor) -> None:
        torch._fused_adamw_(
            [self.flat.master[piece]],
            [grad],
            [self.exp_avg[piece]],
            [self.exp_avg_sq[piece]],
            [],
            [self.steps],
            lr=lr,
            beta1=self.betas[0],
            beta2=self.betas[1],
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=self._found_inf,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, by parameter name, so that it does not depend on the flat layout.

        Copies in host memory, tensor by tensor: on the device it would need as much again as masters and
        moments take, 12 bytes a parameter, which no plan of the memory holds. Waits for the device."""
        return {
            "steps": _on_host(self.steps),
            "master": self._named_on_host(self.flat.master),
            "exp_avg": self._named_on_host(self.exp_avg),
            "exp_avg_sq": self._named_on_host(self.exp_avg_sq),
        }

    def _named_on_host(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: _on_host(tensor) for name, tensor in self.flat.named(buffer)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; the working weights follow the masters."""
        flat = self.flat
        self.steps.copy_(state["steps"])
        for key, buffer in (
            ("master", flat.master),
            ("exp_avg", self.exp_avg),
            ("exp_avg_sq", self.exp_avg_sq),
        ):
            for name, view in flat.named(buffer):
                view.copy_(state[key][name])
        flat.refresh_working()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that later steps do not change."""
    return tensor.to("cpu", copy=True)
