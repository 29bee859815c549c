"""Decoding on a simulated device: the CPU's texts, every operation checked against CUDA's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dflash.commands.eval import build
from dflash.config import TargetConfig
from dflash.decode.generate import decode_plainly, speculate
from dflash.device import one_device
from dflash.models.target import load_target, save_target
from steptime.errors import UserError
from steptime.simulate import current
from tests.decode import parts

LENGTHS = (9, 4)


def texts(folder: Path, name: str) -> tuple[list[Any], int]:
    """What is decoded with and without a drafter on a device, and how many operations were checked there."""
    config = TargetConfig(model=str(folder), layer_ids=(0, 1, 2), dtype="float32", devices=[name])
    with one_device(name) as device:
        target = load_target(config, device)
        made = parts.make_drafter(target)
        drafter = build(target, made.shape, made.state_dict(), "here")
        rows: list[Any] = []
        for decoded in (
            decode_plainly(target, parts.prompts(LENGTHS), max_new_tokens=6),
            speculate(target, drafter, parts.prompts(LENGTHS), max_new_tokens=6),
        ):
            rows += [row.tokens for row in decoded.rows]
        simulation = current()
        if simulation is None:
            return rows, 0
        assert simulation.faults == []
        return rows, simulation.counts.operations


@pytest.mark.slow
@pytest.mark.parametrize("family", ["full", "hybrid"])
def test_the_texts_are_the_cpus(family: str, tmp_path: Path) -> None:
    save_target(parts.MODELS[family](), tmp_path)
    plain, unchecked = texts(tmp_path, "cpu")
    found, checked = texts(tmp_path, "sim:0")
    assert found == plain
    assert checked > 1000
    assert unchecked == 0


@pytest.mark.fault
def test_a_drafter_left_on_the_host_is_found(tmp_path: Path) -> None:
    save_target(parts.full_model(), tmp_path)
    config = TargetConfig(model=str(tmp_path), layer_ids=(0, 1, 2), dtype="float32", devices=["sim:0"])
    with one_device("sim:0") as device:
        target = load_target(config, device)
        with pytest.raises(RuntimeError, match="found the host and sim:0"):
            speculate(target, parts.make_drafter(target), parts.prompts((9,)), max_new_tokens=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is there")
def test_a_device_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match="this machine has 0 CUDA devices"), one_device("cuda:0"):
        pass
