"""Audits alone, as what a service's jobs do."""

from collections.abc import Mapping
from typing import Any

from glassblock.jobs.worker import Run
from glassblock.operations.reply import Reply
from glassblock.operations.works import Follower
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import Request


def audits_by(audit: Any) -> Run:
    """`audit(request, progress=, cancelled=)` gives the report of every job."""

    def run(operation: str, request: Request, tensors: Mapping[str, WireTensor], follower: Follower) -> Reply[Any]:
        assert operation == "start_audit"
        assert not tensors
        return Reply(audit(request, progress=follower.progress, cancelled=follower.cancelled))

    return run
