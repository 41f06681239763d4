"""One audit, from its request to its report."""

from collections.abc import Callable

from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.behaviour_study import check_text
from glassblock.audit.capture_study import recorded_stages
from glassblock.audit.engine_dialects import dialect_of
from glassblock.audit.rules import RULES
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.recordings import open_recording
from glassblock.errors import GlassblockError, InvalidValue
from glassblock.operations.store import CheckpointStore
from glassblock.operations.texts import token_ids_of
from glassblock.wire.audits import AuditRequest, Finding, Report

AuditStopped = AuditCancelled


def check(store: CheckpointStore, request: AuditRequest) -> None:
    """Refuse at once what no audit could answer.

    Raises:
        InvalidValue: an unknown rule, or `against` in no dialect that is read, or a text that cannot be tokenised or
            does not go with the vocabulary.
        TooLarge: a text of too many tokens.
        UnknownFamily: an unknown family.
        UnknownCheckpoint, AccessRefused: no such checkpoint, or no such captures, here.
    """
    for name in request.rules or ():
        if name not in RULES:
            raise InvalidValue(
                f"there is no rule {name!r}", field="rules", known=tuple(RULES), hint="see GET /v1/rules"
            )
    checkpoint = store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    token_ids = token_ids_of(store, checkpoint, request.token_ids, request.text)
    if token_ids is not None:
        check_text(checkpoint, token_ids)
    for name in references_of(request):
        open_reference(store, name)
    if request.against is not None:
        dialect_of(request.against)
    if request.captures is not None:
        recorded_stages(open_recording(store.roots, request.captures))


def references_of(request: AuditRequest) -> tuple[str, ...]:
    """The checkpoints to compare with, each once: none, one or several."""
    given = request.reference
    names = () if given is None else (given,) if isinstance(given, str) else given
    return tuple(dict.fromkeys(names))


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
    found: Callable[[Finding], None] = lambda _finding: None,
) -> Report:
    """Audit the checkpoint that `request` names; `found` is told every finding as soon as its rule reports it.

    Raises:
        GlassblockError: the question cannot be asked (unknown checkpoint, rule or family). A
            damaged checkpoint raises nothing: its damage is in the report.
        AuditStopped: `cancelled` answered true.
    """
    checkpoint = store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    references = references_of(request)
    question = AuditQuestion(
        rules=request.rules,
        against=request.against,
        against_name=request.against_name,
        certify=request.certify,
        hash=request.digest,
        family=request.family,
        reference=open_reference(store, references[0]) if len(references) == 1 else None,
        reference_name=references[0] if references else "reference",
        parents=tuple((name, open_reference(store, name)) for name in references) if len(references) > 1 else (),
        captures=None if request.captures is None else open_recording(store.roots, request.captures),
        token_ids=token_ids_of(store, checkpoint, request.token_ids, request.text),
    )
    return audit_checkpoint(
        checkpoint,
        question,
        name=request.checkpoint,
        device=store.device,
        progress=progress,
        cancelled=cancelled,
        found=found,
    )
