"""What happens to an audit, as Server-Sent Events: from the start, or after the last one that the caller has seen."""

from collections.abc import AsyncGenerator

import anyio
import anyio.lowlevel
import anyio.to_thread
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.responses import Response

from glassblock.errors import GlassblockError, InvalidValue
from glassblock.jobs.audits import AuditJobs

LOOK_SECONDS = 0.25
"""Between two looks into the database, which another service may write too."""

PING_SECONDS = 15
"""Between two signs of life where nothing happens, so that nothing in between closes the connection."""

RETRY_MILLISECONDS = 2000
"""After which a browser whose connection broke asks again."""

THREADS = 4
"""That look into the database for every stream together."""


def stream_events(audits: AuditJobs, audit_id: str, *, last: str | None) -> Response:
    """The events of an audit after the one with id `last`; the stream ends with the audit.

    Raises:
        UnknownAudit: no such audit.
        InvalidValue: `last` is no id of an event.
    """
    after = _event_id(last)
    audits.events(audit_id, after=after)  # refuse before the answer has begun
    return EventSourceResponse(
        _events(audits, audit_id, after), ping=PING_SECONDS, headers={"Cache-Control": "no-store"}
    )


def _event_id(last: str | None) -> int:
    if last is None or last == "":
        return 0
    if len(last) > 18 or not (last.isascii() and last.isdigit()):
        raise InvalidValue(
            f"{last[:40]!r} is no id of an event", field="Last-Event-ID", hint="send the `id` of the last event seen"
        )
    return int(last)


_LIMITER = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("glassblock_events")


async def _events(audits: AuditJobs, audit_id: str, after: int) -> AsyncGenerator[ServerSentEvent]:
    limiter = _limiter()
    while True:
        try:
            events, ended = await anyio.to_thread.run_sync(
                lambda after=after: audits.events(audit_id, after=after), limiter=limiter
            )
        except GlassblockError:
            return  # the audit was forgotten, or the database is away: the caller asks again, and is told then
        for event in events:
            yield ServerSentEvent(event.model_dump_json(), event=event.kind, id=str(event.id), retry=RETRY_MILLISECONDS)
            after = event.id
        if ended:
            return
        if not events:
            await anyio.sleep(LOOK_SECONDS)


def _limiter() -> anyio.CapacityLimiter:
    try:
        return _LIMITER.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(THREADS)
        _LIMITER.set(limiter)
        return limiter
