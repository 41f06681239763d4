"""Jobs under every fault at hand: kill -9, a locked database, a full disk, clocks that jump, a shared queue.

The jobs are audits of the example. Every worker is a process of its own.
"""

import importlib
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from glassblock.errors import StorageUnavailable
from glassblock.jobs import history
from glassblock.jobs.database import FILE, Database, open_database
from glassblock.jobs.history import Asked
from glassblock.jobs.leases import counts
from glassblock.wire.audits import AuditQuery, AuditRequest
from record import ROOT, Promise, publish

KILLS, JOBS_KILLED, JOBS_SHARED, JOBS_CLOCK = 50, 40, 200, 20
LOCKED_SECONDS = 5.0
END_SECONDS = 600.0

sys.path.insert(0, str(ROOT / "tests"))  # before this folder, where `jobs` is this script
processes: Any = importlib.import_module("jobs.processes")
servers: Any = importlib.import_module("jobs.postgres_server")


def main() -> int:
    faults = [killed, locked, clocks]
    with tempfile.TemporaryDirectory() as scratch:
        promises = [fault(Path(scratch) / fault.__name__) for fault in faults]
        promises += [full(Path(scratch) / "full"), *shared()]
    says = (
        f"{KILLS} kills at random moments of the first 1.2 s of a worker; a lease of {processes.QUICK.lease_seconds} s."
    )
    return publish("Jobs", says, promises, [])


def killed(folder: Path) -> Promise:
    rng, database = random.Random(50), open_database(folder)
    wanted, workers = processes.ask(database, JOBS_KILLED), processes.Workers(folder)
    began = time.monotonic()
    try:
        for _ in range(KILLS):
            process = workers.start()
            time.sleep(rng.uniform(0.0, 1.2))
            workers.kill(process)
        workers.start()
        processes.wait_for_the_end(database, seconds=END_SECONDS)
    finally:
        workers.close()
    text = f"kill -9 of the worker, {KILLS} times: {JOBS_KILLED} jobs end well, each once, with the same report"
    return Promise(text, f"{told(database, wanted)}, {time.monotonic() - began:.0f} s", ended_once(database, wanted))


def locked(folder: Path) -> Promise:
    database, workers = open_database(folder), processes.Workers(folder)
    wanted = processes.ask(database, 10)
    try:
        workers.start()
        while counts(database)["succeeded"] < 2:
            time.sleep(0.05)
        other = sqlite3.connect(folder / FILE, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        before = counts(database)["succeeded"]
        time.sleep(LOCKED_SECONDS)
        during = counts(database)["succeeded"] - before
        other.execute("ROLLBACK")
        other.close()
        wanted += processes.ask(database, 1)
        processes.wait_for_the_end(database, seconds=END_SECONDS)
    finally:
        workers.close()
    measured = f"{told(database, wanted)}, {during} of them while it was locked"
    held = ended_once(database, wanted) and during == 0
    return Promise(f"database locked for {LOCKED_SECONDS:g} s: everybody waits, nothing is lost", measured, held)


def clocks(folder: Path) -> Promise:
    database, workers = open_database(folder), processes.Workers(folder, wild=True)
    wanted = processes.ask(database, JOBS_CLOCK)
    try:
        workers.start()
        workers.start()
        processes.wait_for_the_end(database, seconds=END_SECONDS)
    finally:
        workers.close()
    twice = sum(audit.attempts > 1 for audit in history.listed(database, AuditQuery(limit=500)).audits)
    measured = f"{told(database, wanted)}, {twice} taken from a living worker"
    text = "the clocks of two workers jump by a day with every look: no lease is broken"
    return Promise(text, measured, ended_once(database, wanted) and twice == 0)


def full(folder: Path) -> Promise:
    text = "disk full in the data folder: new jobs are refused with 503, the accepted ones end well once there is room"
    folder.mkdir()
    with small_disk(folder) as mounted:
        if not mounted:
            return Promise(text, "not measured: no tmpfs may be mounted here", held=True)
        database, workers = open_database(folder), processes.Workers(folder)
        wanted, refusal = processes.ask(database, 5), ""
        ballast = folder / "ballast"
        with ballast.open("wb", buffering=0) as stream:
            try:
                while stream.write(b"x" * 4096):
                    pass
            except OSError:
                pass
        large = AuditRequest(checkpoint="tiny-llama", against={"x": random.Random(1).randbytes(100_000).hex()})
        try:
            history.enqueue(database, Asked(large), waiting=100)
        except StorageUnavailable as error:
            refusal = error.message
        try:
            workers.start()
            time.sleep(5)
            during = counts(database)["succeeded"]
            ballast.unlink()
            processes.wait_for_the_end(database, seconds=END_SECONDS)
        finally:
            workers.close()
        measured = f"{told(database, wanted)}, {during} while it was full; refused: {refusal or 'no'}"
        held = ended_once(database, wanted) and "full" in refusal
        database.close()
    return Promise(text, measured, held)


def shared() -> list[Promise]:
    text = (
        f"two services over one PostgreSQL, {JOBS_SHARED} jobs, one service killed in the middle: none twice, none lost"
    )
    try:
        with servers.postgres_server() as server:
            place = servers.fresh_database(server)
            database, workers = open_database(place), processes.Workers(place)
            wanted = processes.ask(database, JOBS_SHARED)
            try:
                first = workers.start()
                workers.start()
                while counts(database)["succeeded"] < JOBS_SHARED // 2:
                    time.sleep(0.05)
                workers.kill(first)
                processes.wait_for_the_end(database, seconds=END_SECONDS)
            finally:
                workers.close()
            promise = Promise(text, told(database, wanted), ended_once(database, wanted))
            database.close()
            return [promise]
    except servers.NoServer as fault:
        return [Promise(text, f"not measured: {fault}", held=True)]


def ended_once(database: Database, wanted: list[str]) -> bool:
    ends = processes.ends(database)
    return ends == {audit: {"succeeded": 1} for audit in wanted} and list(processes.digests(database).values()) == [
        len(wanted)
    ]


def told(database: Database, wanted: list[str]) -> str:
    ends, digests = processes.ends(database), processes.digests(database)
    once = sum(ends.get(audit) == {"succeeded": 1} for audit in wanted)
    return f"{once} of {len(wanted)} ended well once, {sum(digests.values())} reports of {len(digests)} content"


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of 2 MiB over `folder`, where this process may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)]
    try:
        mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=False)


if __name__ == "__main__":
    sys.exit(main())
