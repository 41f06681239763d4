"""Schemathesis over the whole OpenAPI document of a running service, with valid and with invalid data."""

import os
import subprocess
import sys
from pathlib import Path

from served import served

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("busy_says_when", "response_schema_conformance", "status_code_conformance", "content_type_conformance")
WITHOUT_END = "/v1/audits/{id}/events"
"""A stream, which has a test of its own."""


def walk(*, examples: int, seed: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """What schemathesis says of a fresh service, after `examples` cases for each operation, mode and phase."""
    # As many requests as it likes: a rate that is used up would hide everything behind 429.
    settings = {"GLASSBLOCK_RATE": "1000000/second", "GLASSBLOCK_WAITING": "4"}
    with served(ROOT / "examples", log=folder / "service.log", **settings) as service:
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{service.url}/openapi.json"),
            *("--mode", "all", "--phases", "coverage,fuzzing", "--checks", ",".join(CHECKS)),
            *("--max-examples", str(examples), "--seed", str(seed), "--generation-database", "none"),
            *("--request-timeout", "60", "--continue-on-failure", "--exclude-path", WITHOUT_END),
        ]
        hooks = {
            "SCHEMATHESIS_HOOKS": "schemathesis_hooks",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        return subprocess.run(command, env=os.environ | hooks, cwd=folder, capture_output=True, text=True, check=False)
