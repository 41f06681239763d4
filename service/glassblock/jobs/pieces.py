"""What is too large for a row: tensors posted with a job, and the answer it ends with, in pieces, within one budget.

They lie in the database, and so in the data folder or where every service of a shared queue finds them, and they come
and go in the transactions that begin and end the job: none is ever left behind.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from sqlalchemy import Connection, delete, func, insert, select

from glassblock.errors import NoRoom, TooLarge
from glassblock.jobs.database import ROOM, alone
from glassblock.jobs.tables import ANSWERS, PIECES

PIECE_BYTES = 4 << 20
"""Databases hold a gigabyte in a value at most, and copy it whole."""

Side = Literal["request", "answer"]


def keep(connection: Connection, number: int, side: Side, chunks: Sequence[bytes | memoryview], *, budget: int) -> None:
    """Write down a body of a job. The answers of the jobs that came first make room for it.

    Args:
        number: of the job.
        budget: bytes that all bodies may take.

    Raises:
        TooLarge: it is larger than that.
        NoRoom: it does not fit beside the tensors that wait for their jobs.
    """
    needed = sum(memoryview(chunk).nbytes for chunk in chunks)
    if not needed:
        return
    if needed > budget:
        raise TooLarge(
            f"{needed:,} bytes are to be kept for a job, and {budget:,} may be",
            hint="send or ask for less, or raise GLASSBLOCK_JOBS_MIB",
        )
    alone(connection, ROOM)
    free = budget - connection.execute(select(func.coalesce(func.sum(PIECES.c.bytes), 0))).scalar_one()
    if free < needed:
        free += _make_room(connection, needed - free)
    if free < needed:
        raise NoRoom(
            f"{needed:,} bytes are to be kept for a job; {free:,} of {budget:,} are free until others have ended",
            hint="send it again later, or raise GLASSBLOCK_JOBS_MIB",
            retry_after=30,
        )
    for piece in _cut(chunks):
        connection.execute(insert(PIECES).values(audit=number, side=side, bytes=len(piece), data=piece))


def read(connection: Connection, number: int, side: Side) -> list[bytes]:
    """The pieces of a body, in order."""
    statement = select(PIECES.c.data).where(PIECES.c.audit == number, PIECES.c.side == side).order_by(PIECES.c.number)
    return [bytes(piece) for piece in connection.execute(statement).scalars()]


def drop(connection: Connection, numbers: Sequence[int], *sides: Side) -> None:
    """Forget bodies of jobs."""
    connection.execute(delete(PIECES).where(PIECES.c.audit.in_(numbers), PIECES.c.side.in_(sides)))
    if "answer" in sides:
        connection.execute(delete(ANSWERS).where(ANSWERS.c.audit.in_(numbers)))


def _make_room(connection: Connection, wanted: int) -> int:
    """Forget the oldest answers until so many bytes are free; how many became so."""
    freed, oldest = 0, list[int]()
    sizes = (
        select(PIECES.c.audit, func.sum(PIECES.c.bytes))
        .where(PIECES.c.side == "answer")
        .group_by(PIECES.c.audit)
        .order_by(PIECES.c.audit)
    )
    for number, size in connection.execute(sizes).all():
        if freed >= wanted:
            break
        freed += int(size)
        oldest.append(number)
    drop(connection, oldest, "answer")
    return freed


def _cut(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            yield bytes(view[start : start + PIECE_BYTES])
