"""The report as a person reads it: verdict first, then what is wrong, then the layers, then what was checked."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from glassblock.reports.layer_table import layer_table
from glassblock.reports.page import page
from glassblock.reports.ranges import layer_ranges
from glassblock.wire.audits import AuditedCheckpoint, Coverage, Finding, Level, Report
from glassblock.wire.printable import printable

LEVELS: Mapping[Level, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
BADGES = {"pass": "bold white on green", "fail": "bold white on red", "inconclusive": "bold black on yellow"}
FULL_UP_TO = 3
"""Findings of one rule told in full; more of them get a line each."""
LISTED_UP_TO = 8
EVIDENCE_CHARACTERS = 400
GROUP_UP_TO = 3
"""Values of a group of evidence that still go into the line."""


def render_text(report: Report, *, width: int = 80, colour: bool = False) -> str:
    """The report as text of at most `width` columns."""
    return page(_sections(report, width), width=width, colour=colour)


def _sections(report: Report, width: int) -> Iterator[RenderableType]:
    yield _header(report)
    yield _verdict(report)
    for group in _grouped_findings(report.findings):
        yield Text()
        yield _finding_group(group)
    table = layer_table(report.layers, width=width)
    if table is not None:
        yield Text()
        yield table
    yield Text()
    yield _coverage(report.coverage)


def _header(report: Report) -> Text:
    checkpoint = report.checkpoint
    facts = (
        _family(checkpoint),
        None if checkpoint.layers is None else f"{checkpoint.layers:,} layers",
        f"{checkpoint.tensors:,} tensors",
        byte_count(checkpoint.bytes),
    )
    text = Text(printable(checkpoint.path), "bold", overflow="fold")
    return text.append("\n" + " · ".join(fact for fact in facts if fact is not None), "not bold dim")


def _family(checkpoint: AuditedCheckpoint) -> str:
    if checkpoint.family is None:
        return "family unknown"
    verified = f" (verified: {checkpoint.verified})" if checkpoint.verified else ""
    return printable(checkpoint.family + verified)


def _verdict(report: Report) -> RenderableType:
    counts = [(level, sum(finding.level == level for finding in report.findings)) for level in LEVELS]
    told = ", ".join(f"{count} {level}{'s' if count > 1 else ''}" for level, count in counts if count)
    sentence = {
        "pass": told or "nothing wrong in what was checked",
        "fail": told,
        "inconclusive": f"{told or 'no finding'}, but a question stayed open: see 'not decided'",
    }[report.verdict]
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(Text(f" {report.verdict.upper()} ", BADGES[report.verdict]), sentence)
    return Padding(line, (1, 0, 0, 0))


def _grouped_findings(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Findings of one rule and level together, the worst level first."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.level, finding.rule, finding.certainty), []).append(finding)
    order = list(LEVELS)
    return sorted(groups.values(), key=lambda group: order.index(group[0].level))


def _finding_group(group: list[Finding]) -> Group:
    first = group[0]
    layers = [finding.layer for finding in group if finding.layer is not None]
    heading = Text.assemble(
        (first.level.upper(), LEVELS[first.level]),
        "  ",
        (printable(first.rule), "bold"),
        f"  {layer_ranges(layers)}" if layers else "",
        (f"  ({first.certainty})", "dim"),
    )
    if len(group) <= FULL_UP_TO:
        return Group(heading, *(_full(finding) for finding in group))
    parts: list[RenderableType] = [heading]
    parts += [Padding(Text(_located(finding)), (0, 0, 0, 2)) for finding in group[:LISTED_UP_TO]]
    if len(group) > LISTED_UP_TO:
        parts.append(Text(f"  and {len(group) - LISTED_UP_TO} more; the JSON report lists all", "dim"))
    fixes = dict.fromkeys(finding.fix.description for finding in group if finding.fix)
    parts += [_labelled([("fix", fix, "green")]) for fix in fixes if len(fixes) == 1]
    return Group(*parts)


def _full(finding: Finding) -> RenderableType:
    rows = [("evidence", _evidence(finding.evidence), "")]
    if finding.file is not None:
        rows.append(("file", finding.file + (f", byte {finding.byte:,}" if finding.byte is not None else ""), ""))
    rows.append(("tensor" if len(finding.tensors) == 1 else "tensors", "\n".join(finding.tensors), ""))
    if finding.fix is not None:
        rows.append(("fix", finding.fix.description, "green"))
    return Group(Padding(Text(_located(finding)), (0, 0, 0, 2)), _labelled(rows))


def _located(finding: Finding) -> str:
    """The message, with its layer in front where it does not begin with one."""
    place = "" if finding.layer is None else f"layer {finding.layer}"
    if finding.expert is not None:
        place += f", expert {finding.expert}"
    message = printable(finding.message)
    return message if not place or message.startswith(place) else f"{place}: {message}"


def _labelled(rows: Iterable[tuple[str, str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", width=8)
    grid.add_column(overflow="fold")
    for label, value, style in rows:
        if value:
            lines = "\n".join(printable(line) for line in value.split("\n"))
            grid.add_row(label, Text(lines, style))
    return Padding(grid, (0, 0, 0, 2))


def _evidence(evidence: Mapping[str, Any]) -> str:
    """What fits in a line or two: values, and groups of a few values; larger groups are left to the JSON report."""
    told: list[str] = []
    for key, value in evidence.items():
        name = key.replace("_", " ")
        if isinstance(value, dict):
            told += _small_group(name, cast("dict[str, object]", value))
        elif value is not None:
            told.append(f"{name} {_value(value)}")
    line = " · ".join(told)
    return line if len(line) <= EVIDENCE_CHARACTERS else line[: EVIDENCE_CHARACTERS - 1] + "…"


def _small_group(name: str, group: Mapping[str, object]) -> list[str]:
    if len(group) > GROUP_UP_TO or any(isinstance(inner, dict) for inner in group.values()):
        return []
    return [f"{name}: " + ", ".join(f"{key.replace('_', ' ')} {_value(inner)}" for key, inner in group.items())]


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _coverage(coverage: Iterable[Coverage]) -> RenderableType:
    rows = list(coverage)
    parts = [
        _open_questions("not decided", _undecided(rows), "yellow"),
        _open_questions("not checked", _skipped(rows), ""),
        _checked(rows),
    ]
    return Group(*(part for part in parts if part is not None))


def _checked(rows: list[Coverage]) -> RenderableType | None:
    checked = [row for row in rows if row.checked]
    if not checked:
        return Text("checked: nothing", "yellow")
    text = Text()
    for row in sorted(checked, key=lambda row: row.rule):
        text.append(" · " if text else "")
        # A no-break space keeps a rule and its count on one line.
        text.append(printable(row.rule)).append(f"\N{NO-BREAK SPACE}{row.checked:,}", "dim")
    title = Text.assemble(("checked", "bold"), " (how many files, tensors or layers each rule decided)")
    return Group(title, Padding(text, (0, 0, 0, 2)))


Question = tuple[str, str]
"""Why it stayed open, and what would decide it."""


def _open_questions(title: str, questions: Mapping[Question, list[str]], style: str) -> RenderableType | None:
    if not questions:
        return None
    parts: list[RenderableType] = [Text(title, f"bold {style}")]
    for (reason, would_decide), rules in questions.items():
        text = printable(f"{reason}; would decide: {would_decide}" if would_decide else reason)
        parts.append(Padding(text, (0, 0, 0, 2)))
        parts.append(Padding(Text(", ".join(rules), "dim"), (0, 0, 0, 4)))
    return Group(*parts, Text())


def _undecided(rows: Iterable[Coverage]) -> dict[Question, list[str]]:
    return _by_reason(
        (row.rule, open_.layer, (open_.reason, open_.would_decide)) for row in rows for open_ in row.undecidable
    )


def _skipped(rows: Iterable[Coverage]) -> dict[Question, list[str]]:
    return _by_reason((row.rule, skip.layer, (skip.reason, "")) for row in rows for skip in row.skipped)


def _by_reason(entries: Iterable[tuple[str, int | None, Question]]) -> dict[Question, list[str]]:
    """For every question the rules that left it open, each with its layers in ranges."""
    layers: dict[Question, dict[str, list[int]]] = {}
    for rule, layer, question in entries:
        of_rule = layers.setdefault(question, {}).setdefault(rule, [])
        if layer is not None:
            of_rule.append(layer)
    return {
        question: [printable(rule) + (f" ({layer_ranges(found)})" if found else "") for rule, found in of_rules.items()]
        for question, of_rules in layers.items()
    }


def byte_count(count: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.0f} PB"
