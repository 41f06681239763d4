"""SARIF against the OASIS schema, and against what code hosts do with it."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from glassblock.operations.tables import rules as rule_table
from glassblock.reports.baseline import fingerprint
from glassblock.reports.sarif import render_sarif
from glassblock.reports.shown import Shown
from glassblock.wire.audits import Coverage, Report
from glassblock.wire.tables import RuleList
from jsonschema import Draft7Validator

from reports.report_makers import (
    full_report,
    hostile_report,
    huge_report,
    located_finding,
    report,
    swapped_report,
    undecided_report,
)

EVIL = "a\x1b[2J\n<b>[click](http://evil.test){0} ../../etc \u202e\ud800%2e"


@cache
def validator() -> Draft7Validator:
    schema = json.loads((Path(__file__).parent / "vectors" / "sarif-schema-2.1.0.json").read_text(encoding="utf-8"))
    return Draft7Validator(schema)


def run_of(made: Report, rules: RuleList | None = None) -> dict[str, Any]:
    log = json.loads(render_sarif(made, Shown(rules=rules)))
    errors = [f"{'/'.join(map(str, error.path))}: {error.message}" for error in validator().iter_errors(log)]
    assert errors == []
    return log["runs"][0]


@pytest.mark.parametrize(
    "made",
    [report(), full_report(), swapped_report(2), undecided_report(), hostile_report(EVIL), report(coverage=())],
    ids=["pass", "everything", "swapped", "undecided", "hostile", "nothing"],
)
def test_every_report_is_valid_against_the_schema_of_oasis(made: Report):
    run = run_of(made)
    assert len(run["results"]) == len(made.findings)


def test_every_rule_is_told_in_its_own_words_and_what_to_do():
    table = rule_table()
    every = report(coverage=tuple(Coverage(rule=row.name, checked=1) for row in table.rules))
    told = {rule["id"]: rule for rule in run_of(every, table)["tool"]["driver"]["rules"]}
    for row in table.rules:
        rule = told[row.name]
        assert rule["shortDescription"]["text"] == row.what
        assert rule["fullDescription"]["text"].startswith(row.what)
        for words in (row.hurts, row.detection, f"glassblock rules {row.name}", "glassblock fix"):
            assert _unescaped(words) in _unescaped(rule["help"]["text"])
        assert rule["defaultConfiguration"]["level"] == row.level
        assert "helpUri" not in rule
    assert len({rule["shortDescription"]["text"] for rule in told.values()}) == len(table.rules)


def test_a_rule_of_a_newer_service_is_told_by_its_name():
    (rule,) = run_of(report(coverage=(Coverage(rule="new/rule", checked=1),)), rule_table())["tool"]["driver"]["rules"]
    assert rule["shortDescription"]["text"] == "new/rule"
    assert "glassblock rules new/rule" in rule["help"]["text"]


def _unescaped(text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}")


def test_the_schema_is_one_that_can_fail():
    log = json.loads(render_sarif(full_report()))
    log["runs"][0]["results"][0]["level"] = "fatal"
    assert not validator().is_valid(log)


def test_a_place_is_file_byte_and_tensor():
    finding = located_finding(2)
    (result,) = run_of(report(findings=(finding,)))["results"]
    for place, name, offset in zip(result["locations"], finding.tensors, (1000, 2000), strict=True):
        assert place["physicalLocation"] == {
            "artifactLocation": {"uri": "SmolLM2-135M/model.safetensors"},
            "region": {"byteOffset": offset, "byteLength": 512},
        }
        assert place["logicalLocations"] == [{"fullyQualifiedName": name, "kind": "tensor"}]


def test_every_result_has_a_place_a_rule_and_a_stable_fingerprint():
    made = full_report()
    run = run_of(made)
    rules = run["tool"]["driver"]["rules"]
    for result, finding in zip(run["results"], made.findings, strict=True):
        assert result["locations"]
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == finding.rule
        assert result["level"] == finding.level
        assert set(result["partialFingerprints"].values()) == {fingerprint(finding)}
        assert (finding.fix is None) or finding.fix.description in result["message"]["text"]
        assert finding.known == ("suppressions" in result)
    assert {(rule["id"]) for rule in rules} >= {row.rule for row in made.coverage}


def test_a_finding_in_a_file_says_the_byte_and_one_without_a_file_names_the_checkpoint():
    places = [result["locations"][0]["physicalLocation"] for result in run_of(full_report())["results"]]
    assert places[1] == {
        "artifactLocation": {"uri": "SmolLM2-135M/model.safetensors"},
        "region": {"byteOffset": 1234567, "byteLength": 0},
    }
    assert places[2] == {"artifactLocation": {"uri": "SmolLM2-135M"}}


def test_a_checkpoint_of_one_file_is_not_a_folder():
    made = swapped_report(2)
    alone = made.checkpoint.model_copy(update={"path": "org/model.safetensors"})
    made = made.model_copy(update={"checkpoint": alone, "findings": (located_finding(2),)})
    place = run_of(made)["results"][0]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "org/model.safetensors"


def test_names_lead_nowhere_and_are_no_link_or_placeholder():
    run = run_of(hostile_report(EVIL))
    for result in run["results"]:
        assert "](" not in result["message"]["text"]
        assert "{{0}}" in result["message"]["text"]
        for place in result["locations"]:
            uri = place["physicalLocation"]["artifactLocation"]["uri"]
            assert ":" not in uri
            assert not uri.startswith("/")
            assert ".." not in unquote(uri).split("/")


def test_what_stayed_open_is_told_and_is_no_alert():
    run = run_of(undecided_report())
    (told,) = run["invocations"][0]["toolExecutionNotifications"]
    assert run["results"] == []
    assert "untrained: no tensor differs from noise; would decide: a trained checkpoint" in told["message"]["text"]
    assert "(ffn/gate-up-swapped (layers 0-3))" in told["message"]["text"]


def test_a_result_has_no_more_places_than_code_hosts_take():
    first = huge_report().findings[0]
    places = first.locations * 300
    (result,) = run_of(report(findings=(first.model_copy(update={"locations": places}),)))["results"]
    assert len(result["locations"]) == 100
    assert result["properties"]["tensors"] == 12
