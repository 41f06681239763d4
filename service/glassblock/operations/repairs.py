"""Findings repaired: a patch from every finding that the files tell how to repair, written, and audited again."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.fix import Unrepaired
from glassblock.audit.fixes import joined, repair_of
from glassblock.checkpoint.family_file import parse_family_row
from glassblock.checkpoint.in_place import interrupted, undo_interrupted, write_in_place
from glassblock.checkpoint.index import is_plain_name
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.patches import Draft, Patch, drafted
from glassblock.checkpoint.roots import Roots
from glassblock.checkpoint.writing import require_place, write_checkpoint
from glassblock.errors import AccessRefused, DamagedCheckpoint, InvalidValue
from glassblock.operations.audits import open_reference
from glassblock.operations.repair_words import told_edit
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import Finding, Report
from glassblock.wire.repairs import RefusedRepair, RepairAnswer, RepairRequest, RepairStep

MOST_ROUNDS = 3
"""Looks at the patched checkpoint: a repaired config may lay open what it hid."""


@dataclass(frozen=True)
class Outputs:
    """Where repaired checkpoints may be written.

    Attributes:
        root: The folder under which outputs are named; None: nowhere.
        in_place: Whether a repair without an output changes the checkpoint where it lies.
    """

    root: Path | None = None
    in_place: bool = False


@dataclass(frozen=True)
class _Plan:
    """What a checkpoint would be repaired by."""

    steps: tuple[RepairStep, ...]
    refused: tuple[RefusedRepair, ...]
    draft: Draft
    report: Report


def repair(
    store: CheckpointStore,
    request: RepairRequest,
    *,
    outputs: Outputs,
    progress: Callable[[int, int, str], None],
    cancelled: Callable[[], bool],
) -> RepairAnswer:
    """Repair what can be repaired, into a new directory, in place, or only in memory.

    Raises:
        InvalidValue: It is not said where to write, the output is there already or inside the checkpoint, the disk
            has no room, or an in-place change would move data.
        AccessRefused: The service may not write there.
        UnknownCheckpoint, UnknownFamily: See `open_checkpoint`.
        DamagedCheckpoint: A file was changed meanwhile, or a change in place was broken off before.
        AuditCancelled: `cancelled` answered true; nothing was written.
    """
    output = _output_of(request, outputs)
    parent = None if output is None else require_place(output)
    checkpoint = store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    if parent is not None and checkpoint.contents.present is not None:
        _require_beside(parent, checkpoint)
    undone: tuple[str, ...] = ()
    if interrupted(checkpoint.contents.directory):
        if not outputs.in_place:
            raise DamagedCheckpoint(
                f"a change of {request.checkpoint} in place was broken off",
                hint="`glassblock fix --in-place` first brings back what it had changed.",
            )
        undone = undo_interrupted(checkpoint.contents.directory)
        checkpoint = store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    row = None if request.family_row is None else parse_family_row(request.family_row)
    question = AuditQuestion(
        rules=request.rules,
        against=request.against,
        against_name=request.against_name,
        hash=request.digest,
        family=request.family,
        reference=None if request.reference is None else open_reference(store, request.reference),
        reference_name=request.reference or "reference",
    )

    def audited(of: Checkpoint) -> Report:
        return audit_checkpoint(
            of, question, name=request.checkpoint, device=store.device, progress=progress, cancelled=cancelled
        )

    before = audited(checkpoint)
    plan = _plan(checkpoint, before, audited)
    answer = RepairAnswer(
        checkpoint=request.checkpoint,
        steps=plan.steps,
        refused=plan.refused,
        before=before,
        after=plan.report,
        header_only=plan.draft.in_place,
        undone=undone,
    )
    if request.dry_run or not plan.steps:
        return answer
    if output is None:
        backups = write_in_place(plan.draft)
        after = audited(store.open(request.checkpoint, family=request.family, family_row=request.family_row))
        written = {"written": request.checkpoint, "backups": backups, "bytes_written": _small(plan.draft)}
    else:
        count = write_checkpoint(plan.draft, output, roots=store.roots, tick=_ticking(progress, cancelled))
        place = output if checkpoint.contents.present is not None else output / checkpoint.path.name
        after = audited(open_checkpoint(place, roots=Roots([output.parent]), family=row or request.family))
        written = {"written": request.output, "bytes_written": count}
    return answer.model_copy(update={**written, "after": after})


def _require_beside(parent: Path, checkpoint: Checkpoint) -> None:
    if parent.is_relative_to(Path(os.path.realpath(checkpoint.contents.directory))):
        raise InvalidValue(
            "the output would lie inside the checkpoint, which stays as it is",
            field="output",
            hint="Choose a folder beside it.",
        )


def _output_of(request: RepairRequest, outputs: Outputs) -> Path | None:
    """Where to write; None for in place and for nowhere."""
    if request.output is None:
        if not outputs.in_place and not request.dry_run:
            raise InvalidValue(
                "it is not said where to write: neither `output` nor `dry_run` is given",
                field="output",
                hint="Give `output` the name of a new folder, or `dry_run` as true to write nothing.",
            )
        return None
    if outputs.root is None:
        raise AccessRefused(
            "this service writes no checkpoints", field="output", hint="GLASSBLOCK_OUTPUT_ROOT names a folder for them."
        )
    if not is_plain_name(request.output):
        raise InvalidValue(f"the output {request.output!r:.80} is no plain name", field="output")
    return outputs.root / request.output


def _plan(checkpoint: Checkpoint, before: Report, audited: Callable[[Checkpoint], Report]) -> _Plan:
    """Patches of all findings that can be repaired, and of what they lay open."""
    steps: list[RepairStep] = []
    draft, report = drafted(checkpoint, ()), before
    patch: Patch = ()
    for _ in range(MOST_ROUNDS):
        current = draft.checkpoint
        told = {_key(step) for step in steps}
        repairs = [(finding, repair_of(current, finding)) for finding in report.findings if _key(finding) not in told]
        found = [(finding, edits) for finding, edits in repairs if not isinstance(edits, Unrepaired) and edits]
        if not found:
            break
        steps.extend(_step(finding, edits) for finding, edits in found)
        patch = (*patch, *joined(current, (edits for _, edits in found)))
        draft = drafted(checkpoint, patch)
        report = audited(draft.checkpoint)
    remaining = ((finding, repair_of(draft.checkpoint, finding)) for finding in report.findings)
    refused = tuple(_refused(finding, why) for finding, why in remaining if isinstance(why, Unrepaired))
    return _Plan(tuple(steps), refused, draft, report)


def _key(of: Finding | RepairStep) -> tuple[str, int | None, str]:
    return of.rule, of.layer, of.message


def _step(finding: Finding, patch: Patch) -> RepairStep:
    edits = tuple(told_edit(edit) for edit in patch)
    return RepairStep(rule=finding.rule, level=finding.level, layer=finding.layer, message=finding.message, edits=edits)


def _refused(finding: Finding, why: Unrepaired) -> RefusedRepair:
    return RefusedRepair(
        rule=finding.rule,
        level=finding.level,
        layer=finding.layer,
        message=finding.message,
        reason=why.reason,
        needs=why.needs,
    )


def _small(draft: Draft) -> int:
    return sum(len(file.header) for file in draft.files.values()) + sum(map(len, draft.texts.values()))


def _ticking(
    progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
) -> Callable[[int, int, str], None]:
    def tick(done: int, total: int, what: str) -> None:
        if cancelled():
            raise AuditCancelled
        progress(done, total, f"writing {what}")

    return tick
