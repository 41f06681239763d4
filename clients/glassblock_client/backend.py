"""The HTTP library, imported here and nowhere else: moving to its successor is this one line."""

import httpx

__all__ = ["httpx"]
