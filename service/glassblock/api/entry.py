"""The one door through which the command line starts a service: inside its own process, or to listen."""

import signal
import socket
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import anyio.from_thread
import httpx
import uvicorn
from anyio.from_thread import BlockingPortal
from fastapi import FastAPI
from pydantic import ValidationError

from glassblock.api.allocator import settle_objects, share_arena
from glassblock.api.answers import invalid_value
from glassblock.api.app import create_app, root_trouble
from glassblock.api.connections import BACKLOG, BoundedProtocol, Crowd, room_for
from glassblock.api.envelope import MAX_HEAD_BYTES
from glassblock.api.listening import listening_sockets, url_of
from glassblock.api.logs import log_as_json
from glassblock.api.settings import Settings
from glassblock.jobs.database import open_database
from glassblock.operations.operations import Operations
from glassblock.operations.repairs import Outputs
from glassblock.operations.store import CheckpointStore, usable_device
from glassblock.wire.printable import printable
from glassblock.wire.repairs import RepairAnswer, RepairRequest
from glassblock.wire.selftests import SelftestAnswer, SelftestRequest

GRACE_SECONDS = 30
"""What requests under way are given when the service is told to stop."""


@contextmanager
def connect(*, roots: Sequence[Path], device: str = "auto") -> Generator[httpx.BaseTransport]:
    """The same service in this process: a transport for an httpx client, its event loop in a thread.

    Args:
        roots: folders that hold checkpoints.
        device: "auto", "cpu" or "cuda:N".

    Raises:
        InvalidValue: a root is no folder, or the device is not here.
    """
    # Its own jobs alone: a shared queue would hand them to services that have other roots. Its caller is at home.
    # Nobody else has the device, so it may take as long as it takes, and room will not come of waiting.
    alone = dict.fromkeys(
        ("data", "database", "keys_file", "access_log", "otlp_endpoint", "output_root", "wait_tflop", "wait_gib")
    )
    with in_process(create_app(_settings(roots=tuple(roots), device=device, room_seconds=0, **alone))) as transport:
        yield transport


def repair(
    roots: Sequence[Path],
    request: RepairRequest,
    *,
    output_root: Path | None = None,
    in_place: bool = False,
    device: str = "auto",
    progress: Callable[[int, int, str], None],
) -> RepairAnswer:
    """Repair a checkpoint under `roots` in this thread, so that Ctrl-C ends it and what it was writing.

    Args:
        roots: folders that hold the checkpoint, and a reference.
        request: what to repair.
        output_root: folder for the output.
        in_place: without an output, exchange headers and config where they lie.
        device: "auto", "cpu" or "cuda:N".
        progress: told (done, total, what comes next).

    Raises:
        GlassblockError: see `operations.repairs.repair`.
    """
    store = CheckpointStore(roots, device=device)
    operations = Operations(store, Outputs(output_root, in_place=in_place))
    return operations.repair(request, progress=progress).answer


def selftest(
    root: Path, request: SelftestRequest, *, device: str = "auto", progress: Callable[[int, int, str], None]
) -> SelftestAnswer:
    """Plant mistakes in a checkpoint under `root`, in memory, and see what is found; in this thread.

    Raises:
        GlassblockError: see `operations.selftests.selftest`.
    """
    return Operations(CheckpointStore([root], device=device)).selftest(request, progress=progress).answer


@contextmanager
def in_process(app: FastAPI) -> Generator[httpx.BaseTransport]:
    """A transport to `app`, started and stopped in this process."""
    fault: BaseException | None = None
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
    ):
        try:
            yield _InProcess(app, portal)
        except BaseException as met:
            fault = met
    if fault is not None:
        raise fault


def serve(**given: Any) -> None:
    """Listen until SIGTERM or SIGINT; requests under way are finished first. Says on stderr where it listens.

    Args:
        given: fields of `Settings`; what is not given comes from `GLASSBLOCK_*` or its default.

    Raises:
        InvalidValue: a setting cannot be used, the address is open to others without leave, or the port is taken.
        StorageUnavailable: the database of the jobs does not answer.
    """
    settings = _settings(**given)
    settings.refuse_open_address()
    share_arena()  # before there are threads to have their own
    log_as_json(settings.log_level)
    # What somebody has just typed must be there; what an environment names may be mounted later.
    app = create_app(settings, roots_may_come="roots" not in given)
    if settings.jobs_place is not None:
        open_database(settings.jobs_place).close()  # what is wrong with it is told here, and not in a trace
    listeners = listening_sockets(settings.host, settings.port)
    # uvicorn stops gracefully, then raises the signal again: these make that an ordinary return.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _return)
    crowd = Crowd(
        room_for(settings.connections), head_seconds=settings.head_seconds, unread_seconds=settings.silence_seconds
    )
    config = uvicorn.Config(
        app,
        http=cast("type[BoundedProtocol]", partial(BoundedProtocol, crowd=crowd)),
        ws="none",
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=GRACE_SECONDS,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=settings.trusted_proxies or None,
    )
    settle_objects()
    _Server(config, settings).run(sockets=listeners)


class _Server(uvicorn.Server):
    """uvicorn's, with one line once it listens in place of its own four."""

    def __init__(self, config: uvicorn.Config, settings: Settings) -> None:
        super().__init__(config)
        self._settings = settings

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.started or not sockets:
            return
        url = url_of(self._settings.host, sockets[0])
        roots = ", ".join(_told_root(root) for root in self._settings.roots) or "none"
        device = usable_device(self._settings.device)
        with suppress(OSError):  # nobody reads it: no reason not to serve
            sys.stderr.write(printable(f"glassblock listens on {url} (device {device}, roots: {roots})") + "\n")
            sys.stderr.flush()


def _told_root(root: Path) -> str:
    why = root_trouble(root)
    return str(root) if why is None else f"{root} ({why})"


def _settings(**given: Any) -> Settings:
    try:
        return Settings(**given)
    except ValidationError as fault:
        error = invalid_value(fault)
        name = str(error.field).partition(".")[0]
        told = "`glassblock serve --help` tells what it may be"
        error.hint = told if name in given else f"it is set by GLASSBLOCK_{name.upper()} in the environment"
        raise error from fault


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
