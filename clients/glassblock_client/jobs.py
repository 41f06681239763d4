"""Waiting for a job: how long between two looks, what its events say, and what its end means."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from glassblock.errors import (
    GlassblockError,
    InternalFault,
    InvalidValue,
    NotReady,
    ServiceUnavailable,
    StorageUnavailable,
    TooManyRequests,
)
from glassblock.wire.audits import ENDED, Audit, AuditEvent, JobAnswer, Progress, Report
from glassblock.wire.endpoints import ENDPOINTS, START_AUDIT, Endpoint
from glassblock.wire.problems import Problem, error_from_problem
from glassblock.wire.values import Answer
from pydantic import ValidationError

OnProgress = Callable[[Progress], object]
OnEvent = Callable[[AuditEvent], object]

AWAY: tuple[type[GlassblockError], ...] = (ServiceUnavailable, StorageUnavailable, TooManyRequests)
"""What a look at a job may end with while the job itself goes on."""

AWAY_SECONDS = 120.0
"""How long a service may be away before the wait for a job ends: a restart takes less."""

GIVE_UP_SECONDS = 5.0
"""For the service to hear that a job is cancelled, by whoever waits no longer."""

LONGEST_EVENT = 1 << 20
"""Bytes; a longer one is none of ours."""


def pauses() -> Iterator[float]:
    """Seconds between two looks: short at first, for small checkpoints, then a second."""
    pause = 0.05
    while True:
        yield pause
        pause = min(1.0, pause * 1.5)


def ended_well(audit: Audit) -> bool:
    """Whether a job has ended well; False while it has not ended.

    Raises:
        GlassblockError: what it failed with.
        NotReady: it was cancelled.
    """
    if audit.state not in ENDED:
        return False
    if audit.problem is not None:
        raise error_from_problem(Problem.model_validate(audit.problem))
    if audit.state == "cancelled":
        raise NotReady(f"audit {audit.id} was cancelled before it ended", hint="start it again")
    return True


def report_of(audit: Audit) -> Report:
    """The report of an audit that ended well.

    Raises:
        InternalFault: it has none.
    """
    if audit.report is None:
        raise InternalFault(f"audit {audit.id} is {audit.state} and has no report")
    return audit.report


def job_endpoint(operation: str) -> Endpoint[Any, Any]:
    """The endpoint of an operation that may be asked for as a job.

    Raises:
        InvalidValue: there is none of that name.
    """
    if type(operation) is not str or operation not in JOBS:
        raise InvalidValue(f"{operation!r} is no operation that can be a job", field="operation", known=tuple(JOBS))
    return JOBS[operation]


def answer_model(operation: str) -> type[Answer]:
    """What a job of this operation ends with; an audit with its report."""
    return JOBS[operation].answer if operation in JOBS else Report if operation == START_AUDIT.name else JobAnswer


JOBS: Mapping[str, Endpoint[Any, Any]] = {endpoint.name: endpoint for endpoint in ENDPOINTS if endpoint.job}


class EventFeed:
    """Server-Sent Events out of the bytes of a stream, as they come.

    Args:
        on_event: told every event.
        after: id of the event after which they were asked for: there may be none any more.
    """

    def __init__(self, on_event: OnEvent | None, *, after: str | None = None) -> None:
        self._on_event = on_event
        self._after = after
        self._rest = b""
        self._data: list[bytes] = []
        self._events: list[AuditEvent] = []

    def close(self) -> tuple[AuditEvent, ...]:
        """All that came.

        Raises:
            ServiceUnavailable: the last of them is no end: the stream broke off, however orderly.
        """
        if not self._events and self._after is None:
            raise ServiceUnavailable("the events broke off before the first", hint="ask again")
        if self._events and self._events[-1].state not in ENDED:
            last = self._events[-1].id
            raise ServiceUnavailable("the events broke off", hint=f"ask for those after it: last_event_id='{last}'")
        return tuple(self._events)

    def add(self, chunk: bytes) -> None:
        """Take the next bytes.

        Raises:
            ServiceUnavailable: they are no events of a Glassblock service.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_EVENT:
            raise ServiceUnavailable("the service sends events that never end")
        for line in lines:
            self._line(line.removesuffix(b"\r"))

    def _line(self, line: bytes) -> None:
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":  # ids and kinds stand in the data too; a line without a name is a sign of life
                self._data.append(value.removeprefix(b" "))
            return
        if not self._data:
            return
        text, self._data = b"\n".join(self._data), []
        try:
            event = AuditEvent.model_validate_json(text)
        except ValidationError as fault:
            raise ServiceUnavailable(
                "the service sends events that are none of Glassblock's", hint="are its version and this one near?"
            ) from fault
        self._events.append(event)
        if self._on_event is not None:
            self._on_event(event)
