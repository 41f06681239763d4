"""JUnit XML: well formed whatever the names, and counted as dashboards count."""

from xml.etree import ElementTree as Xml

import pytest
from glassblock.reports.junit import render_junit
from glassblock.wire.audits import Report
from hypothesis import given
from hypothesis import strategies as st

from reports.report_makers import full_report, hostile_report, report, swap_finding, swapped_report, undecided_report


def cases_of(made: Report) -> dict[tuple[str, str], Xml.Element]:
    root = Xml.fromstring(render_junit(made))
    assert root.tag == "testsuites"
    cases: dict[tuple[str, str], Xml.Element] = {}
    for suite in root:
        for case in suite:
            key = (case.attrib["classname"], case.attrib["name"])
            assert key not in cases
            cases[key] = case
    for holder in (root, *root):
        found = list(holder.iter("testcase"))
        assert int(holder.attrib["tests"]) == len(found)
        for kind, tag in (("failures", "failure"), ("skipped", "skipped")):
            assert int(holder.attrib[kind]) == sum(case.find(tag) is not None for case in found)
    return cases


def test_a_finding_is_a_failed_test_with_what_where_and_the_repair():
    case = cases_of(full_report())["glassblock.ffn", "gate-up-swapped layer 2"]
    failure = case.find("failure")
    assert failure is not None
    assert failure.attrib["type"] == "error"
    assert failure.attrib["message"].startswith("layer 2: gate_proj and up_proj of layer 2 are exchanged")
    assert "\nfix: Rename model.layers.2.mlp.gate_proj.weight" in (failure.text or "")
    assert "model.safetensors, bytes 1000 to 1512: model.layers.2.mlp.gate_proj.weight" in (failure.text or "")


def test_warnings_fail_notes_pass_and_what_is_known_is_skipped():
    cases = cases_of(full_report())
    outcomes = {name: [child.tag for child in case] for (_, name), case in cases.items()}
    assert outcomes["eps-conflict"] == ["failure"]
    assert outcomes["fp16-overflow layer 3"] == ["system-out"]
    assert outcomes["gate-up-swapped layer 1, expert 4"] == ["skipped"]
    known = cases["glassblock.ffn", "gate-up-swapped layer 1, expert 4"].find("skipped")
    assert known is not None
    assert known.attrib["message"].startswith("known from known.json: ")


def test_a_suite_is_a_group_of_rules_and_a_silent_rule_one_passed_test():
    root = Xml.fromstring(render_junit(report()))
    assert [suite.attrib["name"] for suite in root] == ["ffn", "container", "config", "tensor", "index"]
    cases = cases_of(report())
    assert [child.tag for child in cases["glassblock.container", "truncated"]] == ["system-out"]
    assert root.attrib["failures"] == "0"


def test_what_was_not_decided_is_skipped_with_its_reason():
    case = cases_of(undecided_report())["glassblock.ffn", "gate-up-swapped layers 0-3"]
    (skipped,) = case
    assert skipped.attrib["message"] == (
        "not decided: untrained: no tensor differs from noise; would decide: a trained checkpoint"
    )


def test_like_findings_are_told_apart():
    again = swapped_report(2).model_copy(update={"findings": (swap_finding(2),) * 3})
    names = [name for _, name in cases_of(again) if name.startswith("gate-up-swapped")]
    assert names == ["gate-up-swapped layer 2", "gate-up-swapped layer 2 (2)", "gate-up-swapped layer 2 (3)"]


@pytest.mark.parametrize("evil", ["\x00\x0b\x1b[2J", "\ufffe\uffff\ud800", ']]><!ENTITY a "b">&a;', "a\" b='c"])
def test_control_characters_and_markup_stay_text(evil: str):
    assert cases_of(hostile_report(evil))


@given(st.text(st.characters()))
def test_any_name_is_well_formed(evil: str):
    cases_of(hostile_report(evil))
