"""The committed schema of a report: current, and true of reports."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from glassblock.reports import REPORTS
from glassblock.reports.schema import report_schema
from glassblock.wire.audits import LayerMetrics, Report
from jsonschema import Draft202012Validator

from reports.report_makers import full_report, hostile_report, report, swapped_report, undecided_report

COMMITTED = Path(__file__).resolve().parents[2] / "docs" / "report.schema.json"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(COMMITTED.read_text(encoding="utf-8"))


def test_the_committed_schema_is_current(schema: dict[str, Any]):
    assert schema == report_schema(), "python -m glassblock.reports.schema > docs/report.schema.json"
    Draft202012Validator.check_schema(schema)


def test_the_command_prints_it():
    command = [sys.executable, "-m", "glassblock.reports.schema"]
    env = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout == COMMITTED.read_text()


@pytest.mark.parametrize(
    "made",
    [
        report(),
        full_report(),
        swapped_report(2),
        undecided_report(),
        hostile_report("\x00<"),
        report(layers=(LayerMetrics(layer=0, metrics={"a": float("nan"), "b": float("-inf"), "c": None}),)),
    ],
    ids=["pass", "everything", "swapped", "undecided", "hostile", "not finite"],
)
def test_reports_are_valid(schema: dict[str, Any], made: Report):
    Draft202012Validator(schema).validate(json.loads(REPORTS["json"].render(made)))


@pytest.mark.parametrize(
    "change",
    [{"schema_version": "2"}, {"verdict": "ok"}, {"findings": [{"rule": "a/b"}]}, {"layers": [{"layer": 0}]}],
)
def test_what_is_no_report_is_not_valid(schema: dict[str, Any], change: dict[str, Any]):
    told = json.loads(REPORTS["json"].render(report()))
    assert not Draft202012Validator(schema).is_valid(told | change)
