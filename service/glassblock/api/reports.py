"""Which format a caller wants a report in: by `?format=` or by `Accept`."""

import re
from collections.abc import Mapping

from glassblock.errors import InvalidValue
from glassblock.reports import REPORTS, ReportFormat


def format_for(wanted: str | None, accept: str) -> ReportFormat:
    """The one that is `wanted`, else the one that `accept` weighs most, else JSON.

    Raises:
        InvalidValue: `wanted` is no known format.
    """
    if wanted is not None and wanted not in REPORTS:
        raise InvalidValue(f"no report format {wanted!r}", field="format", known=tuple(REPORTS))
    return REPORTS[wanted or preferred(accept)]


def preferred(accept: str) -> str:
    """The format whose media type an Accept header names with the greatest weight; of equal ones the first named.

    Wildcards do not choose: whoever takes anything gets JSON.
    """
    weights = _weights(accept)
    named = [(weights[row.media_type], -list(weights).index(row.media_type), row.name) for row in _rows(weights)]
    return max(named, default=(0.0, 0, "json"))[2]


def _rows(weights: Mapping[str, float]) -> list[ReportFormat]:
    return [row for row in REPORTS.values() if weights.get(row.media_type, 0) > 0]


def _weights(accept: str) -> dict[str, float]:
    """Media types in the order of an Accept header, each with its weight; RFC 9110, section 12.5.1."""
    weights: dict[str, float] = {}
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        given = [match[1] for part in parameters if (match := re.fullmatch(r"q=([01](?:\.\d{0,3})?)", part))]
        weights.setdefault(name, min(1.0, float(given[0])) if given else 1.0)
    return weights
