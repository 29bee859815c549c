"""The workflow, as far as it can be run without a runner: its schema, the choice of machines, and that its
commands exist."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from bench import cli
from dflash.config import load_config
from steptime import commandline
from steptime.errors import UserError
from steptime.gate.accept import parse_text
from tests.test_readme import nox_sessions

ROOT = Path(__file__).parent.parent
WORKFLOW = ROOT / ".github" / "workflows" / "gate.yml"
TEXT = WORKFLOW.read_text(encoding="utf-8")
COMMAND_OF = {"bench": "overhead", "gate": "gate", "selfcheck": "selfcheck"}
"""What `nox -s NAME` runs of `python -m bench`."""
CPU, GPU = ("cpu", "ubuntu-latest", "configs/cpu-tiny.toml"), ("gpu", "my-gpu", "configs/h200-single.toml")


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(TEXT)["jobs"]
    return found


def runs(job: str) -> list[str]:
    """The commands of a job, each on one line, for a machine of its matrix."""
    return [" ".join(step["run"].split()) for step in jobs()[job]["steps"] if "run" in step]


def check_schema(path: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        "vendor.github-workflows",
        str(path),
    ]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in WORKFLOW.parent.iterdir()))
def test_the_workflow_is_one(name: str) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    done = check_schema(WORKFLOW.parent / name)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.fault
def test_a_misspelt_key_would_be_seen(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    assert "timeout-minutes: 45" in TEXT
    bad = tmp_path / "gate.yml"
    bad.write_text(TEXT.replace("timeout-minutes: 45", "timeout-minute: 45"))
    assert check_schema(bad).returncode != 0


def choose(folder: Path, **environment: str) -> tuple[list[tuple[str, str, str]], str]:
    """Run the step that chooses machines as a runner would; (name, runner, config) of each, and the job's
    summary."""
    (step,) = [step for step in jobs()["machines"]["steps"] if step.get("id") == "choose"]
    assert set(step["env"]) == {"GPU_RUNNER", "FORKS_ALLOWED", "IS_FORK"}
    output, summary = folder / "output", folder / "summary"
    for file in (output, summary):
        file.write_text("")
    given = {"GPU_RUNNER": "", "FORKS_ALLOWED": "", "IS_FORK": "false", "PATH": "/usr/bin:/bin"} | environment
    given |= {"GITHUB_OUTPUT": str(output), "GITHUB_STEP_SUMMARY": str(summary)}
    subprocess.run(["bash", "-e", "-c", step["run"]], env=given, check=True)
    name, _, value = output.read_text().strip().partition("=")
    assert name == "matrix"
    return [
        (one["name"], one["runner"], one["config"]) for one in json.loads(value)["include"]
    ], summary.read_text()


@pytest.mark.parametrize(
    ("environment", "machines", "said"),
    [
        ({}, [CPU], "No GPU runner"),
        ({"IS_FORK": "true", "FORKS_ALLOWED": "1"}, [CPU], "No GPU runner"),
        ({"GPU_RUNNER": "my-gpu"}, [CPU, GPU], ""),
        ({"GPU_RUNNER": "my-gpu", "IS_FORK": "true"}, [CPU], "takes no code from forks"),
        ({"GPU_RUNNER": "my-gpu", "IS_FORK": "true", "FORKS_ALLOWED": "1"}, [CPU, GPU], ""),
    ],
)
def test_machines_are_chosen(
    environment: dict[str, str], machines: list[Any], said: str, tmp_path: Path
) -> None:
    found, summary = choose(tmp_path, **environment)
    assert found == machines
    assert said in summary
    assert bool(said) == bool(summary)


@pytest.mark.parametrize("config", [CPU[2], GPU[2]])
def test_the_configs_load(config: str) -> None:
    load_config(config)


def parse(words: list[str]) -> None:
    """Hand the words to the command that they name; it runs nothing."""

    def quiet(app: typer.Typer) -> None:
        for one in app.registered_commands:
            one.callback = functools.wraps(one.callback)(lambda **options: None)
        for one in app.registered_groups:
            quiet(one.typer_instance)

    app = cli.build_app(words)
    quiet(app)
    commandline.call(app, words, cli.PROGRAM)


@pytest.mark.parametrize("job", ["gate", "nightly"])
def test_each_command_is_one(job: str) -> None:
    """nox has the session, the harness takes the arguments, and each environment has been made by then."""
    judged, made = [], set[str]()
    for text in runs(job):
        for command in text.replace("${{ matrix.config }}", CPU[2]).split(" && "):
            words = shlex.split(command)
            if words[1:3] == ["-m", "nox"]:
                session = words[words.index("-s") + 1]
                assert session in nox_sessions()
                made.add(f".nox/{session}/bin/python")
                if "--" in words:
                    parse([COMMAND_OF[session], *words[words.index("--") + 1 :]])
                    judged.append(session)
                else:
                    assert words[words.index("-s") + 2 :] == ["--install-only"]
            elif words[1:3] == ["-m", "bench"]:
                assert words[0] in made
                parse(words[3:])
                judged.append(words[3])
            elif words[1:3] == ["-m", "pytest"]:
                assert words[0] in made
                options = [word for word in words[4:] if word.startswith("--bench-")]
                known = (ROOT / "bench" / "pytest_benchmark" / "plugin.py").read_text()
                assert options
                assert all(f'"{option}"' in known for option in options)
                assert (ROOT / words[3]).exists()
                judged.append("pytest")
            elif words[0] == "printf":
                assert command == "printf '%s' \"$BODY\" > pull-request.txt", "text goes through a file alone"
            else:
                assert words == ["python", "-m", "pip", "install", "nox"], f"no check for {command!r}"
    assert judged == {"gate": ["gate"], "nightly": ["bench", "pytest", "selfcheck", "baseline"]}[job]


@pytest.mark.parametrize(
    ("result", "asked", "accepted", "green"),
    [
        ("success", "false", "skipped", True),
        ("failure", "false", "skipped", False),
        ("cancelled", "false", "skipped", False),
        ("skipped", "false", "skipped", False),
        ("success", "true", "success", True),
        ("success", "true", "skipped", False),
        ("success", "true", "failure", False),
        ("success", "false", "failure", False),
        ("failure", "true", "success", False),
    ],
)
def test_one_check_stands_for_all_gates(result: str, asked: str, accepted: str, green: bool) -> None:
    """A matrix has other jobs for a fork, so none of them can be required."""
    job = jobs()["verdict"]
    assert job["needs"] == ["gate", "accepted"]
    assert job["if"].startswith("always()")
    assert job["name"] == "gate"
    (step,) = job["steps"]
    says = "contains(github.event.pull_request.body, 'Bench-Accept:')"
    assert step["env"] == {
        "RESULT": "${{ needs.gate.result }}",
        "ACCEPTED": "${{ needs.accepted.result }}",
        "ASKED": f"${{{{ {says} }}}}",
    }
    environment = {"RESULT": result, "ACCEPTED": accepted, "ASKED": asked}
    assert (subprocess.run(["bash", "-ec", step["run"]], env=environment).returncode == 0) is green
    assert says in jobs()["accepted"]["if"], "the same question decides whether a reviewer is asked"


def test_what_a_text_lets_through_waits_for_a_reviewer(tmp_path: Path) -> None:
    job = jobs()["accepted"]
    assert job["environment"] == "bench-accept"
    (step,) = job["steps"]
    line = "\tBench-Accept: numerics close -- why"
    for body, told in ((f"a\n{line}\nb", f"{line}\n"), ("see Bench-Accept: docs", "")):
        summary = tmp_path / "summary"
        summary.write_text("")
        environment = {"BODY": body, "GITHUB_STEP_SUMMARY": str(summary), "PATH": os.environ["PATH"]}
        assert subprocess.run(["bash", "-ec", step["run"]], env=environment).returncode == 0
        assert summary.read_text() == told, "the same lines as the gate reads"
        assert parse_text(body).lines == tuple(told.strip().splitlines())
    triggers = yaml.safe_load(TEXT)[True]["pull_request"]["types"]
    assert {"edited", "synchronize", "opened", "reopened"} <= set(triggers), "a new text needs a new approval"
    assert "environment `bench-accept`" in (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")


def test_the_tests_are_run_as_the_readme_says() -> None:
    command = "python -m pip install nox && python -m nox -s tests"
    assert command in (ROOT / "README.md").read_text(encoding="utf-8")
    (job,) = yaml.safe_load((WORKFLOW.parent / "tests.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [command]
    oldest = re.search(
        r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    assert oldest
    assert job["strategy"]["matrix"]["python"][0] == oldest[1]


@pytest.mark.fault
def test_an_option_that_is_none_would_be_seen() -> None:
    with pytest.raises(UserError, match="no such option --minuts"):
        parse(["gate", "--base", "HEAD^1", "--minuts", "10"])


def test_what_a_job_measured_is_kept_whatever_its_verdict() -> None:
    """Every folder that a command writes is below the one that is uploaded, and the upload always happens."""
    for job in ("gate", "nightly"):
        *_, upload = jobs()[job]["steps"]
        assert upload["uses"].startswith("actions/upload-artifact@")
        assert upload["if"] == "always()"
        assert upload["with"]["if-no-files-found"] == "error"
        places = re.findall(r"(?:--out|--benchmark-json) (\S+)", " ".join(runs(job)))
        assert places
        assert all(place.startswith(upload["with"]["path"]) for place in places)
        assert not [step for step in jobs()[job]["steps"] if "continue-on-error" in step]
