"""What is known stays known, what is new is new, and what is gone is told."""

import json

import pytest
from glassblock.errors import InvalidValue
from glassblock.reports import REPORTS
from glassblock.reports.baseline import Baseline, baseline_of, compared, fingerprint, read_baseline, written
from glassblock.wire.audits import Coverage, Finding, KnownFinding, Report, Skipped, Undecidable

from reports.report_makers import RULE, full_report, report, swap_finding, swapped_report


def after(old: Report, new: Report) -> Report:
    return compared(new, baseline_of(old), name="known.json")


def known_layers(made: Report) -> list[int | None]:
    return [finding.layer for finding in made.findings if finding.known]


def test_only_what_was_there_is_known():
    made = after(swapped_report(1, 2), swapped_report(2, 3))
    assert known_layers(made) == [2]
    assert made.comparison is not None
    assert [known.layer for known in made.comparison.fixed] == [1]
    assert made.comparison.unseen == ()
    assert made.verdict == "fail"


def test_the_words_and_numbers_of_a_finding_may_change():
    other = swap_finding(2).model_copy(
        update={"message": "other words", "evidence": {}, "fix": None, "certainty": "proved", "locations": ()}
    )
    assert known_layers(after(swapped_report(2), report(findings=(other,)))) == [2]
    assert fingerprint(other) == fingerprint(swap_finding(2))


def test_the_order_of_tensors_means_nothing():
    turned = swap_finding(2).model_copy(update={"tensors": swap_finding(2).tensors[::-1]})
    assert fingerprint(turned) == fingerprint(swap_finding(2))


@pytest.mark.parametrize(
    "change", [{"rule": "ffn/fused-order"}, {"layer": 3}, {"layer": None}, {"expert": 0}, {"tensors": ("x",)}]
)
def test_another_rule_layer_expert_or_tensor_is_another_finding(change: dict[str, object]):
    other = swap_finding(2).model_copy(update=change)
    assert fingerprint(other) != fingerprint(swap_finding(2))
    assert not after(swapped_report(2), report(findings=(other,))).findings[0].known


def test_a_fingerprint_is_the_same_for_ever():
    assert fingerprint(swap_finding(2)) == "00c4749e2673735ca5c517cda6b34d53"


def test_files_tell_findings_apart_that_name_no_tensor():
    one, other = (
        Finding(rule="container/truncated", level="error", certainty="proved", message="", file=f"{n}.safetensors")
        for n in "ab"
    )
    made = after(report(findings=(one,)), report(findings=(one, other)))
    assert [finding.known for finding in made.findings] == [True, False]


def test_a_finding_is_known_only_as_often_as_it_was():
    twice = report(findings=(swap_finding(2), swap_finding(2)))
    assert [finding.known for finding in after(swapped_report(2), twice).findings] == [True, False]


def test_a_finding_that_got_worse_is_new_and_not_fixed():
    warning = swap_finding(2).model_copy(update={"level": "warning"})
    made = after(report(findings=(warning,)), swapped_report(2))
    assert known_layers(made) == []
    assert made.comparison is not None
    assert made.comparison.fixed == ()
    assert known_layers(after(swapped_report(2), report(findings=(warning,)))) == [2]


@pytest.mark.parametrize(
    ("coverage", "seen"),
    [
        ((Coverage(rule=RULE, checked=4),), True),
        ((Coverage(rule=RULE, checked=0, skipped=(Skipped(reason="no"),)),), False),
        ((Coverage(rule=RULE, checked=3, skipped=(Skipped(reason="no other config was given"),)),), False),
        ((Coverage(rule=RULE, checked=3, skipped=(Skipped(layer=1, reason="no"),)),), True),
        ((Coverage(rule=RULE, checked=3, undecidable=(Undecidable(layer=2, reason="a", would_decide="b"),)),), False),
        ((Coverage(rule=RULE, checked=3, undecidable=(Undecidable(layer=1, reason="a", would_decide="b"),)),), True),
        ((), False),
    ],
)
def test_gone_means_that_it_was_looked_for(coverage: tuple[Coverage, ...], seen: bool):
    comparison = after(swapped_report(2), report(coverage=coverage)).comparison
    assert comparison is not None
    assert [known.layer for known in comparison.fixed] == [2] * seen
    assert [known.layer for known in comparison.unseen] == [2] * (not seen)


def test_the_file_is_read_back_and_a_report_does_as_well():
    made = full_report()
    small = written(baseline_of(made))
    assert read_baseline(json.loads(small), name="b") == baseline_of(made)
    assert read_baseline(json.loads(REPORTS["json"].render(made)), name="r") == baseline_of(made)
    assert all(finding.known for finding in after(made, made).findings)


def test_the_file_does_not_depend_on_the_order_of_findings():
    made = full_report()
    turned = made.model_copy(update={"findings": made.findings[::-1]})
    assert written(baseline_of(made)) == written(baseline_of(turned))


OTHERS = {
    "a config": ({"model_type": "llama"}, "it has no schema_version"),
    "a newer report": ({"schema_version": "2"}, "is of version '2'"),
    "a newer baseline": ({"baseline_version": 1}, "is of version 1"),
    "half a report": ({"schema_version": "1", "findings": []}, "glassblock is missing"),
    "a wrong level": (
        {"baseline_version": "1", "checkpoint": "x", "findings": [{"rule": "a/b", "level": "fatal"}]},
        "findings.0.level: 'fatal' is none of 'error', ",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_baseline_is_refused_and_named(name: str):
    value, told = OTHERS[name]
    with pytest.raises(InvalidValue, match="the-file") as refused:
        read_baseline(value, name="the-file")
    assert told in refused.value.message


@pytest.mark.parametrize("row", REPORTS.values(), ids=list(REPORTS))
def test_every_format_tells_known_and_fixed(row):
    made = after(swapped_report(1, 2), swapped_report(2))
    plain = row.render(swapped_report(2))
    told = row.render(made)
    assert "known" in told.lower()
    assert told != plain
    if row.name not in {"sarif", "junit"}:
        assert "fixed" in told


def test_a_report_of_an_older_version_is_read():
    told = json.loads(REPORTS["json"].render(swapped_report(2)))
    del told["comparison"]
    for finding in told["findings"]:
        del finding["locations"], finding["known"]
    assert Report.model_validate(told) == swapped_report(2)


def test_a_baseline_by_hand_needs_no_more_than_it_says():
    value = {"baseline_version": "1", "checkpoint": "x", "findings": [{"rule": "a/b", "level": "note"}]}
    assert read_baseline(value, name="b") == Baseline(
        checkpoint="x", findings=(KnownFinding(rule="a/b", level="note"),)
    )
