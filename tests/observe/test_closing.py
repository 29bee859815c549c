"""The lines that a run ends with, from the numbers of a dashboard."""

from __future__ import annotations

from dflash.observe.closing import closing, flops_text, host_figures, lock_line
from dflash.observe.roles import RoleMap

VALUES = {"train/mfu": 0.312, "target/mfu": 0.101, "drafter/mfu": 0.211}
ROLES = RoleMap(("cpu",), ("cpu",), rates=(("cpu", 105e9),))


def test_the_share_of_the_machine_is_told_with_the_rate_that_it_is_a_share_of() -> None:
    said = closing("no bottleneck", VALUES, ROLES)
    assert said.lines == (
        "no bottleneck",
        "MFU 31.2% of 105 GFLOP/s, this machine's own matmul rate (targets 10.1%, drafters 21.1%)",
    )
    assert {key: value for key, value in said.figures.items() if value is not None} == {
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


LOCK = {
    "host/lock_wakes": 200.0,
    "host/lock_held_ratio": 0.25,
    "drafter/0/tokens_per_second": 600.0,
    "drafter/1/tokens_per_second": 400.0,
    "drafter/0/capacity_tokens_per_second": 900.0,
    "target/0/tokens_per_second": 1000.0,
    "drafter/0/batches": 6.0,
    "drafter/1/batches": 4.0,
    "drafter/0/host_s": 3.0,
    "drafter/1/host_s": 2.0,
}


def test_the_lock_allows_the_rate_over_the_share_of_time_for_which_it_is_held() -> None:
    assert lock_line(LOCK, 2) == (
        "interpreter lock held 25% of the time (20% to 31%): at 8 workers it allows at most 4,000 tok/s"
    )
    assert "at 12 workers" in lock_line(LOCK, 12)
    figures = host_figures(LOCK)
    assert figures["lock_tokens_per_second"] == 4000.0
    assert figures["lock_held_95"] == "0.195 to 0.314"
    assert figures["drafter_host_s_per_batch"] == 0.5
    assert figures["target_host_s_per_batch"] is None


def test_a_lock_that_was_never_found_held_bounds_from_below_only() -> None:
    values = LOCK | {"host/lock_held_ratio": 0.0}
    assert lock_line(values, 2).endswith(
        "held 0% of the time (0% to 2%): at 8 workers it allows 53,062 tok/s or more"
    )
    assert host_figures(values)["lock_tokens_per_second"] is None


def test_a_lock_that_nobody_looked_at_has_no_line() -> None:
    assert lock_line({key: value for key, value in LOCK.items() if not key.startswith("host/")}, 2) == ""
    assert lock_line({"host/lock_wakes": 5.0, "host/lock_held_ratio": 1.0}, 2) == ""
