"""The receipt: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.records.receipt import SCHEMA, BaselineView, Receipt
from bench.records.types import (
    Commit,
    ConfigRef,
    Cost,
    ExitCode,
    GpuState,
    Machine,
    MachineState,
    Throughput,
    Verdict,
)
from steptime.errors import UserError
from tests.bench.make import counts, interval, measurement


def receipt() -> Receipt:
    made = measurement(rounds_=2)
    small = interval(0.1, -0.1, 0.3)
    cost = Cost("profile", small, small, 0.01, 0, 0, 0, None, Verdict.WITHIN, ("at most 0.30%",))
    arms = {arm.name: tuple(s for s in made.segments if s.arm == arm.name) for arm in made.arms}
    return Receipt(
        command="overhead",
        commit=Commit("0123abcd", dirty=True, diff_hash="ff"),
        machine=Machine("cpu-x", "CPU X", 2, (("GPU", "ab"),), {"torch": "2.13.0"}),
        config=ConfigRef("cpu-tiny", "0123"),
        arms=arms,
        losses_equal=True,
        collectors=(cost,),
        all=cost,
        throughput=Throughput(1000.0, 990.0, 1010.0),
        baseline=BaselineView("missing"),
        pipeline_efficiency=0.97,
        verdict=Verdict.WITHIN,
        exit_code=ExitCode.WITHIN,
        aa=small,
        counts=counts(made.arms),
        losses={"off": (1.5, 2.5)},
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
    assert tree["schema"] == "dflash-bench/receipt/1"
    contract = (
        "command commit machine config arms losses_equal collectors all throughput baseline "
        "pipeline_efficiency verdict exit_code"
    )
    assert set(contract.split()) <= set(tree)
    assert set(tree["commit"]) == {"id", "dirty", "diff_hash"}
    assert "key" in tree["machine"]
    assert set(tree["config"]) == {"name", "hash"}
    assert {"off", "all", "only:profile", "without:profile", "off-again"} <= set(tree["arms"])
    assert {"seconds", "tokens", "order"} <= set(tree["arms"]["off"][0])
    cost = {"name", "isolated", "marginal", "accounted_percent", "verdict"}
    cost |= {f"{kind}_added" for kind in ("syncs", "operations", "copies", "allocations")}
    assert cost <= set(tree["collectors"][0])
    assert cost <= set(tree["all"])
    assert {"percent", "low", "high", "mde"} <= set(tree["collectors"][0]["isolated"])
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
            lambda t: t.update(schema="dflash-bench/receipt/2"),
            f"schema 'dflash-bench/receipt/2' is not '{SCHEMA}'",
        ),
        (lambda t: t.pop("schema"), f"schema None is not '{SCHEMA}'"),
        (lambda t: t.update(verdikt=1), "unknown key 'verdikt'; did you mean 'verdict'?"),
        (lambda t: t["collectors"][0].update(isolatd=1), "unknown key 'collectors.0.isolatd'"),
        (lambda t: t.pop("verdict"), "missing key 'verdict'"),
        (lambda t: t["throughput"].pop("low"), "missing key 'throughput.low'"),
        (lambda t: t.update(verdict="fine"), "verdict = 'fine': input should be 'within'"),
        (lambda t: t["aa"].update(percent="a lot"), "aa.percent = 'a lot'"),
        (lambda t: t["aa"].update(percent=float("nan")), "aa.percent = nan"),
    ],
)
def test_refused_by_name(change: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Receipt.from_json(damage(change), "receipt.json")


def test_broken_file_is_refused_by_line(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    path.write_text('{\n "schema": "dflash-bench/receipt/1",\n oops\n}')
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
