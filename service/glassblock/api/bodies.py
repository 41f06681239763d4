"""Bodies: a message with its tensors, as JSON or as one safetensors file, in either direction."""

import json
import re
from collections.abc import Iterator
from typing import TypeVar, cast

import numpy as np
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from glassblock.api.answers import invalid_value
from glassblock.errors import InvalidValue, TooLarge, UnsupportedContent
from glassblock.operations.reply import Reply
from glassblock.wire import framing
from glassblock.wire.endpoints import AnswerT, Endpoint, RequestT

JSON = "application/json"
ModelT = TypeVar("ModelT")


async def read_body(request: HttpRequest, *, limit: int) -> memoryview:
    """The whole body, received into memory of its declared size.

    That memory is asked for without being touched, so that a caller who declares much and sends
    little costs nothing.

    Raises:
        TooLarge: more than `limit` bytes are declared, or come.
        UnsupportedContent: the body is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise UnsupportedContent(f"content encoding {encoding!r} is not read here", known=("identity",))
    declared = request.headers.get("content-length", "")
    if not declared.isascii() or not declared.isdigit():
        return await _of_unknown_size(request, limit)
    # A number of more digits than this is over every limit; it need not be computed.
    size = int(declared) if len(declared) < 19 else limit + 1
    if size > limit:
        raise _too_large(limit)
    body = memoryview(cast("bytes", np.empty(size, dtype=np.uint8)))
    filled = 0
    async for chunk in request.stream():
        end = filled + len(chunk)
        if end > size:
            raise _too_large(size)
        body[filled:end] = chunk
        filled = end
    return body[:filled]


async def _of_unknown_size(request: HttpRequest, limit: int) -> memoryview:
    body = bytearray()
    async for chunk in request.stream():
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        body += chunk
    return memoryview(body)


def parse_body(
    endpoint: Endpoint[RequestT, AnswerT], headers: Headers, body: memoryview
) -> tuple[RequestT, dict[str, framing.WireTensor]]:
    """The message and the tensors of a request body.

    Raises:
        UnsupportedContent: neither JSON nor, where the endpoint takes tensors, safetensors.
        InvalidValue: what arrived is not what its type says; the field is named.
    """
    tensors: dict[str, framing.WireTensor] = {}
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    text: bytes | str = b""
    if media_type == framing.MEDIA_TYPE and endpoint.tensors_in:
        text, tensors = framing.unframe("request", body)
        _refuse_unread(endpoint.tensors_in, tensors)
    elif media_type == JSON:
        text = bytes(body)
    elif body and media_type != JSON:
        accepted = (JSON, framing.MEDIA_TYPE) if endpoint.tensors_in else (JSON,)
        raise UnsupportedContent(
            f"content type {media_type or 'none'!r} is not read here",
            field="content-type",
            known=accepted,
            hint="set the Content-Type header",
        )
    try:
        value: object = json.loads(text or b"{}", object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as fault:
        told = "nested too deep" if isinstance(fault, RecursionError) else fault
        raise InvalidValue(f"the body is not JSON: {told}", field="body", hint="send one JSON object") from fault
    try:
        return endpoint.request.model_validate(value), tensors
    except ValidationError as fault:
        raise invalid_value(fault) from fault


def render(endpoint: Endpoint[RequestT, AnswerT], reply: Reply[AnswerT], *, accept: str) -> Response:
    """The answer in the form that `accept` asks for."""
    if endpoint.tensors_out and accepts(accept, framing.MEDIA_TYPE):
        tensors = reply.wire_tensors()
        chunks = framing.frame("response", reply.answer.model_dump_json(), tensors)
        header = next(chunks)
        length = len(header) + framing.frame_bytes(tensors)
        return StreamingResponse(
            _each(header, chunks), endpoint.status, {"Content-Length": str(length)}, framing.MEDIA_TYPE
        )
    return Response(reply.nested().model_dump_json(), endpoint.status, reply.headers, JSON)


async def _each(header: bytes | memoryview, rest: Iterator[bytes | memoryview]):
    yield header
    for chunk in rest:
        yield chunk


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise InvalidValue(f"{repeated!r} stands twice in one object of the body", field="body", hint="send it once")
    return fields


def accepts(accept: str, media_type: str) -> bool:
    """Whether an Accept header names `media_type` itself, and not with a weight of zero."""
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name == media_type:
            return not any(re.fullmatch(r"q=0(\.0*)?", parameter) for parameter in parameters)
    return False


def _refuse_unread(known: tuple[str, ...], tensors: dict[str, framing.WireTensor]) -> None:
    for name in tensors:
        if name not in known:
            raise InvalidValue(f"tensor {name!r} is not read here", field="body", tensor=name, known=known)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {limit} bytes", field="body", hint="send less, or raise GLASSBLOCK_MAX_BODY_MIB"
    )
