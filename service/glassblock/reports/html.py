"""One HTML file that a person would rather look at than read: self-contained, without script, offline.

The page loads nothing and runs nothing: its content security policy allows one style, by its hash. Whatever comes from
the checkpoint is text, escaped where it is written.
"""

import base64
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from glassblock.reports.behaviour_lines import HEADS, behaviour_cells, behaviour_title, not_asked
from glassblock.reports.charts import legend
from glassblock.reports.html_style import STYLE
from glassblock.reports.layer_charts import charts_of, number_of
from glassblock.reports.repair_command import repair_sentence
from glassblock.reports.shown import PLAIN, Shown
from glassblock.reports.wording import (
    Question,
    asked_in_part,
    besides,
    byte_count,
    checked_rules,
    evidence_line,
    facts_of,
    grouped_findings,
    layers_of,
    located_message,
    question_sentence,
    remembered,
    shortened,
    unasked,
    undecided,
    verdict_sentence,
)
from glassblock.wire.audits import Finding, KnownFinding, LayerMetrics, ReferenceSummary, Report
from glassblock.wire.printable import printable

OPEN_UP_TO = 3
"""Findings of one rule whose details lie open."""
LISTED_UP_TO = 6
"""Findings of one rule before the others are folded away."""
FINDINGS_UP_TO = 200
"""Findings of one rule, hypotheses, rows of a profile; a browser is slow with more, and nobody reads them."""
TENSORS_UP_TO = 50
NAME_CHARACTERS = 256
MESSAGE_CHARACTERS = 1200
QUESTIONS_UP_TO = 200

COLUMNS: Mapping[str, tuple[str, str]] = {
    "gate z": ("gate_z", ".1f"),
    "up z": ("up_z", ".1f"),
    "gate log₁₀ p": ("gate_log10_p", ".1f"),
    "up log₁₀ p": ("up_log10_p", ".1f"),
    "gate row norm": ("gate_row_norm_median", ".3g"),
    "up row norm": ("up_row_norm_median", ".3g"),
    "down column norm": ("down_column_norm_median", ".3g"),
    "gain before attention": ("norm_attn_in_gain_rms", ".3g"),
    "gain before feed-forward": ("norm_ffn_in_gain_rms", ".3g"),
}

_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"


def render_html(report: Report, shown: Shown = PLAIN) -> str:
    """A whole page."""
    return "".join(
        (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="referrer" content="no-referrer">\n',
            f"<title>{_text(report.verdict)}: {_text(report.checkpoint.path)} - Glassblock</title>\n",
            f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n",
            *_sections(report, shown.asked),
            "</main>\n</body>\n</html>\n",
        )
    )


def _text(text: str) -> str:
    return escape(printable(text))


def _code(text: str) -> str:
    return f"<code>{_text(shortened(text, NAME_CHARACTERS))}</code>"


def _sections(report: Report, asked: str | None) -> Iterator[str]:
    yield (
        f'<header><h1>{_text(report.checkpoint.path)}</h1>\n<p class="soft">{_text(facts_of(report))}</p>\n'
        f'<p class="verdict {report.verdict}"><span class="badge">{report.verdict.upper()}</span>'
        f"<span>{_text(verdict_sentence(report))}</span></p></header>\n"
    )
    groups = grouped_findings(report.findings)
    for title, known in (("Findings", False), ("Known findings", True)):
        some = [group for group in groups if group[0].known == known]
        if some:
            yield f"<section><h2>{title}</h2>\n{''.join(map(_group, some))}</section>\n"
    yield from _comparison(report)
    yield from _besides(report)
    yield from _behaviour(report)
    yield from _charts(report)
    yield from _coverage(report)
    yield from _layers(report.layers)
    yield from _repair(report, asked)
    yield (
        f"<footer>Glassblock {_text(report.glassblock)}, report schema {_text(report.schema_version)}. "
        "The JSON report has every number.</footer>\n"
    )


def _group(group: Sequence[Finding]) -> str:
    first = group[0]
    fixes = list(dict.fromkeys(finding.fix.description for finding in group if finding.fix is not None))
    items = [
        _item(finding, opened=len(group) <= OPEN_UP_TO, with_fix=len(fixes) > 1) for finding in group[:FINDINGS_UP_TO]
    ]
    listed, folded = items[:LISTED_UP_TO], items[LISTED_UP_TO:]
    left_out = _left_out(len(group) - FINDINGS_UP_TO, "p")
    more = _folded(f"{len(folded)} more", "".join(folded) + left_out) if folded else ""
    shared = f'<p class="fix"><b>Fix</b> {_text(fixes[0])}</p>' if len(fixes) == 1 else ""
    return (
        f'<article class="card finding {"known" if first.known else first.level}"><div class="head">'
        f'<span class="level">{first.level}</span><h3>{_text(first.rule)}</h3>'
        f'<span class="soft">{_text(", ".join(filter(None, (layers_of(group), first.certainty))))}</span></div>\n'
        f"{''.join(listed)}{more}{shared}</article>\n"
    )


def _item(finding: Finding, *, opened: bool, with_fix: bool) -> str:
    rows = [*_where(finding)]
    evidence = evidence_line(finding.evidence)
    if evidence:
        rows.append(f'<p class="soft">{_text(evidence)}</p>')
    if with_fix and finding.fix is not None:
        rows.append(f'<p class="fix"><b>Fix</b> {_text(finding.fix.description)}</p>')
    message = _text(shortened(located_message(finding), MESSAGE_CHARACTERS))
    if opened or not rows:
        return f'<div class="item"><p>{message}</p>{"".join(rows)}</div>\n'
    return f'<div class="item"><details><summary>{message}</summary>{"".join(rows)}</details></div>\n'


def _where(finding: Finding) -> Iterator[str]:
    if finding.file is not None:
        byte = "" if finding.byte is None else f', <span class="soft">byte {finding.byte:,}</span>'
        yield f"<p>{_code(finding.file)}{byte}</p>"
    if not finding.tensors:
        return
    places: dict[str, list[str]] = {}
    for place in finding.locations:
        told = f"{_text(place.file)}, byte {place.byte_offset:,}, {byte_count(place.byte_length)}"
        places.setdefault(place.tensor, []).append(told)
    items = [
        f'<li>{_code(name)} <span class="soft">{"; ".join(places.get(name, []))}</span></li>'
        for name in finding.tensors[:TENSORS_UP_TO]
    ]
    yield f'<ul class="tensors">{"".join(items)}{_left_out(len(finding.tensors) - TENSORS_UP_TO)}</ul>'


def _comparison(report: Report) -> Iterator[str]:
    if report.comparison is None:
        return
    name = _code(report.comparison.baseline)
    for title, told in (
        ("fixed, and still in it", report.comparison.fixed),
        ("in it, and not looked for this time", report.comparison.unseen),
    ):
        if told:
            yield (
                f"<details><summary>Baseline {name}: {len(told)} {title}</summary>"
                f"<ul>{''.join(_remembered(told))}</ul></details>\n"
            )


def _besides(report: Report) -> Iterator[str]:
    for heading, title, lines in besides(report):
        items = "".join(f"<li>{_text(shortened(line, MESSAGE_CHARACTERS))}</li>" for line in lines)
        profile = _profile(report.reference) if report.reference is not None and heading == "Beside a reference" else ""
        yield (
            f"<section><h2>{heading}</h2>\n<p>{_text(shortened(title, MESSAGE_CHARACTERS))}</p>"
            f"<ul>{items}</ul>{profile}</section>\n"
        )


def _profile(reference: ReferenceSummary) -> str:
    rows = "".join(
        f"<tr><td>{row.layer}</td><td>{row.least:.6f}</td></tr>" for row in reference.profile[:FINDINGS_UP_TO]
    )
    table = (
        '<div class="scroll"><table><thead><tr><th scope="col">layer</th><th scope="col">least cosine</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    left_out = _left_out(len(reference.profile) - FINDINGS_UP_TO, "p")
    return _folded("Cosines by layer", table + left_out) if rows else ""


def _behaviour(report: Report) -> Iterator[str]:
    behaviour = report.behaviour
    if behaviour is None:
        return
    heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in HEADS)
    rows = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in behaviour_cells(hypothesis))}</tr>\n"
        for hypothesis in behaviour.hypotheses[:FINDINGS_UP_TO]
    )
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>'
    lines = [*not_asked(behaviour), *behaviour.notes]
    notes = _left_out(len(behaviour.hypotheses) - FINDINGS_UP_TO)
    notes += "".join(f"<li>{_text(shortened(line, MESSAGE_CHARACTERS))}</li>" for line in lines)
    yield (
        f"<section><h2>Behaviour</h2>\n<p>{_text(shortened(behaviour_title(behaviour), MESSAGE_CHARACTERS))}</p>"
        f"{table if rows else ''}{f'<ul>{notes}</ul>' if notes else ''}</section>\n"
    )


def _remembered(told: Sequence[KnownFinding]) -> Iterator[str]:
    yield from (f"<li>{_code(remembered(known))}</li>" for known in told[:FINDINGS_UP_TO])
    yield _left_out(len(told) - FINDINGS_UP_TO)


def _charts(report: Report) -> Iterator[str]:
    figures = [
        f'<figure class="card"><h3>{escape(chart.title)}</h3>{legend(chart.names)}{chart.svg}'
        f"<figcaption>{escape(chart.reading)}</figcaption></figure>\n"
        for chart in charts_of(report)
    ]
    if figures:
        yield f'<section><h2>Layer by layer</h2>\n<div class="charts">\n{"".join(figures)}</div></section>\n'


def _coverage(report: Report) -> Iterator[str]:
    yield "<section><h2>What was checked</h2>\n"
    open_ = undecided(report.coverage)
    if open_:
        yield _folded(f"Not decided: {len(open_)}", _questions(open_), opened=report.verdict == "inconclusive")
    skipped = unasked(report.coverage)
    if skipped:
        yield _folded(f"Not checked: {len(skipped)}", _questions(skipped))
    partly = asked_in_part(report.coverage)
    if partly:
        yield _folded(f"Checked in part: {len(partly)}", _questions(partly))
    checked = [
        f'<li>{_text(rule)} <span class="soft">{count:,}</span></li>' for rule, count in checked_rules(report.coverage)
    ]
    if checked:
        told = '<p class="soft">How many files, tensors or layers each rule decided.</p>'
        yield _folded(f"Checked: {len(checked)} rules", f'{told}<ul class="rules">{"".join(checked)}</ul>')
    else:
        yield "<p>Checked: nothing</p>"
    yield "</section>\n"


def _repair(report: Report, asked: str | None) -> Iterator[str]:
    repair = repair_sentence(report, asked)
    if repair is not None:
        before, command, after = repair
        told = f"{_text(before)} <code>{_text(command)}</code> {_text(after)}"  # whole: a command that is cut is none
        yield f"<section><h2>Repair</h2>\n<p>{told}</p></section>\n"


def _questions(questions: Mapping[Question, list[str]]) -> str:
    items = [
        f'<li>{_text(question_sentence(question))}<br><span class="soft">{_text(", ".join(rules))}</span></li>'
        for question, rules in list(questions.items())[:QUESTIONS_UP_TO]
    ]
    return f"<ul>{''.join(items)}{_left_out(len(questions) - QUESTIONS_UP_TO)}</ul>"


def _left_out(count: int, element: str = "li") -> str:
    return f"<{element}>and {count:,} more; the JSON report lists all</{element}>" if count > 0 else ""


def _folded(summary: str, body: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{_text(summary)}</summary>{body}</details>\n"


def _layers(layers: Sequence[LayerMetrics]) -> Iterator[str]:
    """The numbers behind the charts, as a table, for whoever cannot see them or wants the digits."""
    columns = {
        title: (key, form)
        for title, (key, form) in COLUMNS.items()
        if any(number_of(layer, key) is not None for layer in layers)
    }
    judged = any(layer.metrics.get("verdict") is not None for layer in layers)
    if not columns and not judged:
        return
    heads = "".join(f'<th scope="col">{escape(title)}</th>' for title in ("layer", *columns, *["verdict"] * judged))
    rows = "".join(f"<tr>{''.join(_cells(layer, columns.values(), judged=judged))}</tr>\n" for layer in layers)
    table = f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}</tbody></table></div>'
    yield f"<section><h2>Numbers</h2>\n{_folded('Every layer in a table', table)}</section>\n"


def _cells(layer: LayerMetrics, columns: Iterable[tuple[str, str]], *, judged: bool) -> Iterator[str]:
    yield f"<td>{layer.layer}</td>"
    for key, form in columns:
        number = number_of(layer, key)
        yield f"<td>{'-' if number is None else format(number, form)}</td>"
    if judged:
        verdict = layer.metrics.get("verdict")
        known = verdict if verdict in {"swapped", "as-named"} else "other"
        yield f'<td class="{known}">{"-" if verdict is None else _text(str(verdict).replace("-", " "))}</td>'
