"""The one door through which the command line starts a service: inside its own process, or to listen."""

import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import anyio.from_thread
import httpx
import uvicorn
from anyio.from_thread import BlockingPortal
from fastapi import FastAPI
from pydantic import ValidationError

from glassblock.api.answers import invalid_value
from glassblock.api.app import create_app
from glassblock.api.settings import Settings


@contextmanager
def connect(*, roots: Sequence[Path], device: str = "auto") -> Generator[httpx.BaseTransport]:
    """The same service in this process: a transport for an httpx client, its event loop in a thread.

    Args:
        roots: folders that hold checkpoints.
        device: "auto", "cpu" or "cuda:N".

    Raises:
        InvalidValue: a root is no folder, or the device is not here.
    """
    app = create_app(Settings(roots=tuple(roots), device=device))
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
    ):
        yield _InProcess(app, portal)


def serve(**given: Any) -> None:
    """Listen until SIGTERM or SIGINT; requests under way are finished first.

    Args:
        given: fields of `Settings`; what is not given comes from `GLASSBLOCK_*` or its default.

    Raises:
        InvalidValue: a setting cannot be used, or the address is open to others without leave.
    """
    try:
        settings = Settings(**given)
    except ValidationError as fault:
        raise invalid_value(fault) from fault
    settings.refuse_open_address()
    app = create_app(settings)
    # uvicorn stops gracefully, then raises the signal again: these make that an ordinary return.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _return)
    graceful = 30  # seconds that requests under way are given
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        timeout_graceful_shutdown=graceful,
        access_log=False,
        server_header=False,
    )
    uvicorn.Server(config).run()


def _return(_number: int, _frame: FrameType | None) -> None: ...


class _InProcess(httpx.BaseTransport):
    def __init__(self, app: FastAPI, portal: BlockingPortal) -> None:
        self._transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self._portal = portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self._portal.call(self._handle, request)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(
            httpx.Request(request.method, request.url, headers=request.headers, content=request.read())
        )
        return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())
