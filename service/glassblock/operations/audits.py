"""One audit, from its request to its report."""

from collections.abc import Callable
from typing import Protocol

from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.rules import RULES
from glassblock.errors import InvalidValue
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import AuditRequest, Report

AuditStopped = AuditCancelled


class Operation(Protocol):
    """Runs one audit. `progress(done, total, message)` is told between tensors, where `cancelled()` is asked."""

    def __call__(
        self, request: AuditRequest, *, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Report:
        """Audit the checkpoint that `request` names."""
        ...


def check(store: CheckpointStore, request: AuditRequest) -> None:
    """Refuse at once what no audit could answer.

    Raises:
        InvalidValue: an unknown rule.
        UnknownFamily: an unknown family.
        UnknownCheckpoint, AccessRefused: no such checkpoint here.
    """
    for name in request.rules or ():
        if name not in RULES:
            raise InvalidValue(
                f"there is no rule {name!r}", field="rules", known=tuple(RULES), hint="see GET /v1/rules"
            )
    store.open(request.checkpoint, family=request.family)


def audit(
    store: CheckpointStore,
    request: AuditRequest,
    *,
    progress: Callable[[int, int, str], None],
    cancelled: Callable[[], bool],
) -> Report:
    """Audit the checkpoint that `request` names.

    Raises:
        GlassblockError: the question cannot be asked (unknown checkpoint, rule or family). A
            damaged checkpoint raises nothing: its damage is in the report.
        AuditStopped: `cancelled` answered true.
    """
    question = AuditQuestion(
        rules=request.rules,
        against=request.against,
        against_name=request.against_name,
        certify=request.certify,
        family=request.family,
    )
    checkpoint = store.open(request.checkpoint, family=request.family)
    return audit_checkpoint(
        checkpoint,
        question,
        name=request.checkpoint,
        device=store.device,
        progress=progress,
        cancelled=cancelled,
    )
