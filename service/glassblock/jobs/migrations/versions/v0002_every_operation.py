"""Other operations than audits, their inputs and answers in pieces, and findings among the events."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Add two tables and three columns; what is there stays as it is."""
    op.add_column("audits", sa.Column("operation", sa.String(64), nullable=False, server_default="start_audit"))
    op.add_column("audits", sa.Column("form", sa.String(16), nullable=False, server_default="json"))
    op.add_column("events", sa.Column("finding", sa.Text))
    op.create_table(
        "answers",
        sa.Column("audit", Number, sa.ForeignKey("audits.number"), primary_key=True, autoincrement=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("media_type", sa.String(64), nullable=False),
    )
    op.create_table(
        "pieces",
        sa.Column("number", Number, primary_key=True, autoincrement=True),
        sa.Column("audit", Number, sa.ForeignKey("audits.number"), nullable=False),
        sa.Column("side", sa.String(8), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("data", sa.LargeBinary, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("pieces_by_audit", "pieces", ["audit", "side", "number"])


def downgrade() -> None:
    """Nothing goes back: an older service would not know what it is told."""
    raise NotImplementedError("keep a copy of the database before an upgrade")
