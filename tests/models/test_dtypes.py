from __future__ import annotations

import pytest
import torch

from dflash.config import Config, DrafterConfig, TargetConfig
from dflash.device import Device
from dflash.models import dtypes
from dflash.models.target import load_target


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(dtypes, "_said", set())


@pytest.mark.parametrize(("fast", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_auto_follows_the_devices_and_says_so_once(monkeypatch, capsys, fast, chosen):
    monkeypatch.setattr(dtypes, "fast_bfloat16", lambda device: fast)
    config = Config(target=TargetConfig(dtype="auto"), drafter=DrafterConfig(dtype="auto"))
    for _ in range(2):
        settled = dtypes.settle_dtypes(config)
        assert (settled.target.dtype, settled.drafter.dtype) == (chosen, chosen)
    said = capsys.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in said] == [
        f"dflash: {who}.dtype = auto: {chosen}" for who in ("target", "drafter")
    ]


def test_a_slow_bfloat16_that_was_asked_for_is_told(monkeypatch, capsys):
    monkeypatch.setattr(dtypes, "fast_bfloat16", lambda device: False)
    monkeypatch.setattr(dtypes, "_product_s", {torch.bfloat16: 9.5, torch.float32: 0.1}.__getitem__)
    config = Config(drafter=DrafterConfig(dtype="bfloat16"))
    assert dtypes.settle_dtypes(config) is config
    assert "drafter.dtype = bfloat16: cpu has no bfloat16 units" in (said := capsys.readouterr().err)
    assert "takes 95 times as long as in float32" in said


def test_what_is_plain_is_left_alone_and_unsaid(monkeypatch, capsys):
    monkeypatch.setattr(dtypes, "fast_bfloat16", None)  # would raise
    config = Config()
    assert dtypes.settle_dtypes(config) is config
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("capability", "flags", "fast"),
    [("AVX2", (False, False), False), ("AVX512", (True, False), True), ("AVX512", (False, True), True)],
)
def test_an_x86_cpu_is_known_by_its_flags(monkeypatch, capability, flags, fast):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: flags[0])
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: flags[1])
    monkeypatch.setattr(dtypes, "_product_s", None)
    assert dtypes.fast_bfloat16("cpu:3") is fast


def test_another_cpu_is_measured(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    for low, fast in ((0.1, True), (3.0, False)):
        monkeypatch.setattr(dtypes, "_product_s", {torch.bfloat16: low, torch.float32: 1.0}.__getitem__)
        assert dtypes.fast_bfloat16("cpu") is fast


def test_a_product_is_measured_in_the_type_asked_for():
    assert dtypes._product_s(torch.bfloat16) > 0.0


def test_a_target_alone_settles_too(monkeypatch):
    monkeypatch.setattr(dtypes, "fast_bfloat16", lambda device: True)
    tiny = {"hidden_size": 32, "layers": 5, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab_size": 300}
    config = TargetConfig.model_validate({"dtype": "auto", "taps": 2, "tiny": tiny})
    assert load_target(config, Device("cpu")).embedding.dtype == torch.bfloat16
