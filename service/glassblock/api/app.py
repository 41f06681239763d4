"""The ASGI application: routes made from the endpoint table, errors from the answer table."""

import stat
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import glassblock
from glassblock.api.answers import ANSWERS, answer_defect, answer_error, answer_http_exception
from glassblock.api.bodies import parse_body, read_body, render
from glassblock.api.openapi import document
from glassblock.api.routes import ROUTES, Call, Route, Service
from glassblock.api.settings import MIB, Settings
from glassblock.errors import GlassblockError, InvalidValue
from glassblock.jobs.audits import AuditJobs
from glassblock.operations.operations import Operations
from glassblock.operations.store import CheckpointStore
from glassblock.wire.endpoints import ENDPOINTS, Nothing

LIGHT_THREADS = 8
"""Threads for what only looks: health, lists, tables, jobs."""

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
    store = CheckpointStore(settings.roots, device=settings.device, resident_bytes=settings.resident_mib * MIB)
    operations = Operations(store)
    service = Service(operations, AuditJobs(operations.audit, status_of=lambda error: ANSWERS[type(error)]))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        yield
        await anyio.to_thread.run_sync(service.audits.close)

    app = FastAPI(title="Glassblock", version=glassblock.__version__, lifespan=lifespan, redoc_url=None, docs_url=None)
    app.openapi = document
    lanes = {"light": anyio.CapacityLimiter(LIGHT_THREADS), "heavy": anyio.CapacityLimiter(settings.threads)}
    for endpoint in ENDPOINTS:
        answer = _answer(ROUTES[endpoint.name], service, settings, lanes)
        # A checkpoint's name is a path: it may hold slashes, quoted or not.
        path = endpoint.path.replace("{name}", "{name:path}")
        app.add_route(path, answer, methods=[endpoint.method], include_in_schema=False)
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
    route: Route, service: Service, settings: Settings, lanes: Mapping[str, anyio.CapacityLimiter]
) -> Callable[[HttpRequest], Awaitable[Response]]:
    endpoint = route.endpoint

    limit = settings.max_body_bytes if endpoint.tensors_in else min(settings.max_body_bytes, MAX_MESSAGE_BYTES)

    def work(request: HttpRequest, body: memoryview) -> Response:
        message, tensors = parse_body(endpoint, request.headers, body)
        reply: Any = route.handler(Call(service, message, tensors, request))
        if isinstance(reply, Response):
            return reply
        return render(endpoint, reply, accept=request.headers.get("accept", ""))

    async def answer(request: HttpRequest) -> Response:
        try:
            # An endpoint that is asked by its path alone does not look at a body.
            body = memoryview(b"") if endpoint.request is Nothing else await read_body(request, limit=limit)
            if route.lane == "inline":
                return work(request, body)
            return await anyio.to_thread.run_sync(work, request, body, limiter=lanes[route.lane])
        except GlassblockError as error:
            return answer_error(error)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it

    return answer
