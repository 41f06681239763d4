"""Bodies of jobs, over both databases: posted tensors, kept to the end and no longer; answers, within a budget."""

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
from glassblock.errors import InvalidValue, NoRoom, NotReady, StorageUnavailable, TooLarge, UnknownAudit
from glassblock.jobs import history, leases, pieces
from glassblock.jobs.audits import AuditJobs
from glassblock.jobs.database import Database, open_database
from glassblock.jobs.history import Asked
from glassblock.jobs.leases import Lease, Made
from glassblock.jobs.tables import PIECES
from glassblock.jobs.worker import Rules, Run
from glassblock.numerics.watching import ComputationCancelled
from glassblock.operations.reply import Reply
from glassblock.operations.works import Follower
from glassblock.wire import framing
from glassblock.wire.audits import AuditQuery, AuditRequest, JobAnswer
from glassblock.wire.framing import WireTensor
from glassblock.wire.norms import NormStatisticsRequest
from glassblock.wire.values import Request
from glassblock_client.tensors import wire_from_array
from sqlalchemy import func, select

BUDGET = 1_000_000
RULES = Rules(beat_seconds=0.02, idle_seconds=0.02, held_bytes=BUDGET)
WAIT_S = 30.0


@contextmanager
def opened(run: Run, place: str | Path, rules: Rules = RULES) -> Iterator[AuditJobs]:
    jobs = AuditJobs(run, place=place, status_of=lambda _: 500, rules=rules)
    jobs.open()
    try:
        yield jobs
    finally:
        jobs.close()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def norms(size: int, **more: str) -> Asked:
    tensors = framing.frame("request", "{}", {"x": wire_from_array(np.zeros(size, np.uint8))})
    return Asked(NormStatisticsRequest(eps=1e-5), operation="norm_statistics", tensors=tuple(tensors), **more)


def kept(place: str | Path) -> dict[str, int]:
    """Bytes that lie there, by side."""
    database = open_database(place)
    with database.reading() as connection:
        rows = connection.execute(select(PIECES.c.side, func.sum(PIECES.c.bytes)).group_by(PIECES.c.side)).all()
    database.close()
    return {side: int(size) for side, size in rows}


class Patient:
    """Goes on until it is let go."""

    def __init__(self) -> None:
        self.runs, self.go = 0, False

    def __call__(
        self, operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower
    ) -> Reply[Any]:
        self.runs += 1
        while not self.go:
            time.sleep(0.005)
            if follower.cancelled():
                raise ComputationCancelled
        assert len(tensors["x"].data) == 400_000
        return Reply(JobAnswer())


def test_posted_tensors_are_kept_to_the_end_of_their_job(place: str | Path) -> None:
    work = Patient()
    with opened(work, place) as jobs:
        with pytest.raises(TooLarge) as never:
            jobs.start(norms(BUDGET))
        assert "GLASSBLOCK_JOBS_MIB" in (never.value.hint or "")
        first, second = jobs.start(norms(400_000)), jobs.start(norms(400_000))
        with pytest.raises(NoRoom) as refused:
            jobs.start(norms(400_000))
        assert refused.value.retry_after
        assert 800_000 < kept(place)["request"] < 801_000
        assert len(jobs.listed(AuditQuery()).audits) == 2, "what was refused is not there"
        wait_until(lambda: jobs.get(first.id).state == "running")
        told = time.monotonic()
        jobs.cancel(first.id)
        wait_until(lambda: work.runs == 2)
        assert time.monotonic() - told < 1.0, "cancelling stopped the work within a second"
        with pytest.raises(NotReady):
            jobs.answer(first.id)
    assert 400_000 < kept(place)["request"] < 401_000, "a job that is handed back keeps its tensors"
    work.go = True
    with opened(work, place) as jobs:
        wait_until(lambda: jobs.get(second.id).state == "succeeded")
        assert jobs.answer(second.id).chunks == [b"{}"]
    assert kept(place) == {"answer": 2}


def test_a_job_that_fails_leaves_no_tensors_behind(place: str | Path) -> None:
    def run(operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower) -> Reply[Any]:
        raise InvalidValue("x is odd", field="x")

    with opened(run, place) as jobs:
        job = jobs.start(norms(10))
        wait_until(lambda: jobs.get(job.id).state == "failed")
        with pytest.raises(InvalidValue, match="x is odd"):
            jobs.answer(job.id)
    assert kept(place) == {}


class Filled(Reply[Any]):
    """A reply whose body is as large as x was."""

    def __init__(self, tensors: Mapping[str, WireTensor]) -> None:
        super().__init__(JobAnswer())
        object.__setattr__(self, "size", len(tensors["x"].data))

    def body(self, form: str) -> tuple[str, tuple[bytes | memoryview, ...]]:
        return "application/json", (b"x" * getattr(self, "size"),)  # noqa: B009  it is set above


def test_old_answers_make_room_for_new_ones(place: str | Path) -> None:
    with opened(lambda _operation, _request, tensors, _follower: Filled(tensors), place) as jobs:
        ids: list[str] = []
        for _ in range(3):
            ids.append(jobs.start(norms(400_000)).id)
            wait_until(lambda: jobs.get(ids[-1]).state == "succeeded")
        assert sum(map(len, jobs.answer(ids[-1]).chunks)) == 400_000
        with pytest.raises(UnknownAudit, match="made room"):
            jobs.answer(ids[0])
        assert jobs.get(ids[0]).state == "succeeded", "its history stays"
    assert kept(place)["answer"] <= BUDGET


def test_an_answer_that_leaves_while_it_is_read_is_read_whole(
    place: str | Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = open_database(place)

    def end_one() -> str:
        job = history.enqueue(database, norms(1), waiting=9)
        lease = leases.take(database)
        assert lease is not None
        assert leases.finish(database, lease, Made("application/json", (b"x" * 600_000,)), budget=BUDGET)
        return job.id

    first, read = end_one(), pieces.read

    def read_late(*which: Any) -> list[bytes]:
        with ThreadPoolExecutor(1) as another:
            another.submit(end_one).result(WAIT_S)  # for whose answer the first one makes room
        return read(*which)

    with monkeypatch.context() as patched:
        patched.setattr(pieces, "read", read_late)
        _, answer = history.answered(database, first)
    assert answer is not None
    assert sum(map(len, answer.chunks)) == 600_000
    assert history.answered(database, first)[1] is None
    database.close()


def test_tensors_that_come_at_once_stay_within_the_budget(place: str | Path) -> None:
    database, at_once = open_database(place), Barrier(6)

    def post(_: int) -> bool:
        at_once.wait(WAIT_S)
        try:
            history.enqueue(database, norms(600_000), waiting=99, budget=BUDGET)
        except NoRoom:
            return False
        return True

    with ThreadPoolExecutor(6) as callers:
        assert sum(callers.map(post, range(6))) == 1
    database.close()
    assert kept(place)["request"] <= BUDGET


def test_a_database_that_is_away_for_a_moment_fails_no_job(place: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    posted, looks = leases.posted, list[int]()

    def away_once(database: Database, lease: Lease) -> memoryview:
        looks.append(lease.token)
        if len(looks) == 1:
            raise StorageUnavailable("the connection was lost", retry_after=0.01)
        return posted(database, lease)

    monkeypatch.setattr(leases, "posted", away_once)
    work = Patient()
    work.go = True
    with opened(work, place) as jobs:
        job = jobs.start(norms(400_000))
        wait_until(lambda: jobs.get(job.id).ended is not None)
        assert (jobs.get(job.id).state, jobs.get(job.id).attempts, len(looks)) == ("succeeded", 1, 2)


def test_an_answer_that_cannot_be_kept_fails_its_job(place: str | Path) -> None:
    def run(operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower) -> Reply[Any]:
        return Filled({"x": WireTensor("U8", (BUDGET + 1,), memoryview(bytes(BUDGET + 1)))})

    with opened(run, place) as jobs:
        job = jobs.start(norms(10))
        wait_until(lambda: jobs.get(job.id).state == "failed")
        with pytest.raises(TooLarge):
            jobs.answer(job.id)
    assert kept(place) == {}


def test_a_large_body_comes_back_as_it_was(place: str | Path) -> None:
    body = np.random.default_rng(3).integers(0, 256, 2 * pieces.PIECE_BYTES + 17, np.uint8).tobytes()
    seen: list[bytes] = []

    def run(operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower) -> Reply[Any]:
        seen.append(bytes(tensors["x"].data))
        return Reply(JobAnswer())

    framed = tuple(framing.frame("request", "{}", {"x": WireTensor("U8", (len(body),), memoryview(body))}))
    rules = Rules(beat_seconds=0.02, idle_seconds=0.02)
    with opened(run, place, rules) as jobs:
        job = jobs.start(Asked(NormStatisticsRequest(eps=1e-5), operation="norm_statistics", tensors=framed))
        wait_until(lambda: jobs.get(job.id).state == "succeeded")
    assert seen == [body]


def test_the_key_of_a_request_holds_for_its_tensors_too(place: str | Path) -> None:
    database = open_database(place)
    first = history.enqueue(database, norms(10, key="k"), waiting=9)
    assert history.enqueue(database, norms(10, key="k"), waiting=9).id == first.id
    for other in (norms(11, key="k"), Asked(AuditRequest(checkpoint="a"), key="k"), norms(10, key="k", form="tensors")):
        with pytest.raises(InvalidValue, match="another request"):
            history.enqueue(database, other, waiting=9)
    database.close()


def test_a_job_waits_for_room_on_the_device(place: str | Path) -> None:
    calls: list[float] = []

    def run(operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower) -> Reply[Any]:
        calls.append(time.monotonic())
        if len(calls) < 3:
            raise NoRoom("the device is full", retry_after=0.01)
        return Reply(JobAnswer())

    with opened(run, place) as jobs:
        job = jobs.start(norms(1))
        wait_until(lambda: jobs.get(job.id).state == "succeeded")
        assert (len(calls), jobs.get(job.id).attempts) == (3, 1)


def test_a_job_for_which_no_room_comes_is_failed(place: str | Path) -> None:
    def run(operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower) -> Reply[Any]:
        raise NoRoom("the device is full", retry_after=0.01)

    with opened(run, place, rules=replace(RULES, room_seconds=0.05)) as jobs:
        job = jobs.start(norms(1))
        wait_until(lambda: jobs.get(job.id).state == "failed")
        with pytest.raises(NoRoom, match="the device is full"):
            jobs.answer(job.id)


def test_what_only_a_newer_service_knows_fails_and_holds_nothing_up(place: str | Path) -> None:
    database = open_database(place)
    job = history.enqueue(database, Asked(NormStatisticsRequest(eps=1e-5), operation="of_tomorrow"), waiting=9)
    database.close()
    with opened(Patient(), place) as jobs:
        wait_until(lambda: jobs.get(job.id).state == "failed")
        with pytest.raises(InvalidValue, match="is not read by glassblock"):
            jobs.answer(job.id)
