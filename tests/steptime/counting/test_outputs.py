"""What `syncs` writes: a table, SARIF, annotations; of a script, a module, a subject, threads of a kind."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch

from steptime import cli
from steptime.counting.count import count_syncs
from steptime.errors import UserError
from steptime.subjects.steps.counts import ALL, OFF, count, count_steps
from tests.steptime.subjects.test_steps import on_cuda, trainer

PROGRAM = """import sys
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(4, 4).to("cuda")
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
for _ in range(4):
    loss = model(torch.ones(1, 4, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    loss.item()
    loss.tolist()  # sync-ok: a test
print("words:", sys.argv[1:])
"""
SUBJECT = """import torch
from steptime import Steps
def make():
    value = torch.ones(1, device="cuda")
    return Steps(lambda i: value.item(), cycle=2)
def broken():
    return Steps(lambda i: 1 / 0)
"""
WAIT, ACCEPTED = 10, 11
"""Lines of the program."""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    (tmp_path / "mine.py").write_text(PROGRAM)
    return "mine.py"


def test_markdown_is_a_table_with_the_line_and_the_reason(
    program: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.call(["syncs", "--format", "markdown", "--", program]) == 0
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("|")
    ]
    assert rows[0] == ["role", "waits", "where", "asked by", "per step", "when", "accepted"]
    places = {row[2].rpartition(":")[2]: row for row in rows[2:]}
    assert places[str(WAIT)][1] == "item()"
    assert [row[-1] for row in places.values()].count("a test") == 1


def test_sarif_marks_each_line_and_suppresses_what_is_accepted(program: str, tmp_path: Path) -> None:
    assert cli.call(["syncs", "--sarif", "out.sarif", "--", program]) == 0
    (run,) = json.loads((tmp_path / "out.sarif").read_text())["runs"]
    found = {one["locations"][0]["physicalLocation"]["region"]["startLine"]: one for one in run["results"]}
    assert set(found) == {WAIT, ACCEPTED}
    place = found[WAIT]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert place == {"uri": "mine.py"}, "relative to the folder, as code scanning wants it"
    assert found[WAIT]["suppressions"] == []
    assert found[ACCEPTED]["suppressions"][0]["justification"] == "a test"
    assert {one["ruleId"] for one in run["results"]} == {one["id"] for one in run["tool"]["driver"]["rules"]}


def test_annotations_are_of_new_places_only(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.call(["syncs", "--format", "github", "--", program]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]
    assert len(lines) == 1
    assert lines[0].startswith(f"::warning file=mine.py,line={WAIT},title=host sync::host sync: item()")


def test_a_module_runs_with_its_arguments_untouched(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["syncs", "--json", "counts.json", "-m", "mine", "--", "--steps", "9", "-m"]
    assert cli.call(words) == 0
    assert "words: ['--steps', '9', '-m']" in capsys.readouterr().out
    tree = json.loads(Path("counts.json").read_text())
    assert tree["steps"] == 2
    assert {row["where"] for row in tree["counts"]} == {"mine.py:10 <module>", "mine.py:11 <module>"}


def test_threads_of_a_kind_are_one_role() -> None:
    with count_syncs(device="cuda") as counted:
        value = torch.ones(1, device="cuda")

        def read() -> None:
            value.item()

        threads = [threading.Thread(target=read) for _ in range(2)]
        threads.append(threading.Thread(target=read, name="writer-2"))
        for thread in threads:
            thread.start()
            thread.join()
    assert {role: n for (role, _, _), n in counted.counts.items()} == {"Thread (read)": 2, "writer-2": 1}


def test_a_subject_is_reported_by_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject.py").write_text(SUBJECT)
    words = ["syncs", "--json", "counts.json", "--subject"]
    assert cli.call([*words, "subject.py", "--fail"]) == 1
    tree = json.loads(Path("counts.json").read_text())
    assert (tree["steps"], tree["warmup"], tree["syncs"]) == (2, 6, 2)
    assert "subject.py:5" in tree["counts"][0]["where"]
    with pytest.raises(UserError, match="has steps to count by place"):
        cli.call(["syncs", "--subject", "spin"])
    with pytest.raises(UserError, match="takes no script"):
        cli.call(["syncs", "--subject", "subject.py", "--", "subject.py"])


def test_an_error_of_a_step_leaves_its_traceback_and_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "subject.py").write_text(SUBJECT)
    assert cli.call(["syncs", "--subject", "subject.py:broken"]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("make", [trainer, on_cuda])
def test_a_subject_has_the_syncs_of_its_exact_counts(make) -> None:  # type: ignore[no-untyped-def]
    code, counted = count_steps(make)
    assert code == 0
    assert counted.total == count(make, {OFF: (), ALL: ()}, everything=True)[ALL].syncs
