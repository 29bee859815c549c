"""The receipt: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steptime.errors import UserError
from steptime.records.receipt import SCHEMA, Receipt
from steptime.records.types import (
    Commit,
    ConfigRef,
    ExitCode,
    GpuState,
    Machine,
    MachineState,
    Throughput,
    Verdict,
)
from tests.steptime.make import measured, receipt_of

HERE = Path(__file__).parent


def receipt() -> Receipt:
    return receipt_of(
        measured(),
        Machine("cpu-x", "CPU X", 2, (("GPU", "ab"),), {"torch": "2.13.0"}),
        ConfigRef("cpu-tiny", "0123"),
        Commit("0123abcd", dirty=True, diff_hash="ff"),
        pipeline_efficiency=0.97,
        before=MachineState(1.0, gpus=(GpuState(0, throttle_reasons=("power cap",)),)),
        options={"seed": 0, "minutes": 0.5, "quick": True, "only": ""},
        extra={"notes": ["one"]},
    )


def test_round_trip() -> None:
    text = receipt().to_json()
    assert Receipt.from_json(text) == receipt()
    assert Receipt.from_json(text).to_json() == text


def test_the_contract_of_the_receipt() -> None:
    """Readers rely on these keys."""
    tree = json.loads(receipt().to_json())
    assert next(iter(tree)) == "schema"
    assert tree["schema"] == "dflash-bench/receipt/2"
    contract = (
        "command commit machine config pairs losses_equal collectors all throughput baseline "
        "pipeline_efficiency verdict exit_code"
    )
    assert set(contract.split()) <= set(tree)
    assert set(tree["commit"]) == {"id", "dirty", "diff_hash"}
    assert "key" in tree["machine"]
    assert set(tree["config"]) == {"name", "hash"}
    assert set(tree["pairs"][0]) == {
        "number",
        "layer",
        "question",
        "first",
        "second",
        "process",
        "losses_equal",
    }
    assert {"on", "steps", "tokens", "seconds", "group"} <= set(tree["pairs"][0]["first"])
    cost = {"name", "estimate", "accounted_percent", "added", "verdict", "minutes_to_settle"}
    assert cost <= set(tree["collectors"][0])
    assert cost <= set(tree["all"])
    assert set(tree["all"]["added"]) == {"syncs", "operations", "copies", "allocations"}
    assert {"percent", "low", "high", "mde", "layers"} <= set(tree["collectors"][0]["estimate"])
    assert set(tree["throughput"]) == {"tokens_per_second", "low", "high"}
    assert {"status", "value", "origin"} <= set(tree["baseline"])
    assert (tree["verdict"], tree["exit_code"]) == ("within", 0)


def damage(change: Callable[[dict[str, Any]], Any]) -> str:
    tree = json.loads(receipt().to_json())
    change(tree)
    return json.dumps(tree)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(schema="dflash-bench/receipt/3"),
            f"schema 'dflash-bench/receipt/3' is not '{SCHEMA}'",
        ),
        (lambda t: t.pop("schema"), f"schema None is not '{SCHEMA}'"),
        (lambda t: t.update(verdikt=1), "unknown key 'verdikt'; did you mean 'verdict'?"),
        (lambda t: t["collectors"][0].update(isolatd=1), "unknown key 'collectors.0.isolatd'"),
        (lambda t: t.pop("verdict"), "missing key 'verdict'"),
        (lambda t: t["throughput"].pop("low"), "missing key 'throughput.low'"),
        (lambda t: t.update(verdict="fine"), "verdict = 'fine': input should be 'within'"),
        (lambda t: t["pairs"][0].update(layer="roof"), "pairs.0.layer = 'roof'"),
        (lambda t: t["pairs"][0]["first"].update(seconds=float("nan")), "pairs.0.first.seconds = nan"),
    ],
)
def test_refused_by_name(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Receipt.from_json(damage(change), "receipt.json")


def test_broken_file_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text('{\n "schema": "dflash-bench/receipt/2",\n oops\n}')
    with pytest.raises(UserError, match=r"receipt\.json:3: not valid JSON"):
        Receipt.read(path)
    with pytest.raises(UserError, match="cannot read the receipt"):
        Receipt.read(tmp_path / "absent.json")
    with pytest.raises(UserError, match="schema 'list' is not"):
        Receipt.from_json("[]")


def test_a_number_that_is_none_is_refused_when_written() -> None:
    bad = Throughput(float("nan"), 1.0, 2.0)
    with pytest.raises(ValueError, match=r"JSON compliant"):
        replace(receipt(), throughput=bad).to_json()


def test_a_pair_stands_on_one_line() -> None:
    text = receipt().to_json()
    assert sum(line.startswith('{"number"') for line in text.splitlines()) == len(receipt().pairs)
    assert json.loads(receipt().to_json(indent=None)) == json.loads(text)
    assert Receipt.from_json(replace(receipt(), pairs=()).to_json()).pairs == ()


def test_receipts_of_the_first_schema_are_read() -> None:
    """What they conclude, and a gate's segments as pairs; their intervals stay in the file."""
    old = Receipt.read(HERE / "overhead_1.json")
    assert (old.verdict, old.exit_code) == (Verdict.WITHIN, ExitCode.WITHIN)
    assert old.throughput == Throughput(1000.0, 990.0, 1010.0)
    assert old.sentinel is not None
    assert old.sentinel.after_s == {"together": 0.51}
    assert (old.pairs, old.collectors, old.all) == ((), (), None)
    gate = Receipt.read(HERE / "gate_1.json")
    assert len(gate.pairs) == 24
    assert {pair.process for pair in gate.pairs} == {0, 1, 2}
    slower = [pair.second if pair.sign("head") < 0 else pair.first for pair in gate.pairs]
    assert all(segment.on == ("head",) and segment.seconds > 0.22 for segment in slower)


@pytest.mark.fault
def test_a_damaged_receipt_of_the_first_schema_is_refused_by_name() -> None:
    tree = json.loads((HERE / "gate_1.json").read_text())
    del tree["verdict"]
    with pytest.raises(UserError, match="missing key 'verdict'"):
        Receipt.from_json(json.dumps(tree), "old.json")
