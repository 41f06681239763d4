"""The jobs of a service, audits above all: asked for, worked on, answered for. Safe to call from any thread."""

import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from glassblock.errors import GlassblockError, NotReady, StorageUnavailable, UnknownAudit
from glassblock.jobs import history, leases
from glassblock.jobs.database import Database, open_database
from glassblock.jobs.history import Asked, Stored, StoredAnswer
from glassblock.jobs.worker import Observer, Rules, Run, Worker
from glassblock.wire.audits import ENDED, Audit, AuditEvent, AuditList, AuditQuery, JobState
from glassblock.wire.problems import Problem, error_from_problem

LOW_BYTES = 256 << 20
"""Free space of the data folder below which somebody should look: a report takes a few kilobytes to a few megabytes."""


class AuditJobs:
    """Starts audits and answers for them, once it is open.

    Args:
        run: does what jobs ask for, telling its progress and asking whether to stop.
        place: of the database: a folder or a URL (`open_database`). None: a folder that goes when this closes.
        status_of: HTTP status for an error, to write the problem of a failed job.
        observers: told what became of every job that was worked on here.
    """

    def __init__(
        self,
        run: Run,
        *,
        place: str | Path | None = None,
        status_of: Callable[[GlassblockError], int],
        rules: Rules | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self._run = run
        self._place = place
        self._status_of = status_of
        self._rules = rules or Rules()
        self._observers = observers
        self._open: tuple[Database, Worker] | None = None
        self._undo = ExitStack()

    def open(self) -> None:
        """Open the database, and begin to work on what waits there.

        Raises:
            InvalidValue: the place cannot be used.
            StorageUnavailable: the database does not answer.
        """
        place = self._place
        if place is None:
            place = Path(self._undo.enter_context(tempfile.TemporaryDirectory(prefix="glassblock-")))
        database = open_database(place, durable=self._place is not None)
        self._undo.callback(database.close)
        worker = Worker(database, self._run, status_of=self._status_of, rules=self._rules, observers=self._observers)
        worker.start()
        self._undo.callback(worker.close)
        self._open = database, worker

    def close(self) -> None:
        """Stop; a job under way is handed back, for the next worker to take up."""
        self._undo.close()
        self._open = None

    def start(self, asked: Asked) -> Audit:
        """Queue a job, or find the one that its idempotency key has queued.

        Raises:
            NoRoom: too many are waiting, or their tensors leave no room.
            TooLarge: its tensors cannot be kept.
            InvalidValue: the key belongs to another request.
            StorageUnavailable: it cannot be written down now.
        """
        audit = history.enqueue(self._database, asked, waiting=self._rules.waiting, budget=self._rules.held_bytes)
        self._worker.wake()
        return audit

    def get(self, audit_id: str) -> Audit:
        """State, progress and, when it ended well, the report.

        Raises:
            UnknownAudit: no such audit, or it was forgotten.
        """
        return history.get(self._database, audit_id)

    def listed(self, query: AuditQuery) -> AuditList:
        """One page of the audits, the newest first, without their reports."""
        return history.listed(self._database, query)

    def events(self, audit_id: str, *, after: int) -> tuple[list[AuditEvent], bool]:
        """What happened to an audit after event `after`, and whether nothing more will.

        Raises:
            UnknownAudit: no such audit.
        """
        return history.events(self._database, audit_id, after=after)

    def report(self, audit_id: str) -> Stored:
        """The report of an audit.

        Raises:
            UnknownAudit: no such audit; another operation has an answer, and no report.
            NotReady: it has not ended, or was cancelled.
            GlassblockError: what it failed with.
        """
        audit, report = history.stored(self._database, audit_id)
        if audit.operation != Asked.operation:
            raise UnknownAudit(f"{audit_id} is no audit: it is {audit.operation}", hint="see its /answer")
        if report is None:
            raise _why_nothing(audit)
        return report

    def answer(self, audit_id: str) -> StoredAnswer:
        """What a job ended with, as its endpoint would have sent it.

        Raises:
            UnknownAudit: no such job; or its answer has made room for later ones.
            NotReady: it has not ended, or was cancelled.
            GlassblockError: what it failed with.
        """
        audit, answer = history.answered(self._database, audit_id)
        if answer is None:
            raise _why_nothing(audit)
        return answer

    def cancel(self, audit_id: str) -> Audit:
        """Stop an audit that has not ended; one that has stays as it is.

        Raises:
            UnknownAudit: no such audit.
        """
        audit = history.cancel(self._database, audit_id)
        self._worker.lose(audit_id)
        return audit

    def caller_of(self, audit_id: str) -> str:
        """Who asked for an audit.

        Raises:
            UnknownAudit: no such audit.
        """
        return history.caller_of(self._database, audit_id)

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        return leases.counts(self._database)

    def checks(self) -> dict[str, str]:
        """How the database is, and the disk it lies on where that is ours, in words.

        Raises:
            StorageUnavailable: the database, or the folder, cannot be read.
        """
        counted = self.counts()
        told = {"database": f"ok: {self._database.name}, {counted['queued']} waiting, {counted['running']} running"}
        if isinstance(self._place, Path):
            try:
                free = shutil.disk_usage(self._place).free
            except OSError as fault:
                why = str(fault.strerror or "it does not answer").lower()
                raise StorageUnavailable(f"the data folder cannot be looked at: {why}", retry_after=5) from fault
            told["disk"] = f"ok: {free >> 20} MiB free" if free >= LOW_BYTES else f"low: {free >> 20} MiB free"
        return told

    @property
    def _database(self) -> Database:
        return self._opened[0]

    @property
    def _worker(self) -> Worker:
        return self._opened[1]

    @property
    def _opened(self) -> tuple[Database, Worker]:
        if self._open is None:
            raise StorageUnavailable("the service is not started, or stops", hint="try again", retry_after=5)
        return self._open


def _why_nothing(audit: Audit) -> GlassblockError:
    if audit.problem is not None:
        return error_from_problem(Problem.model_validate(audit.problem))
    if audit.state == "succeeded":
        return UnknownAudit(
            f"the answer of {audit.id} has made room for later ones", hint="ask again, or raise GLASSBLOCK_JOBS_MIB"
        )
    over = audit.state in ENDED
    hint = "start another one: this one has ended" if over else "ask again when its state is 'succeeded'"
    return NotReady(f"audit {audit.id} is {audit.state}", hint=hint)
