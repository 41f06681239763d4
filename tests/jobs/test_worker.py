"""The worker: it stops when told, gives up what it lost, and outlives a database that is locked, full or away."""

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from glassblock.errors import StorageUnavailable
from glassblock.jobs import database as databases
from glassblock.jobs import history
from glassblock.jobs.audits import AuditJobs
from glassblock.jobs.database import FILE
from glassblock.jobs.history import Asked
from glassblock.jobs.leases import Lease
from glassblock.jobs.worker import Rules
from glassblock.operations.audits import AuditStopped
from glassblock.operations.operations import Operations
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import AuditQuery, AuditRequest, JobState, Report
from makers import tiny_checkpoint
from reports.report_makers import report
from sqlalchemy import event
from sqlalchemy.pool import Pool

from jobs.works import audits_by

RULES = Rules(beat_seconds=0.05, idle_seconds=0.05)
DATABASE_BUSY_S = 5.0
PAGES = random.Random(1).randbytes(20_000).hex()
"""Text that takes new pages of a database, compressed or not."""


class Work:
    """An audit that goes on until it is let go, asking all the time whether to stop, unless it is deaf."""

    def __init__(self, *, deaf: bool = False) -> None:
        self.runs = threading.Semaphore(0)
        self.let_go = threading.Event()
        self.deaf = deaf

    def __call__(
        self, request: AuditRequest, *, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Report:
        self.runs.release()
        step = 0
        while not self.let_go.wait(0.005):
            step += 1
            progress(step, 10**6, "layer 0")
            if cancelled() and not self.deaf:
                raise AuditStopped
        return report().model_copy(update={"glassblock": PAGES})


@contextmanager
def opened(work: object, place: str | Path, rules: Rules = RULES) -> Iterator[AuditJobs]:
    jobs = AuditJobs(audits_by(work), place=place, status_of=lambda _: 500, rules=rules)
    jobs.open()
    try:
        yield jobs
    finally:
        jobs.close()


def put(jobs: AuditJobs, checkpoint: str = "a") -> str:
    return jobs.start(Asked(AuditRequest(checkpoint=checkpoint))).id


def wait_until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def test_a_stop_hands_the_job_back_and_the_next_service_ends_it(place: str | Path) -> None:
    work = Work()
    with opened(work, place) as first:
        audit = put(first)
        assert work.runs.acquire(timeout=10)
        told = time.monotonic()
    assert time.monotonic() - told < 5, "it waited for the audit"
    assert work.let_go.is_set() is False
    work.let_go.set()
    with opened(work, place) as second:
        wait_until(lambda: second.get(audit).state == "succeeded")
        assert second.get(audit).attempts == 1, "the attempt that was handed back does not count"


def test_a_stop_hands_back_also_what_does_not_hear(tmp_path: Path) -> None:
    work = Work(deaf=True)
    with opened(work, tmp_path, Rules(beat_seconds=0.05, idle_seconds=0.05, stop_seconds=0.3)) as first:
        audit = put(first)
        assert work.runs.acquire(timeout=10)
    waiting = Work()
    with opened(waiting, tmp_path) as second:
        assert waiting.runs.acquire(timeout=10)
        work.let_go.set()  # the old worker comes back with its report
        time.sleep(0.3)
        assert second.get(audit).state == "running", "what the old worker found was thrown away"
        waiting.let_go.set()
        wait_until(lambda: second.get(audit).state == "succeeded")


def test_cancelling_stops_the_work_of_another_service_within_a_second(place: str | Path) -> None:
    work = Work()
    with opened(work, place) as worker, opened(Work(), place, Rules(idle_seconds=3600)) as other:
        audit = put(worker)
        assert work.runs.acquire(timeout=10)
        put(worker, "next")
        assert other.cancel(audit).state == "cancelled"
        assert work.runs.acquire(timeout=1.0), "the next job was not begun within a second"


def test_a_worker_that_was_given_up_stops_its_work(tmp_path: Path) -> None:
    work = Work()
    with opened(work, tmp_path) as jobs:
        audit = put(jobs)
        assert work.runs.acquire(timeout=10)
        with sqlite3.connect(tmp_path / FILE, isolation_level=None) as other:
            other.execute("UPDATE audits SET token = token + 1")
        other.close()
        put(jobs, "next")
        assert work.runs.acquire(timeout=5), "it went on with a job that is no longer its own"
        assert jobs.get(audit).report is None


def test_an_attempt_that_takes_too_long_is_failed(tmp_path: Path) -> None:
    rules = Rules(beat_seconds=0.05, idle_seconds=0.05, limit_seconds=0.2)
    with opened(Work(), tmp_path, rules) as jobs:
        audit = put(jobs)
        wait_until(lambda: jobs.get(audit).state == "failed")
        problem = jobs.get(audit).problem
    assert problem is not None
    assert "GLASSBLOCK_AUDIT_HOURS" in problem["hint"]


def test_the_observer_is_told_after_the_end_was_stored(tmp_path: Path) -> None:
    seen: list[tuple[str, JobState, str]] = []

    def observe(lease: Lease, state: JobState, *, seconds: float, report: Report | None) -> None:
        seen.append((lease.id, state, jobs.get(lease.id).state))
        raise RuntimeError("an observer that fails takes nobody with it")

    work = Work()
    work.let_go.set()
    jobs = AuditJobs(audits_by(work), place=tmp_path, status_of=lambda _: 500, rules=RULES, observers=(observe,))
    jobs.open()
    for _ in range(2):
        audit = put(jobs)
        wait_until(lambda audit=audit: jobs.get(audit).state == "succeeded" and seen[-1:] != [])
    wait_until(lambda: len(seen) == 2)
    jobs.close()
    assert [(told, then) for _, told, then in seen] == [("succeeded", "succeeded")] * 2


def test_a_database_that_is_locked_is_waited_for(tmp_path: Path) -> None:
    work = Work()
    with opened(work, tmp_path) as jobs:
        audit = put(jobs)
        assert work.runs.acquire(timeout=10)
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        work.let_go.set()
        with ThreadPoolExecutor(1) as asker:
            second = asker.submit(put, jobs)
            assert jobs.get(audit).state == "running", "readers do not wait"
            time.sleep(DATABASE_BUSY_S)
            assert not second.done()
            other.execute("ROLLBACK")
            other.close()
            wait_until(lambda: jobs.get(second.result()).state == "succeeded")
        assert (jobs.get(audit).state, jobs.get(audit).attempts) == ("succeeded", 1)


def test_a_database_that_stays_locked_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(databases, "BUSY_SECONDS", 0.2)
    with opened(Work(), tmp_path) as jobs:
        other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageUnavailable, match="locked") as refused:
            put(jobs)
        assert refused.value.retry_after
        other.execute("ROLLBACK")
        other.close()
        assert jobs.get(put(jobs)).state in {"queued", "running"}


def test_much_is_forgotten_piece_by_piece_between_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, forgotten, forget = Work(), list[int](), history.forget
    done.let_go.set()
    with opened(done, tmp_path) as jobs:
        for _ in range(9):
            put(jobs)
        wait_until(lambda: jobs.counts()["succeeded"] == 9)

    def counted(*arguments: Any, **more: Any) -> int:
        forgotten.append(forget(*arguments, **more))
        return forgotten[-1]

    monkeypatch.setattr(history, "BATCH", 3)
    monkeypatch.setattr(history, "forget", counted)
    with opened(done, tmp_path, Rules(beat_seconds=0.01, keep=1)) as jobs:
        wait_until(lambda: jobs.counts()["succeeded"] == 1)
        wait_until(lambda: len(forgotten) == 3)
    assert forgotten == [3, 3, 2], "and then not again for an hour"


class Disk:
    """SQLite's own answer to a full disk, for every connection that is taken while `full`: no page can be added."""

    full = False

    def __call__(self, connection: sqlite3.Connection, *_: object) -> None:
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count={pages if self.full else 2**30}")


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    event.listen(Pool, "checkout", disk)
    yield disk
    event.remove(Pool, "checkout", disk)


def test_a_full_disk_is_told_of_and_loses_no_job(tmp_path: Path, disk: Disk) -> None:
    work = Work()
    with opened(work, tmp_path) as jobs:
        audit = put(jobs)
        assert work.runs.acquire(timeout=10)
        disk.full = True
        with pytest.raises(StorageUnavailable, match="full") as refused:
            jobs.start(Asked(AuditRequest(checkpoint="a", against={"x": PAGES})))
        assert "free space" in (refused.value.hint or "")
        work.let_go.set()
        time.sleep(0.5)  # the worker has its report, and cannot store it
        assert jobs.get(audit).state == "running"
        disk.full = False
        wait_until(lambda: jobs.get(audit).state == "succeeded")
        assert len(jobs.listed(AuditQuery()).audits) == 1, "what was refused is not there"


@pytest.mark.parametrize("what", ["replaced", "deleted"])
def test_a_checkpoint_that_changes_under_its_audit_fails_it(tmp_path: Path, what: str) -> None:
    weights = tiny_checkpoint("llama", tmp_path / "llama") / "model.safetensors"
    operations = Operations(CheckpointStore([tmp_path], device="cpu"))

    def work(
        request: AuditRequest, *, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Report:
        def changing(done: int, total: int, message: str) -> None:
            if weights.exists() and done > 0:
                content = weights.read_bytes()
                weights.unlink()
                if what == "replaced":
                    weights.write_bytes(content)
            progress(done, total, message)

        return operations.audit(request, progress=changing, cancelled=cancelled)

    with opened(work, tmp_path / "data") as jobs:
        audit = put(jobs, "llama")
        wait_until(lambda: jobs.get(audit).state == "failed", 30)
        problem = jobs.get(audit).problem
    assert problem is not None
    assert problem["code"] == "damaged-checkpoint"
    assert problem["file"] == "model.safetensors"
