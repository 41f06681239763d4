"""Bodies: a message with its tensors, as JSON or as one safetensors file, in either direction."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import anyio
import numpy as np
import xxhash
from pydantic import ValidationError
from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glassblock.api.answers import invalid_value
from glassblock.api.body_budget import RequestBudget
from glassblock.api.envelope import visit_of
from glassblock.api.landing import LANDING_BYTES, land_of, launch_of, untouched
from glassblock.api.long_json import read_json
from glassblock.api.results import Rendered
from glassblock.errors import InvalidValue, TooLarge, UnsupportedContent
from glassblock.operations.reply import Reply
from glassblock.wire import framing
from glassblock.wire.endpoints import AnswerT, Endpoint, RequestT

JSON = "application/json"

MAX_DEPTH = 64
"""Levels of lists and objects in a JSON body. A tensor has 32 axes at most, an engine's config a few levels."""

PIECE_BYTES = 1 << 20
"""Bytes handed to the socket at once. What it does not take is copied, and the rest of it again after every write."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""In a JSON text: half of a character, alone or with its other half."""


class Patience(NamedTuple):
    """How long a body may take in all, and how long its sender may be silent, seconds."""

    total: float
    silence: float


class TooSlow(Exception):
    """The body did not come in time."""


async def read_body(request: HttpRequest, *, limit: int, patience: Patience, budget: RequestBudget) -> memoryview:
    """The whole body, received into memory of its declared size.

    That memory is asked for without being touched, so that a caller who declares much and sends
    little costs nothing but its part of `budget`. What is long is written there by the kernel, where
    the server can (`landing`).

    Raises:
        TooLarge: more than `limit` bytes are declared, or come; or more than the whole budget.
        NoRoom: the other bodies under way leave no room in the budget.
        UnsupportedContent: the body is compressed.
        TooSlow: the body, or the next part of it, does not come within `patience`.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedContent(f"content encoding {encoding!r} is not read here", known=("identity",))
    declared = request.headers.get("content-length", "")
    # One scope whose deadline moves: entering one for every chunk would cost more than the chunk.
    with anyio.CancelScope() as scope:
        until = anyio.current_time() + patience.total

        def arrived() -> None:
            scope.deadline = min(until, anyio.current_time() + patience.silence)

        arrived()
        if declared.isascii() and declared.isdigit():
            # A number of more digits than this is over every limit; it need not be computed.
            size = int(declared) if len(declared) < 19 else limit + 1
            return await _of_known_size(request, size, limit=limit, arrived=arrived, budget=budget)
        return await _of_unknown_size(request, limit=limit, arrived=arrived, budget=budget)
    raise TooSlow


async def _of_known_size(
    request: HttpRequest, size: int, *, limit: int, arrived: Callable[[], None], budget: RequestBudget
) -> memoryview:
    if size > limit:
        raise _too_large(limit)
    budget.grow(0, size)
    try:
        body = untouched(size)
    except BaseException:
        budget.give_back(size)
        raise
    budget.until_gone(body)
    land = land_of(request.scope) if size >= LANDING_BYTES else None
    filled = 0
    if land is not None:
        digest = xxhash.xxh3_128()

        def landed(piece: memoryview) -> None:
            arrived()
            digest.update(piece)  # now: it lies in the processor's cache, and more comes meanwhile

        filled = await land(body, landed)
        visit_of(request).received += filled
        visit_of(request).posted = digest.digest() if filled else b""
    async for chunk in request.stream():
        arrived()
        end = filled + len(chunk)
        if end > size:
            raise _too_large(size)
        body[filled:end] = chunk
        filled = end
    return body[:filled]


async def _of_unknown_size(
    request: HttpRequest, *, limit: int, arrived: Callable[[], None], budget: RequestBudget
) -> memoryview:
    body = bytearray()
    try:
        async for chunk in request.stream():
            arrived()
            size = len(body) + len(chunk)
            if size > limit:
                raise _too_large(limit)
            budget.grow(len(body), size)
            body += chunk
    except BaseException:
        budget.give_back(len(body))
        raise
    if not body:
        return memoryview(b"")
    view = memoryview(cast("bytes", np.frombuffer(body, dtype=np.uint8)))
    budget.until_gone(view)
    return view


def parse_body(
    endpoint: Endpoint[RequestT, AnswerT], headers: Headers, body: memoryview
) -> tuple[RequestT, dict[str, framing.WireTensor]]:
    """The message and the tensors of a request body.

    Raises:
        UnsupportedContent: neither JSON nor, where the endpoint takes tensors, safetensors.
        InvalidValue: what arrived is not what its type says; the field is named.
    """
    tensors: dict[str, framing.WireTensor] = {}
    media_type = media_type_of(headers)
    text = ""
    if media_type == framing.MEDIA_TYPE and endpoint.tensors_in:
        text, tensors = framing.unframe("request", body)
        _refuse_unread(endpoint, tensors)
    elif media_type == JSON:
        text = _decoded(body)
    elif body:
        accepted = (JSON, framing.MEDIA_TYPE) if endpoint.tensors_in else (JSON,)
        raise UnsupportedContent(
            f"content type {media_type or 'none'!r} is not read here",
            field="content-type",
            known=accepted,
            hint="set the Content-Type header",
        )
    try:
        value: object = read_json(text or "{}", object_of=_each_once)
    except (ValueError, RecursionError) as fault:
        told = "nested too deep" if isinstance(fault, RecursionError) else fault
        raise InvalidValue(f"the body is not JSON: {told}", field="body", hint="send one JSON object") from fault
    if _is_deep(value):
        raise InvalidValue(f"the body is nested too deep: more than {MAX_DEPTH} levels", field="body")
    if "\\" in text and _HALF.search(text):  # the first look takes no time
        _refuse_halves(value)
    try:
        return endpoint.request.model_validate(value), tensors
    except ValidationError as fault:
        raise invalid_value(fault, endpoint.request) from fault


def json_of(headers: Headers, body: memoryview) -> memoryview:
    """What of a body is read as JSON: all of it, the header of a safetensors file, or nothing."""
    media_type = media_type_of(headers)
    if media_type == framing.MEDIA_TYPE:
        length = int.from_bytes(body[:8], "little")
        return body[8 : 8 + length] if length <= framing.MAX_HEADER_BYTES else body[:0]  # which is refused
    return body if media_type == JSON else body[:0]


def media_type_of(headers: Headers) -> str:
    """Of a body, without parameters, in lower case; empty where none is said."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def parse_query(endpoint: Endpoint[RequestT, AnswerT], query: QueryParams) -> RequestT:
    """The message of a GET, which travels in the query.

    Raises:
        InvalidValue: an unknown parameter, one that stands twice, or a value that cannot be used.
    """
    for name, times in Counter(name for name, _ in query.multi_items()).items():
        if times > 1:
            raise InvalidValue(f"{name!r} stands twice in the query", field=name, hint="send it once")
    try:
        return endpoint.request.model_validate(dict(query))
    except ValidationError as fault:
        raise invalid_value(fault, endpoint.request) from fault


def render(endpoint: Endpoint[RequestT, AnswerT], reply: Reply[AnswerT], *, accept: str) -> Rendered:
    """The answer in the form that `accept` asks for."""
    form = "tensors" if as_tensors(endpoint, accept) else "json"
    headers: Mapping[str, str] = {} if form == "tensors" else reply.headers
    return Rendered(endpoint.status, headers, *reply.body(form))


def as_tensors(endpoint: Endpoint[Any, Any], accept: str) -> bool:
    """Whether an answer goes out as safetensors."""
    return endpoint.tensors_out and accepts(accept, framing.MEDIA_TYPE)


def response_of(rendered: Rendered, headers: Mapping[str, str] | None = None) -> Response:
    """What is sent to one caller."""
    told = {**rendered.headers, **(headers or {})}
    if len(rendered.chunks) == 1 and isinstance(rendered.chunks[0], bytes) and rendered.bytes <= PIECE_BYTES:
        return Response(rendered.chunks[0], rendered.status, told, rendered.media_type)
    told["Content-Length"] = str(rendered.bytes)
    return _Pieces(rendered.chunks, rendered.status, told, rendered.media_type)


class _Pieces(Response):
    """An answer whose body is sent from where its pieces lie."""

    def __init__(
        self, pieces: Iterable[bytes | memoryview], status: int, headers: Mapping[str, str], kind: str
    ) -> None:
        super().__init__(None, status, headers, kind)
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  ASGI's
        launch = None if scope["method"] == "HEAD" else launch_of(scope)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in map(memoryview, self._pieces):
            if launch is not None and piece.nbytes >= LANDING_BYTES:
                visit_of(HttpRequest(scope)).sent += await launch(piece)
                continue
            for start in range(0, piece.nbytes, PIECE_BYTES):
                await send(
                    {"type": "http.response.body", "body": piece[start : start + PIECE_BYTES], "more_body": True}
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _decoded(body: memoryview) -> str:
    try:
        return str(body, "utf-8-sig")
    except UnicodeDecodeError as fault:
        raise InvalidValue(f"the body is not JSON: {fault}", field="body", hint="send it as UTF-8") from fault


def _refuse_halves(value: object) -> None:
    """No answer, error or database could hold them; a field that is a text refuses them, any other does not look."""
    for text in _texts(value):
        try:
            text.encode()
        except UnicodeEncodeError as fault:
            raise InvalidValue(
                "a text of the body holds half a character, as \\ud83d is without what follows it",
                field="body",
                hint="send whole characters",
            ) from fault


def _texts(value: object) -> Iterator[str]:
    """Every text in a JSON value, names included."""
    level: list[object] = [value]
    while level:
        for part in level:
            if isinstance(part, str):
                yield part
            elif isinstance(part, dict):
                yield from cast("dict[str, object]", part)
        level = [child for part in level for child in _parts(part) if isinstance(child, str | list | dict)]


def _is_deep(value: object) -> bool:
    """Whether lists and objects lie within one another more than `MAX_DEPTH` deep. Looks at containers alone."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for part in level for child in _parts(part) if isinstance(child, list | dict)]
        if not level:
            return False
    return True


def _parts(part: object) -> Iterable[object]:
    if isinstance(part, dict):
        return cast("dict[str, object]", part).values()
    return cast("list[object]", part) if isinstance(part, list) else ()


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        repeated = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise InvalidValue(f"{repeated!r} stands twice in one object of the body", field="body", hint="send it once")
    return fields


def accepts(accept: str, media_type: str) -> bool:
    """Whether an Accept header names `media_type` itself, and not with a weight of zero."""
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name == media_type:
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


def _refuse_unread(endpoint: Endpoint[Any, Any], tensors: dict[str, framing.WireTensor]) -> None:
    for name in tensors:
        if not endpoint.reads_tensor(name):
            known = endpoint.tensors_in
            raise InvalidValue(f"tensor {name!r} is not read here", field="body", tensor=name, known=known)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {limit} bytes", field="body", hint="send less, or raise GLASSBLOCK_MAX_BODY_MIB"
    )
