"""What is known already: findings that a pipeline has accepted, so that it fails on new ones alone.

A baseline is a report, or the small file that `written` makes of one. A finding is recognised by what it is (rule,
layer, expert, tensors; the file, where it names no tensor), not by its words and numbers, which change from version to
version. It counts as known only as often as the baseline has it, and at no worse level than there.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import ValidationError

from glassblock.errors import InvalidValue
from glassblock.reports.wording import LEVELS
from glassblock.wire.audits import Comparison, Finding, KnownFinding, Report
from glassblock.wire.refusals import refusal
from glassblock.wire.values import SCHEMA_VERSION, Answer

HINT = "give a report (--format json) or a file that --write-baseline made"

_Identity = tuple[str, int | None, int | None, tuple[str, ...], str | None]


class Baseline(Answer):
    """The small file: what a reader needs to know the findings again, and can review in a diff."""

    baseline_version: Literal["1"] = SCHEMA_VERSION
    checkpoint: str
    findings: tuple[KnownFinding, ...]


def fingerprint(finding: Finding | KnownFinding) -> str:
    """32 hexadecimal digits that stay the same from run to run, from version to version, from machine to machine."""
    told = json.dumps(["glassblock/1", *_identity(finding)], ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def baseline_of(report: Report) -> Baseline:
    """Every finding of a report, known ones included, in an order that does not depend on the rules'."""
    findings = (KnownFinding.model_validate(finding.model_dump()) for finding in report.findings)
    return Baseline(checkpoint=report.checkpoint.path, findings=tuple(sorted(findings, key=_place)))


def written(baseline: Baseline) -> str:
    """The file's text."""
    return baseline.model_dump_json(indent=2) + "\n"


def read_baseline(value: Mapping[str, Any], *, name: str) -> Baseline:
    """A baseline out of the object that a JSON file holds.

    Args:
        value: The object: a report, or a baseline.
        name: What to call the file.

    Raises:
        InvalidValue: It is neither, or of a version that is not read here.
    """
    kind, key = (Baseline, "baseline_version") if "baseline_version" in value else (Report, "schema_version")
    if key not in value:
        raise InvalidValue(f"{name} is no baseline: it has no schema_version", field="baseline", hint=HINT)
    if value[key] != SCHEMA_VERSION:
        raise InvalidValue(
            f"{name} is of version {value[key]!r}", field="baseline", known=(SCHEMA_VERSION,), hint="write it again"
        )
    try:
        read = kind.model_validate(value)
    except ValidationError as fault:
        told = refusal(fault, kind).message
        raise InvalidValue(f"{name} is no baseline: {told}", field="baseline", hint=HINT) from fault
    return read if isinstance(read, Baseline) else baseline_of(read)


def compared(report: Report, baseline: Baseline, *, name: str) -> Report:
    """The report with its known findings marked, and with those of the baseline that it no longer has.

    The verdict stays what it is: it speaks of the checkpoint. What fails a pipeline is a finding that is not known.

    Args:
        report: Of an audit that ended.
        baseline: What was accepted.
        name: What to call the baseline.
    """
    left: dict[_Identity, list[KnownFinding]] = defaultdict(list)
    for known in sorted(baseline.findings, key=lambda known: LEVELS.index(known.level)):
        left[_identity(known)].append(known)
    marked: dict[int, Finding] = {}
    # The worst of several like findings meets the worst that was accepted.
    for number, finding in sorted(enumerate(report.findings), key=lambda item: LEVELS.index(item[1].level)):
        accepted = left[_identity(finding)]
        known = bool(accepted) and LEVELS.index(accepted[0].level) <= LEVELS.index(finding.level)
        if accepted:
            accepted.pop(0)  # met again, though perhaps worse: it is not fixed
        marked[number] = finding.model_copy(update={"known": known})
    gone = sorted((known for some in left.values() for known in some), key=_place)
    looked_for = _looked_for(report)
    return report.model_copy(
        update={
            "findings": tuple(marked[number] for number in range(len(report.findings))),
            "comparison": Comparison(
                baseline=name,
                fixed=tuple(known for known in gone if looked_for(known)),
                unseen=tuple(known for known in gone if not looked_for(known)),
            ),
        }
    )


def _identity(finding: Finding | KnownFinding) -> _Identity:
    tensors = tuple(sorted(finding.tensors))
    return finding.rule, finding.layer, finding.expert, tensors, None if tensors else finding.file


def _place(known: KnownFinding) -> tuple[str, int, int, tuple[str, ...], str, int]:
    def number(value: int | None) -> int:
        return -1 if value is None else value

    level = LEVELS.index(known.level)
    return known.rule, number(known.layer), number(known.expert), known.tensors, known.file or "", level


def _looked_for(report: Report) -> Callable[[KnownFinding], bool]:
    """Whether the rule of a known finding decided something this time, and left neither its layer open nor a part
    that it does not name by layers: another engine's config that was not given, a file that was not read."""
    checked = {row.rule for row in report.coverage if row.checked or not (row.skipped or row.undecidable)}
    left_open = {(row.rule, entry.layer) for row in report.coverage for entry in (*row.undecidable, *row.skipped)}

    def looked_for(known: KnownFinding) -> bool:
        return known.rule in checked and not left_open & {(known.rule, None), (known.rule, known.layer)}

    return looked_for
