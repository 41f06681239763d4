"""The ASGI application: routes made from the endpoint table, errors from the answer table."""

import stat
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import glassblock
from glassblock.api.abandoned import Gone, TooLate, allowed_seconds, run_while_wanted, wants_job
from glassblock.api.allocator import trimmed_when_idle
from glassblock.api.answers import ANSWERS, answer_defect, answer_error, answer_http_exception
from glassblock.api.bodies import Patience, TooSlow, json_of, parse_body, parse_query, read_body, render
from glassblock.api.body_budget import SMALL_BODY, BodyBudget, RequestBudget, object_bytes
from glassblock.api.desk import WATCHED_LANES, Desk, sent
from glassblock.api.doors import Doors, require_scope
from glassblock.api.envelope import Envelope, visit_of
from glassblock.api.logs import AccessLog
from glassblock.api.metrics import Looked, Metrics
from glassblock.api.openapi import document
from glassblock.api.results import Rendered
from glassblock.api.routes import ROUTES, Call, Route, Service, job_of
from glassblock.api.settings import MIB, Settings
from glassblock.api.tracing import Tracer
from glassblock.errors import GlassblockError, InvalidValue, ServiceUnavailable
from glassblock.jobs.audits import AuditJobs
from glassblock.jobs.worker import Observer
from glassblock.operations.operations import Operations
from glassblock.operations.repairs import Outputs
from glassblock.operations.store import CheckpointStore
from glassblock.operations.works import WORKS
from glassblock.wire.endpoints import ENDPOINTS, START_AUDIT, Endpoint, Nothing
from glassblock.wire.framing import WireTensor

MAX_MESSAGE_BYTES = 16 * MIB
"""Largest body of an endpoint that takes no tensors."""

ABSENT = "does not exist"


def create_app(settings: Settings, *, roots_may_come: bool = False) -> FastAPI:
    """The service for `settings`.

    Args:
        roots_may_come: a root that is not there yet is accepted: the service is alive, and ready once it is there.

    Raises:
        InvalidValue: a root is no folder, or the device is not here.
    """
    for root in settings.roots:
        why = root_trouble(root)
        if why is not None and not (roots_may_come and why == ABSENT):
            raise InvalidValue(
                f"{root} {why}, so no checkpoints can lie under it", field="roots", hint="give a folder that holds some"
            )
    store = CheckpointStore(
        settings.roots,
        device=settings.device,
        resident_bytes=settings.resident_mib * MIB,
        device_bytes=settings.device_bytes,
    )
    operations = Operations(store, Outputs(settings.output_root))
    desk, bodies = Desk(settings), BodyBudget(settings.bodies_bytes)
    looked = Looked(
        jobs=lambda: audits.counts(),  # noqa: PLW0108  it comes below
        usage=operations.usage,
        memory=operations.memory,
        # Both change in the event loop alone, and are looked at from a thread.
        lines=lambda: anyio.from_thread.run_sync(desk.lines),
        stored=desk.counted,
        bodies=lambda: anyio.from_thread.run_sync(lambda: (bodies.held, bodies.total)),
    )
    metrics = Metrics(looked, device=str(store.device))
    tracer = None if settings.otlp_endpoint is None else Tracer(settings.otlp_endpoint)
    observers: tuple[Observer, ...] = (metrics.observe_job,)
    audits = AuditJobs(
        lambda operation, request, tensors, follower: WORKS[operation](operations, request, tensors, follower),
        place=settings.jobs_place,
        status_of=lambda error: ANSWERS[type(error)],
        rules=settings.job_rules,
        observers=observers if tracer is None else (*observers, tracer.observe_job),
    )
    service = Service(operations, audits, metrics)
    doors = Doors(keys_file=settings.keys_file, rate=settings.rate)
    access_log = None if settings.access_place is None else AccessLog(settings.access_place)
    witnesses = tuple(witness for witness in (metrics, access_log, tracer) if witness is not None)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        await anyio.to_thread.run_sync(audits.open)
        try:
            async with desk.opened(), trimmed_when_idle(lambda: any(map(any, desk.lines().values()))):
                yield
        finally:
            await anyio.to_thread.run_sync(audits.close)
            for witness in (access_log, tracer):
                if witness is not None:
                    witness.close()

    app = FastAPI(
        title="Glassblock",
        version=glassblock.__version__,
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,
        redirect_slashes=False,
    )
    app.openapi = document
    for endpoint in ENDPOINTS:
        answer = _answer(ROUTES[endpoint.name], service, settings, desk, bodies)
        # A checkpoint's name is a path: it may hold slashes, quoted or not.
        path = endpoint.path.replace("{name}", "{name:path}")
        app.add_route(path, answer, methods=[endpoint.method], include_in_schema=False)
    app.add_middleware(Envelope, doors=doors, witnesses=witnesses)
    app.add_exception_handler(HTTPException, answer_http_exception)
    app.add_exception_handler(Exception, answer_defect)
    return app


def root_trouble(root: Path) -> str | None:
    """Why `root` cannot hold checkpoints; None where it can."""
    try:
        mode = root.stat().st_mode
    except FileNotFoundError:
        return ABSENT
    except (OSError, ValueError) as fault:  # ValueError: a NUL in the path
        return f"cannot be looked at ({str(getattr(fault, 'strerror', None) or fault).lower()})"
    return None if stat.S_ISDIR(mode) else "is not a folder"


def _answer(
    route: Route, service: Service, settings: Settings, desk: Desk, bodies: BodyBudget
) -> Callable[[HttpRequest], Awaitable[Response]]:
    endpoint = route.endpoint
    has_message = endpoint.request is not Nothing
    asked_in_query, has_body = has_message and endpoint.method == "GET", has_message and endpoint.method != "GET"
    patience = Patience(settings.body_seconds, settings.silence_seconds)
    read = partial(read_body, limit=_body_limit(endpoint, settings), patience=patience)

    def parse(request: HttpRequest, body: memoryview) -> Call:
        message, tensors = (
            (parse_query(endpoint, request.query_params), dict[str, WireTensor]())
            if asked_in_query
            else parse_body(endpoint, request.headers, body)
        )
        visit_of(request).inspected = request.path_params.get("name") or getattr(message, "checkpoint", None)
        return Call(service, message, tensors, request)

    work = partial(_done, route, endpoint)
    as_job = Route(endpoint, job_of(endpoint), "jobs") if endpoint.job else None

    async def respond(request: HttpRequest, room: RequestBudget) -> Response:
        since = anyio.current_time()
        # An endpoint that is asked by its URL alone does not look at a body.
        body = await read(request, budget=room) if has_body else memoryview(b"")
        with room.unfolded(await _objects_of(request, body)):
            if as_job is not None and wants_job(request.headers):
                queue = partial(_done, as_job, START_AUDIT)
                response = await desk.ask(as_job, request, partial(parse, request, body), queue)
                response.headers["Preference-Applied"] = "respond-async"
                return response
            wait = allowed_seconds(request.headers)
            if route.lane == "inline":
                return sent(work(parse(request, body)))
            ask = partial(desk.ask, route, request, partial(parse, request, body), work)
            if route.lane not in WATCHED_LANES and wait is None:
                return await ask()
            left = None if wait is None else since + wait - anyio.current_time()
            response = await run_while_wanted(request, ask, seconds=left)
            if wait is not None:
                response.headers["Preference-Applied"] = f"wait={wait}"
            return response

    return partial(_with_answers, partial(_within_scope, endpoint, bodies, respond))


def _done(route: Route, answered: Endpoint[Any, Any], call: Call) -> Rendered | Response:
    """What comes of a call, as an answer of the endpoint `answered`."""
    reply: Any = route.handler(call)
    return reply if isinstance(reply, Response) else render(answered, reply, accept=call.http.headers.get("accept", ""))


def _body_limit(endpoint: Endpoint[Any, Any], settings: Settings) -> int:
    return settings.max_body_bytes if endpoint.tensors_in else min(settings.max_body_bytes, MAX_MESSAGE_BYTES)


async def _objects_of(request: HttpRequest, body: memoryview) -> int:
    """Bytes of the objects that a body becomes, where what is JSON of it is long."""
    text = json_of(request.headers, body)
    return await anyio.to_thread.run_sync(object_bytes, text) if text.nbytes > SMALL_BODY else 0


async def _within_scope(
    endpoint: Endpoint[Any, Any],
    bodies: BodyBudget,
    respond: Callable[[HttpRequest, RequestBudget], Awaitable[Response]],
    request: HttpRequest,
) -> Response:
    """What `respond` gives to a caller who may ask, its body and its answer counted."""
    visit = visit_of(request)
    visit.endpoint = endpoint.name
    require_scope(visit.caller, endpoint)
    room = bodies.of(visit.who)
    response = await respond(request, room)
    room.until_sent(response)
    return response


async def _with_answers(respond: Callable[[HttpRequest], Awaitable[Response]], request: HttpRequest) -> Response:
    """What `respond` gives, or the answer to what it raises."""
    try:
        return await respond(request)
    except (GlassblockError, TooLate, TooSlow, ClientDisconnect, Gone) as fault:
        answer = _answer_to(fault)
        _forget_frames(fault)
        return answer


def _answer_to(fault: Exception) -> Response:
    if isinstance(fault, GlassblockError):
        return answer_error(fault)
    if isinstance(fault, TooLate):
        late = ServiceUnavailable(
            "no answer within the time that the request allows", field="Prefer", hint="allow more time, or ask for less"
        )
        return answer_error(late, status=504)
    if isinstance(fault, TooSlow):
        slow = InvalidValue("the body did not come in time", field="body", hint="send it faster, or less")
        return answer_error(slow, status=408)
    return _Unsent()


class _Unsent(Response):
    """For a caller who has gone: an answer that nobody hears is counted as none, with status 0 (`envelope.Visit`)."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send nothing."""


def _forget_frames(fault: BaseException | None) -> None:
    """Let go what the frames of an answered fault hold: else the body stays until garbage is collected."""
    while fault is not None:
        fault.__traceback__ = None
        fault = fault.__cause__ or fault.__context__
