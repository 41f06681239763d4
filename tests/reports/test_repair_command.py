"""The command that repairs: named once, at the end, where `fix` has something to do."""

import pytest
from glassblock.reports import REPORTS
from glassblock.wire.audits import Fix

from reports.report_makers import report, swap_finding, swapped_report

FOR_PEOPLE = ("text", "markdown", "html")


@pytest.mark.parametrize("name", FOR_PEOPLE)
def test_the_command_is_named_once_and_with_the_checkpoint(name: str):
    told = REPORTS[name].render(swapped_report(*range(30), depth=30), width=200)
    assert told.count("glassblock fix SmolLM2-135M --dry-run") == 1
    assert told.count("glassblock fix") == 1
    assert "--output DIR" in told


@pytest.mark.parametrize("name", FOR_PEOPLE)
def test_what_the_audit_was_asked_goes_into_the_command(name: str):
    told = REPORTS[name].render(swapped_report(2), width=200, asked="/a/b --reference /c")
    assert "glassblock fix /a/b --reference /c --dry-run" in told


def test_a_path_that_a_shell_would_split_is_quoted():
    made = swapped_report(2)
    checkpoint = made.checkpoint.model_copy(update={"path": "my model; rm"})
    told = REPORTS["text"].render(made.model_copy(update={"checkpoint": checkpoint}), width=200)
    assert "glassblock fix 'my model; rm' --dry-run" in told


@pytest.mark.parametrize("action", [None, "fetch-again", "align-eps", "reorder-rows", "of-a-newer-service"])
@pytest.mark.parametrize("name", FOR_PEOPLE)
def test_no_command_is_named_for_what_none_repairs(name: str, action: str | None):
    fix = None if action is None else Fix(action=action, description="Do it.")
    finding = swap_finding(2).model_copy(update={"fix": fix})
    assert "glassblock fix" not in REPORTS[name].render(report(verdict="fail", findings=(finding,)))


def test_an_action_that_needs_evidence_is_named_with_it():
    fix = Fix(action="reorder-rows", description="Do it.")
    evidence = {"groups": 2, "gate_first": False}
    finding = swap_finding(2).model_copy(update={"fix": fix, "evidence": evidence})
    assert "glassblock fix" in REPORTS["text"].render(report(verdict="fail", findings=(finding,)))
