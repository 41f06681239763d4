"""Work whose caller has gone: noticed at the door, and told to the thread that does it."""

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.to_thread
from starlette.requests import Request as HttpRequest

ResultT = TypeVar("ResultT")


def abandoned() -> bool:
    """Asked in a worker thread between pieces of work: False, or the cancellation of whoever waits for it is raised."""
    anyio.from_thread.check_cancelled()
    return False


async def run_while_wanted(
    request: HttpRequest, work: Callable[[], ResultT], limiter: anyio.CapacityLimiter
) -> ResultT | None:
    """Run `work` in a thread; where the caller hangs up, it is cancelled as soon as it asks (`abandoned`), for None.

    The body must have been received already: what comes after it is the end of the connection.
    """
    results: list[ResultT] = []
    faults: list[Exception] = []
    async with anyio.create_task_group() as group:

        async def listen() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(listen)
        try:
            results.append(await anyio.to_thread.run_sync(work, limiter=limiter))
        except Exception as fault:
            faults.append(fault)
        group.cancel_scope.cancel()
    if faults:
        raise faults[0]
    return results[0] if results else None
