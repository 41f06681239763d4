"""Bodies received straight into the memory that keeps them.

On its usual way a body is read in pieces of 256 KiB and copied several times before it lies in one piece, which
takes more than twice as long as the socket does. `LandingProtocol` offers a shortcut to whoever has memory of
the declared size: all but the last byte of the body is written there by the kernel. The last byte goes the usual
way, so that h11 sees the end of the body and nothing else of the protocol is ours.

That memory comes from the system and goes back to it with the last view, past malloc, which would keep what lies
between two bodies that came and went at different times. The last two are kept for the next body,
whose pages then need not be cleared.
"""

import asyncio
import contextlib
import mmap
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import h11
import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from glassblock.errors import NoRoom

Land = Callable[[memoryview, Callable[[], None]], Awaitable[int]]
"""Fills memory with what comes next of the body. Told after every arrival; returns how many bytes were written."""

LANDING_BYTES = 1 << 20
"""From this size on a body is worth its own way in."""

LARGEST_KEPT = 32 << 20
"""Bytes of a body whose memory is kept for the next one."""

_kept: deque[mmap.mmap] = deque(maxlen=2)

_EXTENSION = "glassblock.land"
_MAX_HEAD_BYTES = 64 * 1024


def untouched(size: int) -> memoryview:
    """Memory for a body, of which nothing is taken until it is written to; released with its last view.

    What it holds is undefined: an earlier body may have lain there.

    Raises:
        NoRoom: the system has none.
    """
    if size < LANDING_BYTES or not hasattr(mmap, "MAP_PRIVATE"):
        return memoryview(cast("bytes", np.empty(size, dtype=np.uint8)))
    memory = _kept_one(size) or _mapped(size)
    array = np.frombuffer(memory, dtype=np.uint8, count=size)
    if len(memory) <= LARGEST_KEPT:
        weakref.finalize(array, _kept.append, memory).atexit = False
    return memoryview(cast("bytes", array))


def _kept_one(size: int) -> mmap.mmap | None:
    with contextlib.suppress(IndexError):  # another thread took the last one
        for _ in range(len(_kept)):
            memory = _kept.popleft()
            if size <= len(memory) <= 2 * size:
                return memory
            _kept.append(memory)
    return None


def _mapped(size: int) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as fault:
        raise NoRoom(
            f"there is no memory for a body of {size:,} bytes: {fault.strerror}",
            field="body",
            hint="send it again later, or send less",
            retry_after=5.0,
        ) from fault
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def land_of(scope: Scope) -> Land | None:
    """The shortcut of this request, where the server has one."""
    return cast("Land | None", scope.get("extensions", {}).get(_EXTENSION))


class LandingProtocol(H11Protocol):
    """uvicorn's protocol, with the shortcut in the scope of every request, and without a copy on the way out."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], **rest: Any) -> None:
        super().__init__(config, server_state, app_state, **rest)
        self.conn = _Connection(h11.SERVER, config.h11_max_incomplete_event_size or _MAX_HEAD_BYTES)

    def handle_events(self) -> None:
        """Hand on what h11 has read."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            # Its task was made just now and runs only after this returns.
            extensions = cast("dict[str, dict[str, Any]]", self.cycle.scope.setdefault("extensions", {}))
            extensions[_EXTENSION] = cast("Any", self.land)

    async def land(self, memory: memoryview, arrived: Callable[[], None]) -> int:
        """Fill `memory` with what comes next of the body under way.

        Args:
            memory: shorter than what is still to come by a byte at least.
            arrived: called after every arrival.

        Returns:
            Bytes written: `memory.nbytes`, or 0 where the body has no declared length: nothing was read then.

        Raises:
            ClientDisconnect: the caller hung up.
        """
        # h11 counts down what it still expects. It has no public way to be told of bytes that it did not see.
        reader: Any = getattr(self.conn, "_reader", None)
        left = getattr(reader, "_remaining", None)
        waiting = len(self.cycle.body)
        if not isinstance(left, int) or left + waiting <= memory.nbytes or self.transport.is_closing():
            return 0
        taken = min(waiting, memory.nbytes)
        memory[:taken] = self.cycle.body[:taken]
        del self.cycle.body[:taken]
        if taken < memory.nbytes:
            self.cycle.message_event.clear()
            landing = _Landing(self, memory[taken:], arrived)
            self.transport.set_protocol(landing)
            self.flow.resume_reading()
            try:
                await landing.full
            finally:
                reader._remaining -= landing.filled
                self.transport.set_protocol(self)
        return memory.nbytes


class _Connection(h11.Connection):
    """h11's, which hands on the bytes of a body as they lie."""

    def send(self, event: h11.Event) -> Any:
        """What to write to the socket for `event`."""
        parts = self.send_with_data_passthrough(event) or []
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Landing(asyncio.BufferedProtocol):
    """Stands in for the protocol while the kernel writes into `memory`."""

    def __init__(self, inner: LandingProtocol, memory: memoryview, arrived: Callable[[], None]) -> None:
        self._inner = inner
        self._memory = memory
        self._arrived = arrived
        self.filled = 0
        self.full: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  of the protocol's making
        """Where the next bytes go."""
        return self._memory[self.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were written."""
        self.filled += nbytes
        self._arrived()
        if self.filled == self._memory.nbytes:
            # At once: the next byte that comes is none of ours.
            self._inner.transport.set_protocol(self._inner)
            self._settle()

    def eof_received(self) -> None:
        """The caller sends no more: the connection closes."""
        self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The caller hung up."""
        self._inner.connection_lost(exc)
        self._settle(ClientDisconnect())

    def pause_writing(self) -> None:
        """Of the way back."""
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Of the way back."""
        self._inner.resume_writing()

    def _settle(self, fault: Exception | None = None) -> None:
        if self.full.done():
            return
        if fault is None:
            self.full.set_result(None)
        else:
            self.full.set_exception(fault)
