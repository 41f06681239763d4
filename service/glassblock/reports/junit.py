"""JUnit XML: what CI dashboards show as tests.

A suite is a group of rules (`container`, `ffn`). In it every finding is a test of its own, named after its place, so
that a dashboard tells which are new; a rule without findings is one test. Errors and warnings fail, notes pass and are
printed. Known findings, open questions and what was not looked for are skipped, each with its reason.
"""

from collections.abc import Iterator
from xml.etree import ElementTree as Xml

from glassblock.reports.shown import PLAIN, Shown
from glassblock.reports.wording import (
    Question,
    asked_in_part,
    evidence_line,
    located_message,
    place_of,
    question_sentence,
    unasked,
    undecided,
)
from glassblock.wire.audits import Coverage, Finding, Report
from glassblock.wire.printable import printable

TENSORS_UP_TO = 20


def render_junit(report: Report, shown: Shown = PLAIN) -> str:  # noqa: ARG001  the shape of a format
    """A `testsuites` document."""
    covered = {row.rule: row for row in report.coverage}
    for finding in report.findings:
        covered.setdefault(finding.rule, Coverage(rule=finding.rule, checked=0))
    groups: dict[str, list[Xml.Element]] = {}
    for row in covered.values():
        groups.setdefault(_group(row.rule), []).extend(_cases(report, row))
    root = Xml.Element("testsuites", {"name": f"glassblock {printable(report.checkpoint.path)}"} | _counts(groups))
    for name, cases in groups.items():
        suite = Xml.SubElement(root, "testsuite", {"name": name} | _counts({name: cases}))
        suite.extend(cases)
    Xml.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + Xml.tostring(root, encoding="unicode") + "\n"


def _group(rule: str) -> str:
    return printable(rule.partition("/")[0])


def _counts(groups: dict[str, list[Xml.Element]]) -> dict[str, str]:
    cases = [case for some in groups.values() for case in some]
    failed = sum(case.find("failure") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"tests": str(len(cases)), "failures": str(failed), "errors": "0", "skipped": str(skipped), "time": "0"}


def _cases(report: Report, row: Coverage) -> Iterator[Xml.Element]:
    findings = [finding for finding in report.findings if finding.rule == row.rule]
    names: set[str] = set()
    for finding in findings:
        yield _finding_case(report, finding, names)
    if row.checked and not findings:
        case = _case(row.rule, printable(row.rule.partition("/")[2]), names)
        Xml.SubElement(case, "system-out").text = f"decided: {row.checked:,}"
        yield case
    open_ = {
        "not decided": undecided([row]),
        "not checked": unasked([row]),
        "checked in part": asked_in_part([row]),
    }
    for what, questions in open_.items():
        yield from (_skipped_case(row.rule, what, question, told, names) for question, told in questions.items())


def _case(rule: str, name: str, names: set[str]) -> Xml.Element:
    """A test whose name no other one of its rule has: dashboards tell tests apart by their names."""
    number, unique = 1, name
    while unique in names:
        number += 1
        unique = f"{name} ({number})"
    names.add(unique)
    return Xml.Element("testcase", {"classname": f"glassblock.{_group(rule)}", "name": unique, "time": "0"})


def _finding_case(report: Report, finding: Finding, names: set[str]) -> Xml.Element:
    rule = printable(finding.rule.partition("/")[2])
    place = place_of(finding) or printable(finding.tensors[0] if finding.tensors else finding.file or "")
    case = _case(finding.rule, f"{rule} {place}".strip(), names)
    message, body = located_message(finding), _body(finding)
    if finding.known:
        of = "a baseline" if report.comparison is None else printable(report.comparison.baseline)
        Xml.SubElement(case, "skipped", {"message": f"known from {of}: {message}"}).text = body
    elif finding.level == "note":
        Xml.SubElement(case, "system-out").text = body
    else:
        Xml.SubElement(case, "failure", {"type": finding.level, "message": message}).text = body
    return case


def _skipped_case(rule: str, what: str, question: Question, told: list[str], names: set[str]) -> Xml.Element:
    # `told` is the rule with its layers in brackets.
    layers = told[0].removeprefix(printable(rule)).partition("(")[2].strip(")")
    case = _case(rule, f"{printable(rule.partition('/')[2])} {layers}".strip(), names)
    Xml.SubElement(case, "skipped", {"message": f"{what}: {question_sentence(question)}"})
    return case


def _body(finding: Finding) -> str:
    tensors = [printable(name) for name in finding.tensors]
    places = [
        f"{printable(place.file)}, bytes {place.byte_offset} to {place.byte_offset + place.byte_length}: "
        f"{printable(place.tensor)}"
        for place in finding.locations
    ]
    listed = places or tensors
    left_out = [f"and {len(listed) - TENSORS_UP_TO} more"] if len(listed) > TENSORS_UP_TO else []
    lines = [
        f"{finding.level} ({finding.certainty}): {located_message(finding)}",
        *([] if finding.fix is None else [f"fix: {printable(finding.fix.description)}"]),
        *([] if finding.file is None else [f"file: {printable(finding.file)}"]),
        *listed[:TENSORS_UP_TO],
        *left_out,
        printable(evidence_line(finding.evidence)),
    ]
    return "\n".join(line for line in lines if line)
