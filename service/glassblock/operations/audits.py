"""One audit, from its request to its report."""

from collections.abc import Callable
from typing import Protocol

from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.capture_study import recorded_stages
from glassblock.audit.engine_dialects import dialect_of
from glassblock.audit.rules import RULES
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.recordings import open_recording
from glassblock.errors import GlassblockError, InvalidValue
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
        InvalidValue: an unknown rule, or `against` in no dialect that is read.
        UnknownFamily: an unknown family.
        UnknownCheckpoint, AccessRefused: no such checkpoint, or no such captures, here.
    """
    for name in request.rules or ():
        if name not in RULES:
            raise InvalidValue(
                f"there is no rule {name!r}", field="rules", known=tuple(RULES), hint="see GET /v1/rules"
            )
    store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    if request.reference is not None:
        open_reference(store, request.reference)
    if request.against is not None:
        dialect_of(request.against)
    if request.captures is not None:
        recorded_stages(open_recording(store.roots, request.captures))


def open_reference(store: CheckpointStore, name: str) -> Checkpoint:
    """The checkpoint to compare with.

    Raises:
        UnknownCheckpoint, AccessRefused, InvalidValue: as `Roots.resolve`, for the field `reference`.
    """
    try:
        return store.open(name)
    except GlassblockError as error:
        error.field = "reference" if error.field == "checkpoint" else error.field
        raise


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
        hash=request.digest,
        family=request.family,
        reference=None if request.reference is None else open_reference(store, request.reference),
        reference_name=request.reference or "reference",
        captures=None if request.captures is None else open_recording(store.roots, request.captures),
    )
    checkpoint = store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    return audit_checkpoint(
        checkpoint,
        question,
        name=request.checkpoint,
        device=store.device,
        progress=progress,
        cancelled=cancelled,
    )
