"""The FLOP model against torch's own counter, where every operation is one that was asked for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import MixtralConfig, Qwen3Config

from dflash.config import TargetConfig, TinyTarget
from dflash.data.anchors import visible_pairs
from dflash.data.batch import BatchWork
from dflash.device import Device
from dflash.models import attention, flops
from dflash.models.attention import BlockLayout
from dflash.models.blocks import dense_attention_mask
from dflash.models.objectives import OBJECTIVES
from dflash.models.target import inspect_target, load_target
from tests.models.cases import SHAPE, Case, make_case, make_drafter, run


class VisibleAttention:
    """Row by row over the columns that it sees, and no others."""

    def __init__(self, layout: BlockLayout, window: int | None, dtype: torch.dtype) -> None:
        parts = (layout.anchors, layout.keep, layout.document_start)
        self.mask = dense_attention_mask(*parts, layout.context, layout.block_size, window)
        self.kept = layout.keep.repeat_interleave(layout.block_size, dim=1)

    def __call__(self, query, key, value, context_key, context_value):
        groups = query.shape[1] // key.shape[1]
        keys = torch.cat([context_key, key], dim=2).repeat_interleave(groups, dim=1)
        values = torch.cat([context_value, value], dim=2).repeat_interleave(groups, dim=1)
        out = []
        for row in range(query.shape[0]):
            for place in range(query.shape[2]):
                seen = self.mask[row, place].nonzero().flatten()
                if not self.kept[row, place]:
                    out.append(torch.zeros_like(query[row, :, place]))
                    continue
                logits = query[row, :, None, place] @ keys[row][:, seen].transpose(1, 2)
                out.append((logits.softmax(dim=-1) @ values[row][:, seen])[:, 0])
        return torch.stack(out, dim=1).view(query.shape[1], *query.shape[::2], -1).transpose(0, 1)


def work_of(case: Case, shape=SHAPE, lengths=None) -> BatchWork:
    places = (case.anchors.numpy(), case.keep.numpy(), case.document_start.numpy(), shape.block_size)
    sliding = visible_pairs(*places, shape.sliding_window) if shape.sliding_layers else 0
    rows, context = case.input_ids.shape
    return BatchWork(
        lengths or (context,) * rows, int(case.keep.sum()), visible_pairs(*places), sliding_pairs=sliding
    )


def counted(shape, case: Case, objective: str, monkeypatch) -> int:
    """What the plain modules do in one step, forward and backward."""
    monkeypatch.setitem(attention.KINDS, "visible", VisibleAttention)
    drafter = make_drafter(**dataclasses.asdict(dataclasses.replace(shape, attention="visible")))
    loss = OBJECTIVES[objective]()
    teacher = torch.randn(*case.labels.shape, shape.hidden_size) if loss.needs_teacher else None
    with FlopCounterMode(display=False) as counter:
        hidden = run(drafter, case)
        total, _ = loss(hidden, case.head, case.labels, case.weights, case.scale, teacher)
        total.backward()
    return counter.get_total_flops()


def slow(*values):
    """One of many like cases."""
    return pytest.param(*values, marks=pytest.mark.slow)


WINDOW = dataclasses.replace(SHAPE, sliding_layers=2, sliding_window=9)


@pytest.mark.parametrize(
    ("shape", "objective", "documents"),
    [
        (SHAPE, "ce", False),
        slow(SHAPE, "kd", False),
        slow(SHAPE, "dpace", True),
        slow(WINDOW, "ce", False),
        (WINDOW, "kd", True),
        slow(dataclasses.replace(WINDOW, sliding_window=3, sliding_layers=3), "ce", True),
        slow(
            dataclasses.replace(SHAPE, layers=1, heads=6, block_size=3, vocab_size=61, mask_token_id=60),
            "ce",
            False,
        ),
    ],
    ids=["ce", "kd", "packed", "windows", "packed windows kd", "narrow windows", "another shape"],
)
def test_a_training_step_is_what_torch_counts(shape, objective, documents, monkeypatch):
    case = make_case(shape, batch=1, context=20, anchors=3, documents=documents)
    model = flops.drafter_flops(shape, teacher=OBJECTIVES[objective].needs_teacher)
    assert model.of(work_of(case, shape)) == counted(shape, case, objective, monkeypatch)


@pytest.mark.slow
def test_dropped_blocks_and_hidden_columns_are_no_work(monkeypatch):
    """What torch counts of a batch with padding and dummy blocks is more than was asked for, and by how much
    is known."""
    case = make_case(context=30, anchors=6, dropped=True)
    model = flops.drafter_flops(SHAPE)
    dropped = int((~case.keep).sum())
    assert dropped > 0
    asked = model.of(work_of(case, lengths=(30, 12)))
    assert counted(SHAPE, case, "ce", monkeypatch) == asked + dropped * model.block + 18 * model.token


def test_dense_attention_does_more_than_was_asked_for():
    """The same counter over the dense mask, as some do it, charges what no slot sees."""
    case = make_case(context=30, anchors=4)
    drafter = make_drafter()
    with FlopCounterMode(display=False) as counter:
        run(drafter, case)
    rows = case.keep.numel() * SHAPE.block_size
    columns = 30 + case.keep.shape[1] * SHAPE.block_size
    dense = 4 * SHAPE.layers * SHAPE.heads * SHAPE.head_dim * rows * columns
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] > 0
    visible = work_of(case).pairs * flops.drafter_flops(SHAPE).pair // 3
    assert visible < 0.5 * dense


@given(
    anchors=st.lists(st.integers(0, 29), min_size=1, max_size=6),
    kept=st.integers(0, 63),
    start=st.integers(0, 12),
    block=st.integers(2, 7),
    window=st.one_of(st.none(), st.integers(1, 20)),
)
@settings(max_examples=60, deadline=None)
def test_visible_pairs_are_those_of_the_mask(anchors, kept, start, block, window):
    places = torch.tensor([sorted(anchors)])
    keep = torch.tensor([[bool(kept >> place & 1) for place in range(len(anchors))]])
    starts = torch.clamp(torch.full_like(places, start), max=places)
    mask = dense_attention_mask(places, keep, starts, 32, block, window)
    rows = keep.repeat_interleave(block, dim=1)
    assert visible_pairs(places.numpy(), keep.numpy(), starts.numpy(), block, window) == int(mask[rows].sum())


@given(st.lists(st.integers(1, 12), max_size=4), st.one_of(st.none(), st.integers(1, 14)))
def test_causal_pairs_are_those_of_the_triangle(lengths, window):
    reach = window or 99
    expected = sum(
        1 for length in lengths for row in range(length) for column in range(row + 1) if row - column < reach
    )
    assert flops.causal_pairs(lengths, window) == expected


TINY = TargetConfig(
    taps=2,
    tiny=TinyTarget(
        hidden_size=32, intermediate_size=48, layers=6, heads=2, kv_heads=1, head_dim=16, vocab_size=97,
        linear_heads=2, linear_head_dim=16,
    ),
)  # fmt: skip


def grouped_attention(query, key, value, *_, **__) -> int:
    """torch's formula, which wants as many key heads as query heads."""
    return sdpa_flop_count(query, *((part[0], query[1], *part[2:]) for part in (key, value)))


@pytest.mark.parametrize("to_the_end", [False, True])
def test_a_target_is_its_matrices_and_its_full_attention(to_the_end):
    config = TINY.model_copy(update={"layer_ids": (1, 4)})
    target = load_target(config, Device("cpu"))
    ids = torch.randint(0, 97, (2, 20))
    cpu = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: grouped_attention}
    with FlopCounterMode(display=False, custom_mapping=cpu) as counter:
        (target.taps_and_last if to_the_end else target.taps)(ids)
    by_operation = counter.get_flop_counts()["Global"]
    model = flops.target_flops(config, inspect_target(config), to_the_end=to_the_end)
    products = sum(by_operation.get(op, 0) for op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products == model.token * 40
    square = sum(count for op, count in by_operation.items() if "attention" in str(op))
    visible = model.of(BatchWork((20, 20), 0, 0)) - model.token * 40
    assert visible * 2 * 20 == square * 21 > 0  # torch charges the square, causal or not


def test_sliding_layers_and_experts_of_a_target(tmp_path):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    qwen = Qwen3Config(
        **sizes, **heads, sliding_window=4, use_sliding_window=True, max_window_layers=2,
        layer_types=["full_attention"] * 2 + ["sliding_attention"] * 3,
    )  # fmt: skip
    qwen.save_pretrained(tmp_path / "qwen")
    config = TargetConfig(model=str(tmp_path / "qwen"), layer_ids=(1, 3))
    model = flops.target_flops(config, inspect_target(config))
    assert model.attention == ((None, 2 * 4 * 32), (4, 2 * 4 * 32))
    MixtralConfig(**sizes, **heads, num_local_experts=4, num_experts_per_tok=2).save_pretrained(
        tmp_path / "mixtral"
    )
    config = TargetConfig(model=str(tmp_path / "mixtral"), layer_ids=(1,))
    visited = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 4 * 32 + 2 * 3 * 32 * 48)
    assert flops.target_flops(config, inspect_target(config)).token == 2 * visited


def test_the_published_size_is_that_of_the_reference():
    """Reference 3.2: Qwen3-8B's drafter, 3,072 tokens, 512 anchors, blocks of 16: about 72 TFLOP."""
    shape = dataclasses.replace(
        SHAPE, hidden_size=4096, intermediate_size=12288, layers=5, heads=32, kv_heads=8, head_dim=128,
        block_size=16, vocab_size=151936, target_layer_ids=(1, 9, 17, 25, 33),
    )  # fmt: skip
    anchors = np.linspace(1, 3071, 512).astype(np.int64)[None]
    keep = np.ones_like(anchors, bool)
    pairs = visible_pairs(anchors, keep, np.zeros_like(anchors), 16)
    total = flops.drafter_flops(shape).of(BatchWork((3072,), 512, pairs))
    assert 70e12 < total < 74e12


def test_a_share_needs_a_rate_and_a_time():
    assert flops.mfu(3e12, 0.01, 6e14) == pytest.approx(0.5)
    assert flops.mfu(1.0, 1.0, 0.0) is None
    assert flops.mfu(1.0, 0.0, 1.0) is None
