"""Markdown, read by a Markdown parser: what it shows, and that no name becomes markup."""

from html.parser import HTMLParser

import pytest
from glassblock.reports.markdown import LONGEST, render_markdown
from glassblock.wire.audits import Report
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from reports.report_makers import full_report, hostile_report, huge_report, report, swapped_report, undecided_report

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
OURS = {"h3", "p", "br", "sub", "code", "strong", "table", "thead", "tbody", "tr", "th", "td", "ul", "li"}
OURS |= {"details", "summary"}


class Read(HTMLParser):
    """Tags, attributes, rows and text of what a code host would show."""

    def __init__(self, made: Report) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []
        self.rows: list[int] = []
        self.text = ""
        self.feed(PARSER.render(render_markdown(made)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        if tag == "tr":
            self.rows.append(0)
        if tag in {"td", "th"}:
            self.rows[-1] += 1

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_verdict_comes_first_then_the_table_then_the_coverage():
    told = render_markdown(full_report())
    assert told.startswith("### Glassblock: FAIL <code>SmolLM2&#45;135M</code>".replace("&#45;", "-"))
    assert told.index("2 errors") < told.index("| level |") < told.index("<details>")
    read = Read(full_report())
    assert "2 errors, 1 warning, 1 note; known: 1 error; 1 fixed" in read.text
    assert "gate_proj and up_proj of layer 2 are exchanged" in read.text
    assert "not decided (1)" in read.text
    assert read.rows == [5] * 7


def test_a_pass_is_short_and_says_what_was_checked():
    told = render_markdown(report())
    assert "nothing wrong in what was checked" in told
    assert "| level |" not in told
    assert "checked (5 rules)" in told


def test_an_open_question_names_what_would_decide():
    assert "would decide: a trained checkpoint" in Read(undecided_report()).text


EVIL = {
    "html": "<img src=x onerror=alert(1)><script>",
    "link": "[click](http://evil.test) ![x](http://evil.test/x.png) <http://evil.test>",
    "table": "a | b | c",
    "lines": "a\n\n# b\n\n| x |\n| - |",
    "code": "`a` ``b``",
    "emphasis": "*a* __b__ ~~c~~",
    "entity": "&lt;b&gt; &#60;",
    "backslash": "\\|\\`\\<",
    "details": "</code></details></td>",
}


@pytest.mark.parametrize("name", EVIL)
def test_no_name_becomes_markup(name: str):
    read = Read(hostile_report(EVIL[name]))
    assert read.tags <= OURS
    assert read.attributes == []
    assert set(read.rows) == {5}
    assert EVIL[name].split("\n")[0].strip() in read.text.replace("\u2060", "")


@pytest.mark.parametrize("linked", ["@everyone", "#123", "http://evil.test", "www.evil.test", "a@evil.test", ":bug:"])
def test_what_code_hosts_make_a_link_of_is_broken(linked: str):
    read = Read(hostile_report(linked))
    assert linked not in read.text
    assert linked in read.text.replace("\u2060", "")


@given(st.text(st.characters()))
def test_any_name_stays_in_its_cell(evil: str):
    read = Read(hostile_report(evil))
    assert read.tags <= OURS
    assert read.attributes == []
    assert set(read.rows) == {5}


def test_a_comment_never_grows_too_long_and_says_what_it_leaves_out():
    told = render_markdown(huge_report())
    assert len(told) <= LONGEST + 100 < 65_536
    assert told.count("<details>") == told.count("</details>")
    assert "more (" in told
    everywhere = render_markdown(swapped_report(*range(500), depth=500))
    assert "more (<code>ffn/gate-up-swapped</code> layers " in everywhere
