"""Every operation that may take long, asked for as a job: the answer is the one that a caller who waits would get."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from glassblock.api.app import create_app
from glassblock.api.entry import in_process
from glassblock.api.routes import ROUTES
from glassblock.api.settings import Settings
from glassblock.errors import InvalidValue, TooLarge, UnknownAudit, UnknownCheckpoint
from glassblock.operations.operations import Operations
from glassblock.operations.works import WORKS
from glassblock.wire import framing
from glassblock.wire.audits import Audit, JobAnswer, Progress
from glassblock.wire.endpoints import ENDPOINTS
from glassblock_client import AsyncClient, Client
from glassblock_client.tensors import wire_from_array
from makers import tiny_checkpoint

X = np.random.default_rng(1).standard_normal((3, 48), dtype=np.float32)
SAMPLE = {"rows": 2, "seed": 5}
REQUESTS: dict[str, dict[str, Any]] = {
    "run_block": {"checkpoint": "llama", "layer": 0, "sample": SAMPLE},
    "explain_block": {"checkpoint": "llama", "layer": 0},
    "norm_statistics": {"x": X.tolist(), "eps": 1e-5},
    "compare_residuals": {"checkpoint": "llama", "layer": 0, "sample": SAMPLE},
    "jacobians": {"checkpoint": "llama", "layers": [0, 1], "sample": SAMPLE, "norms": ["frobenius"]},
    "likelihoods": {"checkpoint": "llama", "token_ids": [1, 2, 3]},
    "repair": {"checkpoint": "llama", "dry_run": True},
    "selftest": {"checkpoint": "llama", "rules": ["ffn/gate-up-swapped"]},
}
PATHS = {endpoint.name: endpoint.path for endpoint in ENDPOINTS if endpoint.job}
WAIT_S = 60.0


def test_every_such_operation_is_done_in_one_way() -> None:
    assert {*PATHS, "start_audit"} == set(WORKS)
    assert set(REQUESTS) == set(PATHS)
    assert all(ROUTES[name].lane in {"heavy", "long"} for name in PATHS)


def captured(client: Client) -> dict[str, np.ndarray]:
    ran = client.run_block("llama", 0, x=X, capture=["x", "gate", "hidden"], return_tensors=True)
    return {name: np.asarray(tensor) for name, tensor in ran.tensors.items()}


def ended(client: Client, job: Audit) -> Audit:
    deadline = time.monotonic() + WAIT_S
    while job.state in {"queued", "running"}:
        assert time.monotonic() < deadline, job
        time.sleep(0.02)
        job = client.audit(job.id)
    return job


@pytest.mark.parametrize("name", PATHS)
def test_the_answer_of_a_job_is_that_of_the_operation(http: httpx.Client, client: Client, name: str) -> None:
    tensors = captured(client) if name == "explain_block" else {}
    waited = post(http, name, tensors)
    assert waited.status_code == 200, waited.text
    told = post(http, name, tensors, prefer="respond-async")
    assert told.status_code == 202, told.text
    assert told.headers["preference-applied"] == "respond-async"
    job = Audit.model_validate_json(told.content)
    assert told.headers["location"] == f"/v1/audits/{job.id}"
    assert job.operation == name
    assert ended(client, job).state == "succeeded"
    answer = http.get(f"/v1/audits/{job.id}/answer")
    assert timeless(answer.json()) == timeless(waited.json())
    unchanged = http.get(f"/v1/audits/{job.id}/answer", headers={"If-None-Match": answer.headers["etag"]})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert client.audits(operation=name).audits[0].id == job.id


def timeless(answer: Any) -> Any:
    """Without what was read from disk, which is nothing where the block lay there already, and without seconds."""
    if isinstance(answer, dict):
        return {key: timeless(value) for key, value in answer.items() if key not in {"read", "seconds"}}
    return [timeless(item) for item in answer] if isinstance(answer, list) else answer


def post(
    http: httpx.Client, name: str, tensors: Mapping[str, np.ndarray], *, accept: str = "*/*", **headers: str
) -> httpx.Response:
    text = json.dumps(REQUESTS[name])
    said = {"Accept": accept, "Content-Type": "application/json", **headers}
    content = text.encode()
    if tensors:
        wired = {key: wire_from_array(tensor) for key, tensor in tensors.items()}
        content, said["Content-Type"] = b"".join(framing.frame("request", text, wired)), framing.MEDIA_TYPE
    return http.post(PATHS[name], content=content, headers=said)


def test_tensors_go_in_and_come_out_as_they_are(client: Client) -> None:
    at_once = client.run_block("llama", 1, x=X, capture=["hidden"], return_tensors=True)
    seen: list[Progress] = []
    later = client.as_job(seen.append).run_block("llama", 1, x=X, capture=["hidden"], return_tensors=True)
    np.testing.assert_array_equal(later.tensors["hidden"], at_once.tensors["hidden"])
    assert later.answer.stages == at_once.answer.stages
    job = client.start_job(
        "run_block", {"checkpoint": "llama", "layer": 1, "capture": ["hidden"], "return_tensors": True},
        tensors={"x": X}, return_tensors=True,
    )  # fmt: skip
    assert ended(client, job).state == "succeeded"
    answer = client.audit_answer(job.id)
    np.testing.assert_array_equal(answer.tensors["hidden"], at_once.tensors["hidden"])
    assert type(answer.answer) is type(at_once.answer)


def test_both_clients_wait_alike(root: Path, client: Client) -> None:
    request = REQUESTS["jacobians"]
    app = create_app(Settings(roots=(root,), device="cpu"))

    async def ask() -> Any:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app)
            async with AsyncClient("http://glassblock", transport=transport) as asynchronous:
                job = await asynchronous.start_job("jacobians", request, idempotency_key="k")
                assert (await asynchronous.start_job("jacobians", request, idempotency_key="k")).id == job.id
                return await asynchronous.as_job().jacobians("llama", [0, 1], sample=SAMPLE, norms=["frobenius"])

    assert timeless(anyio.run(ask).answer.model_dump()) == timeless(
        client.jacobians("llama", [0, 1], sample=SAMPLE, norms=["frobenius"]).answer.model_dump()
    )


def test_what_cannot_be_answered_is_refused_before_it_is_queued(client: Client) -> None:
    before = client.audits().audits[:1]
    with pytest.raises(UnknownCheckpoint):
        client.as_job().likelihoods("nonesuch", token_ids=[1])
    with pytest.raises(InvalidValue, match="no operation that can be a job"):
        client.start_job("rules", {})
    assert client.audits().audits[:1] == before


_NAN = np.full((3, 48), np.nan, dtype=np.float32)
_WHOLE = np.ones((3, 48), dtype=np.int32)
_NARROW = np.ones((3, 47), dtype=np.float32)
_BLOCK: dict[str, Any] = {"checkpoint": "llama", "layer": 0}
_LAYERS: dict[str, Any] = {"checkpoint": "llama", "layers": [0]}
_NORM: dict[str, Any] = {"checkpoint": "llama", "layer": 0, "norm": "ffn_in"}
UNFIT: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], str]] = {
    f"{name}: {said}, {kind}": (name, message, {"x": x}, "x")
    for name, said, message in (
        ("run_block", "ffn", _BLOCK),
        ("run_block", "layer", {**_BLOCK, "part": "layer"}),
        ("run_block", "attention", {**_BLOCK, "part": "attention"}),
        ("compare_residuals", "block", _BLOCK),
        ("norm_statistics", "a norm", _NORM),
        ("norm_statistics", "the final norm", {"checkpoint": "llama", "norm": "final"}),
        ("jacobians", "block", _LAYERS),
        ("jacobians", "norm", {**_LAYERS, "part": "norm"}),
        ("jacobians", "layer", {**_LAYERS, "part": "layer"}),
    )
    for kind, x in (("not finite", _NAN), ("whole numbers", _WHOLE), ("too narrow", _NARROW))
} | {
    "norm_statistics: gain": ("norm_statistics", {"eps": 1e-5}, {"x": X, "gain": _NARROW[0]}, "gain"),
    "norm_statistics: square gain": ("norm_statistics", {"eps": 1e-5}, {"x": X, "gain": X}, "gain"),
    "compare_residuals: matrix": ("compare_residuals", {"eps": 1e-5}, {"x": X, "matrix": _NARROW[:, :3]}, "matrix"),
    "explain_block: not finite": ("explain_block", _BLOCK, {"x": X, "hidden": np.full((3, 112), np.nan)}, "hidden"),
    "explain_block: whole numbers": ("explain_block", _BLOCK, {"x": X, "normed": _WHOLE}, "normed"),
    "explain_block: too narrow": ("explain_block", _BLOCK, {"x": X, "normed": _NARROW}, "normed"),
    "explain_block: no stage": ("explain_block", _BLOCK, {"x": X, "y": X}, "body"),
    "explain_block: nothing": ("explain_block", _BLOCK, {}, "captures"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_tensors_that_no_work_could_take_are_refused_in_both_ways(http: httpx.Client, case: str) -> None:
    name, message, tensors, field = UNFIT[case]
    text = json.dumps(message)
    content = b"".join(framing.frame("request", text, {key: wire_from_array(x) for key, x in tensors.items()}))
    said = {"Content-Type": framing.MEDIA_TYPE}
    at_once, later = (
        http.post(PATHS[name], content=content, headers={**said, **prefer})
        for prefer in ({}, {"Prefer": "respond-async"})
    )
    assert (at_once.status_code, later.status_code) == (422, 422), (at_once.text, later.text)
    assert at_once.json()["field"] == later.json()["field"] == field
    assert at_once.json()["detail"] == later.json()["detail"]


def test_numbers_of_a_message_are_looked_at_as_well(http: httpx.Client) -> None:
    message = {**_BLOCK, "x": [[1.0] * 47]}
    later = http.post(PATHS["run_block"], json=message, headers={"Prefer": "respond-async"})
    assert (later.status_code, later.json()["field"]) == (422, "x")


def test_jobs_of_an_unknown_operation_are_not_an_empty_page(http: httpx.Client) -> None:
    refused = http.get("/v1/audits", params={"operation": "nope"})
    assert (refused.status_code, refused.json()["field"]) == (422, "operation")
    assert set(refused.json()["known"]) == set(WORKS)
    assert all(http.get("/v1/audits", params={"operation": name}).status_code == 200 for name in WORKS)


def test_what_fails_fails_as_it_would_have(client: Client) -> None:
    with pytest.raises(InvalidValue) as at_once:
        client.run_block("llama", 99, x=X)
    with pytest.raises(InvalidValue) as later:
        client.as_job().run_block("llama", 99, x=X)
    assert (later.value.message, later.value.field) == (at_once.value.message, at_once.value.field)


def test_a_job_of_another_kind_has_an_answer_and_an_audit_both(client: Client, http: httpx.Client) -> None:
    job = client.start_job("likelihoods", REQUESTS["likelihoods"])
    ended(client, job)
    with pytest.raises(UnknownAudit, match="no audit: it is likelihoods"):
        client.audit_report(job.id)
    audit = client.start_audit("llama")
    report = ended(client, audit).report
    assert client.audit_answer(audit.id).answer == report
    assert JobAnswer.model_validate(http.get(f"/v1/audits/{audit.id}/answer").json())


def test_a_preference_that_nothing_can_be_made_of_is_passed_over(http: httpx.Client) -> None:
    answer = http.get("/v1/rules", headers={"Prefer": "respond-async, handling=strict"})
    assert answer.status_code == 200
    assert "preference-applied" not in answer.headers


@pytest.fixture
def limited(root: Path) -> Iterator[Client]:
    """A service whose callers may wait for next to nothing."""
    app = create_app(Settings(roots=(root,), device="cpu", wait_tflop=1e-9))
    with in_process(app) as transport, Client("http://glassblock", transport=transport) as client:
        yield client


def test_what_costs_more_than_a_caller_may_wait_for_must_be_a_job(limited: Client, client: Client) -> None:
    def ask(of: Client) -> Any:
        return of.jacobians("llama", [0], x=X, norms=["frobenius"]).answer

    with pytest.raises(TooLarge, match="TFLOP to compute") as refused:
        ask(limited)
    assert "Prefer: respond-async" in (refused.value.hint or "")
    assert timeless(ask(limited.as_job()).model_dump()) == timeless(ask(client).model_dump())
    with pytest.raises(TooLarge, match="TFLOP to compute"):
        ask(limited)
    assert limited.budgets(d_model=8, d_ff=32, kind="gated"), "what is no such operation has no such limit"


def test_what_is_found_affordable_is_not_estimated_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimated: list[str] = []
    cost = Operations.cost

    def counted(self: Operations, operation: str, *asked: Any) -> Any:
        estimated.append(operation)
        return cost(self, operation, *asked)

    monkeypatch.setattr(Operations, "cost", counted)
    app = create_app(Settings(roots=(root,), device="cpu"))
    with in_process(app) as transport, Client("http://glassblock", transport=transport) as client:
        for x in (X, X + 1, X, np.concatenate([X, X])):
            client.run_block("llama", 0, x=x)
        client.run_block("llama", 0, x=X, part="layer")
    assert estimated == ["run_block"] * 3, "one for each shape, and for each question"


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_findings_are_told_while_an_audit_runs_and_again_from_any_event_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "roots"
    weights = tiny_checkpoint("llama", folder / "cut", shards=2)
    (weights / "model-00001-of-00002.safetensors").unlink()
    real, waiting = Operations.audit, {"go": False}

    def stopping(self: Operations, request: Any, *, progress: Any, cancelled: Any, found: Any) -> Any:
        def held(done: int, total: int, message: str) -> None:
            progress(done, total, message)
            while not waiting["go"]:
                time.sleep(0.01)

        return real(self, request, progress=held, cancelled=cancelled, found=found)

    monkeypatch.setattr(Operations, "audit", stopping)
    app = create_app(Settings(roots=(folder,), device="cpu"))
    with in_process(app) as transport, Client("http://glassblock", transport=transport) as client:
        audit = client.start_audit("cut")
        wait_until(lambda: bool(client.audit(audit.id).findings))
        early = client.audit(audit.id)
        assert early.state == "running", "no tensor has been read"
        assert {finding.rule for finding in early.findings} == {"index/missing-shard"}
        waiting["go"] = True
        report = ended(client, audit).report
        assert report is not None
        events = client.audit_events(audit.id)
        told = [event for event in events if event.kind == "finding"]
        assert [event.finding for event in told[: len(early.findings)]] == list(early.findings)
        assert sorted(map(repr, (event.finding for event in told))) == sorted(map(repr, report.findings))
        after = client.audit_events(audit.id, last_event_id=str(told[0].id))
        assert [event.id for event in after] == [event.id for event in events if event.id > told[0].id]
        assert client.audit(audit.id).findings == (), "the report has them"
