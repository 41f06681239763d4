"""Workers as processes of their own, to be killed. Not forked from the tests, whose threads may hold locks."""

import logging
import multiprocessing
import os
import random
import time
from collections import Counter
from multiprocessing.process import BaseProcess
from pathlib import Path

from glassblock.jobs import history
from glassblock.jobs.audits import AuditJobs
from glassblock.jobs.database import Database
from glassblock.jobs.history import Asked
from glassblock.jobs.leases import counts
from glassblock.jobs.tables import AUDITS, EVENTS, REPORTS
from glassblock.jobs.worker import Rules
from glassblock.operations.operations import Operations
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import AuditRequest
from sqlalchemy import func, select

from jobs.works import audits_by

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = Rules(lease_seconds=0.6, beat_seconds=0.1, idle_seconds=0.05, attempts=1000, waiting=10_000)
"""Leases that lapse soon, so that a test need not wait; five beats fit into one, on a busy machine too."""


class Workers:
    """Starts workers over one database; the first start loads torch once for all of them.

    Args:
        wild: the clock that each of them sees jumps forth and back by hours.
    """

    def __init__(self, place: str | Path, rules: Rules = QUICK, *, wild: bool = False) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._arguments = (place, rules, wild)
        self._started: list[BaseProcess] = []

    def warm(self) -> None:
        """Load torch for all of them: on a busy machine that takes a minute, in which nothing is tested."""
        process = self._context.Process(target=_nothing, daemon=True)
        process.start()
        process.join()

    def start(self) -> BaseProcess:
        process = self._context.Process(target=_work, args=self._arguments, daemon=True)
        process.start()
        self._started.append(process)
        return process

    def kill(self, process: BaseProcess) -> None:
        """kill -9: no handler runs, nothing is closed."""
        process.kill()
        process.join()
        process.close()
        self._started.remove(process)

    def close(self) -> None:
        for process in [*self._started]:
            self.kill(process)


def ask(database: Database, number: int) -> list[str]:
    request = AuditRequest(checkpoint="tiny-llama")
    return [history.enqueue(database, Asked(request), waiting=10_000).id for _ in range(number)]


def wait_for_the_end(database: Database, *, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        known = counts(database)
        if known["queued"] + known["running"] == 0:
            return
        time.sleep(0.05)
    raise TimeoutError(counts(database))


def digests(database: Database) -> Counter[str]:
    """How many reports of each content there are."""
    with database.reading() as connection:
        return Counter(connection.execute(select(REPORTS.c.digest)).scalars())


def ends(database: Database) -> dict[str, Counter[str]]:
    """How often each job has ended, and how."""
    statement = (
        select(AUDITS.c.id, EVENTS.c.state, func.count())
        .join_from(AUDITS, EVENTS, AUDITS.c.number == EVENTS.c.audit)
        .where(EVENTS.c.kind == "state", EVENTS.c.state.in_(("succeeded", "failed", "cancelled")))
        .group_by(AUDITS.c.id, EVENTS.c.state)
    )
    found: dict[str, Counter[str]] = {}
    with database.reading() as connection:
        for audit, state, number in connection.execute(statement):
            found.setdefault(audit, Counter())[state] = number
    return found


def _nothing() -> None: ...


def _work(place: str | Path, rules: Rules, wild: bool) -> None:
    """A service's jobs over the examples, until it is killed."""
    if wild:
        clock, rng = time.time, random.Random(os.getpid())
        time.time = lambda: clock() + rng.uniform(-100_000, 100_000)
    logging.disable(logging.CRITICAL)  # that leases lapse is what this is about
    store = CheckpointStore([EXAMPLES], device="cpu")
    jobs = AuditJobs(audits_by(Operations(store).audit), place=place, status_of=lambda _: 500, rules=rules)
    jobs.open()
    time.sleep(3600)
