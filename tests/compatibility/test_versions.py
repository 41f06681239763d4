"""A client and a service of different versions talk: what an earlier version said is kept in `v1`, and replayed."""

import io
import json
import os
import subprocess
import sys
import tarfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from glassblock.api.entry import connect
from glassblock.wire.audits import Audit
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.problems import Problem, error_from_problem
from glassblock.wire.values import SCHEMA_HEADER, SCHEMA_VERSION
from glassblock_client import Client, exchange
from served import free_port

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(__file__).parent / "v1"
EARLIER = "6e599ac"
"""The commit whose version wrote the files in `v1`."""

EXCHANGES: list[dict[str, Any]] = json.loads((KEPT / "exchanges.json").read_text())
MODELS = {endpoint.name: endpoint.answer for endpoint in ENDPOINTS}


@pytest.fixture(scope="module")
def transport() -> Iterator[httpx.BaseTransport]:
    with connect(roots=[ROOT / "examples"], device="cpu") as transport:
        yield transport


def _names(value: Any, path: str = "") -> set[str]:
    """Every field that an answer has, however deep; of lists and of maps with free keys, what all items have."""
    if isinstance(value, dict):
        return {f"{path}.{name}" for name in value} | {n for k, v in value.items() for n in _names(v, f"{path}.{k}")}
    return {name for item in value for name in _names(item, f"{path}[]")} if isinstance(value, list) else set()


@pytest.mark.parametrize("kept", EXCHANGES, ids=lambda kept: kept["endpoint"])
def test_an_earlier_request_is_answered_with_all_that_it_was_answered_with_then(
    transport: httpx.BaseTransport, kept: dict[str, Any]
) -> None:
    with httpx.Client(base_url="http://glassblock", transport=transport) as http:
        answer = http.request(kept["method"], kept["path"], json=kept["request"])
        assert answer.status_code == kept["status"], answer.text
        lost = _names(kept["answer"]) - _names(answer.json())
        assert not lost


@pytest.mark.parametrize("kept", EXCHANGES, ids=lambda kept: kept["endpoint"])
def test_an_earlier_answer_is_read(kept: dict[str, Any]) -> None:
    read = MODELS[kept["endpoint"]].model_validate(kept["answer"])
    assert _names(kept["answer"]) <= _names(json.loads(read.model_dump_json()))


def test_an_earlier_report_is_read() -> None:
    audit = Audit.model_validate_json((KEPT / "audit.json").read_text())
    assert audit.report is not None
    assert audit.report.verdict == "pass"
    assert {row.rule for row in audit.report.coverage} >= {"ffn/gate-up-swapped", "config/eps-conflict"}


def test_an_earlier_refusal_is_raised_as_the_same_error() -> None:
    error = error_from_problem(Problem.model_validate_json((KEPT / "problem.json").read_text()))
    assert (type(error).__name__, error.field) == ("InvalidValue", "layer")


EARLIER_CLIENT = """
import sys, time, numpy as np
from glassblock_client import Client
assert "earlier" in sys.modules["glassblock_client"].__file__
with Client(sys.argv[1]) as client:
    for _ in range(300):
        try:
            client.ready(); break
        except Exception:
            time.sleep(0.1)
    assert client.capabilities().schema_version == "1"
    detail = client.checkpoint("tiny-llama")
    x = np.linspace(-1, 1, 2 * detail.d_model, dtype=np.float32).reshape(2, -1)
    run = client.run_block("tiny-llama", 0, x=x, return_tensors=True)
    assert run.tensors["x"].tobytes() == x.tobytes() and run.answer.stages["hidden"].rms > 0
    assert client.norm_statistics(x=x, eps=1e-5).tensors
    assert client.compare_residuals(x=[[1, 2]], matrix=[[1, 0], [0, 2]], eps=1e-5).tensors
    assert client.budgets(checkpoint="tiny-llama").parameters > 0
    assert client.rules().rules and client.families().families
    report = client.audit_checkpoint("tiny-llama")
    print(report.verdict, client.audits().audits[0].state)
"""


def test_the_earlier_client_reads_the_answers_of_this_service(tmp_path: Path) -> None:
    """Over HTTP, with the code of that commit out of the history."""
    git = ["git", "-C", str(ROOT), "archive", EARLIER, "service", "clients"]
    try:
        archive = subprocess.run(git, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no history with the commit {EARLIER}: a shallow clone, or no git")
    earlier = tmp_path / "earlier"
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(earlier, filter="data")
    port = free_port()
    serve = [sys.executable, "-m", "glassblock_client", "serve", "--checkpoints", str(ROOT / "examples")]
    ours = os.environ | {"PYTHONPATH": f"{ROOT / 'service'}:{ROOT / 'clients'}"}
    theirs = os.environ | {"PYTHONPATH": f"{earlier / 'service'}:{earlier / 'clients'}"}
    with subprocess.Popen([*serve, "--port", str(port)], env=ours, stderr=subprocess.DEVNULL) as service:
        try:
            ask = [sys.executable, "-c", EARLIER_CLIENT, f"http://127.0.0.1:{port}"]
            asked = subprocess.run(ask, env=theirs, capture_output=True, text=True, check=False, timeout=120)
        finally:
            service.terminate()
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout.split() == ["pass", "succeeded"]


def test_the_service_says_its_versions(transport: httpx.BaseTransport) -> None:
    with Client("http://glassblock", transport=transport) as client:
        told = client.capabilities()
    assert told.schema_version == SCHEMA_VERSION
    assert {f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS} == set(told.endpoints)


def test_the_client_warns_once_of_another_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_TOLD_SCHEMAS", set())

    def newer(request: httpx.Request) -> httpx.Response:
        answer = {"status": "alive", "of_tomorrow": {"a": 1}}
        return httpx.Response(200, json=answer, headers={SCHEMA_HEADER: "2"})

    with Client("http://glassblock", transport=httpx.MockTransport(newer)) as client:
        with pytest.warns(UserWarning, match="schema version '2'"):
            assert client.live().status == "alive"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            client.live()


def test_the_client_is_silent_where_the_schema_is_its_own(transport: httpx.BaseTransport) -> None:
    with httpx.Client(base_url="http://glassblock", transport=transport) as http:
        assert http.get("/health/live").headers[SCHEMA_HEADER] == SCHEMA_VERSION
    with warnings.catch_warnings(), Client("http://glassblock", transport=transport) as client:
        warnings.simplefilter("error")
        client.live()
