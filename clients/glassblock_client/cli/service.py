"""The one door to the service's own code. Importing it loads torch and FastAPI."""

from glassblock.api.entry import connect, repair, selftest, serve

__all__ = ["connect", "repair", "selftest", "serve"]
