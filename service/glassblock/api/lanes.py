"""The line for the device: so many at once, the next one from another caller than the last, and no longer than so.

A caller is an API key, or an address where there are no keys. Each has its own line; the lines take turns, so that one
who sends a thousand requests at once delays another who sends one by a single request.
"""

from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from glassblock.errors import NoRoom

GUESSED_SECONDS = 1.0
"""How long one takes, before any has been measured."""

WEIGHT_OF_NEWEST = 0.2


@dataclass(eq=False)
class _Waiting:
    called: anyio.Event = field(default_factory=anyio.Event)


class FairLane:
    """Lets so many through at once. Used within one event loop.

    Args:
        slots: how many work at once.
        places: how many may wait; one more is told to come back.
    """

    def __init__(self, slots: int, places: int) -> None:
        self._slots = slots
        self._places = places
        self._working = 0
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._seconds = GUESSED_SECONDS

    @property
    def working(self) -> int:
        """How many are through."""
        return self._working

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(len(line) for line in self._lines.values())

    @asynccontextmanager
    async def slot(self, caller: str) -> AsyncGenerator[None]:
        """Wait for a turn, then hold it. Who is cancelled while waiting leaves the line.

        Raises:
            NoRoom: as many wait as may.
        """
        await self._enter(caller)
        since = anyio.current_time()
        try:
            yield
        finally:
            self._seconds += WEIGHT_OF_NEWEST * (anyio.current_time() - since - self._seconds)
            self._leave()

    async def _enter(self, caller: str) -> None:
        if self._working < self._slots and not self._lines:
            self._working += 1
            return
        if self.waiting >= self._places:
            raise NoRoom(
                f"{self.waiting} requests wait for the device already",
                hint="send it again later, or raise GLASSBLOCK_QUEUE",
                retry_after=max(1.0, self._seconds * self.waiting / self._slots),
            )
        mine = _Waiting()
        line = self._lines.setdefault(caller, deque())
        line.append(mine)
        try:
            await mine.called.wait()
        except BaseException:
            if mine.called.is_set():  # called and cancelled at once: the turn goes to the next
                self._leave()
            else:
                line.remove(mine)
                if not line:
                    self._lines.pop(caller, None)
            raise

    def _leave(self) -> None:
        """Call the first of the caller whose turn it is; the slot goes over without being free in between."""
        if not self._lines:
            self._working -= 1
            return
        caller, line = self._lines.popitem(last=False)
        line.popleft().called.set()
        if line:
            self._lines[caller] = line  # behind all others
