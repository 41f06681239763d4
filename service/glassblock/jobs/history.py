"""The jobs from outside: asked for, looked at, listed, cancelled, forgotten after a while."""

import hashlib
import json
import time
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from glassblock.errors import InvalidValue, NoRoom, UnknownAudit
from glassblock.jobs import pieces
from glassblock.jobs.database import ROOM, Database, alone
from glassblock.jobs.leases import Form, note, storable
from glassblock.jobs.tables import ANSWERS, AUDITS, EVENTS, REPORTS
from glassblock.wire.audits import ENDED, Audit, AuditEvent, AuditList, AuditQuery, Finding, Progress, Report
from glassblock.wire.values import Request

KEY_BYTES = 255
"""Longest idempotency key."""

BATCH = 200
"""Audits forgotten at once, so that nobody waits long for it."""

_BRIEF = [column for column in AUDITS.c if column is not AUDITS.c.request]


@dataclass(frozen=True)
class Asked:
    """One request for an audit, or for another operation as a job.

    Attributes:
        operation: as its endpoint is called.
        tensors: posted beside it, as one safetensors body; empty where none were.
        form: of the answer.
        caller: who asks: the name of a key, or empty without keys.
        key: of the caller's choosing; the same key with the same request is the same job.
        request_id: of the HTTP request, for the log.
    """

    request: Request
    operation: str = "start_audit"
    tensors: Sequence[bytes | memoryview] = ()
    form: Form = "json"
    caller: str = ""
    key: str | None = None
    request_id: str = ""


@dataclass(frozen=True)
class Stored:
    """A report as it was stored. `digest` is the SHA-256 of its JSON."""

    report: Report
    digest: str


@dataclass(frozen=True)
class StoredAnswer:
    """The answer of another operation as it was stored. `digest` is the SHA-256 of its body."""

    media_type: str
    chunks: Sequence[bytes]
    digest: str


def enqueue(database: Database, asked: Asked, *, waiting: int, budget: int = 1 << 31) -> Audit:
    """Put a job into the queue; or find the one that the same key has put there.

    Args:
        waiting: jobs that may wait.
        budget: bytes that posted tensors and answers may take.

    Raises:
        InvalidValue: the key is too long, or belongs to another request.
        NoRoom: `waiting` jobs wait already, or their tensors leave no room for these.
        TooLarge: the tensors are over the budget.
    """
    key = asked.key
    if key is not None and not (0 < len(key) <= KEY_BYTES and key.isascii() and key.isprintable()):
        raise InvalidValue(
            f"an idempotency key has 1 to {KEY_BYTES} printable ASCII characters",
            field="Idempotency-Key",
            hint="take a UUID",
        )
    # What was said and no more: some values are refused only where they were said.
    text = json.dumps(asked.request.model_dump(exclude_unset=True))  # keeps NaN and what is no Unicode, as they came
    digest = _digest(asked)
    try:
        with database.writing() as connection:
            known = None if key is None else _by_key(connection, asked)
            if known is None:
                row = _inserted(connection, asked, text, digest, waiting)
                pieces.keep(connection, row.number, "request", asked.tensors, budget=budget)
                return _told(row)
    except IntegrityError:  # another service was asked the same at the same moment
        with database.reading() as connection:
            known = _by_key(connection, asked)
        if known is None:
            raise NoRoom("the audit was forgotten while it was asked for", hint="ask again", retry_after=1) from None
    if known.request_digest != digest:
        raise InvalidValue(
            f"the idempotency key {key!r} belongs to another request, audit {known.id}",
            field="Idempotency-Key",
            hint="take a new key for a new request",
        )
    return _told(known)


def get(database: Database, audit_id: str) -> Audit:
    """State, progress and, when it ended well, the report.

    Raises:
        UnknownAudit: no such audit, or it was forgotten.
    """
    with database.reading() as connection:
        row = _find(connection, audit_id)
        report = connection.execute(select(REPORTS).where(REPORTS.c.audit == row.number)).first()
        findings = () if report is not None or row.state == "queued" else _findings(connection, row.number)
    return _told(row, None if report is None else _unpacked(report.packed), findings)


def answered(database: Database, audit_id: str) -> tuple[Audit, StoredAnswer | None]:
    """A job, and the answer it ended with; None where it has none.

    Raises:
        UnknownAudit: no such job.
    """
    with database.reading() as connection:
        row = _find(connection, audit_id)
        found = connection.execute(select(ANSWERS).where(ANSWERS.c.audit == row.number)).first()
        if found is not None:
            chunks = pieces.read(connection, row.number, "answer")
            return _told(row), StoredAnswer(found.media_type, chunks, found.digest)
        report = connection.execute(select(REPORTS).where(REPORTS.c.audit == row.number)).first()
    if report is None:
        return _told(row), None
    return _told(row), StoredAnswer("application/json", [zlib.decompress(report.packed)], report.digest)


def stored(database: Database, audit_id: str) -> tuple[Audit, Stored | None]:
    """An audit without its report, and its report with the digest.

    Raises:
        UnknownAudit: no such audit.
    """
    with database.reading() as connection:
        row = _find(connection, audit_id)
        report = connection.execute(select(REPORTS).where(REPORTS.c.audit == row.number)).first()
    return _told(row), None if report is None else Stored(_unpacked(report.packed), report.digest)


def listed(database: Database, query: AuditQuery) -> AuditList:
    """One page of the audits, the newest first, without their reports."""
    statement = select(*_BRIEF).order_by(AUDITS.c.number.desc()).limit(query.limit + 1)
    if query.state is not None:
        statement = statement.where(AUDITS.c.state == query.state)
    if query.operation is not None:
        statement = statement.where(AUDITS.c.operation == storable(query.operation))
    if query.checkpoint is not None:
        statement = statement.where(AUDITS.c.checkpoint == storable(query.checkpoint))
    if query.since is not None:
        statement = statement.where(AUDITS.c.created >= query.since.timestamp())
    if query.cursor is not None:
        statement = statement.where(AUDITS.c.number < int(query.cursor))
    with database.reading() as connection:
        rows = connection.execute(statement).all()
    page = rows[: query.limit]
    return AuditList(
        audits=tuple(_told(row) for row in page), next=str(page[-1].number) if len(rows) > len(page) else None
    )


def events(database: Database, audit_id: str, *, after: int, limit: int = 500) -> tuple[list[AuditEvent], bool]:
    """What happened to an audit after event `after`, and whether nothing more will.

    Raises:
        UnknownAudit: no such audit.
    """
    with database.reading() as connection:
        # The state first: an end that is seen here has its events before it.
        row = _find(connection, audit_id)
        rows = connection.execute(
            select(EVENTS).where(EVENTS.c.audit == row.number, EVENTS.c.id > after).order_by(EVENTS.c.id).limit(limit)
        ).all()
    told = [
        AuditEvent(
            id=event.id,
            kind=event.kind,
            at=datetime.fromtimestamp(event.at, UTC),
            state=event.state,
            progress=Progress(done=event.done, total=event.total, message=event.message),
            finding=None if event.finding is None else Finding.model_validate_json(event.finding),
            attempts=event.attempts,
        )
        for event in rows
    ]
    return told, row.state in ENDED and len(rows) < limit


def cancel(database: Database, audit_id: str) -> Audit:
    """End an audit that has not ended; whoever works on it has lost its lease. One that has ended stays as it is.

    Raises:
        UnknownAudit: no such audit.
    """
    with database.writing() as connection:
        row = connection.execute(
            update(AUDITS)
            .where(AUDITS.c.id == storable(audit_id), AUDITS.c.state.not_in(ENDED))
            .values(state="cancelled", ended=time.time())
            .returning(*_BRIEF)
        ).first()
        if row is None:
            return _told(_find(connection, audit_id))
        pieces.drop(connection, (row.number,), "request")
        note(connection, row, kind="state")
    return _told(row)


def caller_of(database: Database, audit_id: str) -> str:
    """Who asked for an audit.

    Raises:
        UnknownAudit: no such audit.
    """
    with database.reading() as connection:
        return _find(connection, audit_id).caller


def forget(database: Database, *, keep: int, seconds: float) -> int:
    """Delete ended audits, with their reports and events: all but the newest `keep`, and those older than `seconds`.

    Returns:
        How many were deleted; `BATCH`: there may be more.
    """
    ended = select(AUDITS.c.number).where(AUDITS.c.state.in_(ENDED))
    with database.writing() as connection:
        newest = connection.execute(ended.order_by(AUDITS.c.number.desc()).offset(keep).limit(1)).scalar()
        too_many = AUDITS.c.number <= (-1 if newest is None else newest)
        too_old = AUDITS.c.ended < time.time() - seconds
        numbers = connection.execute(ended.where(too_many | too_old).limit(BATCH)).scalars().all()
        pieces.drop(connection, numbers, "request", "answer")
        for table, column in ((REPORTS, REPORTS.c.audit), (EVENTS, EVENTS.c.audit), (AUDITS, AUDITS.c.number)):
            connection.execute(delete(table).where(column.in_(numbers)))
    return len(numbers)


def _digest(asked: Asked) -> str:
    """Of all that was asked; two requests with one key must agree in it."""
    digest = hashlib.sha256(json.dumps(asked.request.model_dump(), sort_keys=True).encode())
    if asked.operation != Asked.operation or asked.form != Asked.form:  # an audit's is as it always was
        digest.update(f"{asked.operation} {asked.form}".encode())
    for chunk in asked.tensors:
        digest.update(chunk)
    return digest.hexdigest()


def _inserted(connection: Connection, asked: Asked, text: str, digest: str, waiting: int) -> Any:
    alone(connection, ROOM)
    queued = connection.execute(select(func.count()).where(AUDITS.c.state == "queued")).scalar_one()
    if queued >= waiting:
        raise NoRoom(f"{queued} audits are waiting", hint="try again later", retry_after=30)
    row = connection.execute(
        insert(AUDITS)
        .values(
            id=uuid.uuid4().hex,
            operation=asked.operation,
            form=asked.form,
            checkpoint=storable(getattr(asked.request, "checkpoint", None) or ""),
            request=text,
            state="queued",
            done=0,
            total=0,
            message="",
            attempts=0,
            token=0,
            beat=0,
            caller=asked.caller,
            idempotency_key=asked.key,
            request_digest=digest,
            request_id=asked.request_id,
            created=time.time(),
        )
        .returning(*AUDITS.c)
    ).one()
    note(connection, row, kind="state")
    return row


def _by_key(connection: Connection, asked: Asked) -> Any:
    return connection.execute(
        select(AUDITS).where(AUDITS.c.caller == asked.caller, AUDITS.c.idempotency_key == asked.key)
    ).first()


def _find(connection: Connection, audit_id: str) -> Any:
    row = connection.execute(select(*_BRIEF).where(AUDITS.c.id == storable(audit_id))).first()
    if row is None:
        raise UnknownAudit(f"no audit {audit_id!r}", hint="see GET /v1/audits")
    return row


def _findings(connection: Connection, number: int) -> tuple[Finding, ...]:
    """What the last attempt has found so far."""
    ours = select(EVENTS.c.finding).where(EVENTS.c.audit == number, EVENTS.c.kind == "finding")
    began = select(func.max(EVENTS.c.id)).where(
        EVENTS.c.audit == number, EVENTS.c.kind == "state", EVENTS.c.state == "running"
    )
    rows = connection.execute(ours.where(EVENTS.c.id > began.scalar_subquery()).order_by(EVENTS.c.id)).scalars()
    return tuple(Finding.model_validate_json(finding) for finding in rows)


def _unpacked(packed: bytes) -> Report:
    return Report.model_validate_json(zlib.decompress(packed))


def _told(row: Any, report: Report | None = None, findings: tuple[Finding, ...] = ()) -> Audit:
    return Audit(
        id=row.id,
        operation=row.operation,
        state=row.state,
        checkpoint=row.checkpoint,
        progress=Progress(done=row.done, total=row.total, message=row.message),
        findings=findings,
        report=report,
        problem=None if row.problem is None else json.loads(row.problem),
        created=_moment(row.created),
        started=_moment(row.started),
        ended=_moment(row.ended),
        attempts=row.attempts,
    )


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
