"""The report as it is: the versioned JSON that programs read."""

from glassblock.wire.audits import Report
from glassblock.wire.tables import RuleList


def render_json(
    report: Report,
    *,
    width: int = 80,
    colour: bool = False,
    asked: str | None = None,
    rules: RuleList | None = None,
) -> str:
    """Indented JSON. NaN and infinity are strings, so that every JSON parser reads it."""
    del width, colour, asked, rules
    return report.model_dump_json(indent=2) + "\n"
