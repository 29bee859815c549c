"""Each silent error of this field, planted: the guard that exists against it must find it.

A drafter with any of these trains well and drafts badly. The guards pass on the sound code (the first test,
and the first lines of the others); then the fault is planted, and the guard must fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import dflash.data.anchors
import dflash.models.attention
import dflash.models.drafter
import dflash.models.split
import dflash.models.stack
from dflash.config import TargetConfig, TinyTarget
from dflash.data.anchors import BlockGeometry, document_starts
from dflash.device import Device
from dflash.models.drafter import DrafterShape, Rotary
from dflash.models.target import Target, build_target_layer_ids, build_tiny, load_target
from tests.models.cases import Case, flatten, make_case, make_drafter, run
from tests.models.slow import slow_forward
from tests.models.test_blocks import slow_slot

pytestmark = [pytest.mark.fault, pytest.mark.slow]

PATHS = ["modules, dense", "modules, split", "written out"]
DEFAULT = {"sliding_layers": 1, "sliding_window": 9}


@contextmanager
def must_fail() -> Iterator[None]:
    """The guard inside must raise."""
    try:
        yield
    except AssertionError:
        return
    pytest.fail("the guard did not notice")


def check_forward(path: str, case: Case | None = None, **changes: object) -> None:
    """Guard: hidden states of every kept block against the slow drafter."""
    case = case or make_case(dropped=True, documents=True, context=40, anchors=8)
    drafter = make_drafter(
        attention="dense" if path == "modules, dense" else "split", **{**DEFAULT, **changes}
    )
    expected = slow_forward(drafter.state_dict(), drafter.shape, case)
    if path == "written out":
        flatten(drafter, torch.device("cpu"), torch.float32)
        hidden = run(drafter, case, limits=case.limits)
    else:
        with torch.no_grad():
            hidden = run(drafter, case)
    torch.testing.assert_close(hidden[case.keep].double().detach(), expected[case.keep], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layers", [0, 1, 3])
def test_the_guard_passes_on_sound_code(path, layers):
    check_forward(path, sliding_layers=layers)
    check_forward(path, make_case(context=33, anchors=5), sliding_layers=layers, kv_heads=4)


@pytest.mark.parametrize("path", PATHS)
def test_context_including_the_anchor(path, monkeypatch):
    sound = dflash.models.drafter.BlockLayout

    def mutated(anchors, *rest):
        return sound(anchors + 1, *rest)

    monkeypatch.setattr(dflash.models.drafter, "BlockLayout", mutated)
    if path == "written out":  # there the anchors' places also give the positions; move the mask alone
        monkeypatch.setattr(
            dflash.models.stack, "slot_positions", lambda anchors, size: _positions(anchors - 1, size)
        )
    with must_fail():
        check_forward(path)


def _positions(anchors: torch.Tensor, size: int) -> torch.Tensor:
    return anchors[..., None] + torch.arange(size)


@pytest.mark.parametrize("path", PATHS)
def test_blocks_seeing_each_other(path, monkeypatch):
    if path == "modules, dense":
        sound = dflash.models.attention.dense_attention_mask

        def mutated(anchors, keep, start, context, size, window=None):
            mask = sound(anchors, keep, start, context, size, window)
            mask[..., context:] = True
            return mask

        monkeypatch.setattr(dflash.models.attention, "dense_attention_mask", mutated)
    else:
        kernel = (
            dflash.models.attention.SplitAttention
            if path == "modules, split"
            else dflash.models.split.SplitKernel
        )
        name = "__call__" if path == "modules, split" else "forward"
        sound_call = getattr(kernel, name)

        def mutated_call(self, *args):
            first = 0 if path == "modules, split" else 1
            query, key, value, *rest = args[first:]
            step = self.size if path == "modules, split" else 1
            return sound_call(
                self, *args[:first], query, key.roll(step, dims=2), value.roll(step, dims=2), *rest
            )

        monkeypatch.setattr(kernel, name, mutated_call)
    with must_fail():
        check_forward(path, sliding_layers=0)


@pytest.mark.parametrize("path", PATHS)
def test_causal_inside_a_full_attention_block(path, monkeypatch):
    case = make_case(context=40, anchors=8)
    drafter = make_drafter(attention="dense" if path == "modules, dense" else "split")
    expected = slow_forward(
        drafter.state_dict(), drafter.shape, case
    )  # by the sound windows: a full layer has none
    if path == "written out":
        flatten(drafter, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(DrafterShape, "window", lambda self, layer: 10**6)
    with must_fail():
        torch.testing.assert_close(run(drafter, case).detach().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("path", PATHS)
def test_wrong_mask_id(path, monkeypatch):
    sound = dflash.models.drafter.Drafter.block_input

    def mutated(self, input_ids, anchors, embedding):
        return sound(self, input_ids, anchors, _swap(embedding, self.shape.mask_token_id))

    monkeypatch.setattr(dflash.models.drafter.Drafter, "block_input", mutated)
    with must_fail():
        check_forward(path)


def _swap(embedding: torch.Tensor, mask: int) -> torch.Tensor:
    """As if the id next to the mask's had been taken."""
    changed = embedding.clone()
    changed[mask] = embedding[mask - 1]
    return changed


@pytest.mark.parametrize("path", PATHS)
def test_position_ids_restarted_per_block(path, monkeypatch):
    def mutated(anchors, size):
        return torch.zeros_like(anchors)[..., None] + torch.arange(size)

    for module in (dflash.models.drafter, dflash.models.stack):
        monkeypatch.setattr(module, "slot_positions", mutated)
    with must_fail():
        check_forward(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("leak", ["partial rotary factor", "the target's theta"])
def test_rotary_factor_leaked(path, leak, monkeypatch):
    sound = Rotary.grow

    def mutated(self, positions, device, dtype):
        if leak == "the target's theta":
            self.theta = 1e4
        sound(self, positions, device, dtype)
        if leak == "partial rotary factor":
            turning = torch.arange(self.head_dim) % (self.head_dim // 2) < self.head_dim // 8
            self.cos = torch.where(turning, self.cos, 1.0)
            self.sin = torch.where(turning, self.sin, 0.0)

    monkeypatch.setattr(Rotary, "grow", mutated)
    with must_fail():
        check_forward(path)


@pytest.mark.parametrize("path", PATHS)
def test_slot_0_scored(path, monkeypatch):
    for module in (dflash.models.drafter, dflash.models.stack):
        monkeypatch.setattr(module, "scored_slots", lambda states: states[..., :-1, :])
    with must_fail():
        check_forward(path)


@pytest.mark.parametrize("path", PATHS)
def test_document_boundary_crossed_by_attention(path):
    case = make_case(documents=True, context=40, anchors=8)
    assert case.document_start.any()
    drafter = make_drafter(attention="dense" if path == "modules, dense" else "split")
    expected = slow_forward(drafter.state_dict(), drafter.shape, case)
    if path == "written out":
        flatten(drafter, torch.device("cpu"), torch.float32)
    crossed = case.changed(document_start=torch.zeros_like(case.document_start))
    with must_fail():
        torch.testing.assert_close(run(drafter, crossed).detach().double(), expected, rtol=1e-4, atol=1e-4)


# ---- labels

IDS = np.arange(100, 124)
MASK = np.array([False] * 4 + [True] * 16 + [False] * 4)
DOCUMENTS = np.array([0] * 9 + [1] * 15)


def check_labels(slot_labels: Callable[..., tuple[np.ndarray, np.ndarray]]) -> None:
    """Guard: labels and weights slot by slot, over two documents, a dropped block and a partial last one."""
    anchors, keep = np.array([4, 6, 15, 18, 0]), np.array([True, True, True, True, False])
    geometry = BlockGeometry(5, 6, gamma=3.0)
    labels, weights = slot_labels(IDS, MASK, anchors, keep, geometry, DOCUMENTS)
    for n in range(5):
        for k in range(1, 6):
            label, weight = slow_slot(IDS, MASK, DOCUMENTS, anchors[n], keep[n], k, 3.0)
            assert labels[n, k - 1] == label
            assert abs(weights[n, k - 1] - weight) < 1e-6


def test_label_shifted_by_one():
    sound = dflash.data.anchors.slot_labels
    check_labels(sound)
    for shift in (1, -1):
        with must_fail():
            check_labels(lambda ids, *rest, shift=shift: sound(np.roll(ids, shift), *rest))


def test_document_boundary_crossed_by_labels():
    with must_fail():
        check_labels(lambda *args: dflash.data.anchors.slot_labels(*args[:-1], None))


def test_document_starts_are_those_of_the_anchors_document():
    anchors = np.array([4, 6, 15, 18])
    assert document_starts(anchors, DOCUMENTS).tolist() == [0, 0, 9, 9]
    with must_fail():
        assert document_starts(anchors, None).tolist() == [0, 0, 9, 9]


# ---- tapped layers


def check_published_ids(build: Callable[[int, int], tuple[int, ...]]) -> None:
    assert build(36, 5) == (1, 9, 17, 25, 33)
    assert build(64, 5) == (1, 16, 31, 46, 61)


TINY = TargetConfig(
    tiny=TinyTarget(
        hidden_size=32,
        intermediate_size=48,
        heads=2,
        kv_heads=1,
        head_dim=16,
        linear_heads=2,
        linear_head_dim=16,
        vocab_size=120,
    )
)


def check_taps() -> None:
    """Guard: tap j is the output of layer j, transformers' hidden_states[j + 1]."""
    ids = torch.arange(24).view(2, 12)
    target = load_target(TINY, Device("cpu"))
    with torch.no_grad():
        states = build_tiny(TINY).eval()(ids, output_hidden_states=True).hidden_states
    for tap, layer in zip(target.taps(ids), (1, 2, 3, 4, 5), strict=True):
        torch.testing.assert_close(tap, states[layer + 1], rtol=1e-5, atol=1e-6)


def test_layer_id_off_by_one_in_the_formula():
    check_published_ids(build_target_layer_ids)
    with must_fail():
        check_published_ids(lambda layers, taps: tuple(i + 1 for i in build_target_layer_ids(layers, taps)))


def test_layer_id_off_by_one_at_the_hook(monkeypatch):
    """The engines' numbering: what enters layer j instead of what leaves it."""
    check_taps()

    def mutated(self, module, args, output):
        sound(self, module, args, args[0])

    sound = Target._take
    monkeypatch.setattr(Target, "_take", mutated)
    with must_fail():
        check_taps()
