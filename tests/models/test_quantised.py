"""Quantised targets: their embedding and head in full, what they take, and each kind from end to end where
its library is installed. docs/targets.md is the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from dflash.config import TargetConfig, load_config
from dflash.device import Device
from dflash.models.quantized import check_runs, quantization_of
from dflash.models.target import Target, count_weight_bytes, inspect_target, load_target
from dflash.pipeline.dry_run import make_plan, print_plan
from steptime.errors import UserError
from tests.models import quantised
from tests.models.families import FAMILIES, VOCAB
from tests.models.quantised import FAST, KINDS
from tests.models.test_targets import run_settings, trains_decodes_and_exports

PAGE = Path(__file__).parents[2] / "docs" / "targets.md"
LAYERS = (0, 1, 2)
ELEMENTS = {"layers": 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128), "ends": 2 * VOCAB * 64, "norms": 9 * 64}


class Int8Linear(nn.Module):
    """Stands for a quantised layer: bytes and a scale in the place of a matrix."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("scale", linear.weight.detach().abs().amax(1, keepdim=True) / 127.0)
        self.weight = nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)
        self.bias = linear.bias

    def forward(self, x):
        return F.linear(x, self.weight.to(x) * self.scale.to(x), self.bias)


class Int8Embedding(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.register_buffer("scale", embedding.weight.detach().abs().amax(1, keepdim=True) / 127.0)
        self.weight = nn.Parameter((embedding.weight.detach() / self.scale).round().to(torch.int8), False)

    def forward(self, ids):
        return self.weight[ids] * self.scale[ids]


def stand_in(folder: Path) -> Target:
    """A target whose embedding, head and one layer are quantised."""
    quantised.plain(folder)
    settings = TargetConfig(model=str(folder), layer_ids=LAYERS)
    info = load_target(settings, Device("cpu")).info
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.set_input_embeddings(Int8Embedding(model.get_input_embeddings()))
    model.lm_head = Int8Linear(model.lm_head)
    model.model.layers[1].mlp.up_proj = Int8Linear(model.model.layers[1].mlp.up_proj)
    return Target(model, info, Device("cpu"))


def test_a_quantised_embedding_and_head_come_out_in_full(tmp_path):
    target = stand_in(tmp_path)
    ids = torch.arange(1, 21)[None]
    taps, last = target.taps_and_last(ids)
    assert {one.dtype for one in (target.embedding, target.head, last, *taps)} == {torch.float32}
    assert not target.embedding.requires_grad
    assert not target.head.requires_grad
    torch.testing.assert_close(last @ target.head.T, target.model(ids).logits, rtol=0, atol=1e-5)
    rows = target.model.get_input_embeddings()(ids)
    assert torch.equal(F.embedding(ids, target.embedding), rows)
    twin = target.twin(Device("cpu"))
    assert torch.equal(twin.model(ids).logits, target.model(ids).logits)
    assert twin.layers[1].mlp.up_proj.weight is target.layers[1].mlp.up_proj.weight


def test_a_bias_is_no_part_of_the_head(tmp_path):
    quantised.plain(tmp_path)
    target = load_target(TargetConfig(model=str(tmp_path), layer_ids=LAYERS), Device("cpu"))
    whole = nn.Linear(64, VOCAB)
    target.model.lm_head = Int8Linear(whole)
    target = Target(target.model, target.info, Device("cpu"))
    assert target.head_has_bias
    torch.testing.assert_close(target.head, whole.weight.detach(), rtol=0, atol=1e-3)


def test_a_layer_that_keeps_state_from_its_first_pass_is_shared(tmp_path):
    """As bitsandbytes' int8 layers do: the bytes move into a state beside the weight."""

    class State:
        kept = None

    class Lazy(Int8Linear):
        def __init__(self, linear):
            super().__init__(linear)
            self.state = State()

        def forward(self, x):
            if self.state.kept is None:
                self.state.kept = self.weight.data.clone()
                self.weight.data.zero_()
            return F.linear(x, self.state.kept.to(x) * self.scale, self.bias)

    target = stand_in(tmp_path)
    target.layers[0].mlp.up_proj = Lazy(load_target_again(tmp_path).layers[0].mlp.up_proj)
    twin = target.twin(Device("cpu"))
    ids = torch.arange(1, 9)[None]
    assert torch.equal(twin.model(ids).logits, target.model(ids).logits)
    assert twin.layers[0].mlp.up_proj.state.kept is target.layers[0].mlp.up_proj.state.kept


def load_target_again(folder):
    return load_target(TargetConfig(model=str(folder), layer_ids=LAYERS), Device("cpu"))


def test_layers_that_cannot_be_shared_have_no_twin(tmp_path):
    class Forgetful(Int8Linear):
        def __deepcopy__(self, memo):
            other = nn.Linear(64, 128, bias=False)
            return other.requires_grad_(False)

    target = stand_in(tmp_path)
    target.layers[0].mlp.up_proj = Forgetful(load_target_again(tmp_path).layers[0].mlp.up_proj)
    with pytest.raises(UserError, match="cannot be shared by two threads"):
        target.twin(Device("cpu"))


TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
}
GROUPS = {"_type": "PerGroup", "_data": {"group_size": 32}}
INTX = {"_type": "IntxWeightOnlyConfig", "_data": {"granularity": GROUPS}}
INT4 = {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}
BNB8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True}
STORED = [
    pytest.param(TORCHAO, "cpu", 8.0, 0, id="torchao int8"),
    pytest.param(TORCHAO | {"quant_type": {"default": INT4}}, "cuda:0", 5.0, 0, id="torchao int4"),
    pytest.param(TORCHAO | {"quant_type": {"default": INTX}}, "cpu", 9.25, 0, id="torchao intx"),
    pytest.param(TORCHAO | {"include_input_output_embeddings": True}, "cpu", 8.0, 2, id="torchao, head"),
    pytest.param(TORCHAO | {"quant_type": {"default": {"_type": "Odd"}}}, "cpu", None, 0, id="torchao, odd"),
    pytest.param(BNB4, "cuda:0", 4.5, 0, id="bitsandbytes int4"),
    pytest.param(BNB4 | {"bnb_4bit_use_double_quant": True}, "cpu", 4.127, 0, id="bitsandbytes, double"),
    pytest.param(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, "cpu", 8.0, 0, id="bitsandbytes int8"
    ),
    pytest.param(
        BNB8 | {"llm_int8_skip_modules": ["up_proj", "lm_head"]},
        "cpu",
        8.0,
        1,
        id="bitsandbytes, less",
    ),
    pytest.param(quantised.FP8, "cuda:0", 8.002, 0, id="fp8"),
    pytest.param(quantised.FP8, "cpu", None, 0, id="fp8 on a CPU"),
    pytest.param(
        quantised.compressed("pack-quantized", num_bits=4), "cuda:0", None, 0, id="compressed-tensors"
    ),
    pytest.param({"quant_method": "gptq", "bits": 4}, "cuda:0", 4.0, 0, id="gptq"),
    pytest.param({"quant_method": "odd"}, "cuda:0", None, 0, id="unknown"),
]


@pytest.mark.parametrize(("settings", "device", "bits", "what"), STORED)
def test_the_plan_counts_the_weights_as_they_are_stored(settings, device, bits, what, tmp_path):
    quantised.plain(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    quantised.say(tmp_path, settings)
    config = TargetConfig(model=str(tmp_path), layer_ids=LAYERS, devices=(device,))
    info = inspect_target(config)
    assert info.quantization is not None
    assert info.quantization.bits == (None if bits is None else pytest.approx(bits, abs=1e-3))
    small = 0 if bits is None else ELEMENTS["layers"]
    full = ELEMENTS["layers"] - small + ELEMENTS["ends"] + ELEMENTS["norms"]
    if what == 1:  # some matrices are kept out
        kept = 4 * 64 * 128
        small, full = small - kept, full + kept
    if what == 2:  # the head is quantised, and kept in full besides
        small += VOCAB * 64
    expected = 2 * full + small * (bits or 0.0) / 8
    assert count_weight_bytes(config, info, 2) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    "tree",
    [
        5,
        "int8",
        [],
        quantised.FP8 | {"weight_block_size": [0, 128]},
        quantised.FP8 | {"weight_block_size": 128},
        TORCHAO
        | {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": "x"}}}},
        TORCHAO | {"quant_type": {"default": "Int8"}},
        BNB8 | {"llm_int8_skip_modules": 3},
        BNB8 | {"llm_int8_skip_modules": ["(mlp"]},
    ],
)
def test_what_no_method_writes_is_one_line(tree):
    config = LlamaConfig()
    config.quantization_config = tree
    with pytest.raises(UserError, match=r"'folder': quantization_config of its .* cannot be read"):
        quantization_of(config, "cuda:0", "folder")


def test_experts_are_counted_where_the_method_stores_them_small(tmp_path):
    quantised.plain(tmp_path, "GptOssConfig", num_local_experts=4, num_experts_per_tok=2)
    plain = TargetConfig(model=str(tmp_path), layer_ids=LAYERS, devices=("cuda:0",))
    before = count_weight_bytes(plain, inspect_target(plain), 2)
    quantised.say(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    experts = 4 * 4 * 3 * 64 * 128
    after = count_weight_bytes(plain, inspect_target(plain), 2)
    assert before - after == pytest.approx(experts * (2 - 4.25 / 8), rel=1e-6)


@pytest.mark.slow
def test_the_dry_run_says_it(tmp_path, capsys):
    (tmp_path / "target").mkdir()
    quantised.plain(tmp_path / "target")
    config = load_config(None, run_settings(tmp_path))
    full = make_plan(config).devices[0].memory_bytes[0]
    quantised.say(tmp_path / "target", TORCHAO)
    stored = make_plan(config).devices[0].memory_bytes[0]
    assert (full[0], full[1] - stored[1]) == ("weights", 3 * ELEMENTS["layers"])
    print_plan(config)
    assert "the target is quantised (torchao): 8 bits a quantised weight" in capsys.readouterr().out


def test_what_cannot_run_here_is_one_line(tmp_path):
    target = stand_in(tmp_path)
    target.layers[0].mlp.up_proj = nn.Linear(64, 128, dtype=torch.bfloat16)
    settings = {"quant_method": "torchao"}
    config = target.model.config
    config.quantization_config, config.dtype = settings, torch.bfloat16
    found = quantization_of(config, "cpu")
    with pytest.raises(UserError, match=r"a pass in float32 on cpu fails: .*try target.dtype = bfloat16"):
        check_runs(target.model, "folder", found, "float32")
    check_runs(stand_in(tmp_path).model, "folder", found, "float32")


def test_a_method_whose_library_is_missing_is_one_line(tmp_path):
    quantised.plain(tmp_path)
    quantised.say(tmp_path, {"quant_method": "aqlm"})
    with pytest.raises(UserError, match=r"cannot load its weights: .*aqlm"):
        load_target(TargetConfig(model=str(tmp_path), layer_ids=LAYERS), Device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.thorough) for name in KINDS]
)
def test_a_target_of_each_kind(name, tmp_path, monkeypatch):
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package, reason=f"{package} is not installed, so no {name} target is tried")
    monkeypatch.setattr("dflash.decode.evaluate.plot", lambda *_: False)
    folder = tmp_path / "target"
    folder.mkdir()
    kind.make(folder)
    config = TargetConfig(model=str(folder), layer_ids=LAYERS)
    target = load_target(config, Device("cpu"))
    assert target.info.quantization is not None
    assert (target.info.quantization.bits is None) is kind.widened
    counted = count_weight_bytes(config, target.info, 4)
    assert counted == pytest.approx(quantised.stored_bytes(target), rel=0.05)
    ids = torch.randint(1, VOCAB, (2, 20), generator=torch.Generator().manual_seed(5))
    taps, last = target.taps_and_last(ids)
    with torch.no_grad():
        whole = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    for tap, hidden in zip(taps, whole.hidden_states[1:], strict=False):
        torch.testing.assert_close(tap, hidden, rtol=0, atol=1e-5)
    assert {target.embedding.dtype, target.head.dtype, last.dtype} == {torch.float32}
    torch.testing.assert_close(last @ target.head.T, whole.logits, rtol=1e-3, atol=1e-3)
    twin = target.twin(Device("cpu"))
    with torch.no_grad():
        assert torch.equal(twin.model(input_ids=ids).logits, target.model(input_ids=ids).logits)
    family = FAMILIES["gpt-oss" if name == "mxfp4" else "Llama"]
    trains_decodes_and_exports(tmp_path, family, ties=kind.ties)


def test_a_drafter_in_another_type_gets_all_of_it_in_that_type(tmp_path):
    """Taps, embedding and head of a quantised target, in the drafter's type."""
    from dflash.pipeline.build import build_replica, prepare_inputs

    folder = tmp_path / "target"
    folder.mkdir()
    target = stand_in(folder)
    inputs = prepare_inputs(load_config(None, [*run_settings(tmp_path), "drafter.dtype=bfloat16"]))
    replica = build_replica(inputs, target, 0)
    assert {replica.embedding.dtype, replica.head.dtype} == {torch.bfloat16}
    torch.testing.assert_close(replica.head.float(), target.head, rtol=1e-2, atol=1e-2)


def test_the_page_lists_each_kind():
    rows = re.findall(r"^\| (\S[^|]*?) \| ([^|]+) \| tried on a CPU \|$", PAGE.read_text(), re.MULTILINE)
    assert {name for name, _ in rows} == set(KINDS)
