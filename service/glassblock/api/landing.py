"""Bodies received straight into the memory that keeps them, and sent from where they lie.

On its usual way a body is read in pieces of 256 KiB and copied several times before it lies in one piece, which
takes more than twice as long as the socket does; and what a socket does not take at once of an answer, asyncio copies.
`LandingProtocol` offers two shortcuts: whoever has memory of the declared size has the body written there by the
kernel, and whoever has memory to send has it read there, by a thread for as long as the other end keeps up. h11 is
told how much it was, and nothing else of the protocol is ours.

That memory comes from the system and goes back to it with the last view, past malloc, which would keep what lies
between two bodies that came and went at different times. The last two are kept for the next body,
whose pages then need not be cleared.
"""

import asyncio
import contextlib
import mmap
import os
import select
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import h11
import numpy as np
from starlette.requests import ClientDisconnect
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from glassblock.errors import NoRoom

Land = Callable[[memoryview, Callable[[memoryview], None]], Awaitable[int]]
"""Fills memory with what comes next of the body. Tells what came after every arrival; returns how many bytes it was."""

Launch = Callable[[memoryview], Awaitable[int]]
"""Sends what comes next of the answer's body; returns how many bytes the socket took."""

LANDING_BYTES = 1 << 20
"""From this size on a body is worth its own way in, and out."""

ROUND_BYTES = 16 << 20
"""Read of all bodies together before the event loop turns to others. The system may hold several MiB for each
connection, and health waits for all of them; but a sender who is alone is slowed down by small pieces."""

SENDERS = 2
"""Threads that send. One of them fills any link; many would keep the event loop from the processor and from Python's
lock, and health with it."""

TURN_SECONDS = 0.02
"""How long a thread sends before another answer gets its turn: tens of MiB to whoever reads as fast as it sends."""

PATIENCE_MS = 5
"""How long a thread waits for the socket to take more. Whoever reads more slowly than that is waited for in the event
loop, where it costs nothing; one who keeps up is never noticed there, which nearly halves the time of an answer."""

PIECE_BYTES = 64 << 10
"""What the event loop sends in between, once the socket takes it: then a thread goes on."""

LARGEST_KEPT = 32 << 20
"""Bytes of a body whose memory is kept for the next one."""

_kept: deque[mmap.mmap] = deque(maxlen=2)

_LAND = "glassblock.land"
_LAUNCH = "glassblock.launch"
_MAX_HEAD_BYTES = 64 * 1024

_arrivals = memoryview(bytearray(256 * 1024))
"""Where every connection reads what does not land; it is handed on before the next one reads."""

_HEAD_BYTES = 16 * 1024
"""Read at once where a head is due, so that most of the body behind it can land."""


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
    return cast("Land | None", scope.get("extensions", {}).get(_LAND))


def launch_of(scope: Scope) -> Launch | None:
    """The shortcut of this request's answer, where the server has one."""
    return cast("Launch | None", scope.get("extensions", {}).get(_LAUNCH))


class LandingProtocol(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's protocol, with the shortcuts in the scope of every request."""

    def __init__(self, config: Config, server_state: ServerState, app_state: dict[str, Any], **rest: Any) -> None:
        super().__init__(config, server_state, app_state, **rest)
        self.conn = _Connection(h11.SERVER, config.h11_max_incomplete_event_size or _MAX_HEAD_BYTES)
        self._launching = 0

    @property
    def unsent(self) -> int:
        """Bytes of the answer under way that the other end has not taken yet, so far as the system tells."""
        own = self.transport.get_extra_info("socket")
        return self.transport.get_write_buffer_size() + self._launching + _waiting_in(own.fileno())

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  uvicorn's
        """Somebody is there."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # else what comes next is copied behind what is left

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  of the protocol's making
        """Where the next bytes go."""
        return _arrivals[:_HEAD_BYTES] if self.conn.their_state is h11.IDLE else _arrivals

    def buffer_updated(self, nbytes: int) -> None:
        """So many came."""
        self.data_received(cast("bytes", _arrivals[:nbytes]))

    def handle_events(self) -> None:
        """Hand on what h11 has read."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            # Its task was made just now and runs only after this returns.
            extensions = cast("dict[str, dict[str, Any]]", self.cycle.scope.setdefault("extensions", {}))
            extensions[_LAND] = cast("Any", self.land)
            if os.name == "posix":  # Windows' loop watches no descriptors
                extensions[_LAUNCH] = cast("Any", self.launch)

    async def land(self, memory: memoryview, arrived: Callable[[memoryview], None]) -> int:
        """Fill `memory` with what comes next of the body under way.

        Args:
            memory: no longer than what is still to come.
            arrived: called after every arrival with what came.

        Returns:
            Bytes written: `memory.nbytes`, or 0 where the body has no declared length: nothing was read then.

        Raises:
            ClientDisconnect: the caller hung up.
        """
        # h11 counts down what it still expects. It has no public way to be told of bytes that it did not see.
        reader: Any = getattr(self.conn, "_reader", None)
        left = getattr(reader, "_remaining", None)
        waiting = len(self.cycle.body)
        if not isinstance(left, int) or left + waiting < memory.nbytes or self.transport.is_closing():
            return 0
        if self.cycle.waiting_for_100_continue:
            told = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(told))
            self.cycle.waiting_for_100_continue = False
        taken = min(waiting, memory.nbytes)
        memory[:taken] = self.cycle.body[:taken]
        del self.cycle.body[:taken]
        arrived(memory[:taken])
        if taken < memory.nbytes:
            self.cycle.message_event.clear()
            landing = _Landing(self, memory[taken:], arrived)
            _Landing.under_way += 1
            self.transport.set_protocol(landing)
            self.flow.resume_reading()
            try:
                await landing.full
            finally:
                _Landing.under_way -= 1
                reader._remaining -= landing.filled
                self.transport.set_protocol(self)
            self.handle_events()  # which may be the end of the body
        return memory.nbytes

    async def launch(self, memory: memoryview) -> int:
        """Send `memory`, next of the answer's body.

        Returns:
            Bytes that the socket took: fewer than `memory.nbytes` where the connection is over.
        """
        if self.cycle.disconnected:  # or told that it sent no HTTP
            return 0
        if not self.transport.is_closing():
            self.transport.write(self.conn.send(h11.Data(data=b"")))  # a head that waits
            await self.flow.drain()
        if self.transport.is_closing():
            self._over()
            return 0
        left = memoryview(self.conn.send(h11.Data(data=cast("bytes", memory))))
        own = self.transport.get_extra_info("socket")
        try:
            while left and not self.transport.is_closing():
                async with _senders():
                    # A descriptor of its own: the connection may be closed, and its number given away, meanwhile.
                    left = left[await anyio.to_thread.run_sync(_sent_at_once, own.dup(), left) :]
                if left and not self.transport.is_closing():
                    rest = left[PIECE_BYTES:]
                    self._launching = rest.nbytes
                    self.transport.write(left[:PIECE_BYTES])
                    await self.flow.drain()
                    left = left if self.transport.is_closing() else rest
        except OSError:
            self.transport.abort()
        finally:
            self._launching = 0
        if left:
            self._over()
        return memory.nbytes - left.nbytes

    def _over(self) -> None:
        """Nobody is there: what comes next is dropped. Else h11 misses what was not sent: uvicorn hears of it later."""
        self.cycle.disconnected = True


def _sent_at_once(out: socket.socket, memory: memoryview) -> int:
    """Send over a socket that does not block, from a thread, for as long as it keeps taking; it is closed then.

    Returns:
        Bytes that it took.
    """
    sent, until = 0, time.monotonic() + TURN_SECONDS
    with out:
        ready = select.poll()
        ready.register(out, select.POLLOUT)
        while sent < memory.nbytes and time.monotonic() < until:
            try:
                sent += out.send(memory[sent:])
            except BlockingIOError:
                if not ready.poll(PATIENCE_MS):
                    break
    return sent


_SENDERS = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("glassblock_senders")


def _senders() -> anyio.CapacityLimiter:
    try:
        return _SENDERS.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(SENDERS)
        _SENDERS.set(limiter)
        return limiter


def _waiting_in(descriptor: int) -> int:
    """Bytes that a socket has taken and the other end has not: it takes no more before a third of them, MiB perhaps, is
    gone. 0 where the system does not tell."""
    if sys.platform != "linux":
        return 0
    import fcntl  # noqa: PLC0415  other systems may have none
    import termios  # noqa: PLC0415

    try:
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it is closed
        return 0


class _Connection(h11.Connection):
    """h11's, which hands on the bytes of a body as they lie, and a head together with what comes behind it."""

    _head: tuple[bytes, ...] = ()

    def send(self, event: h11.Event) -> Any:
        """What to write to the socket for `event`."""
        parts = (*self._head, *(self.send_with_data_passthrough(event) or ()))
        self._head = ()
        if isinstance(event, h11.Response) and any(name == b"content-length" for name, _ in event.headers):
            self._head = parts  # the rest is there: to send twice is to wake the reader twice
            return b""
        return parts[0] if len(parts) == 1 else b"".join(parts)


class _Landing(asyncio.BufferedProtocol):
    """Stands in for the protocol while the kernel writes into `memory`."""

    under_way = 0

    def __init__(self, inner: LandingProtocol, memory: memoryview, arrived: Callable[[memoryview], None]) -> None:
        self._inner = inner
        self._memory = memory
        self._arrived = arrived
        self.filled = 0
        self.full: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002  of the protocol's making
        """Where the next bytes go."""
        return self._memory[self.filled : self.filled + ROUND_BYTES // _Landing.under_way]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes were written."""
        start, self.filled = self.filled, self.filled + nbytes
        self._arrived(self._memory[start : self.filled])
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
