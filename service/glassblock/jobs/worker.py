"""Works on jobs, in the process that owns the device: one job at a time, in a thread, with another that keeps it alive.

work     takes the job that has waited longest, runs it, stores what came of it
keep     shows that the holder lives, tells its progress, sees that it lost its lease; takes back the jobs of
         workers that no longer live; forgets old jobs
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from glassblock.errors import GlassblockError, InternalFault, StorageUnavailable, TooLarge
from glassblock.jobs import history, leases
from glassblock.jobs.database import Database
from glassblock.jobs.leases import Held, Lease
from glassblock.operations.audits import AuditStopped, Operation
from glassblock.wire.audits import JobState, Progress, Report
from glassblock.wire.problems import Problem, problem_from_error

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """How jobs are dealt with.

    Attributes:
        lease_seconds: a holder that shows no life for so long is given up for dead.
        beat_seconds: between two signs of life; also how soon a cancelled job is seen to be.
        idle_seconds: between two looks for a job that another service has queued.
        attempts: how often a job may be taken up before it is failed.
        limit_seconds: longest that one attempt may take.
        stop_seconds: what a job under way is given to notice that the service stops.
        keep: ended jobs that are remembered.
        keep_seconds: and for how long.
        forget_seconds: between two looks for jobs to forget.
        waiting: jobs that may wait; one more is told to come back.
    """

    lease_seconds: float = 15.0
    beat_seconds: float = 0.5
    idle_seconds: float = 0.5
    attempts: int = 3
    limit_seconds: float = 24 * 3600.0
    stop_seconds: float = 10.0
    keep: int = 10_000
    keep_seconds: float = 30 * 24 * 3600.0
    forget_seconds: float = 3600.0
    waiting: int = 64


class Observer(Protocol):
    """Is told what became of a job, after it was stored."""

    def __call__(self, lease: Lease, state: JobState, *, seconds: float, report: Report | None) -> None:
        """Take note."""
        ...


@dataclass
class _Run:
    """The job under way. `lost` is set when its lease is; `progress` is the newest, `told` the newest written down."""

    lease: Lease
    since: float = field(default_factory=time.monotonic)
    lost: threading.Event = field(default_factory=threading.Event)
    progress: Progress | None = None
    told: Progress | None = None


class Watch:
    """Which holders have stood still for the length of a lease, by this process's own monotonic clock."""

    def __init__(self, lease_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._since: dict[Held, float] = {}

    def still(self, held: list[Held]) -> list[Held]:
        """Those of `held` that were seen exactly so a lease ago, and ever since."""
        now = self._clock()
        self._since = {seen: self._since.get(seen, now) for seen in held}
        return [seen for seen, since in self._since.items() if now - since >= self._lease_seconds]


class Worker:
    """Two threads over one database. `start` once, `close` once.

    Args:
        operation: runs one audit to its report.
        status_of: HTTP status for an error, to write the problem of a failed job.
    """

    def __init__(
        self,
        database: Database,
        operation: Operation,
        *,
        status_of: Callable[[GlassblockError], int],
        rules: Rules,
        observers: tuple[Observer, ...],
    ) -> None:
        self._database = database
        self._operation = operation
        self._status_of = status_of
        self._rules = rules
        self._observers = observers
        self._run: _Run | None = None
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._watch = Watch(rules.lease_seconds)
        self._forgot = float("-inf")
        # A thread of PyTorch must not be cut off at the process's end: neither is a daemon.
        self._threads = [
            threading.Thread(target=loop, name=loop.__name__.strip("_")) for loop in (self._work, self._keep)
        ]

    def start(self) -> None:
        """Begin to work."""
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """A job was queued: take it now."""
        self._wake.set()

    def lose(self, audit_id: str) -> None:
        """A job was cancelled: stop at once where it is the one under way."""
        run = self._run
        if run is not None and run.lease.id == audit_id:
            run.lost.set()

    def close(self) -> None:
        """Stop, and hand the job under way back to the queue; also where it does not notice in time."""
        self._stopping.set()
        self._wake.set()
        deadline = time.monotonic() + self._rules.stop_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        run = self._run
        if run is not None and self._threads[0].is_alive():
            run.lost.set()
            self._stored(lambda: leases.hand_back(self._database, run.lease), "handed back", run.lease)

    # The first thread.

    def _work(self) -> None:
        while not self._stopping.is_set():
            try:
                lease = leases.take(self._database)
            except StorageUnavailable as error:
                log.warning("no job can be taken: %s", error)
                self._stopping.wait(1.0)
            except Exception:
                log.exception("no job can be taken")
                self._stopping.wait(1.0)
            else:
                if lease is None:
                    self._wake.wait(self._rules.idle_seconds)
                    self._wake.clear()
                else:
                    self._attempt(_Run(lease))

    def _attempt(self, run: _Run) -> None:
        self._run = run
        try:
            report, error = self._outcome(run)
            self._conclude(run, report, error)
        except Exception:  # without a sign of life the lease lapses: the job is taken up again, or failed
            log.exception("what became of an audit cannot be stored", extra=_ids(run.lease))
        finally:
            self._run = None

    def _outcome(self, run: _Run) -> tuple[Report | None, GlassblockError | None]:
        """The report, or the error; neither where it was stopped."""

        def progress(done: int, total: int, message: str) -> None:
            run.progress = Progress(done=done, total=total, message=message)

        try:
            return self._operation(run.lease.request, progress=progress, cancelled=lambda: self._must_stop(run)), None
        except AuditStopped:
            return None, self._too_long() if self._is_over(run) else None
        except GlassblockError as error:
            return None, error
        except Exception:
            log.exception("an audit failed", extra=_ids(run.lease))
            return None, InternalFault("the audit failed on this checkpoint", hint="the service's log has the details")

    def _conclude(self, run: _Run, report: Report | None, error: GlassblockError | None) -> None:
        lease = run.lease
        state: JobState
        if run.lost.is_set():
            return  # somebody cancelled it, or works on it by now
        if report is not None:
            state, store = "succeeded", lambda: leases.finish(self._database, lease, report)
        elif error is not None:
            problem = problem_from_error(error, self._status_of(error))
            state, store = "failed", lambda: leases.fail(self._database, lease, problem)
        else:
            state, store = "queued", lambda: leases.hand_back(self._database, lease)
        if self._stored(store, state, lease):
            log.info("an audit is %s", state, extra=_ids(lease))
            for observer in self._observers:
                observer(lease, state, seconds=time.monotonic() - run.since, report=report)

    def _stored(self, store: Callable[[], bool], what: str, lease: Lease) -> bool:
        """Store what came of a job; where that cannot be done now, again and again while the lease is held."""
        patience = time.monotonic() + self._rules.stop_seconds
        while True:
            try:
                stored = store()
            except StorageUnavailable as error:
                log.warning("an audit is %s, which cannot be stored yet: %s", what, error, extra=_ids(lease))
                if self._stopping.is_set() and time.monotonic() > patience:
                    return False  # the lease will lapse, and another worker takes the job up
                time.sleep(min(1.0, self._rules.idle_seconds))
            else:
                if not stored:
                    log.warning("an audit is %s, which came too late: the lease was lost", what, extra=_ids(lease))
                return stored

    def _must_stop(self, run: _Run) -> bool:
        return run.lost.is_set() or self._stopping.is_set() or self._is_over(run)

    def _is_over(self, run: _Run) -> bool:
        return time.monotonic() - run.since > self._rules.limit_seconds

    def _too_long(self) -> TooLarge:
        return TooLarge(
            f"the audit took longer than the limit of {self._rules.limit_seconds:g} s",
            hint="ask for fewer rules, or raise GLASSBLOCK_AUDIT_HOURS",
        )

    # The second thread.

    def _keep(self) -> None:
        # To the end of the work, not of the service: a job that finishes late still shows that it lives.
        while self._threads[0].is_alive():
            for duty in (self._beat, self._take_back, self._forget):
                try:
                    duty()
                except StorageUnavailable as error:
                    log.warning("the jobs cannot be kept: %s", error)
                except Exception:
                    log.exception("the jobs cannot be kept")
            self._threads[0].join(self._rules.beat_seconds)

    def _beat(self) -> None:
        run = self._run
        if run is None or run.lost.is_set():
            return
        progress = run.progress
        new = progress if progress != run.told else None
        if leases.beat(self._database, run.lease, new):
            run.told = progress
        elif self._run is run:
            run.lost.set()

    def _take_back(self) -> None:
        for seen in self._watch.still(leases.held(self._database)):
            error = InternalFault(
                f"the audit was taken up {seen.attempts} times, and every time its worker died",
                hint="the service's log may say of what: memory, most often",
            )
            problem: Problem = problem_from_error(error, self._status_of(error))
            state = leases.take_back(self._database, seen, attempts=self._rules.attempts, problem=problem)
            if state is not None:
                log.warning("an audit's worker showed no life for %g s: it is %s", self._rules.lease_seconds, state)
                self._wake.set()

    def _forget(self) -> None:
        if time.monotonic() - self._forgot >= self._rules.forget_seconds:
            self._forgot = time.monotonic()
            history.forget(self._database, keep=self._rules.keep, seconds=self._rules.keep_seconds)


def _ids(lease: Lease) -> dict[str, str]:
    """What every line about a job carries."""
    return {"audit": lease.id, "request_id": lease.request_id, "checkpoint": lease.request.checkpoint}
