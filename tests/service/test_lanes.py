"""Work under way keeps nobody from asking, and what a caller merely announces costs nothing."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from glassblock.api.app import create_app
from glassblock.api.bodies import accepts, read_body
from glassblock.api.settings import Settings
from glassblock.errors import TooLarge
from starlette.requests import Request

MIB = 1024 * 1024


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


def test_an_announced_body_is_not_paid_for() -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x", "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", str(500 * MIB).encode())]}
    process = psutil.Process()
    before = process.memory_info().rss
    bodies = [asyncio.run(read_body(Request(scope, receive), limit=512 * MIB)) for _ in range(4)]
    assert [bytes(body) for body in bodies] == [b"x"] * 4
    assert process.memory_info().rss - before < 100 * MIB


def test_a_body_longer_than_announced_is_refused() -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"xyz", "more_body": False}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-length", b"2")]}
    with pytest.raises(TooLarge):
        asyncio.run(read_body(Request(scope, receive), limit=512 * MIB))


def test_a_body_of_unknown_size_is_bounded(tmp_path: Path) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * MIB, "more_body": True}

    with pytest.raises(TooLarge):
        asyncio.run(read_body(Request({"type": "http", "method": "POST", "headers": []}, receive), limit=8 * MIB))


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
