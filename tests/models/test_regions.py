"""Every shape of every config stays compiled: no bucket, window or drafter falls back to eager."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.attention.flex_attention as flex

import dflash.models.attention
from dflash.config import Config, load_config
from dflash.models.attention import AutogradAttention, BlockLayout, FlexAttention, compiled_flex, prepare
from dflash.models.elementwise_compiled import compiled
from dflash.models.workspace import Workspace
from tests.steptime.backend import Recording

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.toml"))
SCALE = 32
"""Contexts are so many times shorter than the config's: forms are by shape, whatever its size."""


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flex attention refuses gradients on the CPU, where its plain operators have them."""
    monkeypatch.setattr(flex, "_validate_device", lambda *states: None)
    torch._dynamo.reset()
    compiled_flex.cache_clear()
    compiled.cache_clear()
    yield
    torch._dynamo.reset()
    compiled_flex.cache_clear()
    compiled.cache_clear()


def on(device: str, backend: Any, monkeypatch: pytest.MonkeyPatch, *, masks: bool = False) -> None:
    """Attend as a drafter on `device` would; masks are plain, unless wanted: they take seconds to trace."""

    def functions(window: int | None, _: torch.device) -> Any:
        make_mask, attend = compiled_flex(window, torch.device(device), backend)
        return make_mask if masks else dflash.models.attention._make_block_mask, attend

    monkeypatch.setattr(dflash.models.attention, "flex_functions", functions)


def step(bucket: int, window: int | None, size: int = 4) -> None:
    anchors = torch.tensor([[2, 7]])
    context, rows, d = bucket // SCALE, anchors.shape[1] * size, 8
    layout = BlockLayout(
        anchors, torch.ones_like(anchors, dtype=torch.bool), torch.zeros_like(anchors), context, size
    )
    attention = AutogradAttention(
        prepare("flex", layout, window, torch.float32), layout, Workspace(torch.empty(0))
    )
    states = [torch.randn(1, 1, 2, size * groups, d) for groups in (2, 1, 1)]
    context_states = [torch.randn(1, 1, context, d) for _ in range(2)]
    out, saved = attention.forward(0, *states, *context_states)
    gradients = attention.backward(saved, torch.ones_like(out))
    assert out.shape == (1, 1, 2, size * 2, d)
    assert len(gradients) == 5
    assert rows == 8


def windows(config: Config) -> list[int | None]:
    drafter = config.drafter
    sliding: list[int | None] = [drafter.sliding_window] if drafter.sliding_layers else []
    return sliding + ([None] if drafter.sliding_layers < drafter.layers else [])


def combinations(config: Config) -> list[tuple[str, int | None, int]]:
    return [
        (device, window, bucket)
        for device in config.drafter.devices
        for window in windows(config)
        for bucket in config.data.buckets
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shape_of_a_config_stays_compiled(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, wanted = Recording(), combinations(load_config(path))
    for passed in range(2):
        for device, window, bucket in wanted:
            on(device, backend, monkeypatch)
            before = backend.ran
            step(bucket, window)
            assert backend.ran == before + 1, "it ran what was compiled"
        assert backend.compiled == len(wanted), f"pass {passed}: one form for each shape, made once"


@pytest.mark.thorough
def test_masks_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Recording()
    on("cuda:5", backend, monkeypatch, masks=True)
    with torch._dynamo.config.patch(recompile_limit=1):
        for bucket in (512, 1024, 512, 1024):
            step(bucket, None)
    assert (backend.compiled, backend.ran) == (4, 8)


def test_the_largest_config_has_more_shapes_than_torch_keeps_by_itself() -> None:
    most = max(len(combinations(load_config(path))) for path in CONFIGS)
    assert most == 36 > torch._dynamo.config.recompile_limit


@pytest.mark.thorough
def test_one_compiled_function_for_all_shapes_would_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: as it was before. The check above finds it."""
    backend = Recording()
    shared = torch.compile(dflash.models.attention._attend, dynamic=False, backend=backend)
    monkeypatch.setattr(
        dflash.models.attention,
        "flex_functions",
        lambda window, _: (dflash.models.attention._make_block_mask, shared),
    )
    with torch._dynamo.config.patch(recompile_limit=2):
        for bucket in (512, 1024, 1536):
            step(bucket, None)
    assert (backend.compiled, backend.ran) == (2, 2)


@pytest.mark.slow
def test_compiled_flex_gives_what_plain_flex_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    anchors = torch.tensor([[2, 7]])
    layout = BlockLayout(
        anchors, torch.ones_like(anchors, dtype=torch.bool), torch.zeros_like(anchors), 16, 4
    )
    query, key, value = (torch.randn(1, heads, 8, 8) for heads in (2, 1, 1))
    context = [torch.randn(1, 1, 16, 8) for _ in range(2)]
    plain = FlexAttention(layout, 9, torch.float32)(query, key, value, *context)
    on("cuda:5", "aot_eager", monkeypatch, masks=True)
    torch.testing.assert_close(
        FlexAttention(layout, 9, torch.float32)(query, key, value, *context), plain, rtol=1e-5, atol=1e-5
    )


@pytest.mark.slow
def test_elementwise_pieces_keep_a_form_for_each_layout_and_device() -> None:
    """A step of one shape has seven layouts in this function alone."""
    backend = Recording()
    d, calls = 8, 0
    with torch._dynamo.config.patch(recompile_limit=1):
        for device in ("cuda:0", "cuda:1"):
            rotate = compiled(torch.device(device), backend).rotate_into
            for dims in (2, 3, 4):
                x = torch.randn(*range(3, dims + 2), d)
                rotate(x, (torch.ones(d), torch.zeros(d)), torch.empty_like(x))
                calls += 1
                assert backend.ran == calls, (device, dims)
    assert backend.compiled == 6
