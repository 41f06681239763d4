"""`glassblock audit` with formats, files and a baseline."""

import json
import shlex
from pathlib import Path

import pytest
from glassblock.reports import REPORTS
from glassblock.reports.baseline import Baseline, compared, read_baseline
from glassblock.wire.audits import Report
from reports.report_makers import full_report, report, swapped_report, undecided_report

from client.fake_service import RULES
from client.test_command_line import audited, checkpoint, invoke

__all__ = ["checkpoint"]  # a fixture


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("URL", "KEY", "DEVICE"):
        monkeypatch.delenv(f"GLASSBLOCK_{name}", raising=False)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("name", REPORTS)
def test_every_format_goes_to_a_file_and_to_stdout(checkpoint: Path, tmp_path: Path, name: str):
    target = tmp_path / "report"
    arguments = ("audit", checkpoint, "--format", name, "--fail-on", "never")
    result = invoke(audited(full_report()), *arguments, "--output", target)
    assert (result.exit_code, result.stdout) == (0, "")
    asked = shlex.quote(str(checkpoint))
    rules = RULES if REPORTS[name].explains else None
    expected = REPORTS[name].render(full_report(), width=100, asked=asked, rules=rules)
    assert target.read_text(encoding="utf-8") == expected
    told = invoke(audited(full_report()), *arguments).stdout
    assert told == REPORTS[name].render(full_report(), width=80, asked=asked, rules=rules)


@pytest.mark.parametrize(
    ("folder", "given", "place"),
    [
        ("", "models/tiny", "models/tiny/model.safetensors"),
        ("", "{}/models/tiny/", "models/tiny/model.safetensors"),
        ("models/tiny", ".", "model.safetensors"),
        ("models/elsewhere", "../tiny", "SmolLM2-135M/model.safetensors"),
    ],
)
def test_a_code_host_is_told_the_file_as_it_lies_in_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, given: str, place: str
):
    for name in ("tiny", "elsewhere"):
        (tmp_path / "models" / name).mkdir(parents=True)
    write(tmp_path / "models" / "tiny" / "config.json", "{}")
    monkeypatch.chdir(tmp_path / folder)
    finding = swapped_report(2).findings[0].model_copy(update={"locations": (), "file": "model.safetensors"})
    found = swapped_report(2).model_copy(update={"findings": (finding,)})
    told = json.loads(invoke(audited(found), "audit", given.format(tmp_path), "--format", "sarif").stdout)
    (location,) = told["runs"][0]["results"][0]["locations"]
    assert location["physicalLocation"]["artifactLocation"]["uri"] == place


def test_the_command_that_repairs_has_the_path_and_what_the_audit_was_told(checkpoint: Path, tmp_path: Path):
    other = write(tmp_path / "other config.json", "{}")
    result = invoke(audited(swapped_report(2)), "audit", checkpoint, "--family", "llama", "--against", other)
    told = " ".join(result.stdout.split())
    words = shlex.join(
        ["glassblock", "fix", str(checkpoint), "--family", "llama", "--against", str(other), "--dry-run"]
    )
    assert told.replace(" ", "").count(words.replace(" ", "")) == 1
    assert "glassblock fix" not in invoke(audited(report()), "audit", checkpoint).stdout


@pytest.mark.parametrize(
    ("layers", "told"),
    [
        ((2,), "fail, its one finding known in the baseline: "),
        ((2, 3), "fail, 1 of 2 findings known in the baseline: "),
        ((3,), "fail: "),
    ],
)
def test_the_line_about_a_file_says_what_is_known(checkpoint: Path, tmp_path: Path, layers: tuple[int, ...], told: str):
    known = write(tmp_path / "known.json", REPORTS["json"].render(swapped_report(2)))
    target = tmp_path / "report.txt"
    result = invoke(audited(swapped_report(*layers)), "audit", checkpoint, "--baseline", known, "--output", target)
    assert result.stderr == f"{told}the report is in {target}\n"
    assert result.exit_code == (0 if layers == (2,) else 1)


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["report", "baseline"])
def test_what_is_known_does_not_fail(checkpoint: Path, tmp_path: Path, kind: str):
    known = tmp_path / "known.json"
    option = ("--format", "json", "--output", known) if kind == "report" else ("--write-baseline", known)
    assert invoke(audited(swapped_report(2)), "audit", checkpoint, *option).exit_code == 1
    again = invoke(audited(swapped_report(2)), "audit", checkpoint, "--baseline", known)
    assert again.exit_code == 0
    assert "KNOWN ERROR  ffn/gate-up-swapped  layer 2" in again.stdout
    assert "FAIL   nothing that is not known; known: 1 error" in again.stdout
    worse = invoke(audited(swapped_report(2, 3)), "audit", checkpoint, "--baseline", known)
    assert worse.exit_code == 1
    assert "1 error; known: 1 error" in worse.stdout


def test_a_baseline_of_another_checkpoint_is_remarked(checkpoint: Path, tmp_path: Path):
    other = swapped_report(2)
    other = other.model_copy(update={"checkpoint": other.checkpoint.model_copy(update={"path": "another"})})
    known = write(tmp_path / "known.json", REPORTS["json"].render(other))
    result = invoke(audited(swapped_report(2)), "audit", checkpoint, "--baseline", known)
    assert result.stderr == f"{known} was made of another; this is {report().checkpoint.path}\n"
    assert result.exit_code == 0


def test_what_is_gone_is_told(checkpoint: Path, tmp_path: Path):
    known = write(tmp_path / "known.json", REPORTS["json"].render(swapped_report(2)))
    result = invoke(audited(report()), "audit", checkpoint, "--baseline", known)
    assert result.exit_code == 0
    assert "1 fixed" in result.stdout
    assert "fixed, and still in the baseline" in result.stdout
    assert "ffn/gate-up-swapped · layer 2" in result.stdout


def test_the_json_report_marks_what_is_known(checkpoint: Path, tmp_path: Path):
    known = write(tmp_path / "known.json", REPORTS["json"].render(swapped_report(1)))
    result = invoke(audited(swapped_report(1, 2)), "audit", checkpoint, "--baseline", known, "--format", "json")
    baseline = read_baseline(json.loads(known.read_text()), name="x")
    assert Report.model_validate_json(result.stdout) == compared(swapped_report(1, 2), baseline, name=str(known))


@pytest.mark.parametrize(
    ("finished", "options", "status"),
    [
        (swapped_report(2), ["--fail-on", "warning"], 0),
        (swapped_report(2), ["--fail-on", "never"], 0),
        (swapped_report(1), [], 1),
        (undecided_report(), [], 3),
        (undecided_report(), ["--allow-inconclusive"], 0),
    ],
)
def test_exit_statuses_beside_a_baseline(
    checkpoint: Path, tmp_path: Path, finished: Report, options: list[str], status: int
):
    known = write(tmp_path / "known.json", REPORTS["json"].render(swapped_report(2)))
    result = invoke(audited(finished), "audit", checkpoint, "--baseline", known, *options)
    assert result.exit_code == status


def test_a_baseline_can_be_brought_up_to_date_in_place(checkpoint: Path, tmp_path: Path):
    known = write(tmp_path / "known.json", REPORTS["json"].render(swapped_report(1)))
    result = invoke(audited(swapped_report(2, 3)), "audit", checkpoint, "--baseline", known, "--write-baseline", known)
    assert result.exit_code == 1
    assert f"2 findings are known from now on: {known}" in result.stderr
    assert [finding.layer for finding in Baseline.model_validate_json(known.read_bytes()).findings] == [2, 3]


BROKEN = {
    "absent": (None, "known.json does not exist"),
    "no JSON": ("{", "is not JSON"),
    "another object": ("{}", "is no baseline"),
    "another version": ('{"baseline_version": "9"}', "is of version '9'; known: 1"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_baseline_that_is_none_is_said_before_the_audit(checkpoint: Path, tmp_path: Path, name: str):
    content, told = BROKEN[name]
    known = tmp_path / "known.json"
    if content is not None:
        write(known, content)
    service = audited(report())
    result = invoke(service, "audit", checkpoint, "--baseline", known)
    assert result.exit_code == 2
    assert told in result.stderr
    assert service.asked == []


def test_a_baseline_that_cannot_be_written_is_said_before_the_audit(checkpoint: Path, tmp_path: Path):
    service = audited(report())
    result = invoke(service, "audit", checkpoint, "--write-baseline", tmp_path)
    assert (result.exit_code, service.asked) == (2, [])
    assert result.stderr.startswith(f"error: --write-baseline: {tmp_path} ")
