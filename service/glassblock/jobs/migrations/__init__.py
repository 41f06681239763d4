"""The history of the tables, for alembic: `versions` holds one module per step, the oldest first by its number."""
