"""Long operations as jobs, in a database: queued, leased, followed, cancelled, kept for a while."""
