"""Works on jobs, in the process that owns the device: one job at a time, in a thread, with another that keeps it alive.

work     takes the job that has waited longest, runs it, stores what came of it
keep     shows that the holder lives, tells its progress, sees that it lost its lease; takes back the jobs of
         workers that no longer live; forgets old jobs
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import ValidationError

import glassblock
from glassblock.errors import GlassblockError, InternalFault, InvalidValue, NoRoom, StorageUnavailable, TooLarge
from glassblock.jobs import history, leases
from glassblock.jobs.database import Database
from glassblock.jobs.leases import Held, Lease, Made
from glassblock.numerics.watching import ComputationCancelled
from glassblock.operations.audits import AuditStopped
from glassblock.operations.reply import Reply
from glassblock.operations.works import Follower
from glassblock.wire import framing
from glassblock.wire.audits import Finding, JobState, Progress, Report
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.framing import WireTensor
from glassblock.wire.problems import problem_from_error
from glassblock.wire.values import Request

log = logging.getLogger(__name__)

MOST_FOUND = 1000
"""Findings that are told while an audit runs; the report has all of them."""

ROOM_SECONDS = 1.0
"""Between two looks for room on the device."""


@dataclass(frozen=True)
class Rules:
    """How jobs are dealt with.

    Attributes:
        lease_seconds: a holder that shows no life for so long is given up for dead.
        beat_seconds: between two signs of life; also how soon a cancelled job is seen to be.
        idle_seconds: between two looks for a job that another service has queued.
        attempts: how often a job may be taken up before it is failed.
        limit_seconds: longest that one attempt may take.
        room_seconds: how long a job waits for room on the device before it is failed.
        stop_seconds: what a job under way is given to notice that the service stops.
        keep: ended jobs that are remembered.
        keep_seconds: and for how long.
        forget_seconds: between two looks for jobs to forget.
        waiting: jobs that may wait; one more is told to come back.
        held_bytes: what posted tensors and answers may take in the database.
    """

    lease_seconds: float = 15.0
    beat_seconds: float = 0.5
    idle_seconds: float = 0.5
    attempts: int = 3
    limit_seconds: float = 24 * 3600.0
    room_seconds: float = 300.0
    stop_seconds: float = 10.0
    keep: int = 10_000
    keep_seconds: float = 30 * 24 * 3600.0
    forget_seconds: float = 3600.0
    waiting: int = 64
    held_bytes: int = 2 << 30


class Run(Protocol):
    """Does what a job asks for."""

    def __call__(
        self, operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower
    ) -> Reply[Any]:
        """The reply of one operation; `follower` is told how it goes, and asked whether to stop."""
        ...


class Observer(Protocol):
    """Is told what became of a job, after it was stored."""

    def __call__(self, lease: Lease, state: JobState, *, seconds: float, report: Report | None) -> None:
        """Take note."""
        ...


@dataclass
class _Run:
    """The job under way.

    Attributes:
        lost: set when its lease is.
        progress: the newest; `told` is the newest written down.
        found: findings so far; `noted` of them are written down.
    """

    lease: Lease
    since: float = field(default_factory=time.monotonic)
    lost: threading.Event = field(default_factory=threading.Event)
    progress: Progress | None = None
    told: Progress | None = None
    found: list[Finding] = field(default_factory=list[Finding])
    noted: int = 0
    beating: threading.Lock = field(default_factory=threading.Lock)


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
        run: does what jobs ask for.
        status_of: HTTP status for an error, to write the problem of a failed job.
    """

    def __init__(
        self,
        database: Database,
        run: Run,
        *,
        status_of: Callable[[GlassblockError], int],
        rules: Rules,
        observers: tuple[Observer, ...],
    ) -> None:
        self._database = database
        self._do = run
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
            made, error = self._outcome(run)
            self._conclude(run, made, error)
        except Exception:  # without a sign of life the lease lapses: the job is taken up again, or failed
            log.exception("what became of a job cannot be stored", extra=_ids(run.lease))
        finally:
            self._run = None

    def _outcome(self, run: _Run) -> tuple[Report | Made | None, GlassblockError | None]:
        """What came of it, or the error; neither where it was stopped."""

        def progress(done: int, total: int, message: str) -> None:
            run.progress = Progress(done=done, total=total, message=message)

        def found(finding: Finding) -> None:
            if len(run.found) < MOST_FOUND:
                run.found.append(finding)

        follower = Follower(progress, lambda: self._must_stop(run), found)
        try:
            return self._made(run.lease, follower), None
        except (AuditStopped, ComputationCancelled):
            return None, self._too_long() if self._is_over(run) else None
        except GlassblockError as error:
            return None, error
        except Exception:
            log.exception("a job failed", extra=_ids(run.lease))
            return None, InternalFault("the job failed on this request", hint="the service's log has the details")

    def _made(self, lease: Lease, follower: Follower) -> Report | Made:
        asked: tuple[Request, dict[str, WireTensor]] | None = None
        patience = time.monotonic() + self._rules.room_seconds
        while True:
            try:
                asked = asked or asked_for(self._database, lease)
                reply = self._do(lease.operation, *asked, follower)
            except (NoRoom, StorageUnavailable) as error:  # nobody waits for it: it has time until others are done
                if time.monotonic() >= patience:
                    raise
                follower.progress(0, 0, error.message)
                self._stopping.wait(min(ROOM_SECONDS, error.retry_after or ROOM_SECONDS))
                if follower.cancelled():
                    raise AuditStopped from None
            else:
                return reply.answer if isinstance(reply.answer, Report) else Made(*reply.body(lease.form))

    def _conclude(self, run: _Run, made: Report | Made | None, error: GlassblockError | None) -> None:
        self._tell(run)
        lease = run.lease
        state: JobState
        if run.lost.is_set():
            return  # somebody cancelled it, or works on it by now
        if made is not None:
            budget = self._rules.held_bytes
            state, store = "succeeded", lambda: leases.finish(self._database, lease, made, budget=budget)
        elif error is not None:
            problem = problem_from_error(error, self._status_of(error))
            state, store = "failed", lambda: leases.fail(self._database, lease, problem)
        else:
            state, store = "queued", lambda: leases.hand_back(self._database, lease)
        try:
            stored = self._stored(store, state, lease)
        except (TooLarge, NoRoom) as unkept:  # the answer
            self._conclude(run, None, unkept)
            return
        if stored:
            log.info("a job is %s", state, extra=_ids(lease))
            report = made if isinstance(made, Report) else None
            for observer in self._observers:
                observer(lease, state, seconds=time.monotonic() - run.since, report=report)

    def _tell(self, run: _Run) -> None:
        """Write down what was found since the last beat, before the end is."""
        if len(run.found) > run.noted:
            try:
                self._beat()
            except StorageUnavailable as error:
                log.warning("findings cannot be written down, the report will have them: %s", error)

    def _stored(self, store: Callable[[], bool], what: str, lease: Lease) -> bool:
        """Store what came of a job; where that cannot be done now, again and again while the lease is held."""
        patience = time.monotonic() + self._rules.stop_seconds
        while True:
            try:
                stored = store()
            except StorageUnavailable as error:
                log.warning("a job is %s, which cannot be stored yet: %s", what, error, extra=_ids(lease))
                if self._stopping.is_set() and time.monotonic() > patience:
                    return False  # the lease will lapse, and another worker takes the job up
                time.sleep(min(1.0, self._rules.idle_seconds))
            else:
                if not stored:
                    log.warning("a job is %s, which came too late: the lease was lost", what, extra=_ids(lease))
                return stored

    def _must_stop(self, run: _Run) -> bool:
        return run.lost.is_set() or self._stopping.is_set() or self._is_over(run)

    def _is_over(self, run: _Run) -> bool:
        return time.monotonic() - run.since > self._rules.limit_seconds

    def _too_long(self) -> TooLarge:
        return TooLarge(
            f"the job took longer than the limit of {self._rules.limit_seconds:g} s",
            hint="ask for less, or raise GLASSBLOCK_AUDIT_HOURS",
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
        with run.beating:
            progress, findings = run.progress, run.found[run.noted :]
            new = progress if progress != run.told else None
            if leases.beat(self._database, run.lease, new, findings):
                run.told = progress
                run.noted += len(findings)
            elif self._run is run:
                run.lost.set()

    def _take_back(self) -> None:
        for seen in self._watch.still(leases.held(self._database)):
            error = InternalFault(
                f"the job was taken up {seen.attempts} times, and every time its worker died",
                hint="the service's log may say of what: memory, most often",
            )
            problem = problem_from_error(error, self._status_of(error))
            state = leases.take_back(self._database, seen, attempts=self._rules.attempts, problem=problem)
            if state is not None:
                log.warning("a job's worker showed no life for %g s: it is %s", self._rules.lease_seconds, state)
                self._wake.set()

    def _forget(self) -> None:
        if time.monotonic() - self._forgot >= self._rules.forget_seconds:
            forgotten = history.forget(self._database, keep=self._rules.keep, seconds=self._rules.keep_seconds)
            if forgotten < history.BATCH:  # else the rest after the next beat, which must not wait for it
                self._forgot = time.monotonic()


def asked_for(database: Database, lease: Lease) -> tuple[Request, dict[str, WireTensor]]:
    """The message of a job, and the tensors that came with it.

    Raises:
        InvalidValue: this service does not know it: a newer one has queued it.
        StorageUnavailable: the tensors cannot be read now.
    """
    endpoint = _ENDPOINTS.get(lease.operation)
    try:
        request = None if endpoint is None else endpoint.request.model_validate(json.loads(lease.message))
    except ValidationError:
        request = None
    if request is None:
        raise InvalidValue(
            f"the request for {lease.operation} is not read by glassblock {glassblock.__version__}",
            hint="services that share a database must be of one version",
        )
    body = leases.posted(database, lease)
    return request, framing.unframe("request", body)[1] if body else {}


_ENDPOINTS = {endpoint.name: endpoint for endpoint in ENDPOINTS}


def _ids(lease: Lease) -> dict[str, str]:
    """What every line about a job carries."""
    return {
        "audit": lease.id,
        "request_id": lease.request_id,
        "operation": lease.operation,
        "checkpoint": lease.checkpoint,
    }
