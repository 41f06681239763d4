"""glibc's memory, so that a service that runs for weeks grows no larger than its busiest second made it.

glibc gives every thread an arena of its own, up to eight for each core, and a freed block can be used again in its
arena alone. Work that goes from thread to thread leaves the memory of its largest moment behind in one arena after the
other. Here all threads share the first one; and what lies free in it goes back to the system while nobody asks for
anything. Of every other arena malloc_trim leaves the end (up to 64 MiB above its last block) where it is.
(mallopt(3), M_ARENA_MAX; malloc_trim(3); `mtrim` in glibc's malloc.c.)
"""

import ctypes
import gc
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread

ARENAS = 1
"""For all threads. They hardly wait for one another: one of them works, and Python's small objects lie elsewhere."""

TRIM_SECONDS = 10.0
"""Between two looks whether nobody asks. Memory that is needed again is asked for anew, which costs a millisecond for
a few MiB: seldom enough not to be felt."""

_M_ARENA_MAX = -8  # of malloc.h


def share_arena() -> bool:
    """Let this process's threads share one arena; whether that was done.

    It is not where the environment says how many (`MALLOC_ARENA_MAX`, `GLIBC_TUNABLES`), or there is no glibc.
    """
    told = "MALLOC_ARENA_MAX" in os.environ or "glibc.malloc.arena_max" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = _of_glibc("mallopt")
    return not told and mallopt is not None and mallopt(_M_ARENA_MAX, ARENAS) == 1


def settle_objects() -> None:
    """Count what the modules made as there to stay: the collector looks at it no more.

    It looks at all objects only once the new ones are a quarter of the old ones. Beside the 300,000 of torch and its
    like, that lets tens of MiB pile up in circles first: statements of the database, connections that are closed.
    """
    gc.collect()
    gc.freeze()


@asynccontextmanager
async def trimmed_when_idle(busy: Callable[[], bool]) -> AsyncGenerator[None]:
    """Give free memory back to the system every now and then while the service is not busy; nothing without glibc."""
    trim = _of_glibc("malloc_trim")
    async with anyio.create_task_group() as group:
        if trim is not None:
            group.start_soon(_trim, busy, trim)
        try:
            yield
        finally:
            group.cancel_scope.cancel()


async def _trim(busy: Callable[[], bool], trim: Callable[[int], int]) -> None:
    while True:
        await anyio.sleep(TRIM_SECONDS)
        if not busy():
            await anyio.to_thread.run_sync(_collected, trim)


def _collected(trim: Callable[[int], int]) -> None:
    gc.collect()  # of what lies in circles: at rest nothing is allocated that would set the collector off
    trim(0)


def _of_glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if os.name == "posix" else None
