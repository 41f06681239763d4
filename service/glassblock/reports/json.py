"""The report as it is: the versioned JSON that programs read."""

from glassblock.reports.shown import PLAIN, Shown
from glassblock.wire.audits import Report


def render_json(report: Report, shown: Shown = PLAIN) -> str:  # noqa: ARG001  the shape of a format
    """Indented JSON. NaN and infinity are strings, so that every JSON parser reads it."""
    return report.model_dump_json(indent=2) + "\n"
