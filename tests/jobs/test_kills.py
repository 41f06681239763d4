"""kill -9 at random moments: no job is lost, none is stuck, no result is stored twice."""

import random
import time
from collections import Counter
from pathlib import Path

from glassblock.jobs import history
from glassblock.jobs.database import Database, open_database

from jobs.postgres_server import fresh_database
from jobs.processes import Workers, ask, digests, ends, wait_for_the_end

KILLS = 10
END_S = 120.0


def all_ended_well_once(database: Database, wanted: list[str]) -> None:
    assert ends(database) == {audit: Counter({"succeeded": 1}) for audit in wanted}
    (digest,) = digests(database)  # the same files give the same report, whoever was killed meanwhile
    assert digests(database)[digest] == len(wanted)
    report = history.get(database, wanted[-1]).report
    assert report is not None
    assert report.checkpoint.path == "tiny-llama"


def test_a_worker_that_is_killed_again_and_again_loses_nothing(tmp_path: Path) -> None:
    rng = random.Random(6)
    database = open_database(tmp_path)
    wanted = ask(database, 12)
    workers = Workers(tmp_path)
    try:
        workers.warm()
        for _ in range(KILLS):
            process = workers.start()
            time.sleep(rng.uniform(0.0, 1.2))  # before it opens the database, while it waits for a lease, at work
            workers.kill(process)
            assert len(history.listed(database, history.AuditQuery()).audits) == len(wanted)
        workers.start()
        wait_for_the_end(database, seconds=END_S)
    finally:
        workers.close()
    all_ended_well_once(database, wanted)
    database.close()


def test_two_services_share_the_queue_and_one_is_killed(postgres: str) -> None:
    place = fresh_database(postgres)
    database = open_database(place)
    wanted = ask(database, 20)
    workers = Workers(place)
    try:
        workers.warm()
        first, _second = workers.start(), workers.start()
        deadline = time.monotonic() + END_S
        while len(ends(database)) < 5:
            assert time.monotonic() < deadline, "they do not begin"
            time.sleep(0.02)
        workers.kill(first)
        wait_for_the_end(database, seconds=END_S)
    finally:
        workers.close()
    all_ended_well_once(database, wanted)
    database.close()
