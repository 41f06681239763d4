"""Jobs and their leases, over both databases: taken once, fenced off, found again, never lost."""

import ctypes
import json
import math
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from glassblock.errors import InternalFault, InvalidValue, NoRoom, StorageUnavailable, UnknownAudit
from glassblock.jobs import history, leases
from glassblock.jobs.database import CACHE_KIB, FILE, POOL, Database, open_database
from glassblock.jobs.history import Asked
from glassblock.jobs.leases import Held, Lease
from glassblock.jobs.tables import METADATA
from glassblock.jobs.worker import Watch, asked_for
from glassblock.wire.audits import AuditQuery, AuditRequest, Progress
from glassblock.wire.problems import problem_from_error
from reports.report_makers import report
from sqlalchemy import text

from jobs.postgres_server import fresh_database

PROBLEM = problem_from_error(InternalFault("its worker died"), 500)


def put(database: Database, checkpoint: str = "a", **more: str) -> str:
    return history.enqueue(database, Asked(AuditRequest(checkpoint=checkpoint), **more), waiting=1000).id


def taken(database: Database) -> Lease:
    lease = leases.take(database)
    assert lease is not None
    return lease


def test_the_migrations_leave_the_tables_that_the_code_uses(database: Database) -> None:
    with database.reading() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), METADATA)
    assert differences == []


def test_opening_again_finds_what_was_there(place: str | Path) -> None:
    first = open_database(place)
    audit = put(first)
    first.close()
    second = open_database(place)
    assert history.get(second, audit).state == "queued"
    second.close()


def test_many_may_open_a_new_database_at_once(place: str | Path) -> None:
    with ThreadPoolExecutor(4) as openers:
        for database in openers.map(lambda _: open_database(place), range(4)):
            assert leases.take(database) is None
            database.close()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's mallinfo2")
def test_connections_do_not_keep_the_history_in_memory(tmp_path: Path) -> None:
    database = open_database(tmp_path, durable=False)
    put(database)
    with database.writing() as connection:
        row = text("INSERT INTO pieces (audit, side, bytes, data) VALUES (1, 'answer', 3000, zeroblob(3000))")
        for _ in range(2000):  # more than SQLite would keep
            connection.execute(row)
    before = _allocated()
    with ExitStack() as all_at_once:
        for connection in [all_at_once.enter_context(database.reading()) for _ in range(POOL)]:
            connection.execute(text("SELECT sum(bytes) FROM pieces")).scalar_one()
    kept = _allocated() - before
    database.close()
    assert kept < 2 * POOL * CACHE_KIB * 1024, "without a bound it is 2000 KiB each"


def _allocated() -> int:
    """Bytes that malloc has given out, to whomever, and that lie in its arenas."""

    class Counted(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]

    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Counted
    return int(libc.mallinfo2().uordblks)


_MALLINFO = (  # malloc.h
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


def test_what_a_database_says_of_itself_is_for_the_log(postgres: str, caplog: pytest.LogCaptureFixture) -> None:
    place = fresh_database(postgres)
    database = open_database(place)
    with (
        caplog.at_level("WARNING"),
        pytest.raises(StorageUnavailable) as refused,
        database.writing() as connection,
    ):
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))
    database.close()
    assert "administrator" in caplog.text
    assert "administrator" not in refused.value.message
    with pytest.raises(StorageUnavailable, match="nobody"):  # whoever starts the service is told at once
        open_database(place.replace("postgres@", "nobody@"))


def test_a_database_without_an_encoding_will_do(postgres: str) -> None:
    database = open_database(fresh_database(postgres, encoding="SQL_ASCII"))
    assert history.get(database, put(database, "schön")).checkpoint == "schön"
    database.close()


def test_tables_of_a_newer_version_are_refused(place: str | Path) -> None:
    database = open_database(place)
    with database.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    database.close()
    with pytest.raises(InvalidValue, match="brought up to date") as refused:
        open_database(place)
    assert refused.value.field == "database"


def test_jobs_are_taken_in_their_order_and_each_once(database: Database) -> None:
    wanted = [put(database, f"c{number}") for number in range(40)]
    with ThreadPoolExecutor(8) as takers:
        found = list(takers.map(lambda _: leases.take(database), range(48)))
    ids = [lease.id for lease in found if lease is not None]
    assert Counter(ids) == Counter(wanted)
    assert leases.take(database) is None


def test_the_longest_waiting_comes_first(database: Database) -> None:
    wanted = [put(database) for _ in range(5)]
    assert [taken(database).id for _ in wanted] == wanted


def test_what_was_asked_arrives_as_it_was_asked(database: Database) -> None:
    against = {"rms_norm_eps": math.nan, "odd": "\ud800", "nul": "\0", "big": 10**30, "nested": [[1, {"a": None}]]}
    request = AuditRequest(checkpoint="a", against=against, rules=("ffn/gate-up-swapped",), certify=True)
    history.enqueue(database, Asked(request), waiting=10)
    arrived, tensors = asked_for(database, taken(database))
    assert isinstance(arrived, AuditRequest)
    assert not tensors
    assert arrived.against is not None
    assert math.isnan(arrived.against["rms_norm_eps"])
    assert repr(arrived) == repr(request)


def test_a_report_is_stored_whole_and_ends_the_job(database: Database) -> None:
    audit = put(database)
    lease = taken(database)
    assert leases.beat(database, lease, Progress(done=3, total=9, message="layer 1"))
    assert history.get(database, audit).progress == Progress(done=3, total=9, message="layer 1")
    assert leases.finish(database, lease, report())
    ended = history.get(database, audit)
    assert (ended.state, ended.report, ended.attempts) == ("succeeded", report(), 1)
    assert ended.progress.done == ended.progress.total == 9
    assert ended.created is not None
    assert ended.started is not None
    assert ended.ended is not None
    assert not leases.finish(database, lease, report()), "an end is an end"


def test_a_holder_that_was_given_up_for_dead_changes_nothing_any_more(database: Database) -> None:
    audit = put(database)
    stale = taken(database)
    (seen,) = leases.held(database)
    assert leases.take_back(database, seen, attempts=3, problem=PROBLEM) == "queued"
    for change in (
        lambda: leases.beat(database, stale, Progress(done=9, total=9)),
        lambda: leases.finish(database, stale, report()),
        lambda: leases.fail(database, stale, PROBLEM),
        lambda: leases.hand_back(database, stale),
    ):
        assert not change()
        assert history.get(database, audit).state == "queued"
    fresh = taken(database)
    assert fresh.token > stale.token
    assert not leases.finish(database, stale, report()), "also while another one works on it"
    assert leases.finish(database, fresh, report())
    assert history.get(database, audit).attempts == 2


def test_a_holder_that_has_moved_keeps_its_job(database: Database) -> None:
    put(database)
    lease = taken(database)
    (seen,) = leases.held(database)
    assert leases.beat(database, lease, None)
    assert leases.take_back(database, seen, attempts=3, problem=PROBLEM) is None
    assert leases.finish(database, lease, report())


def test_of_two_who_take_a_job_back_one_does(database: Database) -> None:
    put(database)
    taken(database)
    (seen,) = leases.held(database)
    both = [leases.take_back(database, seen, attempts=3, problem=PROBLEM) for _ in range(2)]
    assert both == ["queued", None]


def test_after_its_attempts_a_job_is_failed_and_not_stuck(database: Database) -> None:
    audit = put(database)
    for attempt in (1, 2):
        taken(database)
        (seen,) = leases.held(database)
        state = leases.take_back(database, seen, attempts=2, problem=PROBLEM)
        assert state == ("queued" if attempt == 1 else "failed")
    ended = history.get(database, audit)
    assert ended.problem is not None
    assert ended.problem["detail"] == "its worker died"
    assert leases.take(database) is None


def test_a_job_handed_back_has_not_used_up_an_attempt(database: Database) -> None:
    audit = put(database)
    assert leases.hand_back(database, taken(database))
    assert (history.get(database, audit).state, history.get(database, audit).attempts) == ("queued", 0)
    assert taken(database).id == audit


def test_a_cancelled_job_takes_no_result(database: Database) -> None:
    audit = put(database)
    lease = taken(database)
    assert history.cancel(database, audit).state == "cancelled"
    assert not leases.beat(database, lease, None)
    assert not leases.finish(database, lease, report())
    assert history.get(database, audit).report is None
    waiting = put(database)
    history.cancel(database, waiting)
    assert leases.take(database) is None
    assert history.cancel(database, waiting).state == "cancelled"


def test_no_clock_decides_about_a_lease(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = put(database)
    lease = taken(database)
    watch = Watch(0.2)
    assert watch.still(leases.held(database)) == []
    started = time.time()
    for hours in (-2, 5, -40_000):  # the last: before 1970 by now
        monkeypatch.setattr(time, "time", lambda hours=hours: started + 3600 * hours)
        time.sleep(0.12)
        assert leases.beat(database, lease, None)
        assert watch.still(leases.held(database)) == [], "it lives, whatever the clock says"
    assert leases.finish(database, lease, report())
    ended = history.get(database, audit)
    assert ended.state == "succeeded"
    assert ended.ended is not None


def test_watch_sees_who_stands_still_by_its_own_clock() -> None:
    now = [100.0]
    watch = Watch(10.0, clock=lambda: now[0])
    dead, alive = Held(1, 1, 7, 1), Held(2, 1, 0, 1)
    assert watch.still([dead, alive]) == []
    now[0] += 9.9
    assert watch.still([dead, Held(2, 1, 1, 1)]) == []
    now[0] += 0.2
    assert watch.still([dead, Held(2, 1, 2, 1)]) == [dead]
    assert watch.still([Held(1, 2, 0, 2)]) == [], "taken by somebody else: the watch begins anew"


def test_the_same_key_with_the_same_request_is_the_same_job(database: Database) -> None:
    first = put(database, key="k", caller="ci")
    assert put(database, key="k", caller="ci") == first
    assert put(database, key="k", caller="other") != first
    assert put(database, key="k2", caller="ci") != first
    assert put(database, caller="ci") != put(database, caller="ci")
    with pytest.raises(InvalidValue, match="another request") as refused:
        put(database, "b", key="k", caller="ci")
    assert refused.value.field == "Idempotency-Key"
    leases.finish(database, taken(database), report())
    assert put(database, key="k", caller="ci") == first, "also after its end"


def test_of_many_who_ask_with_one_key_at_once_all_get_one_job(database: Database) -> None:
    with ThreadPoolExecutor(8) as askers:
        ids = set(askers.map(lambda _: put(database, key="k"), range(16)))
    assert len(ids) == 1
    assert leases.counts(database)["queued"] == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "schlüssel"])
def test_an_odd_key_is_refused(database: Database, key: str) -> None:
    with pytest.raises(InvalidValue, match="idempotency key"):
        put(database, key=key)


def test_too_many_waiting_are_refused(database: Database) -> None:
    put(database)
    with pytest.raises(NoRoom) as refused:
        history.enqueue(database, Asked(AuditRequest(checkpoint="a")), waiting=1)
    assert refused.value.retry_after == 30


def test_history_is_filtered_and_comes_in_pages(database: Database) -> None:
    ids = [put(database, f"c{number % 2}") for number in range(7)]
    leases.finish(database, taken(database), report())
    seen: list[str] = []
    query = AuditQuery(limit=3)
    while True:
        page = history.listed(database, query)
        seen += [audit.id for audit in page.audits]
        if page.next is None:
            break
        query = AuditQuery(limit=3, cursor=page.next)
    assert seen == ids[::-1]
    assert [audit.id for audit in history.listed(database, AuditQuery(state="succeeded")).audits] == ids[:1]
    assert {audit.checkpoint for audit in history.listed(database, AuditQuery(checkpoint="c1")).audits} == {"c1"}
    soon = datetime.now(UTC) + timedelta(hours=1)
    assert history.listed(database, AuditQuery(since=soon)).audits == ()
    assert len(history.listed(database, AuditQuery(since=soon - timedelta(hours=2))).audits) == 7


def test_events_increase_and_end_with_the_job(database: Database) -> None:
    audit, other = put(database), put(database)
    lease = taken(database)
    for done in range(3):
        leases.beat(database, lease, Progress(done=done, total=3, message=f"layer {done}\0\ud800"))
        leases.beat(database, lease, None)
        history.cancel(database, other)
    events, ended = history.events(database, audit, after=0)
    assert [(event.kind, event.state) for event in events] == [
        ("state", "queued"),
        ("state", "running"),
        *[("progress", "running")] * 3,
    ]
    assert all(before.id < after.id for before, after in pairwise(events))
    assert events[-1].progress.message == "layer 2\ufffd?"
    assert not ended
    leases.finish(database, lease, report())
    rest, ended = history.events(database, audit, after=events[-1].id)
    assert [event.state for event in rest] == ["succeeded"]
    assert ended
    assert history.events(database, audit, after=rest[-1].id) == ([], True)
    first, ended = history.events(database, audit, after=0, limit=2)
    assert (len(first), ended) == (2, False)


def test_old_jobs_are_forgotten_with_all_that_was_theirs(database: Database) -> None:
    ids = [put(database, key=f"k{number}") for number in range(5)]
    for _ in range(4):
        leases.finish(database, taken(database), report())
    assert history.forget(database, keep=2, seconds=3600) == 2
    for gone in ids[:2]:
        with pytest.raises(UnknownAudit):
            history.events(database, gone, after=0)
    assert {audit.id for audit in history.listed(database, AuditQuery()).audits} == set(ids[2:])
    assert history.forget(database, keep=10, seconds=-1) == 2, "by age: what waits is not forgotten"
    assert [audit.id for audit in history.listed(database, AuditQuery()).audits] == ids[4:]
    with database.reading() as connection:
        left = {table: connection.execute(text(f"SELECT count(*) FROM {table}")).scalar() for table in METADATA.tables}
    assert left == {"audits": 1, "reports": 0, "answers": 0, "pieces": 0, "events": 1}


def test_an_unknown_audit_is_not_found(database: Database) -> None:
    for ask in (history.get, history.cancel, history.stored, history.caller_of):
        for odd in ("nonesuch", "x" * 5000, "\0", "\ud800", "' OR 1=1"):
            with pytest.raises(UnknownAudit):
                ask(database, odd)


@pytest.mark.parametrize("url", ["nonsense", "mysql://host/name", "sqlite+nodriver:///x", "postgresql://host:port/x"])
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        open_database(url.replace("host", "me:secret@host"))
    assert refused.value.field == "database"
    assert "secret" not in json.dumps([refused.value.message, refused.value.hint])


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidValue, match="cannot hold the service's data") as refused:
        open_database(tmp_path / "file" / "data")
    assert refused.value.field == "data"


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"not a database" * 1000)
    with pytest.raises(InvalidValue, match="no database of ours"):
        open_database(tmp_path)


def test_a_file_that_is_damaged_meanwhile_is_told_of(tmp_path: Path) -> None:
    database = open_database(tmp_path)
    database.close()  # all connections: the next one reads the file
    (tmp_path / FILE).write_bytes(b"not a database!!" * ((tmp_path / FILE).stat().st_size // 16))
    for look in (database.reading, database.writing):
        with pytest.raises(StorageUnavailable, match="not a database"), look() as connection:
            connection.execute(text("SELECT count(*) FROM audits"))
    database.close()
