"""The recipes of docs/pipelines.md: parsed, and their commands run against a service that answers from a table."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as Xml
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from glassblock.reports import REPORTS
from reports.report_makers import report, swapped_report

from client.fake_service import listening
from client.test_command_line import audited

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


GITHUB, GITLAB, PRE_COMMIT = (yaml.safe_load(block) for block in blocks("yaml"))
STEPS = {step["name"]: step for step in GITHUB["jobs"]["audit"]["steps"] if "name" in step}


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with a `glassblock` and a `pip` in its path, and a known finding."""
    programs = tmp_path / "bin"
    programs.mkdir()
    paths = os.pathsep.join(str(ROOT / name) for name in ("service", "clients"))
    for name, line in (
        ("glassblock", f'PYTHONPATH="{paths}" exec "{sys.executable}" -m glassblock_client "$@"'),
        ("pip", 'echo "$@" >> pip.txt'),
    ):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "known.json").write_text(REPORTS["json"].render(swapped_report(1)))
    return tmp_path


@pytest.fixture
def url() -> Iterator[str]:
    """Of a service that finds one mistake more than is known."""
    with listening(audited(swapped_report(1, 2))) as url:
        yield url


@pytest.fixture
def url_of_known() -> Iterator[str]:
    """Of one that finds what is known."""
    with listening(audited(swapped_report(1))) as url:
        yield url


def shell(command: str, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    variables = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "GLASSBLOCK_URL": url,
        "GLASSBLOCK_REPOSITORY": "https://example.org/glassblock",
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    return subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def test_github_lets_pass_what_is_known(workplace: Path, url_of_known: str):
    told = shell(STEPS["Audit"]["run"], workplace, url_of_known)
    assert told.returncode == 0, told.stderr


def test_github_audits_and_uploads_what_it_wrote(workplace: Path, url: str):
    assert shell(STEPS["Install"]["run"], workplace, url).returncode == 0
    assert "glassblock[service] @ git+https://example.org/glassblock" in (workplace / "pip.txt").read_text()
    audited_ = shell(STEPS["Audit"]["run"], workplace, url)
    assert audited_.returncode == 1, audited_.stderr
    upload = GITHUB["jobs"]["audit"]["steps"][-1]
    assert upload["uses"].startswith("github/codeql-action/upload-sarif@")
    log = json.loads((workplace / upload["with"]["sarif_file"]).read_text())
    assert log["version"] == "2.1.0"
    assert len(log["runs"][0]["results"]) == 2
    assert GITHUB["permissions"]["security-events"] == "write"


def test_github_shows_a_summary_whatever_was_found(workplace: Path, url: str):
    told = shell(STEPS["Summary"]["run"], workplace, url)
    assert told.returncode == 0, told.stderr
    assert (workplace / "summary.md").read_text().startswith("### Glassblock: FAIL")


def test_gitlab_keeps_the_tests_it_wrote(workplace: Path, url: str):
    job = GITLAB["checkpoint"]
    told = shell("\n".join(job["script"]), workplace, url)
    assert told.returncode == 1, told.stderr
    written = job["artifacts"]["reports"]["junit"]
    assert job["artifacts"] == {"when": "always", "paths": [written], "reports": {"junit": written}}
    assert Xml.parse(workplace / written).getroot().attrib["failures"] == "1"


def test_the_hook_of_pre_commit_runs_what_the_guide_names(workplace: Path, url: str):
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    (repository,) = PRE_COMMIT["repos"]
    (used,) = repository["hooks"]
    assert used["id"] == hook["id"]
    assert hook["language"] == "python"
    assert hook["pass_filenames"] is False
    assert re.search(hook["files"], "models/my-model/model-00001-of-00002.safetensors")
    assert not re.search(hook["files"], "README.md")
    told = shell(" ".join([hook["entry"], *used["args"]]), workplace, url)
    assert told.returncode == 1, told.stderr


def test_a_baseline_is_written_and_used_as_the_guide_says(workplace: Path, url: str):
    write, use = blocks("sh")[0].splitlines()
    assert shell(write, workplace, url).returncode == 1
    assert shell(use, workplace, url).returncode == 0


def test_the_tests_of_the_guide_are_python_and_name_what_is_there():
    (code,) = blocks("python")
    names: dict[str, Any] = {}
    exec(compile(code, "pipelines.md", "exec"), names)
    asked: list[tuple[str, dict[str, Any]]] = []

    def stand_in(path: str, **options: Any) -> object:
        asked.append((path, options))
        return report()

    for name in ("test_what_we_ship", "test_the_norms_of_the_draft"):
        names[name](stand_in)
    assert [path for path, _ in asked] == ["models/my-model", "models/draft"]


def test_the_guide_names_every_format_with_its_media_type():
    for row in REPORTS.values():
        assert f"| `{row.name}` | `{row.media_type}` |" in GUIDE
