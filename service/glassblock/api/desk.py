"""Where parsed requests are handed in: they wait for their turn, are worked on in a thread, and what comes is sent.

What follows from a message, tensors and files alone is computed once for all who ask it at the same time, is told by
its tag to those who hold it already, and is stored where there is a folder for it.
"""

import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Literal, NamedTuple

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glassblock.api.bodies import as_tensors, response_of
from glassblock.api.entity_tags import holds_tag
from glassblock.api.envelope import visit_of
from glassblock.api.flights import Flights
from glassblock.api.lanes import FairLane
from glassblock.api.results import Counted, Rendered, StoredAnswers
from glassblock.api.routes import Call, Route
from glassblock.api.settings import MIB, Settings
from glassblock.errors import HINT_AS_JOB, ServiceUnavailable, TooLarge
from glassblock.operations.content import Content

log = logging.getLogger(__name__)

LIGHT_THREADS = 8
"""Threads for what only looks: health, lists, tables; and for reading messages."""

STORED_THREADS = 2
"""Threads that read and write stored answers. These keep a disk busy; more, with up to 128 MiB in each, would keep the
event loop from the processor, and health with it."""

JOBS_THREADS = 8
"""Threads for what asks the database of the jobs, which may be slow."""

READY_THREADS = 2
"""Threads for whoever asks whether the service is ready: not behind those who wait for a database that is locked."""

AFFORDABLE = 256
"""Forms of requests last found to cost no more than a caller may wait for. Another look would take half a millisecond;
of a mixture of many experts several."""

WATCHED_LANES = frozenset({"heavy", "long"})
"""In which work is worth stopping when its caller hangs up."""

Work = Callable[[Call], Rendered | Response]
Line = Literal["heavy", "long"]


class Limits(NamedTuple):
    """What a request may cost while its caller waits: TFLOP, and GiB read; None for no limit."""

    tflop: float | None
    gib: float | None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return self.tflop is not None or self.gib is not None


class Desk:
    """The lanes of one service, and the answers that it keeps.

    Args:
        settings: how many work at once, how many may wait, where answers are stored.
    """

    def __init__(self, settings: Settings) -> None:
        self._threads = {
            "light": anyio.CapacityLimiter(LIGHT_THREADS),
            "stored": anyio.CapacityLimiter(STORED_THREADS),
            "ready": anyio.CapacityLimiter(READY_THREADS),
            "jobs": anyio.CapacityLimiter(JOBS_THREADS),
            "heavy": anyio.CapacityLimiter(settings.heavy),
            "long": anyio.CapacityLimiter(1),
        }
        self._lanes: Mapping[str, FairLane] = {
            "heavy": FairLane(settings.heavy, settings.queue),
            "long": FairLane(1, settings.queue),
        }
        self._limits = Limits(settings.wait_tflop, settings.wait_gib)
        self._affordable: deque[bytes] = deque(maxlen=AFFORDABLE)
        self._folder, self._budget = settings.answers_folder, settings.answers_mib * MIB
        self._stored: StoredAnswers | None = None
        self._open: tuple[TaskGroup, Flights[Rendered | Response]] | None = None

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Open it while the service runs; what is under way at the end is stopped."""
        if self._folder is not None:
            try:
                self._stored = await anyio.to_thread.run_sync(StoredAnswers, self._folder, self._budget)
            except OSError as fault:
                log.warning("no answers are stored: %s: %s", self._folder, fault.strerror)
        async with anyio.create_task_group() as group:
            self._open = group, Flights(group)
            try:
                yield
            finally:
                self._open = None
                group.cancel_scope.cancel()

    def lines(self) -> Mapping[str, tuple[int, int]]:
        """How many work and how many wait, by lane."""
        return {name: (lane.working, lane.waiting) for name, lane in self._lanes.items()}

    def counted(self) -> Counted | None:
        """The stored answers; None where none are stored."""
        return None if self._stored is None else self._stored.counted()

    async def ask(self, route: Route, request: HttpRequest, parse: Callable[[], Call], work: Work) -> Response:
        """The response to one request.

        Raises:
            GlassblockError: it cannot be read or answered, or has to come back.
        """
        if self._open is None:
            raise ServiceUnavailable("the service starts, or stops", hint="send it again", retry_after=1)
        _, flights = self._open
        # Read outside the lanes: what is refused for its form waits for nobody.
        call, key = await anyio.to_thread.run_sync(partial(_read, route, parse), limiter=self._threads["light"])
        if not route.kept and route.lane not in WATCHED_LANES:
            return sent(await anyio.to_thread.run_sync(work, call, limiter=self._threads[route.lane]))
        tags: dict[str, str] = {}
        if key is not None:
            tag = f'"{key.name[:32]}"'
            # Weak: sums may be taken in another order when it is computed again.
            tags = {"ETag": f"W/{tag}", "Cache-Control": "private, no-cache", "Vary": "Accept"}
            # `*` stands for any answer, and of this one nobody knows yet whether there is any.
            if holds_tag(request.headers.get("if-none-match", "").replace("*", ""), tag):
                return Response(status_code=304, headers=tags)
        stored = None if key is None or self._stored is None else await self._found(key)
        if stored is not None:
            return response_of(stored, tags)
        if self._limits.any and route.endpoint.job and (key is None or key.form not in self._affordable):
            # Before the line, and after the answers that are there already: those cost nothing.
            await anyio.to_thread.run_sync(
                partial(_refuse_costly, call, route.endpoint.name, self._limits), limiter=self._threads["light"]
            )
            if key is not None:
                self._affordable.append(key.form)
        done = await flights.run(key, partial(self._computed, route, call, work, visit_of(request).who, key))
        return sent(done, tags)

    async def _computed(
        self, route: Route, call: Call, work: Work, caller: str, key: Content | None
    ) -> Rendered | Response:
        """What the work gives, once for all who ask it; it is stored beside their answers."""
        lane = self._lanes.get(route.lane)
        async with nullcontext() if lane is None else lane.slot(caller):
            done = await anyio.to_thread.run_sync(work, call, limiter=self._threads[route.lane])
        if isinstance(done, Rendered) and key is not None and self._stored is not None and self._open is not None:
            self._open[0].start_soon(self._keep, self._stored, key, done)
        return done

    async def _found(self, key: Content) -> Rendered | None:
        assert self._stored is not None  # noqa: S101  asked before
        return await anyio.to_thread.run_sync(self._stored.get, key, limiter=self._threads["stored"])

    async def _keep(self, stored: StoredAnswers, key: Content, done: Rendered) -> None:
        try:
            await anyio.to_thread.run_sync(stored.put, key, done, limiter=self._threads["stored"])
        except Exception:
            log.exception("an answer cannot be stored")


def sent(done: Rendered | Response, headers: Mapping[str, str] | None = None) -> Response:
    """What is sent to one caller of what was computed for all."""
    return response_of(done, headers) if isinstance(done, Rendered) else done


def _read(route: Route, parse: Callable[[], Call]) -> tuple[Call, Content | None]:
    call = parse()
    if not route.kept:
        return call, None
    form = "tensors" if as_tensors(route.endpoint, call.http.headers.get("accept", "")) else "json"
    posted = visit_of(call.http).posted
    return call, call.operations.content_of(route.endpoint.name, call.message, call.tensors, form=form, posted=posted)


def _refuse_costly(call: Call, operation: str, limits: Limits) -> None:
    plan = call.operations.cost(operation, call.message, call.tensors)
    for cost, limit, unit, setting in (
        (plan.flops / 1e12, limits.tflop, "TFLOP to compute", "TFLOP"),
        (plan.bytes_read / (1 << 30), limits.gib, "GiB to read", "GIB"),
    ):
        if limit is not None and cost > limit:
            raise TooLarge(
                f"this is estimated to be {cost:.3g} {unit}, and a caller may wait for {limit:g}",
                hint=f"{HINT_AS_JOB}ask for less, or raise GLASSBLOCK_WAIT_{setting}",
            )
