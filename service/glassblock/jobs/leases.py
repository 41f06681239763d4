"""Who works on a job: one holder at a time, and none of them trusted for longer than it shows that it lives.

A lease is a number on the job's row, `token`, that counts up whenever the job is taken. Its holder counts up `beat`
while it lives. Every statement of a holder asks for its token, so a holder that was given up for dead changes nothing
any more, whatever it still believes: the token fences it off.

No clock is compared with another one. Whoever waits for a lease to lapse watches `beat` stand still for the length of
a lease by its own monotonic clock (`worker.Watch`), and then takes the job back only if it stands still yet. Clocks
that differ, or step back, shift the times that are shown and nothing else.
"""

import hashlib
import json
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Connection, and_, func, insert, select, update
from sqlalchemy.sql import ColumnElement

from glassblock.jobs import pieces
from glassblock.jobs.database import Database
from glassblock.jobs.tables import ANSWERS, AUDITS, EVENTS, REPORTS
from glassblock.wire.audits import Finding, JobState, Progress, Report
from glassblock.wire.problems import Problem

Form = Literal["json", "tensors"]
"""How an answer is sent: JSON, or one safetensors body."""


@dataclass(frozen=True)
class Lease:
    """The right to work on one job.

    Attributes:
        number: of the job.
        token: which taking of the job this is.
        operation: as its endpoint is called.
        form: of the answer.
        message: what was asked, as JSON.
        checkpoint: that it names; empty where it names none.
        request_id: of the HTTP request that asked for it, for the log.
    """

    number: int
    token: int
    id: str
    operation: str
    form: Form
    message: str
    checkpoint: str
    request_id: str


@dataclass(frozen=True)
class Made:
    """The answer of an operation, as it is sent."""

    media_type: str
    chunks: Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Held:
    """A job that somebody holds, as it was seen."""

    number: int
    token: int
    beat: int
    attempts: int


def take(database: Database) -> Lease | None:
    """Take the job that has waited longest; None where none waits."""
    with database.writing() as connection:
        longest = (
            select(AUDITS.c.number)
            .where(AUDITS.c.state == "queued")
            .order_by(AUDITS.c.number)
            .limit(1)
            .with_for_update(skip_locked=True)  # SQLite has one writer anyway, and no such words
            .scalar_subquery()
        )
        row = connection.execute(
            update(AUDITS)
            .where(AUDITS.c.number == longest, AUDITS.c.state == "queued")
            .values(
                state="running",
                token=AUDITS.c.token + 1,
                attempts=AUDITS.c.attempts + 1,
                beat=0,
                done=0,
                total=0,
                message="",
                started=time.time(),
            )
            .returning(*AUDITS.c)
        ).first()
        if row is None:
            return None
        note(connection, row, kind="state")
    return Lease(row.number, row.token, row.id, row.operation, row.form, row.request, row.checkpoint, row.request_id)


def posted(database: Database, lease: Lease) -> memoryview:
    """The tensors that came with the request, as one safetensors body; empty where none did."""
    with database.reading() as connection:
        found = pieces.read(connection, lease.number, "request")
    return memoryview(bytearray().join(found))  # writable: no tensor may lie in memory that is not


def beat(database: Database, lease: Lease, progress: Progress | None, findings: Sequence[Finding] = ()) -> bool:
    """Show that the holder lives, and how far it has come and what it has found where that is new.

    Returns:
        False: the lease is lost, and nothing was written.
    """
    changed: dict[str, Any] = {"beat": AUDITS.c.beat + 1}
    if progress is not None:
        changed |= {"done": progress.done, "total": progress.total, "message": storable(progress.message)}
    with database.writing() as connection:
        row = _change(connection, lease, changed)
        if row is not None and progress is not None:
            note(connection, row, kind="progress")
        for finding in findings if row is not None else ():
            note(connection, row, kind="finding", finding=finding)
    return row is not None


def finish(database: Database, lease: Lease, made: Report | Made, *, budget: int = 1 << 31) -> bool:
    """Store what came of a job and end it well. False: the lease is lost, and nothing was stored.

    Args:
        made: a report, or the answer of another operation.
        budget: bytes that answers and posted tensors may take.

    Raises:
        TooLarge, NoRoom: the answer cannot be kept.
    """
    with database.writing() as connection:
        # The whole of it is done; what the last beat said was a moment before.
        row = _change(connection, lease, _ended("succeeded") | {"done": AUDITS.c.total, "message": ""})
        if row is not None:
            pieces.drop(connection, (lease.number,), "request")
            _store(connection, lease.number, made, budget)
            note(connection, row, kind="state")
    return row is not None


def _store(connection: Connection, number: int, made: Report | Made, budget: int) -> None:
    if isinstance(made, Report):
        text = made.model_dump_json().encode()
        stored = {"audit": number, "digest": hashlib.sha256(text).hexdigest(), "packed": zlib.compress(text)}
        connection.execute(insert(REPORTS).values(stored))
        return
    digest = hashlib.sha256()
    for chunk in made.chunks:
        digest.update(chunk)
    pieces.keep(connection, number, "answer", made.chunks, budget=budget)
    connection.execute(insert(ANSWERS).values(audit=number, digest=digest.hexdigest(), media_type=made.media_type))


def fail(database: Database, lease: Lease, problem: Problem) -> bool:
    """End a job badly. False: the lease is lost."""
    with database.writing() as connection:
        row = _change(connection, lease, _ended("failed") | {"problem": dump(problem)})
        if row is not None:
            pieces.drop(connection, (lease.number,), "request")
            note(connection, row, kind="state")
    return row is not None


def hand_back(database: Database, lease: Lease) -> bool:
    """Put a job back into the queue, the attempt uncounted: its holder stops of its own will. False: it is lost."""
    with database.writing() as connection:
        row = _change(connection, lease, {"state": "queued", "attempts": AUDITS.c.attempts - 1})
        if row is not None:
            note(connection, row, kind="state")
    return row is not None


def held(database: Database) -> list[Held]:
    """Every job that somebody holds."""
    with database.reading() as connection:
        rows = connection.execute(
            select(AUDITS.c.number, AUDITS.c.token, AUDITS.c.beat, AUDITS.c.attempts).where(AUDITS.c.state == "running")
        ).all()
    return [Held(row.number, row.token, row.beat, row.attempts) for row in rows]


def take_back(database: Database, seen: Held, *, attempts: int, problem: Problem) -> JobState | None:
    """Give up on the holder of a job, unless it has moved since `seen`.

    Args:
        attempts: how often a job may be taken in all. One that has been is failed with `problem`, any other waits.

    Returns:
        What the job is now; None where its holder has moved.
    """
    spent = seen.attempts >= attempts
    changed: dict[str, Any] = _ended("failed") | {"problem": dump(problem)} if spent else {"state": "queued"}
    with database.writing() as connection:
        row = _change_where(connection, and_(_is(seen.number, seen.token), AUDITS.c.beat == seen.beat), changed)
        if row is None:
            return None
        if spent:
            pieces.drop(connection, (seen.number,), "request")
        note(connection, row, kind="state")
    return "failed" if spent else "queued"


def note(connection: Connection, row: Any, *, kind: str, finding: Finding | None = None) -> None:
    """Write down what has just become of a job: in the transaction that changed its row, so that ids come in order."""
    connection.execute(
        insert(EVENTS).values(
            audit=row.number,
            kind=kind,
            at=time.time(),
            state=row.state,
            done=row.done,
            total=row.total,
            message=row.message,
            attempts=row.attempts,
            finding=None if finding is None else storable(finding.model_dump_json()),
        )
    )


def storable(text: str) -> str:
    """`text` without what PostgreSQL cannot hold: NUL, and halves of characters."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def dump(problem: Problem) -> str:
    """A problem document as the text of its column."""
    return json.dumps(problem.model_dump(mode="json", exclude_none=True))


def _ended(state: JobState) -> dict[str, Any]:
    return {"state": state, "ended": time.time()}


def _change(connection: Connection, lease: Lease, changed: dict[str, Any]) -> Any:
    return _change_where(connection, _is(lease.number, lease.token), changed)


def _change_where(connection: Connection, where: ColumnElement[bool], changed: dict[str, Any]) -> Any:
    return connection.execute(update(AUDITS).where(where).values(**changed).returning(*AUDITS.c)).first()


def _is(number: int, token: int) -> ColumnElement[bool]:
    return and_(AUDITS.c.number == number, AUDITS.c.token == token, AUDITS.c.state == "running")


def counts(database: Database) -> dict[JobState, int]:
    """How many jobs are in each state."""
    known: dict[JobState, int] = {"queued": 0, "running": 0, "succeeded": 0, "failed": 0, "cancelled": 0}
    with database.reading() as connection:
        rows = connection.execute(select(AUDITS.c.state, func.count()).group_by(AUDITS.c.state)).all()
    return known | {row[0]: row[1] for row in rows}
