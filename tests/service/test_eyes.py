"""What is written down of a request and a job: JSON lines, and spans where a collector is configured."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import structlog
from glassblock.api.app import create_app
from glassblock.api.doors import Caller
from glassblock.api.envelope import Visit
from glassblock.api.logs import log_as_json
from glassblock.api.metrics import Looked, Metrics
from glassblock.api.settings import Settings
from glassblock.api.tracing import Tracer
from glassblock.errors import InvalidValue
from glassblock.jobs.leases import Lease
from glassblock.operations.admission import Memory
from glassblock.operations.residency import Usage
from glassblock.wire.audits import AuditEvent, Progress
from glassblock_client.jobs import EventFeed

VISIT = Visit(
    "r-1", "POST", "/v1/blocks/run", "127.0.0.1", Caller("ci", "run"), "run_block", "tiny", status=200, seconds=0.25
)


@pytest.fixture
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.contextvars.clear_contextvars()


@pytest.mark.usefixtures("_logging_as_it_was")
def test_a_log_line_is_json_with_its_ids_and_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    log_as_json("info")
    structlog.contextvars.bind_contextvars(request_id="r-1")
    logging.getLogger("glassblock.x").warning("no %s", "room", extra={"audit": "a-1"})
    logging.getLogger("glassblock.x").debug("nobody asked")
    try:
        raise ValueError("odd\nlines")
    except ValueError:
        logging.getLogger("glassblock.x").exception("failed")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["message"] for line in lines] == ["no room", "failed"]
    assert (lines[0]["level"], lines[0]["request_id"], lines[0]["audit"]) == ("warning", "r-1", "a-1")
    assert lines[0]["logger"] == "glassblock.x"
    assert "ValueError: odd" in lines[1]["exception"]


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """An endpoint for traces, and what it was sent."""
    sent: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def do_POST(self) -> None:
            sent.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", sent
        server.shutdown()
        thread.join()


def test_requests_and_audits_become_spans(collector: tuple[str, list[tuple[str, bytes]]]) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")
    url, sent = collector
    tracer = Tracer(url)
    tracer(VISIT)
    tracer(Visit("r-2", "GET", "/nowhere", "127.0.0.1"))
    lease = Lease(1, 1, "a-1", "start_audit", "json", "{}", "tiny", "r-1")
    tracer.observe_job(lease, "succeeded", seconds=1.5, report=None)
    tracer.close()
    assert {path for path, _ in sent} == {"/v1/traces"}
    body = b"".join(body for _, body in sent)
    for told in (b"run_block", b"r-1", b"a-1", b"tiny", b"glassblock.state"):
        assert told in body
    assert b"r-2" not in body


def test_a_job_that_is_handed_back_has_not_ended() -> None:
    zero = (0, 0)
    looked = Looked(
        jobs=dict, usage=lambda: Usage(*(0,) * 6), memory=lambda: Memory(0, 0, 0, 0), lines=dict, stored=lambda: None,
        bodies=lambda: zero,
    )  # fmt: skip
    metrics = Metrics(looked, device="cpu")
    lease = Lease(1, 1, "a-1", "start_audit", "json", "{}", "tiny", "r-1")
    for state in ("queued", "queued", "succeeded", "failed"):
        metrics.observe_job(lease, state, seconds=1.5, report=None)
    lines = [line for line in metrics.text().decode().splitlines() if line.startswith("glassblock_audits_ended_total")]
    assert lines == [f'glassblock_audits_ended_total{{state="{state}"}} 1.0' for state in ("succeeded", "failed")]
    assert 'audit_seconds_count{state="queued"}' not in metrics.text().decode()


def test_nothing_of_tracing_is_loaded_where_nobody_asks_and_its_absence_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    create_app(Settings(roots=()))
    with pytest.raises(InvalidValue, match="not installed") as refused:
        create_app(Settings(roots=(), otlp_endpoint="http://127.0.0.1:9"))
    assert "glassblock[tracing]" in (refused.value.hint or "")


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_events_are_read_however_they_are_cut(newline: str) -> None:
    moment, progress = datetime(2026, 1, 1, tzinfo=UTC), Progress(done=0, total=0)
    event = AuditEvent(id=7, kind="state", at=moment, state="succeeded", progress=progress)
    text = newline.join([": ping", "", "id: 7", "event: state", f"data: {event.model_dump_json()}", "", ""]).encode()
    seen: list[int] = []
    feed = EventFeed(lambda event: seen.append(event.id))
    for start in range(len(text)):
        feed.add(text[start : start + 1])
    feed.add(text)
    assert feed.close() == (event, event)
    assert seen == [7, 7]
