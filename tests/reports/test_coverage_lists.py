"""What was checked, what was not and what in part: three lists in which no rule stands twice, in every format."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from glassblock.audit.audit import AuditQuestion, audit_checkpoint
from glassblock.reports import REPORTS
from glassblock.reports.wording import asked_in_part, checked_rules, unasked, undecided
from glassblock.wire.audits import Coverage, Report, Skipped, Undecidable
from hypothesis import given
from hypothesis import strategies as st
from plants import PLANTS, healthy_checkpoint

from reports.report_makers import report

HEALTHY = ("llama", "qwen2", "gemma2", "phi3", "mixtral", "gpt2", "gpt_neox", "t5", "olmo2", "qwen3_moe")
PLANTED = {name: plants[0] for name, plants in PLANTS.items()}


def named(questions: Iterable[str]) -> list[str]:
    return [re.split(r"[ (]", told)[0] for told in questions]


def lists(coverage: Iterable[Coverage]) -> dict[str, set[str]]:
    rows = list(coverage)
    return {
        "checked": {rule for rule, _ in checked_rules(rows)},
        "in part": {rule for told in asked_in_part(rows).values() for rule in named(told)},
        "not checked": {rule for told in unasked(rows).values() for rule in named(told)},
    }


def assert_disjoint(coverage: tuple[Coverage, ...]) -> None:
    found = lists(coverage)
    for one, other in (("checked", "in part"), ("checked", "not checked"), ("in part", "not checked")):
        assert not found[one] & found[other], (one, other)
    assert found["checked"] | found["in part"] == {row.rule for row in coverage if row.checked}
    open_ = {rule for told in undecided(coverage).values() for rule in named(told)}
    looked_at = {row.rule for row in coverage if row.checked or row.skipped or row.undecidable}
    assert set[str]().union(*found.values()) | open_ == looked_at


@pytest.mark.parametrize("family", HEALTHY)
def test_of_healthy_checkpoints_no_rule_is_in_two_lists(family: str, tmp_path: Path) -> None:
    made = audit_checkpoint(healthy_checkpoint(family, tmp_path / family))
    assert_disjoint(made.coverage)
    if family == "llama":
        assert "config/activation-conflict" in lists(made.coverage)["in part"]


@pytest.mark.parametrize("rule", PLANTED)
def test_of_broken_checkpoints_no_rule_is_in_two_lists(rule: str, tmp_path: Path) -> None:
    plant = PLANTED[rule]
    directory = plant.healthy(tmp_path / "broken")
    plant.break_(directory)
    assert_disjoint(audit_checkpoint(directory, AuditQuestion(against=plant.against)).coverage)


SOMEWHERE = st.one_of(st.none(), st.integers(0, 5))
ROWS = st.lists(
    st.builds(
        Coverage,
        rule=st.sampled_from(sorted(PLANTS)),
        checked=st.integers(0, 3),
        undecidable=st.lists(
            st.builds(Undecidable, layer=SOMEWHERE, reason=st.sampled_from("ab"), would_decide=st.just("more"))
        ).map(tuple),
        skipped=st.lists(st.builds(Skipped, layer=SOMEWHERE, reason=st.sampled_from("cd"))).map(tuple),
    ),
    unique_by=lambda row: row.rule,
).map(tuple)


@given(ROWS)
def test_of_any_coverage_no_rule_is_in_two_lists(coverage: tuple[Coverage, ...]) -> None:
    assert_disjoint(coverage)


def partly() -> Report:
    rows = (
        Coverage(rule="config/shape", checked=3),
        Coverage(rule="ffn/dead-neurons", checked=28, skipped=(Skipped(layer=3, reason="experts"),)),
        Coverage(rule="config/dtype-conflict", checked=0, skipped=(Skipped(reason="nobody asked"),)),
    )
    return report(coverage=rows)


def test_what_was_checked_in_part_says_how_much_and_where_not() -> None:
    assert asked_in_part(partly().coverage) == {("experts", ""): ["ffn/dead-neurons 28 (not layer 3)"]}


@pytest.mark.parametrize("name", ["text", "markdown", "html", "junit"])
def test_every_format_for_people_tells_it_once(name: str) -> None:
    told = REPORTS[name].render(partly(), width=100)
    assert told.lower().count("checked in part") == 1
    assert told.count("ffn/dead-neurons 28") == (name != "junit")
    assert "not layer 3" in told
