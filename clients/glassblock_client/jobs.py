"""Waiting for an audit: how long between two looks, and what its end means."""

from collections.abc import Callable, Iterator

from glassblock.errors import InternalFault, NotReady
from glassblock.wire.audits import ENDED, Audit, Progress, Report
from glassblock.wire.problems import Problem, error_from_problem

OnProgress = Callable[[Progress], object]


def pauses() -> Iterator[float]:
    """Seconds between two looks: short at first, for small checkpoints, then a second."""
    pause = 0.05
    while True:
        yield pause
        pause = min(1.0, pause * 1.5)


def report_when_ended(audit: Audit) -> Report | None:
    """The report of an audit that ended well; None while it has not ended.

    Raises:
        GlassblockError: what the audit failed with.
        NotReady: it was cancelled.
    """
    if audit.state not in ENDED:
        return None
    if audit.report is not None:
        return audit.report
    if audit.problem is not None:
        raise error_from_problem(Problem.model_validate(audit.problem))
    if audit.state == "cancelled":
        raise NotReady(f"audit {audit.id} was cancelled before it ended", hint="start it again")
    raise InternalFault(f"audit {audit.id} is {audit.state} and has neither report nor problem")
