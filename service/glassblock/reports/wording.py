"""What every format for people says in the same words: the verdict, a finding, the questions left open."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from glassblock.reports.ranges import layer_ranges
from glassblock.wire.audits import Coverage, Finding, KnownFinding, Level, ReferenceSummary, Relation, Report
from glassblock.wire.printable import printable

LEVELS: tuple[Level, ...] = ("error", "warning", "note")
"""The worst first."""

EVIDENCE_CHARACTERS = 400
REFERENCE_UP_TO = 8
"""Differences from a reference told one by one."""

RELATIONS: Mapping[Relation, str] = {
    "identical": "identical",
    "form": "differs in form only",
    "function": "differs in function",
    "fine-tune": "fine-tune of one another",
    "other-model": "another model",
    "unanswered": "not answered",
}
GROUP_UP_TO = 3
"""Values of a group of evidence that still go into the line."""

Question = tuple[str, str]
"""Why it stayed open, and what would decide it."""


def facts_of(report: Report) -> str:
    """Family, layers, tensors and bytes in one line."""
    checkpoint = report.checkpoint
    verified = f" (verified: {checkpoint.verified})" if checkpoint.verified else ""
    facts = (
        "family unknown" if checkpoint.family is None else printable(checkpoint.family + verified),
        None if checkpoint.layers is None else f"{checkpoint.layers:,} layers",
        f"{checkpoint.tensors:,} tensors",
        byte_count(checkpoint.bytes),
    )
    return " · ".join(fact for fact in facts if fact is not None)


def verdict_sentence(report: Report) -> str:
    """What stands beside the verdict: how many findings, and what became of a baseline."""
    told = _counted(finding for finding in report.findings if not finding.known)
    sentence = {
        "pass": told or "nothing wrong in what was checked",
        "fail": told or "nothing that is not known",
        "inconclusive": f"{told or 'no finding'}, but a question stayed open: see 'not decided'",
    }[report.verdict]
    known = _counted(finding for finding in report.findings if finding.known)
    if known:
        sentence += f"; known: {known}"
    if report.comparison is not None and report.comparison.fixed:
        sentence += f"; {len(report.comparison.fixed)} fixed"
    return sentence


def _counted(findings: Iterable[Finding]) -> str:
    levels = [finding.level for finding in findings]
    counts = [(level, levels.count(level)) for level in LEVELS]
    return ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts if count)


def grouped_findings(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one rule, level and certainty together: the new before the known, the worst level first."""
    groups: dict[tuple[bool, str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.known, finding.level, finding.rule, finding.certainty), []).append(finding)
    return sorted(groups.values(), key=lambda group: (group[0].known, LEVELS.index(group[0].level)))


def layers_of(group: Iterable[Finding]) -> str:
    """`layers 0-3, 7`; empty where no finding speaks of a layer."""
    layers = [finding.layer for finding in group if finding.layer is not None]
    return layer_ranges(layers) if layers else ""


def place_of(finding: Finding | KnownFinding) -> str:
    """`layer 7, expert 2`; empty where the finding speaks of no layer."""
    place = "" if finding.layer is None else f"layer {finding.layer}"
    return place if finding.expert is None else f"{place}, expert {finding.expert}".removeprefix(", ")


def located_message(finding: Finding) -> str:
    """The message, with its layer in front where it does not begin with one."""
    place, message = place_of(finding), printable(finding.message)
    return message if not place or message.startswith(place) else f"{place}: {message}"


def reference_lines(reference: ReferenceSummary) -> Iterator[str]:
    """What a comparison with another checkpoint showed, a line each."""
    yield printable(f"{reference.same:,} of {reference.mapped:,} mapped tensors are equal")
    for form in reference.form:
        example = f" ({form.examples[0]})" if form.examples else ""
        yield printable(f"form only: {form.tensors:,} {form.kind}: {form.words}{example}")
    for found in reference.function[:REFERENCE_UP_TO]:
        place = "" if found.layer is None else f"layer {found.layer}: "
        names = ", ".join(found.tensors[:2]) + (f" and {len(found.tensors) - 2} more" if len(found.tensors) > 2 else "")
        yield printable(f"function: {place}{names}: {found.words}")
    if len(reference.function) > REFERENCE_UP_TO:
        yield f"and {len(reference.function) - REFERENCE_UP_TO:,} more differences; the JSON report lists all"
    for where, names in (("here", reference.unmatched), ("in the reference", reference.unmatched_there)):
        if names:
            more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
            yield printable(f"only {where}: {', '.join(names[:3])}{more}")
    if reference.unread:
        yield printable(f"not read: {reference.unread[0]}" + (" and others" if len(reference.unread) > 1 else ""))


def reference_title(reference: ReferenceSummary) -> str:
    """The relation in a line."""
    return printable(f"beside {reference.checkpoint}: {RELATIONS[reference.relation]}. {reference.words}")


def remembered(known: KnownFinding) -> str:
    """A finding of a baseline in one line."""
    tensors = ", ".join(known.tensors[:3]) + (f" and {len(known.tensors) - 3} more" if len(known.tensors) > 3 else "")
    parts = (known.rule, place_of(known), tensors or known.file or "")
    return printable(" · ".join(part for part in parts if part))


def evidence_line(evidence: Mapping[str, Any]) -> str:
    """What fits in a line or two: values, and groups of a few values; larger groups are left to the JSON report."""
    told: list[str] = []
    for key, value in evidence.items():
        name = key.replace("_", " ")
        if isinstance(value, dict):
            told += _small_group(name, cast("dict[str, object]", value))
        elif value is not None:
            told.append(f"{name} {_value(value)}")
    return shortened(" · ".join(told), EVIDENCE_CHARACTERS)


def shortened(text: str, longest: int) -> str:
    """At most so many characters, the last an ellipsis where some are left out."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _small_group(name: str, group: Mapping[str, object]) -> list[str]:
    if len(group) > GROUP_UP_TO or any(isinstance(inner, dict) for inner in group.values()):
        return []
    return [f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {_value(inner)}" for key, inner in group.items())]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def undecided(rows: Iterable[Coverage]) -> dict[Question, list[str]]:
    """For every question that the evidence did not settle the rules that asked it, each with its layers."""
    return _by_reason(
        (row.rule, open_.layer, (open_.reason, open_.would_decide)) for row in rows for open_ in row.undecidable
    )


def unasked(rows: Iterable[Coverage]) -> dict[Question, list[str]]:
    """For every reason not to ask the rules that did not, each with its layers."""
    return _by_reason((row.rule, skip.layer, (skip.reason, "")) for row in rows for skip in row.skipped)


def question_sentence(question: Question) -> str:
    """`reason; would decide: input`."""
    reason, would_decide = question
    return printable(f"{reason}; would decide: {would_decide}" if would_decide else reason)


def _by_reason(entries: Iterable[tuple[str, int | None, Question]]) -> dict[Question, list[str]]:
    layers: dict[Question, dict[str, list[int]]] = {}
    for rule, layer, question in entries:
        of_rule = layers.setdefault(question, {}).setdefault(rule, [])
        if layer is not None:
            of_rule.append(layer)
    return {
        question: [printable(rule) + (f" ({layer_ranges(found)})" if found else "") for rule, found in of_rules.items()]
        for question, of_rules in layers.items()
    }


def checked_rules(rows: Iterable[Coverage]) -> Iterator[tuple[str, int]]:
    """The rules that decided something, by name, with how many files, tensors or layers."""
    yield from ((printable(row.rule), row.checked) for row in sorted(rows, key=lambda row: row.rule) if row.checked)


def byte_count(count: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} PB"
