"""Issue forms and the pull request template ask for what a maintainer needs; the hooks run what nox runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(form: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(form.read_text(encoding="utf-8"))
    return found


def test_there_is_a_form_for_each_kind_of_issue() -> None:
    assert [form.stem for form in FORMS] == ["bug", "new-collector", "slower"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_asks_for_the_doctor_and_the_receipt(form: Path) -> None:
    fields = {field["id"]: field for field in read(form)["body"]}
    assert "`dflash doctor`" in fields["doctor"]["attributes"]["label"]
    assert fields["doctor"]["validations"] == {"required": True}
    assert fields["receipt"]["attributes"]["label"] == "receipt.json"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_is_one(form: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    schema = "vendor.github-issue-forms"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(form)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


ASKED = ["receipt.json", "python -m bench gate", "planted fault", "exit code", "pages"]


@pytest.mark.parametrize("asked", ASKED)
def test_a_pull_request_says_what_was_measured(asked: str) -> None:
    assert asked in (ROOT / ".github" / "pull_request_template.md").read_text(encoding="utf-8")


def test_the_hooks_are_nox_s_own_and_need_no_network() -> None:
    (repository,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"
    assert {hook["language"] for hook in repository["hooks"]} == {"system"}
    nox = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert [hook["entry"] for hook in repository["hooks"]] == ["ruff check", "ruff format --check", "mypy"]
    for hook in repository["hooks"]:
        command = ", ".join(f'"{word}"' for word in hook["entry"].split())
        assert f"session.run({command}" in nox, hook["entry"]
