"""Both databases: SQLite in a folder, and a PostgreSQL of our own where its programs are."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from glassblock.jobs.database import Database, open_database

from jobs.postgres_server import NoServer, fresh_database, postgres_server


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server of this session: its URL, with `{name}` where the name of a database goes."""
    pytest.importorskip("psycopg", reason="the extra `postgres` is not installed")
    try:
        with postgres_server() as server:
            yield server
    except NoServer as fault:
        pytest.skip(str(fault))


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    """Where a fresh database is: as `open_database` takes it."""
    return tmp_path / "data" if request.param == "sqlite" else fresh_database(request.getfixturevalue("postgres"))


@pytest.fixture
def database(place: str | Path) -> Iterator[Database]:
    database = open_database(place)
    yield database
    database.close()
