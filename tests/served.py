"""A service in a process of its own, for tests of what only a real socket shows."""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

WAIT_S = 60.0
"""Far more than anything takes, however busy the machine; reached only where it never comes."""


@dataclass(frozen=True)
class Served:
    """A service that listens."""

    process: int
    port: int

    @property
    def url(self) -> str:
        """Where it is asked."""
        return f"http://127.0.0.1:{self.port}"

    def wire(self) -> socket.socket:
        """A connection of its own."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Look again and again."""
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.02)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def served(roots: Path, *, log: Path = Path(os.devnull), **settings: str) -> Generator[Served]:
    """A service over `roots` with these variables set; what it says goes to `log`."""
    port = free_port()
    serve = [sys.executable, "-m", "glassblock_client", "serve", "--checkpoints", str(roots), "--port", str(port)]
    with log.open("wb") as said, subprocess.Popen(serve, env=os.environ | settings, stderr=said) as process:
        service = Served(process.pid, port)
        try:
            service.wait_until(lambda: process.poll() is not None or _is_ready(service))
            assert process.poll() is None, "it did not start"
            yield service
        finally:
            process.terminate()


def raw_answer(wire: socket.socket) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Status, headers and body of the next answer."""
    answer = http.client.HTTPResponse(wire)
    answer.begin()
    return answer.status, answer.headers, answer.read()


def _is_ready(service: Served) -> bool:
    try:
        return httpx.get(f"{service.url}/health/ready").status_code == 200
    except httpx.TransportError:
        return False
