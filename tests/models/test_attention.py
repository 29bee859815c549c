"""Split and flex attention against the dense mask."""

from __future__ import annotations

import warnings

import pytest
import torch

from dflash.models.attention import BlockLayout, flex_mask, prepare
from dflash.models.blocks import dense_attention_mask
from tests.models.cases import SHAPE, make_case

WINDOWS = [None, 3, 9, 200]


def places_of(case) -> BlockLayout:
    return BlockLayout(
        case.anchors, case.keep, case.document_start, case.input_ids.shape[1], SHAPE.block_size
    )


def states(case) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    batch, count = case.anchors.shape
    rows, context = count * SHAPE.block_size, case.input_ids.shape[1]

    def draw(heads: int, columns: int) -> torch.Tensor:
        return torch.randn(batch, heads, columns, 8, generator=generator)

    return [draw(4, rows), draw(2, rows), draw(2, rows), draw(2, context), draw(2, context)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("kind", ["split", pytest.param("flex", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dropped", "documents"), [(False, False), (True, False), (False, True)])
def test_equals_dense(kind, window, dropped, documents):
    case = make_case(dropped=dropped, documents=documents)
    given = states(case)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = prepare("dense", places_of(case), window, torch.float32)(*given)
        found = prepare(kind, places_of(case), window, torch.float32)(*given)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", WINDOWS)
def test_flex_mask_written_out_is_the_dense_mask(window):
    from torch.nn.attention.flex_attention import create_mask

    case = make_case(dropped=True, documents=True)
    places = places_of(case)
    batch, count = case.anchors.shape
    rows = count * SHAPE.block_size
    written = create_mask(flex_mask(places, window), batch, None, rows, places.context + rows, device="cpu")[
        :, 0
    ]
    dense = dense_attention_mask(
        case.anchors, case.keep, case.document_start, places.context, SHAPE.block_size, window
    )
    assert torch.equal(written, dense)


def test_auto_is_split_on_the_cpu():
    case = make_case()
    assert type(prepare("auto", places_of(case), None, torch.float32)).__name__ == "SplitAttention"
