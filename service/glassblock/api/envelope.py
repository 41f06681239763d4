"""What goes around every request: an id, admission, security headers, and a note of who asked what."""

import re
import time
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glassblock.api.answers import answer_defect, answer_error
from glassblock.api.doors import NOBODY, OPEN_PATHS, Caller, Doors
from glassblock.errors import GlassblockError, InvalidValue, ServiceUnavailable, TooLarge, Unauthenticated
from glassblock.wire.values import SCHEMA_HEADER, SCHEMA_VERSION

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""What is taken over from a caller; any other id is replaced by one of ours, and no log takes a foreign line."""

MAX_HEAD_BYTES = 32 * 1024
"""Longest request line with its headers."""

CROWDED = "glassblock.crowded"
"""The extension of a scope that says whether too many connections are at work to answer it (`connections`)."""

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every answer that does not say otherwise itself."""


@dataclass
class Visit:
    """One request, as it becomes known.

    Attributes:
        endpoint: name of the endpoint; empty where none was reached.
        inspected: the checkpoint that was looked into.
        status: HTTP status; 0 where nobody was there any more to hear it.
        seconds: from the head of the request to the last byte of its answer.
        posted: a fast digest of the body; empty where none was taken while it came.
    """

    id: str
    method: str
    path: str
    address: str
    caller: Caller = NOBODY
    endpoint: str = ""
    inspected: str | None = None
    status: int = 0
    received: int = 0
    sent: int = 0
    seconds: float = 0.0
    posted: bytes = b""
    since: float = field(default_factory=time.perf_counter)

    @property
    def who(self) -> str:
        """Among whom turns and room are shared: the name of the key, or the address where there are no keys."""
        return self.caller.name or self.address


class Witness(Protocol):
    """Is told of every request when it is over."""

    def __call__(self, visit: Visit) -> None:
        """Take note."""
        ...


def complete_headers(headers: MutableHeaders, request_id: str) -> None:
    """Add what every answer carries."""
    headers["X-Request-ID"] = request_id
    headers[SCHEMA_HEADER] = SCHEMA_VERSION
    for name, value in SECURITY_HEADERS.items():
        headers.setdefault(name, value)


def visit_of(request: HttpRequest) -> Visit:
    """What is known of a request so far; its handlers add to it."""
    return request.scope["state"]["visit"]


class Envelope:
    """The ASGI middleware.

    Args:
        witnesses: told of every request when it is over.
    """

    def __init__(self, app: ASGIApp, *, doors: Doors, witnesses: tuple[Witness, ...]) -> None:
        self._app = app
        self._doors = doors
        self._witnesses = witnesses

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; whatever is none goes through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        visit = _visit(scope)
        scope.setdefault("state", {})["visit"] = visit
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=visit.id)

        async def counted() -> Message:
            message = await receive()
            visit.received += len(message.get("body", b""))
            return message

        async def addressed(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                visit.status = message["status"]
                complete_headers(MutableHeaders(scope=message), visit.id)
            else:
                visit.sent += len(message.get("body", b""))
            await send(message)

        try:
            await self._admitted(visit, scope, counted, addressed)
        finally:
            visit.seconds = time.perf_counter() - visit.since
            for witness in self._witnesses:
                witness(visit)

    async def _admitted(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("extensions", {}).get(CROWDED) and visit.path not in OPEN_PATHS:
            crowded = ServiceUnavailable(
                "too many connections are at work",
                hint="send it again later, or raise GLASSBLOCK_CONNECTIONS",
                retry_after=1,
            )
            refusal = answer_error(crowded)
            refusal.headers["Connection"] = "close"
            await refusal(scope, receive, send)
            return
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            error = TooLarge(
                f"the request line and its headers are larger than {MAX_HEAD_BYTES} bytes", field="headers"
            )
            await answer_error(error, status=431)(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy that takes the other one for true sees another end of the request (RFC 9112, 6.1).
            twice = answer_error(
                InvalidValue("the body's length is told twice", field="headers", hint="leave out Content-Length"),
                status=400,
            )
            twice.headers["Connection"] = "close"
            await twice(scope, receive, send)
            return
        if scope["path"].endswith("\n"):  # the router's patterns would overlook it, and take another name for this one
            error = InvalidValue("the path ends with a line feed", field="path", hint="leave it out")
            await answer_error(error)(scope, receive, send)
            return
        try:
            visit.caller = self._doors.admit(visit.path, headers, visit.address)
        except GlassblockError as error:
            answer = answer_error(error)
            if isinstance(error, Unauthenticated):
                answer.headers["WWW-Authenticate"] = 'Bearer realm="glassblock"'
            await answer(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except Exception as defect:
            if visit.status:
                raise  # the answer has begun: its end must not look like a whole one
            await answer_defect(HttpRequest(scope), defect)(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    headers = sum(len(name) + len(value) for name, value in scope["headers"])
    return headers + len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"])


def _visit(scope: Scope) -> Visit:
    given = Headers(scope=scope).get("x-request-id", "")
    client = scope.get("client")
    return Visit(
        id=given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
        method=scope["method"],
        path=scope["path"],
        address=client[0] if client else "",
    )
