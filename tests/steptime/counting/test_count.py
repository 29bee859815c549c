"""Counting on anyone's code."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo

from bench import cli
from dflash.observe.syncs import allowed_sync
from steptime.counting.count import count_syncs
from steptime.errors import UserError
from steptime.syncs.scopes import WORK

SCRIPT = """
import sys
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(6):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "--read" in sys.argv:
        loss.item()
sys.exit(3 if "--leave" in sys.argv else 0)
"""


def main(words: list[str]) -> int:
    return cli.call(["syncs", *(["--as", "cpu"] if words else []), *words])


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_steps_are_the_optimizers_and_warm_up_is_left_out() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with count_syncs(warmup=2) as syncs:
        for _ in range(5):
            loss = model(torch.randn(2, 4)).sum()
            loss.backward()
            optimizer.step()
            loss.item()
    assert (syncs.steps, syncs.total) == (3, 3), "a step lasts from one optimizer step to the next"
    assert "tests/steptime/counting/test_count.py" in syncs.table()


def test_adamw_reads_only_what_torch_reads() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with count_syncs(warmup=1) as syncs:
        for _ in range(4):
            model(torch.randn(2, 4)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    assert syncs.total == 0, syncs.table()


def test_marked_steps_and_declared_syncs() -> None:
    with count_syncs() as syncs:
        for _ in range(4):
            torch.ones(3).sum().item()
            with allowed_sync("report"):
                torch.ones(3).sum().item()
            syncs.step()
    assert (syncs.steps, syncs.total) == (4, 4)


def test_threads_of_the_program_are_counted_by_name() -> None:
    with count_syncs() as syncs:
        thread = threading.Thread(target=lambda: torch.ones(3).tolist(), name="loader")
        thread.start()
        thread.join()
    assert [(role, kind) for role, kind, _ in syncs.counts] == [("loader", "tolist()")]


def test_strict_when_the_device_has_a_number() -> None:
    with count_syncs(device="cpu:0") as syncs:
        torch.ones(3).sum().item()  # host memory
        torch.ones(3, device="cpu:0").to("cpu")
    assert [kind for _, kind, _ in syncs.counts] == ["blocking copy to host"]


def test_nothing_stays_behind() -> None:
    before = threading.Thread.start, torch.cuda.is_available, torch.Generator
    for device in ("cpu", "cuda"):
        with pytest.raises(RuntimeError, match="inside"), count_syncs(device=device):
            raise RuntimeError("inside")
    assert (threading.Thread.start, torch.cuda.is_available, torch.Generator) == before


def test_script_without_a_sync(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--fail", "--", script]) == 0
    assert "0 host syncs in each of 4 steps" in capsys.readouterr().out


def test_script_with_a_sync(script: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "counts.json"
    assert main(["--json", str(out), "--", script, "--read"]) == 0
    assert "train.py:13" in capsys.readouterr().out
    tree = json.loads(out.read_text())
    assert tree["schema"] == "steptime-syncs/2"
    assert tree["counts"][0]["where"].endswith("train.py:13 <module>")
    assert main(["--fail", "--", script, "--read"]) == 1


COMPILED = """
import torch

model = torch.compile(torch.nn.Linear(4, 4), backend="aot_eager", dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
inputs = [torch.randn(8 + {growth} * step, 4) for step in range(6)]
for rows in inputs:
    model(rows).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("growth", "per_step"), [(0, 0.0), (1, 2.0)])
def test_a_compiled_script_is_counted_compiled_and_its_recompiles_are_syncs(
    growth: int, per_step: float, tmp_path: Path
) -> None:
    from steptime.counting.run_script import run
    from steptime.counting.sync_report import rows
    from steptime.counting.sync_report import text as report

    torch._dynamo.reset()
    path = tmp_path / "train.py"
    path.write_text(COMPILED.format(growth=growth))
    code, counted = run(path, [], device="cpu", warmup=2, work=True)
    assert (code, counted.steps) == (0, 4)
    assert counted.total / counted.steps == per_step
    assert {kind for _, kind, _ in counted.counts if kind not in WORK} == (
        {"compile", "recompile"} if growth else set()
    ), "forward again, and its backward"
    assert counted.graphs == 2 * counted.steps
    told = report(counted, rows(counted), work=True)
    assert "compiled graph: Linear, 5 nodes" in told
    assert "8 compiled graphs ran; inside one only waits are seen." in told


def test_the_scripts_exit_code_is_kept(script: str) -> None:
    assert main(["--", script, "--leave"]) == 3


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_the_scripts_arguments_are_its_own(
    separator: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Even those that are options of the command, and a `--` among them."""
    path = tmp_path / "shows.py"
    path.write_text("import sys\nprint(sys.argv[1:])\n")
    words = ["--help", "--fail", "--", "--json", "x", "-h"]
    assert main(["--warmup", "0", *separator, str(path), *words]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(words)


@pytest.mark.fault
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--wramup", "2", "--", "train.py"], "no such option --wramup; did you mean '--warmup'"),
        (["--warmup", "x", "--", "train.py"], "argument --warmup: 'x' is not a whole number"),
        (["--fail"], "SCRIPT is missing"),
        (["--fail", "--"], "SCRIPT is missing"),
    ],
)
def test_a_mistake_names_the_nearest_option(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        main(words)


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "--warmup" in capsys.readouterr().out


def test_a_script_without_an_optimizer_is_counted_as_a_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.py"
    path.write_text("import torch\ntorch.ones(3).sum().item()\n")
    assert main(["--fail", "--", str(path)]) == 1
    assert "1 host sync in the whole run, which took no optimizer step" in capsys.readouterr().out


def test_nothing_is_claimed_where_all_steps_are_warm_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, counts = tmp_path / "short.py", tmp_path / "counts.json"
    path.write_text(
        "import torch\nw = torch.ones(3, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w])\nw.sum().backward()\noptimizer.step()\n"
    )
    assert main(["--warmup", "3", "--json", str(counts), "--", str(path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "nothing was counted: all 1 optimizer steps belong to the warm-up of 3" in shown.err
    assert not counts.exists()


def test_no_such_script(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such script: .*gone\.py"):
        main(["--", str(tmp_path / "gone.py")])
