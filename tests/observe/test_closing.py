"""The lines that a run ends with, from the numbers of a dashboard."""

from __future__ import annotations

from dflash.observe.closing import closing, flops_text
from dflash.observe.roles import RoleMap

VALUES = {"train/mfu": 0.312, "target/mfu": 0.101, "drafter/mfu": 0.211}
ROLES = RoleMap(("cpu",), ("cpu",), rates=(("cpu", 105e9),))


def test_the_share_of_the_machine_is_told_with_the_rate_that_it_is_a_share_of() -> None:
    said = closing("no bottleneck", VALUES, ROLES)
    assert said.lines == (
        "no bottleneck",
        "MFU 31.2% of 105 GFLOP/s, this machine's own matmul rate (targets 10.1%, drafters 21.1%)",
    )
    assert said.figures == {
        "bottleneck": "no bottleneck",
        "mfu": 0.312,
        "target_mfu": 0.101,
        "drafter_mfu": 0.211,
        "matmul_flops_per_second": 105e9,
    }


def test_what_was_not_measured_has_no_line() -> None:
    said = closing("no bottleneck", {}, RoleMap(("sim:0",), ("sim:1",)))
    assert said.lines == ("no bottleneck",)
    assert said.figures["mfu"] is None


def test_flops_have_three_digits_and_a_unit() -> None:
    told = {5.1e6: "5.1 MFLOP", 5.12e9: "5.12 GFLOP", 1.25e14: "125 TFLOP", 3e15: "3 PFLOP"}
    assert {number: flops_text(number) for number in told} == told
