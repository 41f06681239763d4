"""The report as a person reads it: verdict first, then what is wrong, then the layers, then what was checked."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from glassblock.reports.behaviour_lines import behaviour_lines, behaviour_title
from glassblock.reports.layer_table import layer_table
from glassblock.reports.page import page
from glassblock.reports.repair_command import repair_sentence
from glassblock.reports.shown import PLAIN, Shown
from glassblock.reports.wording import (
    Question,
    asked_in_part,
    besides,
    checked_rules,
    evidence_line,
    facts_of,
    grouped_findings,
    layers_of,
    located_message,
    question_sentence,
    remembered,
    unasked,
    undecided,
    verdict_sentence,
)
from glassblock.wire.audits import Comparison, Coverage, Finding, KnownFinding, Level, Report
from glassblock.wire.printable import printable

LEVEL_STYLES: Mapping[Level, str] = {"error": "bold red", "warning": "bold yellow", "note": "bold cyan"}
BADGES = {"pass": "bold white on green", "fail": "bold white on red", "inconclusive": "bold black on yellow"}
FULL_UP_TO = 3
"""Findings of one rule told in full; more of them get a line each."""
LISTED_UP_TO = 8
TENSORS_UP_TO = 12


def render_text(report: Report, shown: Shown = PLAIN) -> str:
    """The report as text of at most `shown.width` columns."""
    return page(_sections(report, shown), width=shown.width, colour=shown.colour)


def _sections(report: Report, shown: Shown) -> Iterator[RenderableType]:
    yield _header(report)
    yield _verdict(report)
    for group in grouped_findings(report.findings):
        yield Text()
        yield _finding_group(group)
    if report.comparison is not None:
        yield from _comparison(report.comparison)
    for _, title, lines in besides(report):
        yield Text()
        yield Text(title, "bold", overflow="fold")
        yield from (Padding(Text(line, overflow="fold"), (0, 0, 0, 2)) for line in lines)
    if report.behaviour is not None:
        yield Text()
        yield Text(behaviour_title(report.behaviour), "bold", overflow="fold")
        yield from (Padding(Text(line, overflow="fold"), (0, 0, 0, 2)) for line in behaviour_lines(report.behaviour))
    table = layer_table(report.layers, width=shown.width)
    if table is not None:
        yield Text()
        yield table
    yield Text()
    yield _coverage(report.coverage)
    repair = repair_sentence(report, shown.asked)
    if repair is not None:
        before, command, after = repair
        yield Text()
        yield Text.assemble(before, " ", (command, "bold"), " ", (after, "dim"), overflow="fold")


def _header(report: Report) -> Text:
    text = Text(printable(report.checkpoint.path), "bold", overflow="fold")
    return text.append("\n" + facts_of(report), "not bold dim")


def _verdict(report: Report) -> RenderableType:
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(Text(f" {report.verdict.upper()} ", BADGES[report.verdict]), verdict_sentence(report))
    return Padding(line, (1, 0, 0, 0))


def _finding_group(group: list[Finding]) -> Group:
    first, layers = group[0], layers_of(group)
    heading = Text.assemble(
        ("KNOWN " if first.known else "", "dim"),
        (first.level.upper(), "dim" if first.known else LEVEL_STYLES[first.level]),
        "  ",
        (printable(first.rule), "bold"),
        f"  {layers}" if layers else "",
        (f"  ({first.certainty})", "dim"),
    )
    if len(group) <= FULL_UP_TO:
        return Group(heading, *(_full(finding) for finding in group))
    parts: list[RenderableType] = [heading]
    parts += [Padding(Text(located_message(finding)), (0, 0, 0, 2)) for finding in group[:LISTED_UP_TO]]
    if len(group) > LISTED_UP_TO:
        parts.append(Text(f"  and {len(group) - LISTED_UP_TO} more; the JSON report lists all", "dim"))
    fixes = dict.fromkeys(finding.fix.description for finding in group if finding.fix)
    parts += [_labelled([("fix", [fix], "green")]) for fix in fixes if len(fixes) == 1]
    return Group(*parts)


def _full(finding: Finding) -> RenderableType:
    rows = [("evidence", [evidence_line(finding.evidence)], "")]
    if finding.file is not None:
        rows.append(("file", [finding.file + (f", byte {finding.byte:,}" if finding.byte is not None else "")], ""))
    if finding.fix is not None:
        rows.append(("fix", [finding.fix.description], "green"))
    left = len(finding.tensors) - TENSORS_UP_TO
    names = [*finding.tensors[:TENSORS_UP_TO], *([f"and {left:,} more; the JSON report lists all"] if left > 0 else [])]
    rows.append(("tensor" if len(finding.tensors) == 1 else "tensors", names, ""))
    return Group(Padding(Text(located_message(finding)), (0, 0, 0, 2)), _labelled(rows))


def _labelled(rows: Iterable[tuple[str, Sequence[str], str]]) -> RenderableType:
    """Label, lines and style of each row; one that has nothing to say is left out."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", width=8)
    grid.add_column(overflow="fold")
    for label, lines, style in rows:
        if any(lines):
            grid.add_row(label, Text("\n".join(map(printable, lines)), style))
    return Padding(grid, (0, 0, 0, 2))


def _comparison(comparison: Comparison) -> Iterator[RenderableType]:
    name = printable(comparison.baseline)
    for title, told, style in (
        (f"fixed, and still in the baseline {name}", comparison.fixed, "green"),
        (f"in the baseline {name}, and not looked for this time", comparison.unseen, ""),
    ):
        if told:
            yield Text()
            yield Text(title, f"bold {style}")
            yield from _listed(told)


def _listed(told: tuple[KnownFinding, ...]) -> Iterator[RenderableType]:
    yield from (Padding(Text(remembered(known), overflow="fold"), (0, 0, 0, 2)) for known in told[:LISTED_UP_TO])
    if len(told) > LISTED_UP_TO:
        yield Text(f"  and {len(told) - LISTED_UP_TO} more; the JSON report lists all", "dim")


def _coverage(coverage: Iterable[Coverage]) -> RenderableType:
    rows = list(coverage)
    parts = [
        _open_questions("not decided", undecided(rows), "yellow"),
        _open_questions("not checked", unasked(rows), ""),
        _open_questions("checked in part", asked_in_part(rows), ""),
        _checked(rows),
    ]
    return Group(*(part for part in parts if part is not None))


def _checked(rows: list[Coverage]) -> RenderableType | None:
    text = Text()
    for rule, count in checked_rules(rows):
        text.append(" · " if text else "")
        # A no-break space keeps a rule and its count on one line.
        text.append(rule).append(f"\N{NO-BREAK SPACE}{count:,}", "dim")
    if not text:
        return Text("checked: nothing", "yellow")
    title = Text.assemble(("checked", "bold"), " (how many files, tensors or layers each rule decided)")
    return Group(title, Padding(text, (0, 0, 0, 2)))


def _open_questions(title: str, questions: Mapping[Question, list[str]], style: str) -> RenderableType | None:
    if not questions:
        return None
    parts: list[RenderableType] = [Text(title, f"bold {style}")]
    for question, rules in questions.items():
        parts.append(Padding(question_sentence(question), (0, 0, 0, 2)))
        parts.append(Padding(Text(", ".join(rules), "dim"), (0, 0, 0, 4)))
    return Group(*parts, Text())
