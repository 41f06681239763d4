"""What every format for people says in the same words: the verdict, a finding, the questions left open."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from glassblock.reports.ranges import layer_ranges
from glassblock.wire.audits import (
    CaptureSummary,
    CoefficientRange,
    Coverage,
    Finding,
    KnownFinding,
    Level,
    MergeSummary,
    ReferenceSummary,
    Relation,
    Report,
)
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
LISTED = 8
"""Values of a list of evidence that are told."""
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
        None if checkpoint.layers is None else _layers_there(checkpoint.layers, checkpoint.declared_layers),
        f"{checkpoint.tensors:,} tensor{'s' * (checkpoint.tensors != 1)}",
        byte_count(checkpoint.bytes),
    )
    return " · ".join(fact for fact in facts if fact is not None)


def _layers_there(there: int, declared: int | None) -> str:
    few = declared is not None and there < declared
    return f"{there:,} of {declared:,} layers" if few else f"{there:,} layer{'s' * (there != 1)}"


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


def merge_lines(merge: MergeSummary) -> Iterator[str]:
    """What a comparison with several checkpoints showed, a line each."""
    for group in merge.groups:
        mixed = ", ".join(f"{part.reference} {_range(part)}" for part in group.coefficients)
        left = (
            "" if not group.coefficients or group.largest_residual is None else f", off by {group.largest_residual:.2g}"
        )
        example = f" ({group.examples[0]})" if group.examples else ""
        yield printable(f"{group.tensors:,} tensors: {group.words}{f': {mixed}{left}' if mixed else ''}{example}")
    stacked = [layer for layer in merge.layers if any(source.layer != layer.layer for source in layer.sources)]
    for layer in stacked[:REFERENCE_UP_TO]:
        sources = ", ".join(f"layer {source.layer} of {source.reference}" for source in layer.sources)
        yield printable(f"layer {layer.layer} is {sources}")
    if len(stacked) > REFERENCE_UP_TO:
        yield f"and {len(stacked) - REFERENCE_UP_TO:,} more layers; the JSON report lists all"
    if merge.unmatched:
        more = f" and {len(merge.unmatched) - 3:,} more" if len(merge.unmatched) > 3 else ""
        yield printable(f"in none of them: {', '.join(merge.unmatched[:3])}{more}")
    if merge.unread:
        yield printable(f"not read: {merge.unread[0]}" + (" and others" if len(merge.unread) > 1 else ""))


def _range(part: CoefficientRange) -> str:
    steady = part.most - part.least < 0.0005
    return f"{part.least:.3f}" if steady else f"{part.least:.3f} to {part.most:.3f}"


def merge_title(merge: MergeSummary) -> str:
    """What the checkpoint is made of, in a line."""
    return printable(f"beside {', '.join(merge.references)}: {merge.words}")


def capture_lines(captures: CaptureSummary) -> Iterator[str]:
    """What captured tensors showed: layers with one verdict together where they are as declared, others one by one."""
    quiet = [layer.layer for layer in captures.layers if layer.verdict == "as-declared"]
    if quiet:
        yield f"as declared: {layer_ranges(quiet)}"
    others = [layer for layer in captures.layers if layer.verdict != "as-declared"]
    for layer in others[:REFERENCE_UP_TO]:
        yield printable(f"layer {layer.layer}: {layer.verdict}: {layer.message}")
    if len(others) > REFERENCE_UP_TO:
        yield f"and {len(others) - REFERENCE_UP_TO:,} more layers; the JSON report lists all"


def capture_title(captures: CaptureSummary) -> str:
    """What was captured, and where it departs first."""
    first = captures.first_departure
    count = len(captures.layers)
    told = f"{count:,} layer{'' if count == 1 else 's'}, " + (
        "all as declared" if first is None else f"the first that is not as declared is layer {first}"
    )
    return printable(f"captures {captures.captures}: {told}")


def besides(report: Report) -> Iterator[tuple[str, str, list[str]]]:
    """A heading, a sentence and lines for each comparison that was asked for: references, captures."""
    if report.reference is not None:
        yield "Beside a reference", reference_title(report.reference), list(reference_lines(report.reference))
    if report.merge is not None:
        yield "Beside several references", merge_title(report.merge), list(merge_lines(report.merge))
    if report.captures is not None:
        yield "Captured tensors", capture_title(report.captures), list(capture_lines(report.captures))


def reference_title(reference: ReferenceSummary) -> str:
    """The relation in a line."""
    return printable(f"beside {reference.checkpoint}: {RELATIONS[reference.relation]}. {reference.words}")


def remembered(known: KnownFinding) -> str:
    """A finding of a baseline in one line."""
    tensors = ", ".join(known.tensors[:3]) + (f" and {len(known.tensors) - 3} more" if len(known.tensors) > 3 else "")
    parts = (known.rule, place_of(known), tensors or known.file or "")
    return printable(" · ".join(part for part in parts if part))


def evidence_line(evidence: Mapping[str, Any]) -> str:
    """What fits in a line or two: values, and groups of a few; larger groups and lists of groups are left to JSON."""
    told: list[str] = []
    for key, value in evidence.items():
        name = key.replace("_", " ")
        if isinstance(value, dict):
            told += _small_group(name, cast("dict[str, object]", value))
        elif value is not None and not _lists_groups(value):
            told.append(f"{name} {_value(value)}")
    return shortened(" · ".join(told), EVIDENCE_CHARACTERS)


def shortened(text: str, longest: int) -> str:
    """At most so many characters, the last an ellipsis where some are left out."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _small_group(name: str, group: Mapping[str, object]) -> list[str]:
    if len(group) > GROUP_UP_TO or any(isinstance(inner, dict) for inner in group.values()):
        return []
    return [f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {_value(inner)}" for key, inner in group.items())]


def _lists_groups(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(inner, dict) for inner in cast("list[object]", value))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        listed = cast("list[object]", value)
        if not any(isinstance(inner, dict | list) for inner in listed):
            more = f" and {len(listed) - LISTED} more" if len(listed) > LISTED else ""
            return ", ".join(map(_value, listed[:LISTED])) + more or "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def undecided(rows: Iterable[Coverage]) -> dict[Question, list[str]]:
    """For every question that the evidence did not settle the rules that asked it, each with its layers."""
    return _by_reason(
        (row.rule, open_.layer, (open_.reason, open_.would_decide)) for row in rows for open_ in row.undecidable
    )


def unasked(rows: Iterable[Coverage]) -> dict[Question, list[str]]:
    """For every reason not to ask the rules that decided nothing for it, each with its layers."""
    return _by_reason(
        (row.rule, skip.layer, (skip.reason, "")) for row in rows if not row.checked for skip in row.skipped
    )


def asked_in_part(rows: Iterable[Coverage]) -> dict[Question, list[str]]:
    """For every reason not to ask further the rules that decided something all the same: how much, and where not."""
    told: dict[Question, list[str]] = {}
    for row in rows:
        for question, (named,) in _by_reason(
            (row.rule, skip.layer, (skip.reason, "")) for skip in row.skipped if row.checked
        ).items():
            rule, _, where = named.partition(" (")
            told.setdefault(question, []).append(f"{rule} {row.checked:,}" + (f" (not {where}" if where else ""))
    return told


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
    """The rules that decided all that they were asked, by name, with how many files, tensors or layers.

    None of them is in `unasked` or `asked_in_part`.
    """
    for row in sorted(rows, key=lambda row: row.rule):
        if row.checked and not row.skipped:
            yield printable(row.rule), row.checked


def byte_count(count: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5:  # what three digits round to 1000 belongs to the next unit
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} PB"
