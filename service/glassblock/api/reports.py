"""A report in the format that the caller asked for, by `?format=` or by `Accept`."""

from starlette.responses import Response

from glassblock.api.bodies import accepts
from glassblock.errors import InvalidValue
from glassblock.reports import REPORTS
from glassblock.wire.audits import Report


def render_report(report: Report, *, wanted: str | None, accept: str) -> Response:
    """`report` as `wanted`, else as the first format whose media type `accept` names, else as JSON.

    Raises:
        InvalidValue: `wanted` is no known format.
    """
    if wanted is not None and wanted not in REPORTS:
        raise InvalidValue(f"no report format {wanted!r}", field="format", known=tuple(REPORTS))
    by_accept = (name for name, format_ in REPORTS.items() if accepts(accept, format_.media_type.partition(";")[0]))
    chosen = REPORTS[wanted or next(by_accept, "json")]
    return Response(chosen.render(report), media_type=chosen.media_type)
