"""One exchange over HTTP, all but the sending: what goes out, and what the answer means.

Both clients stand on this module and differ only in how they wait.

    connection  URL, key, timeout -> what the HTTP library is told
    prepare     endpoint, message, tensors -> Call: path, headers, body
    Landing     the bytes of an answer, received into one buffer
    conclude    status, headers, bytes -> Reply, or the error that the service raised
"""

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, ParamSpec, TypeVar, cast
from urllib.parse import quote, urlencode

import glassblock
import numpy as np
from glassblock.errors import GlassblockError, InvalidValue, ServiceUnavailable, UnknownRoute
from glassblock.wire import framing, problems
from glassblock.wire.endpoints import AnswerT, Endpoint, Nothing, RequestT, Text
from glassblock.wire.framing import WireTensor
from glassblock.wire.problems import Problem, error_from_problem
from glassblock.wire.refusals import refusal
from glassblock.wire.values import SCHEMA_HEADER, SCHEMA_VERSION, Answer
from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from glassblock_client.backend import httpx
from glassblock_client.tensors import Array, array_from_wire

JSON = "application/json"
EVENTS = "text/event-stream"
PIECE_BYTES = 1 << 20
"""Bytes handed to the socket at once: sent whole, a large buffer is copied again after every partial write."""

CONNECT_SECONDS = 10.0
FOR_EVER_SECONDS = 1e9
"""Thirty years. Sockets overflow beyond three hundred."""
URL_HINT = "write it as http://host:port"
SERVICE_HINT = "does the URL point at the root of a Glassblock service, and of a version near this client's?"

P = ParamSpec("P")
OtherT = TypeVar("OtherT", bound=Answer)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach one service. `shown` is its URL as errors may show it: without a password."""

    base_url: httpx.URL
    shown: str
    headers: Mapping[str, str]
    timeout: httpx.Timeout


@dataclass(frozen=True, kw_only=True)
class Call(Generic[AnswerT]):
    """What to send. `path` is relative to the service's URL and fully quoted."""

    endpoint: Endpoint[Any, AnswerT]
    path: str
    headers: Mapping[str, str]
    body: tuple[bytes | memoryview, ...]

    def answered_by(self, kind: type[OtherT]) -> "Call[OtherT]":
        """The same call, whose answer is another message: the job that will have it, or a job's."""
        return cast("Call[OtherT]", replace(self, endpoint=replace(self.endpoint, answer=kind)))

    def saying(self, name: str, value: str) -> "Call[AnswerT]":
        """The same call with one more header."""
        return replace(self, headers={**self.headers, name: value})

    def pieces(self) -> Iterator[bytes]:
        """The body in pieces that a socket takes in a few writes, as views: nothing is copied."""
        for chunk in self.body:
            for start in range(0, len(chunk), PIECE_BYTES):
                yield cast("bytes", chunk[start : start + PIECE_BYTES])


@dataclass(frozen=True)
class Reply(Generic[AnswerT]):
    """What came back: the message, and the tensors of a safetensors answer as numpy arrays."""

    answer: AnswerT
    tensors: Mapping[str, Array] = field(default_factory=dict[str, Array])


def connection(base_url: str, *, api_key: str | None, timeout: float | None) -> Connection:
    """What both clients tell the HTTP library.

    Args:
        timeout: longest silence of the service, seconds; None waits for ever.

    Raises:
        InvalidValue: the URL, the key or the timeout cannot be used.
    """
    if timeout is not None and not timeout > 0:
        raise InvalidValue(
            f"timeout is {timeout}", field="timeout", hint="give seconds above 0, or None to wait for ever"
        )
    if timeout is not None and timeout > FOR_EVER_SECONDS:
        timeout = None
    try:
        url = httpx.URL(base_url)
    except (httpx.InvalidURL, UnicodeError) as fault:
        raise InvalidValue(f"{base_url!r} is no URL: {fault}", field="base_url", hint=URL_HINT) from fault
    if url.scheme not in {"http", "https"} or not url.host:
        raise InvalidValue(f"{base_url!r} is no http:// or https:// URL", field="base_url", hint=URL_HINT)
    headers = {"User-Agent": f"glassblock-client/{glassblock.__version__}"}
    if api_key:
        if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
            raise InvalidValue("the key holds characters that no header can carry", field="api_key")
        headers["Authorization"] = f"Bearer {api_key}"
    wait = httpx.Timeout(timeout, connect=CONNECT_SECONDS if timeout is None else min(CONNECT_SECONDS, timeout))
    return Connection(base_url=url, shown=str(url.copy_with(userinfo=b"")), headers=headers, timeout=wait)


def compose(kind: Callable[P, RequestT], /, *args: P.args, **fields: P.kwargs) -> RequestT:
    """A request message, refused here with the error that the service would answer with.

    Raises:
        InvalidValue: naming the field.
    """
    try:
        return kind(*args, **fields)
    except ValidationError as fault:
        raise refusal(fault, kind if isinstance(kind, type) else None) from None


def prepare(
    endpoint: Endpoint[RequestT, AnswerT],
    message: RequestT,
    *,
    tensors: Mapping[str, WireTensor] | None = None,
    want_tensors: bool = False,
    parameters: Mapping[str, str] | None = None,
    said: Mapping[str, str | None] | None = None,
) -> Call[AnswerT]:
    """The call for one endpoint.

    Args:
        tensors: sent beside the message, in one safetensors body; without any the body is JSON.
        want_tensors: ask for the answer as safetensors.
        parameters: of the path, unquoted.
        said: further headers, those of `endpoint.headers`; what is None stays unsaid.

    Raises:
        InvalidValue: a parameter cannot be part of a path, a header cannot carry its value, or JSON that of a field.
    """
    if type(want_tensors) is not bool:
        raise InvalidValue(f"return_tensors is {want_tensors!r}, not True or False", field="return_tensors")
    segments = {name: _segment(name, value) for name, value in (parameters or {}).items()}
    headers = {"Accept": framing.MEDIA_TYPE if want_tensors else endpoint.media_type or JSON}
    headers |= {name: _header(name, value) for name, value in (said or {}).items() if value is not None}
    if want_tensors:
        headers["Accept-Encoding"] = "identity"  # compressed floats save nothing, and their size would be unknown
    body: tuple[bytes | memoryview, ...] = ()
    path = endpoint.path.format(**segments).lstrip("/")
    # Defaults stay unsaid: they are the wire's, and the service refuses some values only where they were said.
    try:
        text = message.model_dump_json(exclude_defaults=True)
    except PydanticSerializationError as fault:
        raise InvalidValue(f"the request holds what JSON has no form for: {fault}", field="request") from fault
    if tensors:
        body = tuple(framing.frame("request", text, tensors))
        headers["Content-Type"] = framing.MEDIA_TYPE
    elif endpoint.method == "GET":
        query = message.model_dump(mode="json", exclude_defaults=True)
        path += f"?{urlencode(query)}" if query else ""
    elif endpoint.request is not Nothing:
        body = (text.encode(),)
        headers["Content-Type"] = JSON
    if body:
        headers["Content-Length"] = str(sum(len(chunk) for chunk in body))
    return Call(endpoint=endpoint, path=path, headers=headers, body=body)


class Landing:
    """Receives a body into one buffer of its announced size; grows one where none was announced."""

    def __init__(self, headers: httpx.Headers) -> None:
        length = headers.get("Content-Length", "")
        known = length.isascii() and length.isdigit() and "Content-Encoding" not in headers
        self._announced = int(length[:20]) if known else None  # of more digits there is no memory either way
        self._buffer = _room(self._announced or 0)
        self._filled = 0

    def add(self, chunk: bytes) -> None:
        """Take the next bytes."""
        end = self._filled + len(chunk)
        if end > len(self._buffer):
            larger = _room(max(end, 2 * len(self._buffer)))
            larger[: self._filled] = self._buffer[: self._filled]
            self._buffer = larger
        self._buffer[self._filled : end] = chunk
        self._filled = end

    def close(self) -> memoryview:
        """Everything received.

        Raises:
            ServiceUnavailable: less or more came than was announced.
        """
        if self._announced not in {None, self._filled}:
            raise ServiceUnavailable(
                f"the answer announced {self._announced} bytes and had {self._filled}",
                hint="something between here and the service cut it; try again",
            )
        return self._buffer[: self._filled]


def conclude(call: Call[AnswerT], status: int, headers: httpx.Headers, body: memoryview) -> Reply[AnswerT]:
    """The answer that `body` holds. Warns, once in a process, of a service with another schema version.

    Raises:
        GlassblockError: the class that the service raised, with its facts.
        ServiceUnavailable: what answered speaks no protocol of ours.
    """
    _compare_schemas(headers)
    media_type = _media_type(headers)
    if media_type == problems.MEDIA_TYPE:
        raise _told_error(call, status, body)
    if not 200 <= status < 300:
        raise _foreign_status(call, status, headers)
    if media_type == framing.MEDIA_TYPE:
        try:
            text, tensors = framing.unframe("response", body)
        except InvalidValue as fault:
            raise _foreign(call, str(fault)) from fault
        arrays = {name: array_from_wire(tensor) for name, tensor in tensors.items()}
        return Reply(_message(call, text), arrays)
    if media_type == JSON:
        return Reply(_message(call, bytes(body)))
    if media_type == call.endpoint.media_type and call.endpoint.answer is Text:
        return Reply(call.endpoint.answer.model_validate({"text": bytes(body).decode(errors="replace")}))
    raise _foreign(call, f"it is of type {media_type or 'none'}")


def _compare_schemas(headers: httpx.Headers) -> None:
    theirs = headers.get(SCHEMA_HEADER, SCHEMA_VERSION)
    if theirs != SCHEMA_VERSION and theirs not in _TOLD_SCHEMAS:
        _TOLD_SCHEMAS.add(theirs)
        warnings.warn(
            f"the service speaks schema version {theirs[:40]!r}, this client (glassblock {glassblock.__version__}) "
            f"{SCHEMA_VERSION!r}: what one of them does not know is left out or refused; upgrade the older one",
            stacklevel=2,
        )


_TOLD_SCHEMAS: set[str] = set()


def is_job(call: Call[Any], status: int) -> bool:
    """Whether an operation was answered with the job that will have its answer."""
    return call.endpoint.job and status == 202


def require_job(call: Call[Any], status: int, headers: httpx.Headers, landing: Landing) -> None:
    """Raise what was answered in place of a job, as `conclude` does."""
    if not is_job(call, status):
        conclude(call, status, headers, landing.close())
        raise ServiceUnavailable(
            "the service answered at once, and with no job", hint="is it of an older version? call the method itself"
        )


def is_stream(headers: httpx.Headers) -> bool:
    """Whether an answer is a stream of events."""
    return _media_type(headers) == EVENTS


def is_plain(response: httpx.Response) -> bool:
    """Whether a body is still to come, and comes as it is: no decoder has to look at it."""
    return "Content-Encoding" not in response.headers and not response.is_stream_consumed


def require_stream(call: Call[Any], status: int, headers: httpx.Headers, landing: Landing) -> None:
    """Raise what the service answered with in place of a stream of events, as `conclude` does."""
    if not is_stream(headers):
        conclude(call, status, headers, landing.close())
        raise _foreign(call, f"it is of type {_media_type(headers) or 'none'}")


@contextmanager
def transport_failures(base_url: str) -> Generator[None]:
    """Whatever stops an exchange underway, told as `ServiceUnavailable` with what to do."""
    try:
        yield
    except httpx.ConnectTimeout as fault:
        raise ServiceUnavailable(f"no connection to {base_url} in time", hint="is the host right, and up?") from fault
    except httpx.TimeoutException as fault:
        raise ServiceUnavailable(
            f"no answer from {base_url} in time", hint="ask for less, or allow more time with `timeout`"
        ) from fault
    except httpx.ConnectError as fault:
        raise ServiceUnavailable(
            f"cannot connect to {base_url}: {_reason(fault)}", hint="is a service running there? `glassblock serve`"
        ) from fault
    except httpx.RequestError as fault:
        raise ServiceUnavailable(f"the exchange with {base_url} broke: {_reason(fault)}", hint="try again") from fault


def _room(size: int) -> memoryview:
    try:
        return np.empty(size, np.uint8).data
    except (MemoryError, ValueError) as fault:  # numpy: beyond what is free, beyond what an index can say
        raise ServiceUnavailable(f"no memory for an answer of {size} bytes", hint="ask for less") from fault


def _segment(name: str, value: object) -> str:
    """One path segment. Dots alone would be taken for a folder above, and an empty one for another path."""
    if not isinstance(value, str):
        raise InvalidValue(f"{name} is a {type(value).__name__}, not a text", field=name)
    try:
        quoted = quote(value, safe="")
    except UnicodeEncodeError as fault:
        raise InvalidValue(f"{name} {value!r} is not Unicode", field=name) from fault
    if not quoted:
        raise InvalidValue(f"{name} is empty", field=name)
    return quoted.replace(".", "%2E") if not quoted.strip(".") else quoted


def _media_type(headers: httpx.Headers) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _header(name: str, value: object) -> str:
    if not (isinstance(value, str) and value.isascii() and value.isprintable()):
        raise InvalidValue(f"{value!r} holds characters that the header {name} cannot carry", field=name)
    return value


def _message(call: Call[AnswerT], text: str | bytes) -> AnswerT:
    try:
        return call.endpoint.answer.model_validate_json(text)
    except ValidationError as fault:
        raise _foreign(call, str(refusal(fault))) from fault


def _told_error(call: Call[Any], status: int, body: memoryview) -> GlassblockError:
    try:
        problem = Problem.model_validate_json(bytes(body))
    except ValidationError:
        return _foreign(call, f"HTTP {status} with a problem document of another kind")
    if problem.code == UnknownRoute.code:  # the path is this client's: what its caller can mend is the URL before it
        problem = problem.model_copy(update={"hint": SERVICE_HINT})
    return error_from_problem(problem)


def _foreign_status(call: Call[Any], status: int, headers: httpx.Headers) -> ServiceUnavailable:
    wait = headers.get("Retry-After", "")
    hints = {
        401: "a key is needed: pass api_key, or set GLASSBLOCK_KEY",
        403: "the key was not accepted",
        404: SERVICE_HINT,
    }
    if 300 <= status < 400:
        hint = f"it points to {headers.get('Location', 'nowhere')}: give that URL"
    else:
        hint = hints.get(status, "is something between here and the service? its log may say more")
    return ServiceUnavailable(
        f"{call.endpoint.method} /{call.path} was answered with HTTP {status}, not by a Glassblock service",
        hint=hint,
        retry_after=float(wait) if wait.isascii() and wait.isdigit() else None,
    )


def _foreign(call: Call[Any], why: str) -> ServiceUnavailable:
    return ServiceUnavailable(
        f"the answer to {call.endpoint.method} /{call.path} is none of Glassblock's: {why}",
        hint=SERVICE_HINT,
    )


def _reason(fault: Exception) -> str:
    return str(fault) or type(fault).__name__
