"""A report for whoever does not have it yet: 304 where the caller still holds what the answer would be."""

from starlette.datastructures import Headers
from starlette.responses import Response

import glassblock
from glassblock.api.bodies import response_of
from glassblock.api.reports import format_for
from glassblock.api.results import Rendered
from glassblock.jobs.history import Stored, StoredAnswer
from glassblock.operations.tables import rules
from glassblock.reports.html import POLICY


def answer_report(stored: Stored, *, wanted: str | None, headers: Headers) -> Response:
    """`stored` as `wanted`, else as `Accept` prefers; nothing where `If-None-Match` holds its tag.

    Raises:
        InvalidValue: `wanted` is no known format.
    """
    chosen = format_for(wanted, headers.get("accept", ""))
    # The same report may be told in other words by another version.
    tag = f'"{stored.digest[:32]}-{chosen.name}-{glassblock.__version__}"'
    caching = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Accept"}
    if holds_tag(headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=caching)
    told = chosen.render(stored.report, rules=rules() if chosen.explains else None)
    # A browser shows some of these: what it shows runs nothing.
    safe = caching | {"Content-Security-Policy": POLICY}
    return response_of(Rendered(200, safe, chosen.media_type, (told.encode(),)))


def answer_stored(stored: StoredAnswer, *, headers: Headers) -> Response:
    """The answer of a job as it was stored; nothing where `If-None-Match` holds its tag."""
    tag = f'"{stored.digest[:32]}"'
    caching = {"ETag": tag, "Cache-Control": "private, no-cache"}
    if holds_tag(headers.get("if-none-match", ""), tag):
        return Response(status_code=304, headers=caching)
    return response_of(Rendered(200, caching, stored.media_type, stored.chunks))


def holds_tag(if_none_match: str, tag: str) -> bool:
    """Whether an If-None-Match header holds `tag`, strong or weak."""
    held = [item.strip().removeprefix("W/") for item in if_none_match.split(",")]
    return tag in held or "*" in held
