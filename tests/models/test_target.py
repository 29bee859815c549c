"""The target: taps against transformers' own hidden states, early stop, packed documents, and refusals in one
line."""

from __future__ import annotations

import json
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.config import DrafterConfig, TargetConfig, TinyTarget
from dflash.data.documents import DocumentRows
from dflash.device import Device
from dflash.models.target import (
    TargetInfo,
    build_target_layer_ids,
    build_tiny,
    count_parameters,
    inspect_target,
    load_target,
    resolve_mask_token,
    save_target,
    stack_taps,
)
from steptime.errors import UserError
from tests.models.watch import watch
from tests.waiting import HANG_S

SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
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
CPU = Device("cpu")
BUILD = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral, sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=5)),
    "qwen3.5 wrapper": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config={**SIZES, **LINEAR}, vision_config=VISION)
    ),
}


@pytest.fixture
def ids():
    return torch.randint(0, 120, (2, 21), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=BUILD)
def saved(request, tmp_path_factory):
    torch.manual_seed(0)
    model = BUILD[request.param]().eval()
    folder = tmp_path_factory.mktemp("target")
    save_target(model, folder)
    return model, TargetConfig(model=str(folder), taps=3)


def hidden_states(model, ids):
    text = model.model.language_model if hasattr(model.model, "language_model") else model.model
    with torch.no_grad():
        return text(input_ids=ids, output_hidden_states=True, use_cache=False)


def test_inference_mode_changes_no_bit_and_what_is_packed_from_it_can_be_trained_on(saved, ids):
    _, config = saved
    target = load_target(config, CPU)
    with torch.inference_mode():
        inside = target.taps(ids)
    outside = target.taps(ids)
    for one, other in zip(inside, outside, strict=True):
        assert one.equal(other)
    packed = torch.cat(inside, dim=-1, out=torch.empty(*ids.shape, 3 * inside[0].shape[-1]))
    weight = torch.ones(packed.shape[-1], requires_grad=True)
    (packed * weight).sum().backward()
    assert weight.grad is not None


def test_taps_are_the_outputs_of_the_layers(saved, ids):
    model, config = saved
    target = load_target(config, CPU)
    with watch() as seen:
        taps = target.taps(ids)
    assert not seen.reads, "a value was read back"
    expected = hidden_states(model, ids)
    assert target.layer_ids == (1, 3, 5)
    for tap, layer in zip(taps, target.layer_ids, strict=True):
        torch.testing.assert_close(tap, expected.hidden_states[layer + 1], rtol=1e-5, atol=1e-6)
        assert not tap.requires_grad
        assert not tap.is_inference(), "a drafter's backward may keep it"
    assert stack_taps(taps).shape == (2, 21, 3 * 32)


def test_last_hidden_state_gives_the_targets_logits(saved, ids):
    model, config = saved
    target = load_target(config, CPU)
    taps, last = target.taps_and_last(ids)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
    torch.testing.assert_close(last @ target.head.T, logits, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(taps, target.taps(ids), strict=True))


def test_inspect_and_load_agree(saved):
    model, config = saved
    info = inspect_target(config)
    target = load_target(config, CPU)
    assert (info.hidden_size, info.vocab_size, info.layers, info.intermediate_size) == (32, 120, 8, 48)
    assert target.embedding.shape == target.head.shape == (120, 32)
    assert "vision" not in " ".join(name for name, _ in target.model.named_parameters())
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    counted = count_parameters(config)
    tied = target.embedding.data_ptr() == target.head.data_ptr()
    assert counted == sum(p.numel() for p in target.model.parameters())
    assert tied == bool(model.config.get_text_config().tie_word_embeddings)


def test_stops_after_the_last_tapped_layer(ids):
    target = load_target(TINY.model_copy(update={"layer_ids": (1, 4)}), CPU)
    ran: list[str] = []
    for name, module in [
        *((f"layer {i}", layer) for i, layer in enumerate(target.text_model.layers)),
        ("head", target.model.lm_head),
    ]:
        module.register_forward_pre_hook(lambda *_, name=name: ran.append(name))
    target.taps(ids)
    assert ran == [f"layer {i}" for i in range(5)]


def test_recording_rides_on_a_full_pass(ids):
    target = load_target(TINY, CPU)
    with torch.no_grad(), target.recording() as taken:
        logits = target.model(ids).logits
    assert logits.shape == (2, 21, 120)
    assert all(torch.equal(a, b) for a, b in zip(taken, target.taps(ids), strict=True))
    assert target.model.config._attn_implementation == "sdpa"


def test_padding_on_the_right_changes_nothing_before_it(ids):
    target = load_target(TINY, CPU)
    padded = torch.cat([ids, torch.zeros(2, 11, dtype=torch.int64)], dim=1)
    for alone, with_padding in zip(target.taps(ids), target.taps(padded), strict=True):
        torch.testing.assert_close(with_padding[:, :21], alone, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_packed_documents_run_as_if_alone(ids):
    """Full attention and recurrent state start afresh with each document, in batches of unequal packing."""
    target = load_target(TINY, CPU)
    document_ids = np.array([[0] * 4 + [1] * 9 + [2] * 5 + [99] * 3, [0] * 21])
    documents = DocumentRows.split(document_ids)
    assert documents.gather.shape == (5, 21)
    taps, last = target.taps_and_last(ids, documents)
    assert target.taps(ids, documents)[0].shape == (2, 21, 32)
    for row in range(2):
        for document in np.unique(document_ids[row]):
            part = np.flatnonzero(document_ids[row] == document)
            alone, alone_last = target.taps_and_last(ids[row : row + 1, part])
            for packed, expected in zip((*taps, last), (*alone, alone_last), strict=True):
                torch.testing.assert_close(packed[row, part], expected[0], rtol=1e-3, atol=1e-4)
    plain = target.taps(ids)
    assert not torch.allclose(plain[0][0, 4:13], taps[0][0, 4:13], atol=1e-3), "without the reset they differ"


def test_tiny_comes_from_its_seed_alone(ids):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    one = build_tiny(TINY)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    two = build_tiny(TINY)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    kinds = one.config.layer_types
    assert kinds.count("full_attention") == 2
    assert kinds.count("linear_attention") == 6
    other = build_tiny(TINY.model_copy(update={"tiny": TINY.tiny.model_copy(update={"seed": 1})}))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_threads_that_load_at_once_get_the_same_weights():
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(load_target(TINY, CPU).head)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert len(found) == 3
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_trained_tiny_target_is_saved_and_loaded(tmp_path, ids):
    target = load_target(TINY, CPU)
    with torch.no_grad():
        target.head.add_(1.0)
    save_target(target.model, tmp_path)
    again = load_target(TargetConfig(model=str(tmp_path)), CPU)
    assert torch.equal(again.head, target.head)
    assert all(torch.equal(a, b) for a, b in zip(again.taps(ids), target.taps(ids), strict=True))


@pytest.mark.parametrize(
    ("layers", "ids"),
    [
        (16, (1, 4, 7, 10, 13)),
        (24, (1, 6, 11, 16, 21)),
        (28, (1, 7, 13, 19, 25)),
        (32, (1, 8, 15, 22, 29)),
        (36, (1, 9, 17, 25, 33)),
        (40, (1, 10, 19, 28, 37)),
        (64, (1, 16, 31, 46, 61)),
    ],
)
def test_published_layer_ids(layers, ids):
    assert build_target_layer_ids(layers, 5) == ids


def test_layer_ids_without_room_or_out_of_range():
    assert build_target_layer_ids(12, 1) == (6,)
    with pytest.raises(UserError, match=r"target\.taps = 9"):
        build_target_layer_ids(8, 9)
    for ids in ((1, 8), (3, 2), (2, 2)):
        with pytest.raises(UserError, match=r"target\.layer_ids.*below tiny-hybrid's 8 layers"):
            inspect_target(TINY.model_copy(update={"layer_ids": ids}))


def test_inspect_needs_no_weights(tmp_path):
    wrapper = Qwen3_5Config(
        text_config={
            **SIZES,
            **LINEAR,
            "num_hidden_layers": 64,
            "hidden_size": 5120,
            "vocab_size": 248320,
            "eos_token_id": [1, 2],
        },
        vision_config=VISION,
    )
    wrapper.save_pretrained(tmp_path)
    info = inspect_target(TargetConfig(model=str(tmp_path)))
    assert info.layer_ids == (1, 16, 31, 46, 61)
    assert (info.hidden_size, info.vocab_size, info.family) == (5120, 248320, "qwen3_5")
    assert info.eos_ids == (1, 2)
    assert resolve_mask_token(DrafterConfig(), info) == 248070
    with pytest.raises(UserError, match="cannot load its weights"):
        load_target(TargetConfig(model=str(tmp_path)), CPU)


def one_line(model: str) -> str:
    with pytest.raises(UserError) as caught:
        inspect_target(TargetConfig(model=model))
    message = str(caught.value)
    assert "\n" not in message
    assert model in message
    return message


def test_a_target_that_is_not_there_is_one_line_and_no_network(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert "hf download nobody/nothing" in one_line("nobody/nothing")
    assert "no such folder" in one_line("/nowhere/at/all")
    assert "no such folder" in one_line("tiny-hybird")
    assert "has no config.json" in one_line(str(tmp_path))
    (tmp_path / "config.json").write_text("{ not json")
    assert "config.json" in one_line(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    assert "'clip' is not a causal language model" in one_line(str(tmp_path))


def test_weights_that_do_not_fit_are_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save_target(BUILD["qwen3"](), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=name):
        load_target(TargetConfig(model=str(tmp_path)), CPU)


INFO = TargetInfo("somewhere", "qwen3", 32, 48, 151936, 8, (1,), (7,), 5, 1024)


def tokenizer(**fields):
    vocabulary = fields.pop("vocabulary", {})
    return SimpleNamespace(get_vocab=lambda: vocabulary, pad_token_id=None, eos_token_id=None, **fields)


def test_mask_token_order_of_sources():
    own = tokenizer(vocabulary={"<|MASK|>": 11})
    assert resolve_mask_token(DrafterConfig(mask_token_id=9), INFO, own) == 9
    assert resolve_mask_token(DrafterConfig(), INFO, own) == 11
    assert resolve_mask_token(DrafterConfig(), INFO) == 151669


@pytest.mark.parametrize(
    ("token", "reason"), [(151936, "outside"), (-1, "outside"), (5, "pad token"), (7, "end-of-text token")]
)
def test_mask_token_refused(token, reason):
    with pytest.raises(UserError, match=reason):
        resolve_mask_token(DrafterConfig(mask_token_id=token), INFO)


def test_mask_token_of_an_unknown_family():
    info = TargetInfo("somewhere", "novel", 32, 48, 100, 8, (1,), (), None, 1024)
    with pytest.raises(UserError, match=r"set drafter\.mask_token_id.*0 to 99"):
        resolve_mask_token(DrafterConfig(), info)
