"""Reports for people and programs: one row of `REPORTS` per format.

A format reads the wire's `Report` and returns text. It asks nothing of the checkpoint: what it
does not find in the report it cannot show.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from glassblock.reports.json import render_json
from glassblock.reports.text import render_text
from glassblock.wire.audits import Report


class Render(Protocol):
    """What a format does."""

    def __call__(self, report: Report, *, width: int = 80, colour: bool = False) -> str:
        """Report in, text out, with a newline at its end.

        Args:
            report: of an audit that ended.
            width: columns of a line, for formats that have lines.
            colour: whether a terminal's escape sequences may be used.
        """
        ...


@dataclass(frozen=True)
class ReportFormat:
    """One format a report can be had in."""

    name: str
    media_type: str
    render: Render


REPORTS: Mapping[str, ReportFormat] = {
    row.name: row
    for row in (
        ReportFormat("text", "text/plain", render_text),
        ReportFormat("json", "application/json", render_json),
    )
}
