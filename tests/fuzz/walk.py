"""Schemathesis over the whole OpenAPI document of a running service, with valid and with invalid data."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("busy_says_when", "response_schema_conformance", "status_code_conformance", "content_type_conformance")
WITHOUT_END = "/v1/audits/{id}/events"
"""A stream, which has a test of its own."""


def walk(*, examples: int, seed: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """What schemathesis says of a fresh service, after `examples` cases for each operation, mode and phase."""
    with _service(folder) as url:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{url}/openapi.json"),
            *("--mode", "all", "--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)),
            *("--max-examples", str(examples), "--seed", str(seed), "--generation-database", "none"),
            *("--request-timeout", "60", "--continue-on-failure", "--exclude-path", WITHOUT_END),
        ]
        hooks = {
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        return subprocess.run(command, env=os.environ | hooks, cwd=folder, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def _service(folder: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "glassblock_client", "serve", "--checkpoints", str(ROOT / "examples")]
    # As many requests as it likes: a rate that is used up would hide everything behind 429.
    told = os.environ | {"GLASSBLOCK_RATE": "1000000/second", "GLASSBLOCK_WAITING": "4"}
    url = f"http://127.0.0.1:{port}"
    with (
        (folder / "service.log").open("wb") as log,
        subprocess.Popen([*serve, "--port", str(port)], env=told, stderr=log) as service,
    ):
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health/ready", timeout=5).close()
                    break
                time.sleep(0.1)
            yield url
        finally:
            service.terminate()
