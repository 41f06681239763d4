"""Who may come in: keys, what they allow, and how often.

Without a file of keys everybody is the same nameless caller and may do everything, which is why such a service listens
on loopback alone. A file that changes is read again; one that cannot be read any more leaves the last keys in force.
"""

import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import limits
from limits.storage import MemoryStorage
from limits.strategies import SlidingWindowCounterRateLimiter
from starlette.datastructures import Headers

from glassblock.errors import GlassblockError, InvalidValue, NotPermitted, TooManyRequests, Unauthenticated
from glassblock.wire.endpoints import ENDPOINTS, Endpoint
from glassblock.wire.keys import Key, Scope, allows, digest_of, read_keys

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.needs is None)
"""Whoever watches over the process has no key."""

FAILURES = "60/minute"
"""How often one address may come with no key, or an unknown one."""

LARGEST_FILE = 1 << 20
"""Of keys, bytes."""


@dataclass(frozen=True)
class Caller:
    """Who asks. `name` is that of the key, empty without keys."""

    name: str
    scope: Scope


NAMELESS = Caller("", "admin")
NOBODY = Caller("", "read")
"""Who asks for what is open to everybody."""


class Doors:
    """Lets callers in. Safe to call from any thread.

    Args:
        keys_file: of keys (`wire.keys`); None lets everybody in.
        rate: requests that one key may make, as "1200/minute"; None for any number.

    Raises:
        InvalidValue: the file or the rate cannot be read.
    """

    def __init__(self, *, keys_file: Path | None = None, rate: str | None = None) -> None:
        self._keys = None if keys_file is None else _KeyFile(keys_file)
        self._rate = None if rate is None or keys_file is None else _Rate(rate)
        self._failures = _Rate(FAILURES)

    def admit(self, path: str, headers: Headers, address: str) -> Caller:
        """Who is at the door.

        Raises:
            Unauthenticated: a key is needed, and none that is known came.
            TooManyRequests: the caller's rate is used up.
        """
        if self._keys is None:
            return NAMELESS
        if path in OPEN_PATHS:
            return NOBODY
        key = self._keys.find(headers.get("authorization", ""))
        if key is None:
            self._failures.spend(address)
            raise Unauthenticated(
                "no key came that is known here",
                field="Authorization",
                hint="send `Authorization: Bearer KEY`; the client takes GLASSBLOCK_KEY",
            )
        if self._rate is not None:
            self._rate.spend(key.name)
        return Caller(key.name, key.scope)


def require_scope(caller: Caller, endpoint: Endpoint[Any, Any]) -> None:
    """Refuse what the caller's key does not allow.

    Raises:
        NotPermitted: it does not.
    """
    needed = endpoint.needs
    if needed is not None and not allows(caller.scope, needed):
        raise NotPermitted(
            f"{endpoint.method} {endpoint.path} needs a key of scope {needed!r}, and this one has {caller.scope!r}",
            field="Authorization",
            hint="ask whoever runs the service for another key",
        )


class _KeyFile:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._stamp = _stamp(file)
        self._keys = _read(file)

    def find(self, authorization: str) -> Key | None:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        # Looked up by its digest: how long that takes tells nothing about a key.
        return self._current().get(digest_of(token.strip()))

    def _current(self) -> dict[str, Key]:
        with self._lock:
            stamp = _stamp(self._file)
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._keys = _read(self._file)
                except GlassblockError as error:
                    log.error("the keys before stay in force: %s", error)  # noqa: TRY400  its trace tells nothing more
            return self._keys


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(file: Path) -> dict[str, Key]:
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
        text = content.decode()
    except (OSError, ValueError) as fault:
        why = str(getattr(fault, "strerror", None) or fault).lower()
        raise InvalidValue(
            f"the file of keys {os.fspath(file)!r} cannot be read: {why}",
            field="keys_file",
            hint="`glassblock keys NAME --file FILE` writes one",
        ) from fault
    if len(content) > LARGEST_FILE:
        raise InvalidValue(f"the file of keys is larger than {LARGEST_FILE} bytes", field="keys_file")
    return read_keys(text)


class _Rate:
    def __init__(self, rate: str) -> None:
        try:
            self._item = limits.parse(rate)
        except ValueError as fault:
            raise InvalidValue(
                f"{rate!r} is no rate", field="rate", hint="write it as 20/second, 1200/minute or 50000/hour"
            ) from fault
        # Counts by the clock's windows: where it steps, another window is counted, and nobody is locked out.
        self._limiter = SlidingWindowCounterRateLimiter(MemoryStorage())

    def spend(self, who: str) -> None:
        if self._limiter.hit(self._item, who):
            return
        wait = self._limiter.get_window_stats(self._item, who).reset_time - time.time()
        raise TooManyRequests(
            f"more than {self._item.amount} requests in {self._item.get_expiry()} s",
            hint="wait, or ask whoever runs the service for a higher rate",
            retry_after=max(1.0, wait),
        )
