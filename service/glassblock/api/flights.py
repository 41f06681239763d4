"""Requests that ask the same at the same time share one computation; it ends early when the last of them has gone."""

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from glassblock.errors import ServiceUnavailable

ResultT = TypeVar("ResultT")


@dataclass(eq=False)
class _Flight(Generic[ResultT]):
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    landed: anyio.Event = field(default_factory=anyio.Event)
    aboard: int = 0
    results: list[ResultT] = field(default_factory=list[ResultT])
    faults: list[Exception] = field(default_factory=list[Exception])


class Flights(Generic[ResultT]):
    """Computations under way, by what they compute. Used within one event loop.

    Args:
        group: in which they run: they outlive the request that began them while another waits for the same.
    """

    def __init__(self, group: TaskGroup) -> None:
        self._group = group
        self._flights: dict[Hashable, _Flight[ResultT]] = {}

    async def run(self, key: Hashable | None, work: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What `work` gives, or what the same work gives that is under way. A key of None is shared with nobody.

        Raises:
            Whatever `work` raises, in everybody who waits for it.
            ServiceUnavailable: the group was cancelled before.
        """
        flight = None if key is None else self._flights.get(key)
        if flight is None:
            flight = _Flight[ResultT]()
            if key is not None:
                self._flights[key] = flight
            self._group.start_soon(self._fly, key, flight, work)
        flight.aboard += 1
        try:
            await flight.landed.wait()
        finally:
            flight.aboard -= 1
            if not flight.aboard and not flight.landed.is_set():
                self._gone(key, flight)  # who comes now must not join what is being stopped
                flight.scope.cancel()
        if flight.faults:
            raise flight.faults[0]
        if not flight.results:
            raise ServiceUnavailable("the service stops", hint="send it again", retry_after=1)
        return flight.results[0]

    async def _fly(
        self, key: Hashable | None, flight: _Flight[ResultT], work: Callable[[], Awaitable[ResultT]]
    ) -> None:
        try:
            with flight.scope:
                try:
                    flight.results.append(await work())
                except Exception as fault:
                    flight.faults.append(fault)
        finally:  # also where the whole group is cancelled: whoever waits must hear of it
            self._gone(key, flight)
            flight.landed.set()

    def _gone(self, key: Hashable | None, flight: _Flight[ResultT]) -> None:
        if key is not None and self._flights.get(key) is flight:
            del self._flights[key]
