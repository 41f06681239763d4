"""The HTML report: one file that loads nothing, runs nothing and shows names as text."""

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from glassblock.reports.html import render_html
from glassblock.wire.audits import LayerMetrics, Report
from hypothesis import given
from hypothesis import strategies as st

from reports.report_makers import (
    full_report,
    hostile_report,
    huge_report,
    report,
    swapped_report,
    undecided_report,
)

VOID = {"meta", "br"}
LOADING = {"src", "href", "srcset", "xlink:href", "action", "data", "poster", "style", "background", "formaction"}
TAGS = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "article", "footer", "div"}
TAGS |= {"h1", "h2", "h3", "p", "span", "b", "br", "code", "ul", "li", "details", "summary", "figure", "figcaption"}
TAGS |= {"table", "thead", "tbody", "tr", "th", "td", "svg", "path", "text", "rect", "circle", "polyline", "polygon"}


class Page(HTMLParser):
    """Tags, attributes and text, and whether every tag is closed where it should be."""

    def __init__(self, made: Report) -> None:
        super().__init__()
        self.source = render_html(made)
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open and self.open[-1] == "style" else data


@pytest.mark.parametrize(
    "made",
    [report(), full_report(), swapped_report(*range(30), depth=30), undecided_report(), report(layers=(), coverage=())],
    ids=["pass", "everything", "everywhere", "undecided", "nothing"],
)
def test_the_page_loads_nothing_and_runs_nothing(made: Report):
    page = Page(made)
    assert page.tags <= TAGS | {"title"}
    assert not {name for name, _ in page.attributes} & LOADING
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "url(" not in page.source
    assert "@import" not in page.source
    assert "://" not in page.source


def test_the_policy_allows_the_one_style_by_its_hash():
    source = render_html(report())
    style = source.partition("<style>")[2].partition("</style>")[0]
    hashed = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = dict(
        rule.strip().split(" ", 1) for rule in re.findall(r'Security-Policy" content="([^"]+)"', source)[0].split(";")
    )
    assert policy == {
        "default-src": "'none'",
        "style-src": f"'sha256-{hashed}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_it_reads_from_the_verdict_over_the_findings_to_the_charts():
    page = Page(full_report())
    places = [page.text.index(what) for what in ("FAIL", "Findings", "Known findings", "Layer by layer", "Checked:")]
    assert places == sorted(places)
    assert "model.safetensors, byte 1,000, 512 B" in page.text
    assert "Rename model.layers.2.mlp.gate_proj.weight" in page.text
    assert "prefers-color-scheme: dark" in page.source
    assert "@media print" in page.source


def test_all_four_charts_are_drawn_where_there_are_numbers():
    source = render_html(full_report())
    for title in ("Which one is the gate", "Row norms", "Norm gains", "Epsilon sensitivity"):
        assert f"<h3>{title}</h3>" in source
    assert "<figure" not in render_html(report(layers=(LayerMetrics(layer=0, metrics={"x": 1.0}),)))


def test_many_findings_of_one_rule_are_folded_and_counted():
    page = Page(huge_report())
    assert page.source.count('<div class="item">') == 200
    assert "and 2,800 more; the JSON report lists all" in page.text


EVIL = ["<script>alert(1)</script>\"'>", "</style></title>&amp;", "javascript:x\x00\u2028\u202e\ud800"]


@pytest.mark.parametrize("evil", EVIL)
def test_names_are_text(evil: str):
    page = Page(hostile_report(evil))
    assert page.tags <= TAGS
    assert evil.partition("\x00")[0] in page.text
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    page.source.encode()


@given(st.text(st.characters()))
def test_any_name_is_text(evil: str):
    page = Page(hostile_report(evil))
    assert page.tags <= TAGS
