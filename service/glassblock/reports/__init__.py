"""Reports for people and programs: one row of `REPORTS` per format.

A format reads the wire's `Report` and returns text. It asks nothing of the checkpoint: what it
does not find in the report it cannot show.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from glassblock.reports.html import render_html
from glassblock.reports.json import render_json
from glassblock.reports.junit import render_junit
from glassblock.reports.markdown import render_markdown
from glassblock.reports.sarif import render_sarif
from glassblock.reports.shown import Shown
from glassblock.reports.text import render_text
from glassblock.wire.audits import Report
from glassblock.wire.tables import RuleList


@dataclass(frozen=True)
class ReportFormat:
    """One format a report can be had in; `explains` where it tells of every rule what it names."""

    name: str
    media_type: str
    written: Callable[[Report, Shown], str]
    explains: bool = False

    def render(
        self,
        report: Report,
        *,
        width: int = 80,
        colour: bool = False,
        asked: str | None = None,
        rules: RuleList | None = None,
        place: str | None = None,
    ) -> str:
        """Report in, text out, with a newline at its end. The arguments are those of `Shown`.

        Args:
            report: of an audit that ended.
            width: columns of a line.
            colour: whether a terminal's escape sequences may be used.
            asked: the arguments that `glassblock fix` needs to repair what was found.
            rules: of the service, for a format whose row `explains` them.
            place: where the checkpoint lies below the folder that its reader has open.
        """
        return self.written(report, Shown(width, colour, asked, rules, place))


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
