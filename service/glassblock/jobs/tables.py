"""The tables of the jobs, as the newest migration leaves them. A test compares the two.

Times are seconds since 1970 by the clock of whoever wrote them. They are shown, filtered by and used for retention;
nothing about a lease depends on them (`jobs.leases`).
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

Number = BigInteger().with_variant(Integer(), "sqlite")  # SQLite counts up by itself in an INTEGER alone

METADATA = MetaData()

AUDITS = Table(
    "audits",
    METADATA,
    Column("number", Number, primary_key=True, autoincrement=True),  # order of arrival
    Column("id", String(32), nullable=False, unique=True),
    Column("operation", String(64), nullable=False, server_default="start_audit"),
    Column("form", String(16), nullable=False, server_default="json"),  # of the answer: json or tensors
    Column("checkpoint", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("problem", Text),
    Column("attempts", Integer, nullable=False),
    Column("token", Integer, nullable=False),  # of the lease; counts up with every taking
    Column("beat", BigInteger, nullable=False),  # counts up while the holder of the lease lives
    Column("caller", String(128), nullable=False),
    Column("idempotency_key", String(255)),
    Column("request_digest", String(64), nullable=False),
    Column("request_id", String(128), nullable=False),
    Column("created", Float(53), nullable=False),
    Column("started", Float(53)),
    Column("ended", Float(53)),
    UniqueConstraint("caller", "idempotency_key", name="audits_once_per_key"),
    Index("audits_by_state", "state", "number"),
    Index("audits_by_checkpoint", "checkpoint", "number"),
    sqlite_autoincrement=True,  # a number that was deleted is never given again
)

REPORTS = Table(
    "reports",
    METADATA,
    Column("audit", Number, ForeignKey("audits.number"), primary_key=True, autoincrement=False),
    Column("digest", String(64), nullable=False),  # SHA-256 of the report as JSON
    Column("packed", LargeBinary, nullable=False),  # that JSON, by zlib
)

ANSWERS = Table(
    "answers",
    METADATA,
    Column("audit", Number, ForeignKey("audits.number"), primary_key=True, autoincrement=False),
    Column("digest", String(64), nullable=False),  # SHA-256 of the body
    Column("media_type", String(64), nullable=False),
)

PIECES = Table(
    "pieces",
    METADATA,
    Column("number", Number, primary_key=True, autoincrement=True),
    Column("audit", Number, ForeignKey("audits.number"), nullable=False),
    Column("side", String(8), nullable=False),  # of the request's tensors, or of the answer
    Column("bytes", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    Index("pieces_by_audit", "audit", "side", "number"),
    sqlite_autoincrement=True,
)

EVENTS = Table(
    "events",
    METADATA,
    Column("id", Number, primary_key=True, autoincrement=True),
    Column("audit", Number, ForeignKey("audits.number"), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("at", Float(53), nullable=False),
    Column("state", String(16), nullable=False),
    Column("done", BigInteger, nullable=False),
    Column("total", BigInteger, nullable=False),
    Column("message", Text, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("finding", Text),  # JSON
    Index("events_by_audit", "audit", "id"),
    sqlite_autoincrement=True,
)
