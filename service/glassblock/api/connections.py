"""Connections: how many at once, and how long one may be open without asking anything.

uvicorn's own limit refuses everybody once it is reached, whoever watches over the process included. Here a newcomer is
let in, and of those that owe a request's head the one that has owed it longest is closed for it: a flood of connections
that say nothing, or say it byte by byte, closes itself. Where nearly all are at work, only questions after the
service's health are answered (`envelope`).
"""

import asyncio
import contextlib
import logging
import sys
import uuid
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.config import Config
from uvicorn.server import ServerState

from glassblock.api.answers import answer_error
from glassblock.api.envelope import CROWDED, MAX_HEAD_BYTES, complete_headers
from glassblock.api.landing import LandingProtocol
from glassblock.errors import GlassblockError, InvalidValue, TooLarge

log = logging.getLogger(__name__)

OTHER_FILES = 512
"""Open files beside connections: shards, databases, connections that are accepted and not counted yet."""

BACKLOG = 256
"""Connections that the system holds until they are accepted; so many are accepted at once."""

SHARE_FOR_HEALTH = 16
"""One in so many connections is kept for questions after the service's health."""


class Crowd:
    """The connections of one service. Used within one event loop.

    Args:
        most: open at once.
        head_seconds: longest that one may owe a request's head.
        unread_seconds: longest that nothing of an answer is taken.
    """

    def __init__(self, most: int, *, head_seconds: float, unread_seconds: float) -> None:
        self.head_seconds = head_seconds
        self.unread_seconds = unread_seconds
        self._most = most
        self._open: set[BoundedProtocol] = set()
        self._owing: dict[BoundedProtocol, None] = {}  # in the order in which they began to

    def enter(self, one: "BoundedProtocol") -> None:
        """One more; who has said nothing for longest makes room."""
        self._open.add(one)
        self.owes(one)
        if len(self._open) > self._most:
            longest = next(iter(self._owing))
            self.leave(longest)
            longest.transport.abort()

    def owes(self, one: "BoundedProtocol") -> None:
        """One has not asked anything yet, or has its answer."""
        if one in self._open:
            self._owing[one] = None

    def asks(self, one: "BoundedProtocol") -> bool:
        """A head came; returns whether too many are at work to answer it."""
        self._owing.pop(one, None)
        return len(self._open) - len(self._owing) > self._most - self._most // SHARE_FOR_HEALTH

    def leave(self, one: "BoundedProtocol") -> None:
        """One is closed."""
        self._open.discard(one)
        self._owing.pop(one, None)


class BoundedProtocol(LandingProtocol):
    """The protocol of a connection that is one of a `Crowd`."""

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any], *, crowd: Crowd, **rest: Any
    ) -> None:
        super().__init__(config, server_state, app_state, **rest)
        self._crowd = crowd
        self._owed: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  uvicorn's
        """Somebody is there."""
        super().connection_made(transport)
        self._crowd.enter(self)
        self._owe()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        self._crowd.leave(self)
        for timer in (self._owed, self._unread):
            if timer is not None:
                timer.cancel()

    def buffer_updated(self, nbytes: int) -> None:
        """So many came; behind what is no HTTP they are read over."""
        if self.conn.their_state is not h11.ERROR:
            super().buffer_updated(nbytes)

    def handle_events(self) -> None:
        """Hand on what h11 has read."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self.conn.their_state is not h11.ERROR:
            if self._owed is not None:
                self._owed.cancel()
            # Its task was made just now and runs only after this returns.
            extensions = cast("dict[str, Any]", self.cycle.scope.setdefault("extensions", {}))
            extensions[CROWDED] = self._crowd.asks(self)

    def on_response_complete(self) -> None:
        """The answer is written, and what is left of the request's body is read over."""
        super().on_response_complete()
        if self.cycle.response_complete:  # else the next request has come already
            self._crowd.owes(self)
            self._owe()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  uvicorn's, which says no more than that
        """What came is no HTTP: told as every refusal is where an answer can begin yet; then the connection is over.

        Whoever has read the answer closes: where we did, what still comes would reset the connection, unread answer
        and all.
        """
        asked: Any = self.cycle  # None before the first request
        if asked is not None:  # one that is being answered: its caller breaks off
            asked.disconnected = True
            asked.message_event.set()
        if self.conn.our_state not in {h11.IDLE, h11.SEND_RESPONSE}:
            self.transport.close()
            return
        self.transport.write(self._refusal(sys.exception()))
        with contextlib.suppress(OSError):  # the caller has gone meanwhile
            self.transport.write_eof()
        self.flow.resume_reading()  # a body that came too fast may have stopped it
        self._crowd.owes(self)
        self._owe()

    def shutdown(self) -> None:
        """The service stops: who was refused is not waited for."""
        if self.conn.their_state is h11.ERROR:
            self.transport.close()
        else:
            super().shutdown()

    def _refusal(self, fault: BaseException | None) -> bytes:
        too_long = getattr(fault, "error_status_hint", 400) == 431
        error: GlassblockError = (
            TooLarge(f"the request line and its headers are larger than {MAX_HEAD_BYTES} bytes", field="headers")
            if too_long
            else InvalidValue(f"what came is no HTTP request: {fault!s:.80}", hint="send HTTP/1.1 (RFC 9112)")
        )
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if too_long else HTTPStatus.BAD_REQUEST
        answer = answer_error(error, status=status)
        complete_headers(answer.headers, uuid.uuid4().hex)
        answer.headers["Connection"] = "close"
        head = h11.Response(status_code=status, headers=answer.raw_headers, reason=status.phrase.encode())
        body = h11.Data(data=bytes(answer.body))
        return b"".join(self.conn.send(event) for event in (head, body, h11.EndOfMessage()))

    def pause_writing(self) -> None:
        """The caller is slower than the answer."""
        super().pause_writing()
        self._await_reader(self.unsent + 1)

    def resume_writing(self) -> None:
        """The caller has caught up."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _owe(self) -> None:
        if self._owed is not None:
            self._owed.cancel()
        # Whoever does not read the end of an answer either is not waited for: what is unsent is dropped.
        self._owed = self.loop.call_later(self._crowd.head_seconds, self.transport.abort)

    def _await_reader(self, before: int) -> None:
        left = self.unsent
        if left >= before:
            self.transport.abort()
            return
        self._unread = self.loop.call_later(self._crowd.unread_seconds, self._await_reader, left)


def room_for(connections: int) -> int:
    """How many connections there may be: `connections`, or as many as the system lets files be open beside others.

    The soft limit of open files is raised as far as it may be.
    """
    try:
        import resource  # noqa: PLC0415  Windows has none
    except ImportError:
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    most = max(1, soft - OTHER_FILES, soft // 2)
    log.warning("%d connections at once, and not %d: the system allows %d open files", most, connections, soft)
    return most
