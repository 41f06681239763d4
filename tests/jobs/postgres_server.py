"""A PostgreSQL server of our own, by a socket in a folder, where its programs are on this machine."""

import os
import pwd
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class NoServer(Exception):
    """None can start here; says why."""


@contextmanager
def postgres_server() -> Iterator[str]:
    """Its URL, with `{name}` where the name of a database goes.

    Raises:
        NoServer: the programs are not here, or may not run.
    """
    programs = _programs()
    user = _user()
    folder = Path(tempfile.mkdtemp(prefix="pg-"))
    try:
        if user is not None:
            shutil.chown(folder, user)

        def run(program: str, *arguments: str) -> None:
            command = [programs / program, *arguments]
            subprocess.run(command, user=user, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=60)

        run("initdb", "-D", str(folder / "data"), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8")
        # By a socket in the folder alone: no port to collide with another session's.
        options = f"-c listen_addresses='' -k {folder} -c fsync=off -c max_connections=200"
        run("pg_ctl", "-D", str(folder / "data"), "-l", str(folder / "log"), "-o", options, "-w", "start")
        try:
            yield f"postgresql://postgres@/{{name}}?host={folder}"
        finally:
            run("pg_ctl", "-D", str(folder / "data"), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def fresh_database(server: str, *, encoding: str = "UTF8") -> str:
    """URL of a new database."""
    import psycopg  # noqa: PLC0415  an extra, which a test may lack

    name = f"jobs_{uuid.uuid4().hex}"
    with psycopg.connect(server.format(name="postgres"), autocommit=True) as connection:
        connection.execute(
            f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
        )
    return server.format(name=name)


def _programs() -> Path:
    found = shutil.which("initdb")
    homes = [Path(found).parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    home = next((home for home in homes if (home / "initdb").exists()), None)
    if home is None:
        raise NoServer("PostgreSQL's programs are not on this machine")
    return home


def _user() -> str | None:
    """Whom it runs as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        raise NoServer("PostgreSQL does not run as root, and there is no user postgres") from None
