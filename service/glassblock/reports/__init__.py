"""Reports for people and programs: one row of `REPORTS` per format.

A format reads the wire's `Report` and returns text. It asks nothing of the checkpoint: what it
does not find in the report it cannot show.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from glassblock.reports.html import render_html
from glassblock.reports.json import render_json
from glassblock.reports.junit import render_junit
from glassblock.reports.markdown import render_markdown
from glassblock.reports.sarif import render_sarif
from glassblock.reports.text import render_text
from glassblock.wire.audits import Report
from glassblock.wire.tables import RuleList


class Render(Protocol):
    """What a format does."""

    def __call__(
        self,
        report: Report,
        *,
        width: int = 80,
        colour: bool = False,
        asked: str | None = None,
        rules: RuleList | None = None,
    ) -> str:
        """Report in, text out, with a newline at its end.

        Args:
            report: of an audit that ended.
            width: columns of a line, for formats that have lines.
            colour: whether a terminal's escape sequences may be used.
            asked: the arguments that `glassblock fix` needs to repair what was found, as a shell reads them; the
                checkpoint as the report names it when left out.
            rules: of the service, for a format whose row `explains` them.
        """
        ...


@dataclass(frozen=True)
class ReportFormat:
    """One format a report can be had in; `explains` where it tells of every rule what it names."""

    name: str
    media_type: str
    render: Render
    explains: bool = False


REPORTS: Mapping[str, ReportFormat] = {
    row.name: row
    for row in (
        ReportFormat("text", "text/plain", render_text),
        ReportFormat("json", "application/json", render_json),
        ReportFormat("sarif", "application/sarif+json", render_sarif, explains=True),
        ReportFormat("junit", "application/xml", render_junit),
        ReportFormat("markdown", "text/markdown", render_markdown),
        ReportFormat("html", "text/html", render_html),
    )
}
