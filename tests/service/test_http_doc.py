"""docs/http.md: the request of each kind is answered as it stands there."""

import re
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from glassblock.api.app import create_app
from glassblock.api.settings import Settings
from glassblock.wire.endpoints import ENDPOINTS

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "http.md").read_text(encoding="utf-8")
REQUESTS = re.findall(r"^\| `(/v1/[^`]*)` \| `(\{.*\})` \|$", DOC, re.MULTILINE)
ELSEWHERE = {"/v1/blocks/explain", "/v1/plan"}  # which the page shows in sections of their own


def test_every_operation_has_a_request() -> None:
    posted = {endpoint.path for endpoint in ENDPOINTS if endpoint.method == "POST"}
    assert {path for path, _ in REQUESTS} == posted - ELSEWHERE


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_the_request_is_answered(path: str, body: str) -> None:
    with TestClient(create_app(Settings(roots=(ROOT / "examples",), device="cpu"))) as service:
        answer = service.post(path, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == (202 if path == "/v1/audits" else 200), answer.text
