"""Who may come in, what a key allows, how often, and what every answer carries."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from glassblock.api.answers import answer_error
from glassblock.api.app import create_app
from glassblock.api.bodies import Patience, TooSlow, read_body
from glassblock.api.body_budget import BodyBudget
from glassblock.api.doors import Doors
from glassblock.api.entry import in_process
from glassblock.api.envelope import SECURITY_HEADERS
from glassblock.api.lanes import FairLane
from glassblock.api.settings import Settings
from glassblock.errors import InvalidValue, NoRoom, NotPermitted, TooManyRequests, Unauthenticated
from glassblock.operations.operations import Operations
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.keys import SCOPES, allows, digest_of, key_line, new_key, read_keys
from glassblock_client import Client
from starlette.datastructures import Headers
from starlette.requests import Request

EXAMPLES = Path(__file__).parents[2] / "examples"
KEYS = {scope: new_key() for scope in SCOPES} | {"other": new_key()}


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GLASSBLOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    scopes = {name: "run" if name == "other" else name for name in KEYS}
    file.write_text("# ours\n\n" + "".join(f"{key_line(name, scopes[name], KEYS[name])} # x\n" for name in KEYS))
    return file


@contextmanager
def served(**settings: Any) -> Iterator[httpx.Client]:
    app = create_app(Settings(roots=(EXAMPLES,), device="cpu", **settings))
    with in_process(app) as transport, httpx.Client(base_url="http://g", transport=transport) as http:
        yield http


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


def ended(http: httpx.Client, audit: str, headers: dict[str, str]) -> dict[str, Any]:
    for _ in range(1200):
        found = http.get(f"/v1/audits/{audit}", headers=headers).json()
        if found["state"] not in {"queued", "running"}:
            return found
        time.sleep(0.02)
    raise TimeoutError


@pytest.fixture
def guarded(keys_file: Path) -> Iterator[httpx.Client]:
    with served(keys_file=keys_file, access_log="none") as http:
        yield http


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer wrong", f"Basic {KEYS['admin']}", f"Bearer {KEYS['admin']}x", "Bearer \xff"],
    ids=["none", "no key", "wrong", "another scheme", "a key and more", "not ASCII"],
)
def test_nobody_comes_in_without_a_key_that_is_known(guarded: httpx.Client, header: str) -> None:
    headers = {"Authorization": header.encode("latin-1")} if header else {}
    for path in ("/v1", "/v1/checkpoints/tiny-llama", "/metrics", "/openapi.json", "/nowhere"):
        answer = guarded.get(path, headers=headers)
        assert answer.status_code == 401, path
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.json()["code"] == "unauthenticated"
        assert "tiny-llama" not in answer.text


def test_health_asks_for_no_key(guarded: httpx.Client) -> None:
    assert guarded.get("/health/live").status_code == 200
    assert guarded.get("/health/ready").status_code == 200


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_opens_what_its_scope_says(guarded: httpx.Client, endpoint: Any, scope: str) -> None:
    path = endpoint.path.format(name="absent", id="absent") if "{" in endpoint.path else endpoint.path
    content = None if endpoint.method == "GET" else b"{"
    headers = bearer(scope) | {"Content-Type": "application/json"}
    answer = guarded.request(endpoint.method, path, headers=headers, content=content)
    allowed = endpoint.needs is None or allows(scope, endpoint.needs)  # pyright: ignore[reportArgumentType]
    assert (answer.status_code == 403) is not allowed, answer.text
    if not allowed:
        assert answer.json()["code"] == "not-permitted"
        assert repr(endpoint.needs) in answer.json()["detail"]


def test_what_needs_what_is_written_down_here_too() -> None:
    """So that nobody opens a door by accident."""
    needs = {endpoint.name: endpoint.needs for endpoint in ENDPOINTS}
    assert {name for name, need in needs.items() if need is None} == {"live", "ready"}
    assert {name for name, need in needs.items() if need == "admin"} == {"pin", "evict"}
    for endpoint in ENDPOINTS:
        if needs[endpoint.name] == "read":
            assert endpoint.method == "GET"


def test_only_who_asked_for_an_audit_may_cancel_it(guarded: httpx.Client) -> None:
    def start() -> str:
        return guarded.post("/v1/audits", json={"checkpoint": "tiny-llama"}, headers=bearer("run")).json()["id"]

    audit = start()
    refused = guarded.delete(f"/v1/audits/{audit}", headers=bearer("other"))
    assert (refused.status_code, refused.json()["code"]) == (403, "not-permitted")
    assert guarded.delete(f"/v1/audits/{audit}", headers=bearer("run")).status_code == 200
    assert guarded.delete(f"/v1/audits/{start()}", headers=bearer("admin")).status_code == 200


def test_the_client_carries_the_key_and_raises_what_the_service_raised(keys_file: Path) -> None:
    app = create_app(Settings(roots=(EXAMPLES,), device="cpu", keys_file=keys_file, access_log="none"))
    with in_process(app) as transport:
        assert Client("http://g", api_key=KEYS["read"], transport=transport).capabilities().device == "cpu"
        with pytest.raises(Unauthenticated):
            Client("http://g", transport=transport).capabilities()
        with pytest.raises(NotPermitted, match="'run'"):
            Client("http://g", api_key=KEYS["read"], transport=transport).start_audit("tiny-llama")


def test_keys_change_without_a_restart_and_a_broken_file_changes_nothing(keys_file: Path) -> None:
    doors, fresh = Doors(keys_file=keys_file), new_key()
    headers = {name: Headers({"authorization": f"bearer {key}"}) for name, key in (KEYS | {"new": fresh}).items()}
    assert doors.admit("/v1", headers["run"], "a").name == "run"
    with pytest.raises(Unauthenticated):
        doors.admit("/v1", headers["new"], "a")
    keys_file.write_text(key_line("new", "read", fresh))
    assert doors.admit("/v1", headers["new"], "a").name == "new"
    with pytest.raises(Unauthenticated):
        doors.admit("/v1", headers["run"], "a")
    keys_file.write_text("broken")
    assert doors.admit("/v1", headers["new"], "a").name == "new"
    keys_file.unlink()
    assert doors.admit("/v1", headers["new"], "a").name == "new"


def test_a_file_of_keys_holds_no_key(keys_file: Path) -> None:
    assert not any(key in keys_file.read_text() for key in KEYS.values())
    assert all(len(key) >= 43 for key in KEYS.values()), "256 bits"
    assert read_keys(keys_file.read_text())[digest_of(KEYS["admin"])].scope == "admin"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no key"),
        ("# nothing", "no key"),
        ("a run", "line 1"),
        ("\na run sha256:12", "line 2"),
        ("a root sha256:" + "0" * 64, "scope 'root'"),
        ("-a run sha256:" + "0" * 64, "no name"),
        ("a run sha256:" + "0" * 64 + "\na run sha256:" + "1" * 64, "twice"),
        ("a run sha256:" + "0" * 64 + "\nb run sha256:" + "0" * 64, "twice"),
    ],
)
def test_a_file_of_keys_that_is_wrong_is_refused_at_the_start(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InvalidValue, match=why) as refused:
        create_app(Settings(keys_file=file))
    assert refused.value.field == "keys_file"


def test_a_file_of_keys_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="cannot be read"):
        create_app(Settings(keys_file=tmp_path / "absent"))


@pytest.mark.parametrize("name", ["data", "database", "keys_file"])
def test_a_variable_set_to_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"GLASSBLOCK_{name.upper()}", "")
    with pytest.raises(ValueError, match="empty"):
        Settings()


def test_with_keys_any_address_may_be_listened_on(keys_file: Path) -> None:
    Settings(host="0.0.0.0", keys_file=keys_file).refuse_open_address()


def test_each_key_has_its_own_rate(keys_file: Path) -> None:
    with served(keys_file=keys_file, rate="5/hour", access_log="none") as http:
        statuses = [http.get("/v1/rules", headers=bearer("run")).status_code for _ in range(8)]
        assert statuses == [200] * 5 + [429] * 3
        refused = http.get("/v1/rules", headers=bearer("run"))
        assert refused.json()["code"] == "too-many-requests"
        assert 1 <= int(refused.headers["retry-after"]) <= 3600
        assert http.get("/v1/rules", headers=bearer("other")).status_code == 200
        assert http.get("/health/live", headers=bearer("run")).status_code == 200


def test_guesses_are_slowed_down(keys_file: Path) -> None:
    doors = Doors(keys_file=keys_file)
    for _ in range(60):
        with pytest.raises(Unauthenticated):
            doors.admit("/v1", Headers({}), "192.0.2.1")
    with pytest.raises(TooManyRequests):
        doors.admit("/v1", Headers({}), "192.0.2.1")
    with pytest.raises(Unauthenticated):
        doors.admit("/v1", Headers({}), "192.0.2.2")
    assert doors.admit("/v1", Headers(bearer("run")), "192.0.2.1").name == "run", "who has a key is let in from there"


def test_a_clock_that_steps_back_locks_nobody_out(keys_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doors, headers, now = (
        Doors(keys_file=keys_file, rate="2/minute"),
        Headers(bearer("run")),
        time.time(),
    )
    doors.admit("/v1", headers, "a")
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    for _ in range(2):
        doors.admit("/v1", headers, "a")


def test_a_rate_that_is_none_is_refused(keys_file: Path) -> None:
    with pytest.raises(InvalidValue, match="no rate"):
        create_app(Settings(keys_file=keys_file, rate="often"))


def test_every_answer_carries_an_id_and_the_security_headers() -> None:
    with served() as http:
        for path, status in (("/v1", 200), ("/nowhere", 404), ("/v1/audits/x", 404), ("/openapi.json", 200)):
            answer = http.get(path, headers={"X-Request-ID": "pipeline:17.a"})
            assert answer.status_code == status
            assert answer.headers["x-request-id"] == "pipeline:17.a"
            assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
        for odd in ("", "x" * 129, "a b", '{"a":1}'):
            replaced = http.get("/v1", headers={"X-Request-ID": odd}).headers["x-request-id"]
            assert len(replaced) == 32


@pytest.mark.parametrize("where", ["header", "query", "path", "many"])
def test_a_head_that_is_too_long_is_refused(where: str) -> None:
    long = "x" * 40_000
    headers = {"header": {"X-Padding": long}, "many": {f"X-{number}": "x" * 100 for number in range(400)}}
    with served() as http:
        query, path = (f"?q={long}" if where == "query" else ""), (long if where == "path" else "")
        answer = http.get(f"/v1/audits{path}{query}", headers=headers.get(where, {}))
        assert (answer.status_code, answer.json()["code"]) == (431, "too-large")


def test_a_defect_is_told_with_the_same_headers_and_no_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret /etc/passwd")

    monkeypatch.setattr("glassblock.operations.tables.rules", broken)
    with served() as http:
        answer = http.get("/v1/rules")
        assert answer.status_code == 500
        assert answer.json()["code"] == "internal-fault"
        assert "passwd" not in answer.text
        assert answer.headers["x-request-id"]
        assert 'endpoint="rules",status="500"' in http.get("/metrics").text


def test_who_inspected_what_is_written_down(keys_file: Path, tmp_path: Path) -> None:
    log = tmp_path / "access.jsonl"
    with served(keys_file=keys_file, access_log=str(log)) as http:
        http.get("/health/live")
        http.get("/v1/checkpoints/tiny-llama", headers=bearer("read") | {"X-Request-ID": "one"})
        body = {"checkpoint": "tiny-llama", "layer": 0, "sample": {"rows": 2}}
        http.post("/v1/blocks/run", json=body, headers=bearer("run"))
        http.post("/v1/audits", json={"checkpoint": "tiny-llama"}, headers=bearer("read"))
        http.get("/v1", headers={"Authorization": "Bearer guess\u007f"})
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = [(line["caller"], line["endpoint"], line["checkpoint"], line["status"]) for line in lines]
    assert told == [
        ("read", "checkpoint", "tiny-llama", 200),
        ("run", "run_block", "tiny-llama", 200),
        ("read", "start_audit", None, 403),
        ("", "", None, 401),
    ]
    assert lines[0]["request_id"] == "one"
    assert not any(key in log.read_text() for key in KEYS.values())


def test_an_access_log_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="access log"):
        create_app(Settings(access_log=str(tmp_path / "absent" / "log")))


@pytest.mark.parametrize("depth", [65, 900])
def test_a_body_that_is_too_deep_is_refused(depth: int) -> None:
    with served() as http:
        nested: Any = 1
        for _ in range(depth):
            nested = {"a": [nested]} if depth % 2 else [nested]
        answer = http.post("/v1/audits", json={"checkpoint": "tiny-llama", "against": {"x": nested}})
        assert answer.status_code == 422
        assert "too deep" in answer.json()["detail"]


def test_metrics_count_requests_jobs_and_findings() -> None:
    with served() as http:
        audit = http.post("/v1/audits", json={"checkpoint": "tiny-llama"}).json()["id"]
        assert ended(http, audit, {})["state"] == "succeeded"
        http.get("/v1/checkpoints/absent")
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        for line in (
            'glassblock_requests_total{endpoint="start_audit",status="202"} 1.0',
            'glassblock_requests_total{endpoint="checkpoint",status="404"} 1.0',
            'glassblock_audits{state="succeeded"} 1.0',
            'glassblock_audits{state="queued"} 0.0',
            'glassblock_audits_ended_total{state="succeeded"} 1.0',
        ):
            assert line in answer.text, answer.text
        assert float(answer.text.split('glassblock_sent_bytes_total{endpoint="audit"} ')[1].split("\n")[0]) > 100


def test_metrics_look_in_the_event_loop_at_what_changes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_loop(_: object) -> bool:
        return asyncio.get_running_loop().is_running()  # raises in a thread without one

    monkeypatch.setattr(FairLane, "waiting", property(in_loop))
    monkeypatch.setattr(BodyBudget, "held", property(in_loop))
    with served() as http:
        assert 'glassblock_bodies_bytes{kind="held"} 1.0' in http.get("/metrics").text


def test_readiness_tells_of_the_database_and_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(data=tmp_path) as http:
        checks = http.get("/health/ready").json()["checks"]
        assert checks["database"] == "ok: sqlite, 0 waiting, 0 running"
        assert "MiB free" in checks["disk"]
        with monkeypatch.context() as broken:
            broken.setattr(shutil, "disk_usage", Mock(side_effect=FileNotFoundError(2, "No such file or directory")))
            refused = http.get("/health/ready")
        assert (refused.status_code, refused.json()["code"]) == (503, "storage-unavailable")
        assert str(tmp_path) not in refused.text, "whoever asks for readiness has no key"


def test_history_outlives_a_restart_and_pages_over_http(tmp_path: Path) -> None:
    with served(data=tmp_path) as http:
        ids = [http.post("/v1/audits", json={"checkpoint": "tiny-llama"}).json()["id"] for _ in range(3)]
        for audit in ids:
            assert ended(http, audit, {})["state"] == "succeeded"
    with served(data=tmp_path) as http:
        first = http.get("/v1/audits", params={"limit": 2, "state": "succeeded"}).json()
        assert [audit["id"] for audit in first["audits"]] == [ids[2], ids[1]]
        rest = http.get("/v1/audits", params={"limit": 2, "cursor": first["next"]}).json()
        assert [audit["id"] for audit in rest["audits"]] == [ids[0]]
        assert rest["next"] is None
        for query, field in (("limit=0", "limit"), ("state=done", "state"), ("cursor=x", "cursor"), ("page=2", "page")):
            refused = http.get(f"/v1/audits?{query}")
            assert (refused.status_code, refused.json()["field"]) == (422, field)
        assert http.get("/v1/audits?limit=1&limit=2").status_code == 422
        assert http.get("/v1/audits?since=2020-01-01").status_code == 422, "a time without its zone"


def test_an_idempotency_key_is_one_audit() -> None:
    with served() as http:
        body, headers = {"checkpoint": "tiny-llama"}, {"Idempotency-Key": "build-17"}
        first, again = (http.post("/v1/audits", json=body, headers=headers) for _ in range(2))
        assert first.status_code == again.status_code == 202
        assert first.headers["location"] == again.headers["location"]
        other = http.post("/v1/audits", json=body | {"certify": True}, headers=headers)
        assert (other.status_code, other.json()["field"]) == (422, "Idempotency-Key")
        for key in (b"a\x01b", b"a\tb", b"x" * 256, "k\u00e9".encode()):
            refused = http.post("/v1/audits", json=body, headers={b"Idempotency-Key": key})
            assert (refused.status_code, refused.json()["field"]) == (422, "Idempotency-Key"), key
            assert "printable" in refused.json()["detail"]


def test_a_report_is_sent_once_to_who_keeps_it() -> None:
    with served() as http:
        audit = http.post("/v1/audits", json={"checkpoint": "tiny-llama"}).json()["id"]
        ended(http, audit, {})
        path = f"/v1/audits/{audit}/report"
        whole, text = http.get(path), http.get(path, params={"format": "text"})
        tag = whole.headers["etag"]
        assert tag != text.headers["etag"]
        for held in (tag, f'"other", W/{tag}', "*"):
            kept = http.get(path, headers={"If-None-Match": held})
            assert (kept.status_code, kept.content, kept.headers["etag"]) == (304, b"", tag)
        assert http.get(path, headers={"If-None-Match": text.headers["etag"]}).status_code == 200


def test_events_are_streamed_to_the_end_and_resumed(tmp_path: Path) -> None:
    with served() as http:
        audit = http.post("/v1/audits", json={"checkpoint": "tiny-llama"}).json()["id"]
        answer = http.get(f"/v1/audits/{audit}/events")
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line[:5] == "data:"]
        states = [event["state"] for event in events if event["kind"] == "state"]
        assert states == ["queued", "running", "succeeded"]
        ids = [event["id"] for event in events]
        assert ids == sorted(set(ids))
        rest = http.get(f"/v1/audits/{audit}/events", headers={"Last-Event-ID": str(ids[0])}).text
        assert [int(line[4:]) for line in rest.splitlines() if line[:4] == "id: "] == ids[1:]
        for odd in ("x", "-1", "9" * 30):
            assert http.get(f"/v1/audits/{audit}/events", headers={"Last-Event-ID": odd}).status_code == 422
        assert http.get("/v1/audits/absent/events").status_code == 404


def test_the_client_follows_events(tmp_path: Path) -> None:
    app = create_app(Settings(roots=(EXAMPLES,), device="cpu"))
    with in_process(app) as transport:
        client = Client("http://g", transport=transport)
        audit = client.start_audit("tiny-llama", idempotency_key="k")
        seen: list[int] = []
        events = client.audit_events(audit.id, on_event=lambda event: seen.append(event.id))
        assert [event.id for event in events] == seen
        assert events[-1].state == "succeeded"
        assert client.audit_events(audit.id, last_event_id=str(seen[-1])) == ()
        assert client.audits(checkpoint="tiny-llama", limit=1).audits[0].id == audit.id
        assert "glassblock_requests_total" in client.metrics()


@pytest.mark.parametrize("patience", [Patience(30.0, 0.1), Patience(0.2, 30.0)], ids=["silent", "slow"])
def test_a_sender_that_does_not_send_is_not_waited_for(patience: Patience) -> None:
    async def receive() -> dict[str, object]:
        await asyncio.sleep(0.05 if patience.silence > 1 else 5)
        return {"type": "http.request", "body": b" ", "more_body": True}

    request = Request({"type": "http", "method": "POST", "headers": [(b"content-length", b"100000")]}, receive)
    with pytest.raises(TooSlow):
        asyncio.run(read_body(request, limit=10**6, patience=patience, budget=BodyBudget(1 << 40).of("")))


def test_who_comes_back_when_told_is_let_in() -> None:
    assert answer_error(TooManyRequests("too many", retry_after=2.3)).headers["Retry-After"] == "3"
    assert answer_error(NoRoom("full", retry_after=0.1)).headers["Retry-After"] == "1"


def test_a_disk_that_does_not_answer_is_no_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def stalled(_: Operations) -> None:
        raise TimeoutError(110, "Connection timed out")

    monkeypatch.setattr(Operations, "checkpoints", stalled)
    with in_process(create_app(Settings(roots=(EXAMPLES,), device="cpu"))) as transport:
        refused = httpx.Client(base_url="http://g", transport=transport).get("/v1/checkpoints")
    assert (refused.status_code, refused.json()["code"]) == (500, "internal-fault")
