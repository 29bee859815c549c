"""The doctor's page: every check answers, in 80 columns, and one that breaks does not take the others
along."""

from __future__ import annotations

import ctypes
import importlib.metadata

import pynvml
import pytest
import torch

from dflash.cli import run
from dflash.commands import checks
from dflash.observe import nvml
from dflash.observe.sinks.wandb import WandbSink
from tests.observe import nvml_stub


def test_the_page_fits_80_columns_and_names_every_check(capsys):
    assert run(["doctor"]) == 0
    out = capsys.readouterr().out
    for name, _ in checks.CHECKS:
        assert name in out
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "\033" not in out


def test_a_check_that_breaks_is_one_line_and_the_others_go_on(monkeypatch):
    def broken():
        raise RuntimeError("planted")

    monkeypatch.setattr(checks, "CHECKS", (("bad", broken), ("Python", checks.check_python)))
    bad, good, *_ = checks.examine()
    assert bad.state == "warning"
    assert "planted" in bad.text
    assert good.state == "ok"


def test_the_package_of_the_same_name_is_noticed(monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.1.0" if name == "dflash" else real(name)
    )
    state, text = checks.check_clash()
    assert state == "warning"
    assert "0.1.0" in text


@pytest.mark.parametrize(("key", "state"), [("x" * 40, "ok"), ("", "absent")])
def test_wandb_key(monkeypatch, tmp_path, key, state):
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert WandbSink.examine()[0] == state


def test_a_folder_that_cannot_be_written_is_broken(monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checks.tempfile, "TemporaryFile", refuse)
    assert checks.check_disk()[0] == "broken"


def test_colours_only_when_asked():
    findings = [checks.Finding("a", "ok", "b")]
    assert "\033[32m" in checks.page(findings, colour=True)
    assert "\033" not in checks.page(findings)


@pytest.mark.skipif(nvml_stub.COMPILER is None, reason="no C compiler for the stub of libnvidia-ml")
def test_nvml_says_what_a_gpu_refuses(tmp_path, monkeypatch):
    loaded = ctypes.CDLL(str(nvml_stub.compile_stub(tmp_path)))
    monkeypatch.setattr(pynvml, "nvmlLib", None)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "CDLL", lambda name: loaded)
    stub = nvml_stub.Stub(loaded)
    stub.add("GPU-0")
    stub.code(stub.add("GPU-1"), "utilisation", nvml_stub.NOT_SUPPORTED)
    state, text = checks.check_nvml()
    assert (state, text) == (
        "ok",
        "2 GPUs seen, driver 999.1: gpu/* is on; no utilisation on GPU 1 (Not Supported)",
    )
    assert stub.open == 0


def test_collectors_that_have_nothing_to_report_say_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    _, text = checks.check_collectors()
    on, cost, *off = text.split("; ")
    assert on.startswith("profile, pipeline, workers, batch")
    assert cost.startswith("stages by the host clock, a span costs ")
    assert off == ["gpu has nothing to report: no GPU", "cuda has nothing to report: no GPU"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(nvml, "unavailable", lambda: "no NVML")
    _, text = checks.check_collectors()
    on, cost, *off = text.split("; ")
    assert on.startswith("profile, pipeline, workers, batch, cuda")
    assert cost.startswith("stages by CUDA events")
    assert off == ["gpu has nothing to report: no NVML"]
