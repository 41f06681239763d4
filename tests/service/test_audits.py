"""Audits as jobs over HTTP: start, follow, report, cancel."""

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from glassblock.errors import GlassblockError, InvalidValue, NoRoom, NotReady, UnknownAudit
from glassblock.jobs.audits import AuditJobs
from glassblock.jobs.history import Asked
from glassblock.jobs.worker import Rules
from glassblock.operations.audits import AuditStopped
from glassblock.wire.audits import AuditedCheckpoint, AuditRequest, Progress, Report
from glassblock_client import Client
from jobs.works import audits_by
from makers import tiny_checkpoint


def ended(http: httpx.Client, location: str) -> dict[str, object]:
    for _ in range(600):
        audit = http.get(location).json()
        if audit["state"] not in {"queued", "running"}:
            return audit
        time.sleep(0.05)
    raise TimeoutError(location)


class Screen(io.StringIO):
    """A stderr that is a terminal, or none."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_the_client_shows_a_bar_where_somebody_looks(
    client: Client, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Screen(terminal=terminal))
    client.audit_checkpoint("llama")
    drawn = sys.stderr.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert ("auditing llama" in drawn) is terminal
    assert bool(drawn) is terminal
    monkeypatch.setattr(sys, "stderr", Screen(terminal=terminal))
    told: list[Progress] = []
    client.audit_checkpoint("llama", on_progress=told.append)
    assert told
    assert not sys.stderr.getvalue(), "whoever is told draws himself"  # pyright: ignore[reportAttributeAccessIssue]


def test_an_audit_is_a_job_with_a_location_and_a_report(http: httpx.Client) -> None:
    started = http.post("/v1/audits", json={"checkpoint": "llama"})
    assert started.status_code == 202
    location = started.headers["location"]
    assert location == f"/v1/audits/{started.json()['id']}"
    audit = ended(http, location)
    assert audit["state"] == "succeeded"
    report = Report.model_validate(audit["report"])
    assert report.checkpoint.path == "llama"
    assert report.verdict == "inconclusive"  # random weights: nobody can say which is the gate
    assert http.get(f"{location}/report").json() == audit["report"]
    listed = http.get("/v1/audits").json()["audits"]
    assert audit["id"] in {other["id"] for other in listed}
    assert all(other.get("report") is None for other in listed)


def test_the_report_comes_in_the_format_asked_for(http: httpx.Client) -> None:
    location = http.post("/v1/audits", json={"checkpoint": "llama"}).headers["location"]
    ended(http, location)
    text = http.get(f"{location}/report", params={"format": "text"})
    assert text.headers["content-type"].startswith("text/plain")
    assert "llama" in text.text
    by_accept = http.get(f"{location}/report", headers={"Accept": "text/plain"})
    assert by_accept.text == text.text
    refused = http.get(f"{location}/report", params={"format": "docx"})
    assert refused.status_code == 422
    assert "text" in refused.json()["known"]


def test_the_same_files_give_the_same_report(client: Client) -> None:
    first, second = (client.audit_checkpoint("qwen3") for _ in range(2))
    assert first.model_dump_json() == second.model_dump_json()


@pytest.mark.parametrize("name", ["truncated", "unknown-family", "shard-missing"])
def test_a_broken_checkpoint_fails_its_audit_with_a_report(client: Client, root: Path, name: str) -> None:
    directory = tiny_checkpoint("llama", root / f"audit-{name}", shards=3 if name == "shard-missing" else 1)
    match name:
        case "truncated":
            weights = directory / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-10])
            rule = "container/truncated"
        case "unknown-family":
            (directory / "config.json").write_text('{"model_type": "llamax"}')
            rule = "config/unknown-family"
        case _:
            (directory / "model-00002-of-00003.safetensors").unlink()
            rule = "index/missing-shard"
    report = client.audit_checkpoint(directory.name)
    assert report.verdict == "fail"
    assert rule in {finding.rule for finding in report.findings if finding.level == "error"}


def test_an_unknown_rule_is_refused_at_once(client: Client) -> None:
    with pytest.raises(InvalidValue, match="ffn/swapped"):
        client.audit_checkpoint("llama", rules=("ffn/swapped",))


def test_against_another_config(client: Client) -> None:
    same = client.audit_checkpoint("llama", against={"rms_norm_eps": 1e-5})
    other = client.audit_checkpoint("llama", against={"rms_norm_eps": 1e-6}, against_name="engine.json")
    assert [finding.rule for finding in same.findings if finding.level == "error"] == []
    (finding,) = (finding for finding in other.findings if finding.level == "error")
    assert (finding.rule, finding.certainty) == ("config/eps-conflict", "conflict")
    assert "engine.json" in finding.message


class Gate:
    """An audit operation that waits to be let through, telling progress meanwhile."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.running = threading.Event()

    def __call__(
        self, request: AuditRequest, *, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Report:
        self.running.set()
        progress(1, 3, "layer 0")
        while not self.open.wait(0.005):
            if cancelled():
                raise AuditStopped
        if request.checkpoint == "bad":
            raise InvalidValue("no such thing", field="rules")
        if request.checkpoint == "defect":
            raise RuntimeError("secret path /etc/passwd")
        checkpoint = AuditedCheckpoint(path=request.checkpoint, family=None, layers=0, tensors=0, bytes=0)
        return Report(glassblock="0", checkpoint=checkpoint, verdict="pass", findings=(), coverage=(), layers=())


@pytest.fixture
def gate() -> Gate:
    return Gate()


WAITING = 3


@pytest.fixture
def jobs(gate: Gate) -> Iterator[AuditJobs]:
    jobs = AuditJobs(audits_by(gate), status_of=lambda _: 422, rules=Rules(beat_seconds=0.02, waiting=WAITING))
    jobs.open()
    yield jobs
    jobs.close()


def asked(checkpoint: str, **more: str) -> Asked:
    return Asked(AuditRequest(checkpoint=checkpoint), **more)


def wait_for(jobs: AuditJobs, audit_id: str, state: str) -> None:
    wait_until(lambda: jobs.get(audit_id).state == state)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.01)
    raise TimeoutError


def test_progress_is_told_while_it_runs(jobs: AuditJobs, gate: Gate) -> None:
    audit = jobs.start(asked("a"))
    assert gate.running.wait(5)
    wait_for(jobs, audit.id, "running")
    with pytest.raises(NotReady, match="running"):
        jobs.report(audit.id)
    wait_until(lambda: jobs.get(audit.id).progress == Progress(done=1, total=3, message="layer 0"))
    gate.open.set()
    wait_for(jobs, audit.id, "succeeded")
    assert jobs.report(audit.id).report.checkpoint.path == "a"


def test_cancel_stops_the_running_and_the_waiting(jobs: AuditJobs, gate: Gate) -> None:
    first, second = (jobs.start(asked(name)) for name in ("a", "b"))
    assert gate.running.wait(5)
    assert jobs.cancel(second.id).state == "cancelled"
    assert jobs.cancel(first.id).state == "cancelled"
    third = jobs.start(asked("c"))
    gate.open.set()
    wait_for(jobs, third.id, "succeeded")
    assert jobs.get(first.id).state == jobs.get(second.id).state == "cancelled"
    with pytest.raises(NotReady, match="cancelled") as refused:
        jobs.report(first.id)
    assert refused.value.hint == "start another one: this one has ended"
    assert jobs.cancel(third.id).state == "succeeded", "what has ended stays as it ended"


def test_a_failed_job_keeps_its_problem_and_a_defect_tells_no_inside(jobs: AuditJobs, gate: Gate) -> None:
    gate.open.set()
    bad, defect = (jobs.start(asked(name)) for name in ("bad", "defect"))
    wait_for(jobs, bad.id, "failed")
    wait_for(jobs, defect.id, "failed")
    problem = jobs.get(bad.id).problem
    assert problem is not None
    assert (problem["code"], problem["field"], problem["status"]) == ("invalid-value", "rules", 422)
    assert "passwd" not in str(jobs.get(defect.id).problem)
    with pytest.raises(GlassblockError):
        jobs.report(defect.id)


def test_too_many_waiting_are_told_to_come_back(jobs: AuditJobs, gate: Gate) -> None:
    jobs.start(asked("running"))
    assert gate.running.wait(5)
    for _ in range(WAITING):
        jobs.start(asked("waiting"))
    with pytest.raises(NoRoom) as refused:
        jobs.start(asked("one too many"))
    assert refused.value.retry_after


def test_an_unknown_audit_is_not_found(jobs: AuditJobs) -> None:
    for ask in (jobs.get, jobs.cancel, jobs.report):
        with pytest.raises(UnknownAudit):
            ask("nonesuch")
