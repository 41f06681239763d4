"""SARIF 2.1.0 (OASIS standard with errata 01): what code hosts and editors read.

A finding is a result; its places are byte ranges of tensors in files (section 3.30.3, binary regions). What stayed
undecided is a notification of the run, so that it is told and raises no alert. A known finding is suppressed.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import quote

from glassblock.reports.baseline import fingerprint
from glassblock.reports.shown import PLAIN, Shown
from glassblock.reports.wording import located_message, place_of, question_sentence, undecided
from glassblock.wire.audits import Finding, Report
from glassblock.wire.printable import printable
from glassblock.wire.tables import RuleRow

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
PLACES_UP_TO = 100
"""Places of one result; code hosts take no more."""
TENSOR_CHARACTERS = 1024


def render_sarif(report: Report, shown: Shown = PLAIN) -> str:
    """One run with a result for each finding."""
    explained = {} if shown.rules is None else {row.name: row for row in shown.rules.rules}
    names = list(dict.fromkeys([row.rule for row in report.coverage] + [found.rule for found in report.findings]))
    place = report.checkpoint.path if shown.place is None else shown.place
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "Glassblock",
                        "version": printable(report.glassblock),
                        "rules": [_descriptor(name, explained.get(name)) for name in names],
                    }
                },
                "columnKind": "unicodeCodePoints",
                "invocations": [
                    {"executionSuccessful": True, "toolExecutionNotifications": list(_notifications(report))}
                ],
                "results": [_result(report, finding, names.index(finding.rule), place) for finding in report.findings],
                "properties": _properties(report),
            }
        ],
    }
    return json.dumps(log, indent=2, ensure_ascii=True) + "\n"


def _descriptor(rule: str, row: RuleRow | None) -> dict[str, Any]:
    """A rule as viewers show it beside its results.

    No `helpUri`: that is an absolute address (section 3.49.12), and docs/rules.md has none that holds everywhere.
    """
    name = printable(rule)
    ask = f"`glassblock rules {name}` explains it, and so does docs/rules.md."
    if row is None:  # of a service that has the rule, by a client that was not told of it
        return {"id": name, "shortDescription": {"text": name}, "help": {"text": ask}}
    what, found, fooled = (_message(printable(text)) for text in (row.what, row.detection, row.fooled_by))
    hurts = _message(printable(row.hurts))
    do = (
        "Each result says what was seen, and how to repair it where that is known: `glassblock fix PATH --dry-run` "
        f"shows the repair. {ask}"
    )
    parts = {"What it hurts": hurts, "How it is found": found, "What would deceive it": fooled, "What to do": do}
    return {
        "id": name,
        "shortDescription": {"text": what},
        "fullDescription": {"text": f"{what} {hurts}"},
        "help": {
            "text": "\n\n".join([what, *(f"{title}: {text}" for title, text in parts.items())]),
            "markdown": "\n\n".join([what, *(f"**{title}.** {text}" for title, text in parts.items())]),
        },
        "defaultConfiguration": {"level": row.level},
    }


def _notifications(report: Report) -> Iterator[dict[str, Any]]:
    for question, rules in undecided(report.coverage).items():
        text = f"not decided: {question_sentence(question)} ({', '.join(rules)})"
        yield {"level": "note", "message": {"text": _message(text)}}


def _properties(report: Report) -> dict[str, Any]:
    told: dict[str, Any] = {
        "verdict": report.verdict,
        "checkpoint": printable(report.checkpoint.path),
        "family": None if report.checkpoint.family is None else printable(report.checkpoint.family),
    }
    if report.comparison is not None:
        told["fixed"] = [fingerprint(known) for known in report.comparison.fixed]
    return told


def _result(report: Report, finding: Finding, rule_index: int, checkpoint: str) -> dict[str, Any]:
    places = [*_tensor_places(checkpoint, finding)] or [_file_place(checkpoint, finding)]
    told = located_message(finding)
    fix = "" if finding.fix is None else f" Fix: {printable(finding.fix.description)}"
    stable = fingerprint(finding)
    result: dict[str, Any] = {
        "ruleId": printable(finding.rule),
        "ruleIndex": rule_index,
        "level": finding.level,
        "message": {"text": _message(f"{told}.{fix}" if fix and not told.endswith(".") else f"{told}{fix}")},
        "locations": places[:PLACES_UP_TO],
        # Code hosts follow an alert by the second name alone, and would else hash a line of the file.
        "partialFingerprints": {"glassblock/v1": stable, "primaryLocationLineHash": stable},
        "properties": {
            "certainty": finding.certainty,
            "layer": finding.layer,
            "expert": finding.expert,
            "tensors": len(finding.tensors),
            "evidence": _plain(finding.evidence),
        },
    }
    if finding.known:
        of = "a baseline" if report.comparison is None else printable(report.comparison.baseline)
        result["suppressions"] = [{"kind": "external", "justification": f"known from {of}"}]
    return result


def _plain(value: object) -> Any:
    """Evidence as JSON that every parser reads: printable texts, and words for numbers that are none."""
    if isinstance(value, Mapping):
        return {printable(str(key)): _plain(inner) for key, inner in cast("Mapping[object, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in cast("Sequence[object]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, bool | int | float) or value is None else printable(str(value))


def _message(text: str) -> str:
    """Text in which no viewer sees a placeholder (section 3.11.5) or a link (3.11.6)."""
    return text.replace("{", "{{").replace("}", "}}").replace("](", "] (")


def _tensor_places(checkpoint: str, finding: Finding) -> Iterator[dict[str, Any]]:
    for place in finding.locations[:PLACES_UP_TO]:
        name = printable(place.tensor[:TENSOR_CHARACTERS])
        yield {
            "physicalLocation": {
                "artifactLocation": {"uri": _uri(checkpoint, place.file)},
                "region": {"byteOffset": place.byte_offset, "byteLength": place.byte_length},
            },
            "logicalLocations": [{"fullyQualifiedName": name, "kind": "tensor"}],
        }


def _file_place(checkpoint: str, finding: Finding) -> dict[str, Any]:
    """The file where one is named, with the byte if there is one; else the checkpoint itself."""
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(checkpoint, finding.file)}}
    if finding.byte is not None and finding.byte >= 0:
        physical["region"] = {"byteOffset": finding.byte, "byteLength": 0}
    place: dict[str, Any] = {"physicalLocation": physical}
    named = [printable(name[:TENSOR_CHARACTERS]) for name in finding.tensors[:PLACES_UP_TO]] or [place_of(finding)]
    logical = [{"fullyQualifiedName": name, "kind": "tensor" if finding.tensors else "layer"} for name in named if name]
    return place | ({"logicalLocations": logical} if logical else {})


def _uri(checkpoint: str, file: str | None) -> str:
    """A relative reference of which every part is quoted, so that none can lead away."""
    parts = [part for part in checkpoint.split("/") if part not in {"", ".", ".."}]
    if file is not None and (not parts or parts[-1] != file):
        parts += [part for part in file.split("/") if part not in {"", ".", ".."}]
    return "/".join(quote(part, safe="", errors="replace") for part in parts) or "checkpoint"
