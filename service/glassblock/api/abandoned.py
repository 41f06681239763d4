"""Work that nobody wants any more, because its caller has gone or did not want to wait so long.

Noticed at the door, and told to the thread that does the work.
"""

import re
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import anyio
import anyio.from_thread
from starlette.datastructures import Headers
from starlette.requests import Request as HttpRequest

from glassblock.errors import InvalidValue

ResultT = TypeVar("ResultT")

LONGEST_WAIT = 86_400


class Gone(Exception):
    """The caller has hung up."""


class TooLate(Exception):
    """The caller did not want to wait so long."""


def abandoned() -> bool:
    """Asked in a worker thread between pieces of work: False, or the cancellation of whoever waits for it is raised."""
    anyio.from_thread.check_cancelled()
    return False


def allowed_seconds(headers: Headers) -> int | None:
    """How long the caller wants to wait: `Prefer: wait=30` (RFC 7240, 4.3); None where it does not say.

    Raises:
        InvalidValue: it is no number of seconds from 1 to a day.
    """
    for name, told in _preferences(headers):
        if name == "wait":
            if not re.fullmatch(r"[0-9]{1,6}", told) or not 1 <= int(told) <= LONGEST_WAIT:
                raise InvalidValue(
                    f"wait={told!r:.40} is no time to wait", field="Prefer", hint="send whole seconds: Prefer: wait=30"
                )
            return int(told)
    return None


def wants_job(headers: Headers) -> bool:
    """Whether the caller wants a job in place of the answer: `Prefer: respond-async` (RFC 7240, 4.1)."""
    return any(name == "respond-async" for name, _ in _preferences(headers))


def _preferences(headers: Headers) -> Iterator[tuple[str, str]]:
    for preference in ",".join(headers.getlist("prefer")).split(","):
        name, _, value = preference.partition(";")[0].partition("=")
        yield name.strip().lower(), value.strip().strip('"')


async def run_while_wanted(
    request: HttpRequest, work: Callable[[], Awaitable[ResultT]], *, seconds: float | None = None
) -> ResultT:
    """Run `work`; where the caller hangs up, or `seconds` have passed, it is cancelled as soon as it asks.

    The body must have been received already: what comes after it is the end of the connection.

    Raises:
        Gone: the caller has hung up.
        TooLate: the time is over.
    """
    results: list[ResultT] = []
    faults: list[Exception] = []
    left: list[bool] = []
    async with anyio.create_task_group() as group:
        if seconds is not None:
            group.cancel_scope.deadline = anyio.current_time() + seconds

        async def listen() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            left.append(True)
            group.cancel_scope.cancel()

        group.start_soon(listen)
        try:
            results.append(await work())
        except Exception as fault:
            faults.append(fault)
        group.cancel_scope.cancel()
    if results:
        return results[0]
    if faults:
        raise faults[0]
    raise Gone if left or seconds is None else TooLate
