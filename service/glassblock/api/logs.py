"""Logs as JSON, one object a line: what went wrong, on stderr, and who inspected what, where the operator wants it.

Every line that belongs to a request carries its `request_id`, and every line of a job its `audit` besides.
"""

import json
import logging
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

import structlog

from glassblock.api.envelope import Visit
from glassblock.errors import InvalidValue

QUIET = frozenset({"live", "ready", "metrics"})
"""Endpoints that machines ask all day long."""


def log_as_json(level: str) -> None:
    """Send everything that is logged in this process to stderr, from `level` upwards."""
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.EventRenamer("message"),
            structlog.processors.JSONRenderer(),
        ],
    )
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class AccessLog:
    """A line for every request: when, who, what, of which checkpoint, and how it went.

    Args:
        place: a file that lines are appended to, or "-" for stderr.

    Raises:
        InvalidValue: the file cannot be written.
    """

    def __init__(self, place: str) -> None:
        self._lock = threading.Lock()
        self._stream: TextIO = sys.stderr
        if place == "-":
            return
        try:
            self._stream = Path(place).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115  until the process ends
        except (OSError, ValueError) as fault:
            why = str(getattr(fault, "strerror", None) or fault).lower()
            raise InvalidValue(f"the access log {place!r} cannot be written: {why}", field="access_log") from fault

    def __call__(self, visit: Visit) -> None:
        """Write the line; a disk that is full stops no request."""
        if visit.endpoint in QUIET and visit.status < 400:
            return
        line = {
            "timestamp": datetime.now(UTC).isoformat(),
            "logger": "access",
            "request_id": visit.id,
            "caller": visit.caller.name,
            "address": visit.address,
            "method": visit.method,
            "path": visit.path[:1024],
            "endpoint": visit.endpoint,
            "checkpoint": visit.inspected,
            "status": visit.status,
            "milliseconds": round(1e3 * visit.seconds, 1),
            "received": visit.received,
            "sent": visit.sent,
        }
        try:
            with self._lock:
                self._stream.write(json.dumps(line) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            logging.getLogger(__name__).warning("the access log cannot be written")

    def close(self) -> None:
        """Close the file."""
        if self._stream is not sys.stderr:
            self._stream.close()
