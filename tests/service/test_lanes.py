"""Work under way keeps nobody from asking, and what a caller merely announces costs nothing."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import httpx
import psutil
import pytest
from glassblock.api.allocator import trimmed_when_idle
from glassblock.api.app import create_app
from glassblock.api.bodies import Patience, accepts, read_body
from glassblock.api.body_budget import BodyBudget
from glassblock.api.landing import untouched
from glassblock.api.settings import Settings
from glassblock.errors import TooLarge
from starlette.requests import Request

MIB = 1024 * 1024
UNCOUNTED = BodyBudget(1 << 40).of("one")


def test_questions_are_answered_while_every_heavy_thread_works(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, waiting = threading.Event(), threading.Semaphore(0)

    def stuck(*_: object, **__: object) -> None:
        waiting.release()
        let_go.wait(30)
        raise TooLarge("enough")

    monkeypatch.setattr("glassblock.operations.block_runs.run", stuck)
    threads = Settings().heavy
    with ThreadPoolExecutor(threads + 2) as callers:
        body = {"checkpoint": "llama", "layer": 0, "sample": {"rows": 1}}
        calls = [callers.submit(http.post, "/v1/blocks/run", json=body) for _ in range(threads + 2)]
        for _ in range(threads):
            assert waiting.acquire(timeout=30)
        try:
            for path in ("/health/live", "/health/ready", "/v1", "/v1/checkpoints/llama", "/v1/rules", "/v1/audits"):
                assert http.get(path).status_code == 200
        finally:
            let_go.set()
        assert {call.result().status_code for call in calls} == {413}


def read(request: Request, *, limit: int = 512 * MIB) -> memoryview:
    return asyncio.run(read_body(request, limit=limit, patience=Patience(30.0, 30.0), budget=UNCOUNTED))


def test_an_announced_body_is_not_paid_for() -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x", "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", str(500 * MIB).encode())]}
    process = psutil.Process()
    before = process.memory_info().rss
    bodies = [read(Request(scope, receive)) for _ in range(4)]
    assert [bytes(body) for body in bodies] == [b"x"] * 4
    assert process.memory_info().rss - before < 100 * MIB


def test_a_body_longer_than_announced_is_refused() -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"xyz", "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"2")]}
    with pytest.raises(TooLarge):
        read(Request(scope, receive))


def test_a_body_of_unknown_size_is_bounded(tmp_path: Path) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * MIB, "more_body": True}

    with pytest.raises(TooLarge):
        read(Request({"type": "http", "method": "POST", "headers": []}, receive), limit=8 * MIB)


def test_the_app_is_made_without_a_root() -> None:
    assert create_app(Settings(roots=())).title == "Glassblock"


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/x-safetensors", True),
        ("Application/X-SafeTensors", True),
        ("application/json, application/x-safetensors;q=0.5", True),
        ("application/x-safetensors;q=0", False),
        ("application/x-safetensors; q=0.00", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_accept(accept: str, wanted: bool) -> None:
    assert accepts(accept, "application/x-safetensors") is wanted


BODIES_COME_AND_GO = """
import psutil
from glassblock.api.landing import untouched

MIB = 1024 * 1024
process, content, kept = psutil.Process(), bytes(16 * MIB), []
start = process.memory_info().rss
for _ in range(2):  # malloc maps the first time, and keeps from then on what it was given back
    bodies = []
    for _ in range(8):
        bodies.append(untouched(16 * MIB))
        bodies[-1][:] = content
        kept.append(bytes(100_000))  # behind each body: malloc could not give back what lies in front of it
    view = bodies[0][5:6]
    assert process.memory_info().rss - start > 120 * MIB
    del bodies
    # A body of which a view is held, and two that are kept for the next; the rest is some of Python's own.
    assert process.memory_info().rss - start < 3 * 16 * MIB + 16 * MIB
    assert bytes(view) == b"\\0"
    del view
"""


def test_memory_of_a_body_goes_back_to_the_system_with_its_last_view() -> None:
    """In a process of its own: what other tests left is given back to the system at any moment."""
    ended = subprocess.run([sys.executable, "-c", BODIES_COME_AND_GO], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_memory_of_a_body_is_not_given_to_another_while_a_view_of_it_is_held() -> None:
    first = untouched(2 * MIB)
    first[:] = b"a" * (2 * MIB)
    view = first[MIB:]
    del first
    others = [untouched(2 * MIB) for _ in range(4)]
    for other in others:
        other[:] = b"b" * (2 * MIB)
    assert bytes(view) == b"a" * MIB
    del other, others, view
    assert len(untouched(2 * MIB - 5)) == 2 * MIB - 5


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's arenas")
@pytest.mark.parametrize(("told", "most"), [({}, 1), ({"MALLOC_ARENA_MAX": "5"}, 5)])
def test_threads_share_one_arena_where_nobody_says_otherwise(told: dict[str, str], most: int) -> None:
    script = """
import ctypes, sys, threading
from glassblock.api.allocator import share_arena
share_arena()
blocks, all_here = [], threading.Barrier(9)
def take():
    blocks.append(bytes(100_000))
    all_here.wait()
threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads: thread.start()
all_here.wait()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
libc.malloc_info(0, ctypes.c_void_p(libc.fdopen(1, b"w")))
libc.fflush(None)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))}
    out = subprocess.run(
        [sys.executable, "-c", script], env=environment | told, capture_output=True, text=True, check=True
    )
    assert out.stdout.count("<heap nr=") == most


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's arenas")
def test_what_lies_free_above_the_last_block_of_a_thread_goes_back_as_well() -> None:
    script = """
import ctypes, threading
from glassblock.api.allocator import share_arena
share_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks, resident = (ctypes.c_void_p * 200)(), []
def look():
    with open("/proc/self/statm") as file:
        resident.append(int(file.read().split()[1]) >> 8)
def work():
    libc.free(libc.malloc(31 << 20))  # from now on malloc maps nothing smaller, and keeps twice as much at its end
    for number in range(200):
        blocks[number] = libc.malloc(200 << 10)
        libc.memset(blocks[number], 1, 200 << 10)
    for block in blocks:
        libc.free(block)
look()
thread = threading.Thread(target=work)
thread.start()
thread.join()
look()
libc.malloc_trim(0)
look()
print(*resident)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC", "GLIBC"))}
    out = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    before, freed, trimmed = map(int, out.stdout.split())
    assert freed - before >= 35, "39 MiB lie free, or this shows nothing"
    assert trimmed - before <= 4


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc_trim")
def test_what_lies_free_goes_back_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassblock.api.allocator.TRIM_SECONDS", 0.05)
    process, busy = psutil.Process(), [True]

    async def main() -> None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        blocks = [libc.malloc(60_000) for _ in range(2000)]  # below what malloc maps
        for block in blocks:
            ctypes.memset(ctypes.c_void_p(block), 1, 60_000)
        for block in blocks[:-1]:  # the last one lies on top of all
            libc.free(ctypes.c_void_p(block))
        full = process.memory_info().rss
        async with trimmed_when_idle(lambda: busy[0]):
            await anyio.sleep(0.3)
            assert process.memory_info().rss > full - 20 * MIB
            busy[0] = False
            await anyio.sleep(0.5)
        assert process.memory_info().rss < full - 80 * MIB
        libc.free(ctypes.c_void_p(blocks[-1]))

    anyio.run(main)
