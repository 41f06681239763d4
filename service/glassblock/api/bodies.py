"""Bodies: a message with its tensors, as JSON or as one safetensors file, in either direction."""

from collections.abc import Iterator
from typing import TypeVar

import pydantic_core
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from glassblock.api.answers import invalid_value
from glassblock.errors import InvalidValue, TooLarge, UnsupportedContent
from glassblock.operations.reply import Reply
from glassblock.wire import framing
from glassblock.wire.endpoints import AnswerT, Endpoint, RequestT

JSON = "application/json"
ModelT = TypeVar("ModelT")


async def read_body(request: HttpRequest, *, limit: int) -> bytearray:
    """The whole body, received into memory of its declared size.

    Raises:
        TooLarge: more than `limit` bytes are declared, or come.
    """
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isascii() and declared.isdigit() and len(declared) < 19 else 0
    if size > limit:
        raise _too_large(limit)
    body = bytearray(size)
    filled = 0
    async for chunk in request.stream():
        end = filled + len(chunk)
        if end > limit:
            raise _too_large(limit)
        body[filled:end] = chunk
        filled = end
    del body[filled:]
    return body


def parse_body(
    endpoint: Endpoint[RequestT, AnswerT], content_type: str, body: bytearray
) -> tuple[RequestT, dict[str, framing.WireTensor]]:
    """The message and the tensors of a request body.

    Raises:
        UnsupportedContent: neither JSON nor, where the endpoint takes tensors, safetensors.
        InvalidValue: what arrived is not what its type says; the field is named.
    """
    tensors: dict[str, framing.WireTensor] = {}
    media_type = content_type.partition(";")[0].strip().lower()
    text: bytes | bytearray | str = body
    if media_type == framing.MEDIA_TYPE and endpoint.tensors_in:
        text, tensors = framing.unframe("request", memoryview(body))
        _refuse_unread(endpoint.tensors_in, tensors)
    elif body and media_type != JSON:
        accepted = (JSON, framing.MEDIA_TYPE) if endpoint.tensors_in else (JSON,)
        raise UnsupportedContent(
            f"content type {media_type or 'none'!r} is not read here",
            field="content-type",
            known=accepted,
            hint="set the Content-Type header",
        )
    try:
        value: object = pydantic_core.from_json(text or b"{}")
    except ValueError as fault:
        raise InvalidValue(f"the body is not JSON: {fault}", field="body", hint="send one JSON object") from fault
    try:
        return endpoint.request.model_validate(value), tensors
    except ValidationError as fault:
        raise invalid_value(fault) from fault


def render(endpoint: Endpoint[RequestT, AnswerT], reply: Reply[AnswerT], *, accept: str) -> Response:
    """The answer in the form that `accept` asks for."""
    if endpoint.tensors_out and framing.MEDIA_TYPE in accept:
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


def _refuse_unread(known: tuple[str, ...], tensors: dict[str, framing.WireTensor]) -> None:
    for name in tensors:
        if name not in known:
            raise InvalidValue(f"tensor {name!r} is not read here", field="body", tensor=name, known=known)


def _too_large(limit: int) -> TooLarge:
    return TooLarge(
        f"the body is larger than {limit} bytes", field="body", hint="send less, or raise GLASSBLOCK_MAX_BODY_MIB"
    )
