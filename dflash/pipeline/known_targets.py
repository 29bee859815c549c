"""Sizes of published targets, so that a plan can be printed on a machine that does not hold them."""

from __future__ import annotations

from dataclasses import dataclass

from dflash.config import TargetConfig
from dflash.models.flops import TargetFlops
from dflash.models.target import TargetInfo, build_target_layer_ids


@dataclass(frozen=True)
class KnownTarget:
    """From the model's published config; parameters are those of the text model with its head, which is the
    embedding when `tied`."""

    model: str
    family: str
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    layers: int
    parameters: int
    eos_ids: tuple[int, ...]
    max_positions: int
    tied: bool = False

    def flops(self, info: TargetInfo, *, to_the_end: bool) -> TargetFlops:
        """Of its matrices, all layers alike; without attention."""
        ends = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        share = 1.0 if to_the_end else (info.layer_ids[-1] + 1) / self.layers
        return TargetFlops(round(2 * (self.parameters - ends) * share), ())

    def info(self, config: TargetConfig) -> TargetInfo:
        """As `inspect_target` would say it."""
        return TargetInfo(
            model=self.model,
            family=self.family,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            vocab_size=self.vocab_size,
            layers=self.layers,
            layer_ids=config.layer_ids or build_target_layer_ids(self.layers, config.taps),
            eos_ids=self.eos_ids,
            pad_id=None,
            max_positions=self.max_positions,
        )


KNOWN_TARGETS = {
    target.model: target
    for target in (
        KnownTarget(
            "Qwen/Qwen3.6-27B", "qwen3_5", 5120, 17408, 248320, 64, 26_895_998_464, (248044, 248046), 262144
        ),
        KnownTarget("Qwen/Qwen3-8B", "qwen3", 4096, 12288, 151936, 36, 8_190_735_360, (151645,), 40960),
        KnownTarget(
            "Qwen/Qwen3-4B", "qwen3", 2560, 9728, 151936, 36, 4_022_468_096, (151645,), 40960, tied=True
        ),
    )
}
