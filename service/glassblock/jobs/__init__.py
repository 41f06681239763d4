"""Audits as jobs: started, followed, cancelled, kept for a while."""
