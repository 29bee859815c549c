from __future__ import annotations

import pytest
import torch

from dflash.config import DrafterConfig, TargetConfig, TinyTarget
from dflash.models.drafter import Drafter, DrafterShape
from dflash.models.target import inspect_target

TARGET = TargetConfig(tiny=TinyTarget(hidden_size=32, intermediate_size=48, layers=8, vocab_size=300), taps=3)
MASK_ID = 299


@pytest.fixture(scope="session")
def info():
    return inspect_target(TARGET)


@pytest.fixture(params=[0, 2], ids=["full", "two sliding"])
def shape(request, info):
    config = DrafterConfig(
        layers=5,
        heads=4,
        kv_heads=2,
        head_dim=16,
        block_size=8,
        sliding_layers=request.param,
        sliding_window=9,
        rope_theta=1e7,
    )
    return DrafterShape.resolve(config, info, MASK_ID)


@pytest.fixture
def tensors(shape):
    drafter = Drafter(shape, 0)
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in drafter.state_dict().items()
    }
