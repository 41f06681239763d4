"""What alembic runs: the steps over the connection that `jobs.database` hands in, within its transaction."""

from alembic import context

from glassblock.jobs.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,  # SQLite changes a column by copying its table
)
context.run_migrations()
