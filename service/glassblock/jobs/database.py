"""Where jobs are kept: SQLite in a folder, PostgreSQL by its URL, one code path over both."""

import logging
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    InterfaceError,
    InternalError,
    OperationalError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from glassblock.errors import InvalidValue, StorageUnavailable

log = logging.getLogger(__name__)

FILE = "jobs.sqlite3"
BUSY_SECONDS = 10.0
"""How long a statement waits for another one's write to end, before the caller is told to come back."""

POOL = 16
CACHE_KIB = 256
"""Of pages, that each connection to SQLite keeps. What another one writes empties them, and the system keeps the file's
pages for all: SQLite's own 2000 KiB would but fill in every connection as the history grows."""

_IMMEDIATE = "glassblock_immediate"

MIGRATION = 4_707_269_181
ROOM = 4_707_269_182
"""PostgreSQL's advisory locks: while the tables are brought up to date, and while it is counted whether one more job,
its tensors or its answer may come in. Any numbers that nobody else uses."""


_AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeout)
"""Errors of a database that does not do its work, whatever it is told."""


class Database:
    """An open database with the newest tables.

    Args:
        url: as SQLAlchemy takes it.
        durable: a commit is on the disk before it is answered for. Without, a crash of the machine may lose the last
            moments; a crash of the process loses nothing either way.
    """

    def __init__(self, url: URL, *, durable: bool) -> None:
        sqlite = url.get_backend_name() == "sqlite"
        # Text comes as text, also out of a database that was made without an encoding.
        told = {"connect_timeout": int(BUSY_SECONDS), "client_encoding": "utf8"}
        arguments: dict[str, Any] = {"timeout": BUSY_SECONDS} if sqlite else told
        self.name = url.get_backend_name()
        # A server's own words name hosts, users and files: they are for whoever opens it, and for the log.
        self.tells_why = True
        self._engine = create_engine(
            url, pool_size=POOL, max_overflow=0, pool_timeout=BUSY_SECONDS, pool_pre_ping=not sqlite,
            connect_args=arguments,
        )  # fmt: skip
        if sqlite:
            _settle_sqlite(self._engine, durable=durable)

    @contextmanager
    def reading(self) -> Generator[Connection]:
        """A transaction that only looks; what it sees stays the same to its end.

        Raises:
            StorageUnavailable: the database cannot be read now.
        """
        # SQLite looks so by itself.
        snapshot = {} if self.name == "sqlite" else {"isolation_level": "REPEATABLE READ"}
        with self._told(), self._engine.connect().execution_options(**snapshot) as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self) -> Generator[Connection]:
        """A transaction that writes: all of it, or none where an error leaves it.

        Raises:
            StorageUnavailable: the database cannot be written now.
        """
        immediate = {_IMMEDIATE: True}
        with self._told(), self._engine.connect().execution_options(**immediate) as connection, connection.begin():
            yield connection

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextmanager
    def _told(self) -> Generator[None]:
        try:
            yield
        except (DatabaseError, InterfaceError, PoolTimeout) as fault:
            if not _of_the_database(fault):
                raise
            # Not SQLAlchemy's own text: it holds the statement with its values.
            why = _first_line(getattr(fault, "orig", None) or fault)
            hint = "free space where the data lies" if "full" in why or "no space" in why else "try again"
            if not self.tells_why:
                log.warning("the database of the jobs cannot be used now: %s", why)
                why = "the service's log has the reason"
            raise StorageUnavailable(
                f"the database of the jobs cannot be used now: {why}", hint=hint, retry_after=5
            ) from fault


def _of_the_database(fault: Exception) -> bool:
    """Whether an error is the database's, a damaged file among them; else it is a mistake of a statement."""
    return isinstance(fault, _AWAY) or type(fault) is DatabaseError


def alone(connection: Connection, lock: int) -> None:
    """Wait until no other transaction has said the same; SQLite has one writer anyway."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": lock})


def open_database(place: str | Path, *, durable: bool = True) -> Database:
    """The database at `place`, its tables brought up to date.

    Args:
        place: a folder, for SQLite in it; or a URL, `postgresql://user@host/name` or `sqlite:///file`.

    Raises:
        InvalidValue: the folder or the URL cannot be used, or a newer version of the tables is there.
        StorageUnavailable: the database does not answer.
    """
    database = Database(_url(place), durable=durable)
    try:
        with database.writing() as connection:
            alone(connection, MIGRATION)
            _migrate(connection)
    except BaseException as fault:
        database.close()
        cause = fault.__cause__ if isinstance(fault, StorageUnavailable) else fault
        if not isinstance(cause, DatabaseError) or isinstance(cause, _AWAY):
            raise
        raise InvalidValue(
            f"what is there is no database of ours: {_first_line(cause.orig)}",
            field="database" if isinstance(place, str) else "data",
            hint="give another folder or database; a damaged file can be moved away, and its history with it",
        ) from cause
    database.tells_why = database.name == "sqlite"
    return database


def _url(place: str | Path) -> URL:
    if isinstance(place, Path):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as fault:
            why = str(getattr(fault, "strerror", None) or fault).lower()
            raise InvalidValue(
                f"{place} cannot hold the service's data: {why}", field="data", hint="give a folder that can be written"
            ) from fault
        return URL.create("sqlite", database=str(place / FILE))
    try:
        url = make_url(place)
        if url.drivername in {"postgresql", "postgres"}:
            url = url.set(drivername="postgresql+psycopg")
        url.get_dialect()
    except (ArgumentError, SQLAlchemyError, ValueError, ImportError) as fault:
        raise InvalidValue(
            "the database's URL cannot be read, or its driver is not installed",
            field="database",
            hint="postgresql://user:password@host/name, with the extra `postgres` installed; or sqlite:////a/file",
        ) from fault
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        raise InvalidValue(
            f"no database of the kind {url.get_backend_name()!r}", field="database", known=("sqlite", "postgresql")
        )
    return url


def _migrate(connection: Connection) -> None:
    config = Config()
    config.set_main_option("script_location", "glassblock.jobs:migrations")
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except command.util.CommandError as fault:
        raise InvalidValue(
            f"the database's tables cannot be brought up to date: {fault}",
            field="database",
            hint="a newer version of the service made them: run that one, or give another database",
        ) from fault


def _settle_sqlite(engine: Engine, *, durable: bool) -> None:
    @event.listens_for(engine, "connect")
    def settle(connection: sqlite3.Connection, _record: object) -> None:  # pyright: ignore[reportUnusedFunction]
        connection.isolation_level = None  # transactions begin where we say so, below
        # WAL: readers and the one writer do not wait for each other.
        synchronous, cache = "FULL" if durable else "OFF", -CACHE_KIB  # of pages, where it is positive
        for pragma in (
            "journal_mode=WAL", f"synchronous={synchronous}", "foreign_keys=ON", f"cache_size={cache}",
        ):  # fmt: skip
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]
        # A transaction that looked first could not write later where another one has written in between.
        immediate = connection.get_execution_options().get(_IMMEDIATE, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _first_line(fault: BaseException | None) -> str:
    return str(fault).strip().partition("\n")[0].lower()
