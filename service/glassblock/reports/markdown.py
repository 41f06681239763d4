"""Markdown for a comment on a pull request: the verdict, a table of what is wrong, and the coverage folded away.

Text out of the checkpoint is written so that Markdown and the code host see none of it: every character that means
something is an HTML character reference, and what a host would make a link of (a mention, an issue number, an address)
is broken by a word joiner, which nobody sees.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from glassblock.reports.behaviour_lines import behaviour_lines, behaviour_title
from glassblock.reports.repair_command import repair_sentence
from glassblock.reports.shown import PLAIN, Shown
from glassblock.reports.wording import (
    Question,
    asked_in_part,
    besides,
    checked_rules,
    facts_of,
    grouped_findings,
    layers_of,
    located_message,
    place_of,
    question_sentence,
    remembered,
    shortened,
    unasked,
    undecided,
    verdict_sentence,
)
from glassblock.wire.audits import Finding, Report
from glassblock.wire.printable import printable

LISTED_UP_TO = 20
MESSAGE_CHARACTERS = 240
NAME_CHARACTERS = 100
TENSORS_UP_TO = 2
LONGEST = 65_000
"""Code hosts take 65,536 characters."""
TABLE_CHARACTERS = {False: 40_000, True: 10_000}
"""Of the table of new findings, and of that of known ones."""

_PLAIN = re.compile(r"[A-Za-z0-9 ,;()/+=%'\".\-\u0080-\U0010ffff]")
_LINKED = re.compile(r"(?<=@)|(?<=#)(?=\w)|(?<=:)(?=\S)|(?<=www)(?=\.)", re.IGNORECASE)
_WORD_JOINER = "&#8288;"


def render_markdown(report: Report, shown: Shown = PLAIN) -> str:
    """GitHub and GitLab flavoured Markdown, at most 65,000 characters."""
    blocks = [
        f"### Glassblock: {report.verdict.upper()} {_code(report.checkpoint.path)}",
        f"{_text(verdict_sentence(report))}<br><sub>{_text(facts_of(report))}</sub>",
        *_tables(report),
        *_comparison(report),
        *_besides(report),
        *_behaviour(report),
        *_coverage(report),
        *_repair(report, shown.asked),
    ]
    text = ""
    for block in blocks:
        if len(text) + len(block) > LONGEST:
            text += "The rest is left out here: the JSON report has all.\n\n"
            break
        text += block + "\n\n"
    return text.rstrip("\n") + "\n"


def _tables(report: Report) -> Iterator[str]:
    groups = grouped_findings(report.findings)
    for known in (False, True):
        findings = [finding for group in groups for finding in group if finding.known == known]
        if not findings:
            continue
        lines, left_out = _rows(findings, TABLE_CHARACTERS[known])
        if left_out:
            lines += ["", f"and {len(left_out)} more ({_left_out(left_out)})"]
        table = "\n".join(lines)
        yield _folded(f"{len(findings)} known", table) if known else table


def _rows(findings: Sequence[Finding], longest: int) -> tuple[list[str], Sequence[Finding]]:
    """Lines of a table of at most so many characters, and the findings that found no room."""
    lines = ["| level | rule | where | what | fix |", "| --- | --- | --- | --- | --- |"]
    used = 0
    for number, finding in enumerate(findings):
        row = _row(finding)
        used += len(row)
        if used > longest:
            return lines, findings[number:]
        lines.append(row)
    return lines, ()


def _row(finding: Finding) -> str:
    where = [_text(place_of(finding))] if finding.layer is not None or finding.expert is not None else []
    where += [_code(name) for name in finding.tensors[:TENSORS_UP_TO]]
    if len(finding.tensors) > TENSORS_UP_TO:
        where.append(f"and {len(finding.tensors) - TENSORS_UP_TO} more")
    if finding.file is not None:
        where.append(_code(finding.file) + ("" if finding.byte is None else f" byte {finding.byte:,}"))
    cells = (
        f"**{finding.level}**<br>{finding.certainty}",
        _code(finding.rule),
        "<br>".join(where),
        _text(shortened(located_message(finding), MESSAGE_CHARACTERS)),
        "" if finding.fix is None else _text(shortened(finding.fix.description, MESSAGE_CHARACTERS)),
    )
    return f"| {' | '.join(cells)} |"


def _left_out(findings: Sequence[Finding]) -> str:
    groups = grouped_findings(findings)
    told = ", ".join(
        f"{_code(group[0].rule)} {_text(shortened(layers_of(group), NAME_CHARACTERS))}".strip() for group in groups[:10]
    )
    return told if len(groups) <= 10 else f"{told} and others"


def _comparison(report: Report) -> Iterator[str]:
    if report.comparison is None:
        return
    name = _code(report.comparison.baseline)
    for what, told in (("fixed", report.comparison.fixed), ("not looked for this time", report.comparison.unseen)):
        if told:
            lines = [f"- {_code(remembered(known))}" for known in told[:LISTED_UP_TO]]
            lines += [f"- and {len(told) - LISTED_UP_TO} more"] if len(told) > LISTED_UP_TO else []
            yield _folded(f"{len(told)} of the baseline {name} {what}", "\n".join(lines))


def _besides(report: Report) -> Iterator[str]:
    for _, title, lines in besides(report):
        items = [f"- {_text(shortened(line, MESSAGE_CHARACTERS))}" for line in lines]
        yield _folded(_text(shortened(title, MESSAGE_CHARACTERS)), "\n".join(items))


def _behaviour(report: Report) -> Iterator[str]:
    if report.behaviour is not None:
        lines = [f"- {_text(shortened(line, MESSAGE_CHARACTERS))}" for line in behaviour_lines(report.behaviour)]
        title = _text(shortened(behaviour_title(report.behaviour), MESSAGE_CHARACTERS))
        yield _folded(title, "\n".join(lines)) if lines else title


def _coverage(report: Report) -> Iterator[str]:
    open_, skipped = undecided(report.coverage), unasked(report.coverage)
    checked = [f"{_code(rule)} {count:,}" for rule, count in checked_rules(report.coverage)]
    if open_:
        yield _folded(f"not decided ({len(open_)})", _questions(open_))
    if skipped:
        yield _folded(f"not checked ({len(skipped)})", _questions(skipped))
    partly = asked_in_part(report.coverage)
    if partly:
        yield _folded(f"checked in part ({len(partly)})", _questions(partly))
    told = ", ".join(checked) + "\n\nHow many files, tensors or layers each rule decided."
    yield _folded(f"checked ({len(checked)} rules)", told) if checked else "checked: nothing"


def _repair(report: Report, asked: str | None) -> Iterator[str]:
    repair = repair_sentence(report, asked)
    if repair is not None:
        before, command, after = repair
        # Whole, however long: a command that is cut is none.
        yield f"{_text(before)} <code>{_text(command)}</code> {_text(after)}"


def _questions(questions: Mapping[Question, list[str]]) -> str:
    lines: list[str] = []
    for question, rules in list(questions.items())[:LISTED_UP_TO]:
        told = ", ".join(_code(rule) for rule in rules[:LISTED_UP_TO])
        lines.append(f"- {_text(shortened(question_sentence(question), MESSAGE_CHARACTERS))} ({told})")
    if len(questions) > LISTED_UP_TO:
        lines.append(f"- and {len(questions) - LISTED_UP_TO} more")
    return "\n".join(lines)


def _folded(summary: str, body: str) -> str:
    # Markdown is read again only after an empty line.
    return f"<details><summary>{summary}</summary>\n\n{body}\n\n</details>"


def _code(text: str) -> str:
    return f"<code>{_text(shortened(text, NAME_CHARACTERS))}</code>"


def _text(text: str) -> str:
    """Text that stays text: in a table, beside HTML, and for whatever looks for mentions and links."""
    pieces = _LINKED.split(printable(text))
    return _WORD_JOINER.join("".join(_reference(character) for character in piece) for piece in pieces)


def _reference(character: str) -> str:
    return character if _PLAIN.fullmatch(character) else f"&#{ord(character)};"
