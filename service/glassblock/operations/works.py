"""The operations that may take long, called alike: at once for a caller who waits, or later as a job."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from glassblock.operations.operations import Operations, Tensors
from glassblock.operations.reply import Reply
from glassblock.wire.audits import Finding


class Follower(NamedTuple):
    """Who follows a piece of work.

    Attributes:
        progress: told (pieces done, pieces in all, what comes next) between pieces.
        cancelled: asked at the same places whether to stop.
        found: told what a rule of an audit has found, as soon as it has.
    """

    progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None
    cancelled: Callable[[], bool] = lambda: False
    found: Callable[[Finding], None] = lambda _finding: None


Work = Callable[[Operations, Any, Tensors, Follower], Reply[Any]]

WORKS: Mapping[str, Work] = MappingProxyType(
    {
        "run_block": lambda operations, message, tensors, by: operations.run_block(
            message, tensors, progress=by.progress, cancelled=by.cancelled
        ),
        "explain_block": lambda operations, message, tensors, by: operations.explain_block(
            message, tensors, progress=by.progress, cancelled=by.cancelled
        ),
        "norm_statistics": lambda operations, message, tensors, by: operations.norm_statistics(
            message, tensors, progress=by.progress, cancelled=by.cancelled
        ),
        "compare_residuals": lambda operations, message, tensors, by: operations.compare_residuals(
            message, tensors, progress=by.progress, cancelled=by.cancelled
        ),
        "jacobians": lambda operations, message, tensors, by: operations.jacobians(
            message, tensors, progress=by.progress, cancelled=by.cancelled
        ),
        "likelihoods": lambda operations, message, _, by: operations.likelihoods(
            message, progress=by.progress, cancelled=by.cancelled
        ),
        "start_audit": lambda operations, message, _, by: Reply(
            operations.audit(message, progress=by.progress, cancelled=by.cancelled, found=by.found)
        ),
        "repair": lambda operations, message, _, by: operations.repair(
            message, progress=by.progress, cancelled=by.cancelled
        ),
        "selftest": lambda operations, message, _, by: operations.selftest(
            message, progress=by.progress, cancelled=by.cancelled
        ),
    }
)
"""By the name of the endpoint: the ones that may be asked for as a job, and audits, which always are."""
