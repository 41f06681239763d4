"""The audits of this process, in memory. One runs at a time; the others wait their turn."""

import logging
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from glassblock.errors import GlassblockError, InternalFault, NoRoom, NotReady, UnknownAudit
from glassblock.operations.audits import AuditStopped, Operation
from glassblock.wire.audits import ENDED, Audit, AuditRequest, JobState, Progress, Report
from glassblock.wire.problems import Problem, error_from_problem, problem_from_error

log = logging.getLogger(__name__)

KEPT = 256
"""Ended audits that are remembered; the oldest go first."""

WAITING = 64
"""Audits that may wait; one more is told to come back."""


@dataclass
class _Job:
    id: str
    checkpoint: str
    request: AuditRequest | None
    state: JobState = "queued"
    progress: Progress = field(default_factory=lambda: Progress(done=0, total=0))
    report: Report | None = None
    problem: Problem | None = None
    cancel: threading.Event = field(default_factory=threading.Event)


class AuditJobs:
    """Starts audits and answers for them. Safe to call from any thread.

    Args:
        operation: runs one audit to its report, telling its progress and asking whether to stop.
        status_of: HTTP status for an error, to write the problem of a failed job.
    """

    def __init__(self, operation: Operation, *, status_of: Callable[[GlassblockError], int]) -> None:
        self._operation = operation
        self._status_of = status_of
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="audit")

    def start(self, request: AuditRequest) -> Audit:
        """Queue an audit.

        Raises:
            NoRoom: too many are waiting.
        """
        job = _Job(uuid.uuid4().hex, request.checkpoint, request)
        with self._lock:
            if sum(other.state == "queued" for other in self._jobs.values()) >= WAITING:
                raise NoRoom(f"{WAITING} audits are waiting", hint="try again later", retry_after=30)
            self._jobs[job.id] = job
            self._forget()
            answer = self._told(job)
        self._worker.submit(self._run, job)
        return answer

    def get(self, audit_id: str) -> Audit:
        """State, progress and, when it ended well, the report.

        Raises:
            UnknownAudit: no such audit, or it was forgotten.
        """
        with self._lock:
            return self._told(self._find(audit_id))

    def every(self) -> tuple[Audit, ...]:
        """All remembered audits, the newest first, without their reports."""
        with self._lock:
            return tuple(self._told(job, whole=False) for job in reversed(self._jobs.values()))

    def report(self, audit_id: str) -> Report:
        """The report of an audit.

        Raises:
            UnknownAudit: no such audit.
            NotReady: it has not ended, or was cancelled.
            GlassblockError: what it failed with.
        """
        with self._lock:
            job = self._find(audit_id)
        if job.problem is not None:
            raise error_from_problem(job.problem)
        if job.report is None:
            raise NotReady(f"audit {audit_id} is {job.state}", hint="ask again when its state is 'succeeded'")
        return job.report

    def cancel(self, audit_id: str) -> Audit:
        """Stop an audit that has not ended; one that has stays as it is.

        Raises:
            UnknownAudit: no such audit.
        """
        with self._lock:
            job = self._find(audit_id)
            if job.state not in ENDED:
                job.cancel.set()
                job.state, job.request = "cancelled", None
            return self._told(job)

    def close(self) -> None:
        """Stop everything and wait for the one that runs."""
        with self._lock:
            for job in self._jobs.values():
                job.cancel.set()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _run(self, job: _Job) -> None:
        def progress(done: int, total: int, message: str) -> None:
            job.progress = Progress(done=done, total=total, message=message)

        with self._lock:
            request = job.request
            if job.cancel.is_set() or request is None:
                return
            job.state = "running"
        try:
            report = self._operation(request, progress=progress, cancelled=job.cancel.is_set)
        except AuditStopped:
            self._end(job, "cancelled")
        except GlassblockError as error:
            self._end(job, "failed", error=error)
        except Exception:
            log.exception("audit %s failed", job.id)
            fault = InternalFault("the audit failed on this checkpoint", hint="the service's log has the details")
            self._end(job, "failed", error=fault)
        else:
            self._end(job, "succeeded", report=report)

    def _end(
        self, job: _Job, state: JobState, *, report: Report | None = None, error: GlassblockError | None = None
    ) -> None:
        with self._lock:
            if job.state not in ENDED:
                job.state, job.report, job.request = state, report, None
                # Not the error itself: its traceback would hold the tensors that were being looked at.
                job.problem = error and problem_from_error(error, self._status_of(error))

    def _find(self, audit_id: str) -> _Job:
        try:
            return self._jobs[audit_id]
        except KeyError:
            raise UnknownAudit(f"no audit {audit_id!r}", hint="see GET /v1/audits") from None

    def _forget(self) -> None:
        ended = [job.id for job in self._jobs.values() if job.state in ENDED]
        for audit_id in ended[: max(0, len(ended) - KEPT)]:
            del self._jobs[audit_id]

    def _told(self, job: _Job, *, whole: bool = True) -> Audit:
        return Audit(
            id=job.id,
            state=job.state,
            checkpoint=job.checkpoint,
            progress=job.progress,
            report=job.report if whole else None,
            problem=job.problem and job.problem.model_dump(exclude_none=True),
        )
