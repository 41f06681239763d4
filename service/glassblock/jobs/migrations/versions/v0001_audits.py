"""Audits, their reports and their events."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make the first three tables."""
    op.create_table(
        "audits",
        sa.Column("number", Number, primary_key=True, autoincrement=True),
        sa.Column("id", sa.String(32), nullable=False, unique=True),
        sa.Column("checkpoint", sa.Text, nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("done", sa.BigInteger, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("problem", sa.Text),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("token", sa.Integer, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False),
        sa.Column("caller", sa.String(128), nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("request_digest", sa.String(64), nullable=False),
        sa.Column("request_id", sa.String(128), nullable=False),
        sa.Column("created", sa.Float(53), nullable=False),
        sa.Column("started", sa.Float(53)),
        sa.Column("ended", sa.Float(53)),
        sa.UniqueConstraint("caller", "idempotency_key", name="audits_once_per_key"),
        sqlite_autoincrement=True,
    )
    op.create_index("audits_by_state", "audits", ["state", "number"])
    op.create_index("audits_by_checkpoint", "audits", ["checkpoint", "number"])
    op.create_table(
        "reports",
        sa.Column("audit", Number, sa.ForeignKey("audits.number"), primary_key=True, autoincrement=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("packed", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "events",
        sa.Column("id", Number, primary_key=True, autoincrement=True),
        sa.Column("audit", Number, sa.ForeignKey("audits.number"), nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("done", sa.BigInteger, nullable=False),
        sa.Column("total", sa.BigInteger, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_audit", "events", ["audit", "id"])


def downgrade() -> None:
    """Nothing goes back: an older service would not know what it is told."""
    raise NotImplementedError("keep a copy of the database before an upgrade")
