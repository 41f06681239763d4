"""One audit: a checkpoint and a question in, a report out."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch

import glassblock
from glassblock.audit.against import AGAINST_RULES, answered
from glassblock.audit.behaviour_findings import behaviour_summary, with_behaviour
from glassblock.audit.behaviour_study import behaviour_study, check_text
from glassblock.audit.capture_findings import CAPTURE_RULES, capture_summary, unanswered
from glassblock.audit.capture_study import CaptureStudy, capture_study, recorded_stages
from glassblock.audit.early_findings import Told
from glassblock.audit.engine_dialects import dialect_of
from glassblock.audit.evidence import Evidence
from glassblock.audit.gate_metrics import layer_metrics
from glassblock.audit.gate_plans import LAYOUT_RULES
from glassblock.audit.gather import Progress, gather
from glassblock.audit.layer_numbers import norm_metrics
from glassblock.audit.locations import located
from glassblock.audit.merge_study import MergeStudy, merge_study
from glassblock.audit.merge_summary import merge_summary_of
from glassblock.audit.question import AuditCancelled, AuditQuestion
from glassblock.audit.reference_findings import REFERENCE_RULES, summary_of
from glassblock.audit.reference_study import reference_study
from glassblock.audit.rotary_study import ROTARY_RULE
from glassblock.audit.rule import Rule, apply_rule
from glassblock.audit.rules import RULES
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.checkpoint.recordings import Recording
from glassblock.errors import DamagedCheckpoint, InvalidValue
from glassblock.numerics.rotary_order import OrderVerdict
from glassblock.numerics.watching import ComputationCancelled, Watch
from glassblock.wire.audits import AuditedCheckpoint, Coverage, Finding, LayerMetrics, Report, Verdict

__all__ = ["AuditCancelled", "AuditQuestion", "Progress", "audit_checkpoint"]


def audit_checkpoint(
    checkpoint: Checkpoint | Path | str,
    question: AuditQuestion | None = None,
    *,
    name: str | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
    found: Callable[[Finding], None] | None = None,
) -> Report:
    """Look at a whole checkpoint and say what is wrong with it, what is not, and what was not looked at.

    The same files and question give the same report: every draw is seeded.

    Args:
        checkpoint: As opened, or where it lies.
        question: Which rules, and what to compare with; all rules by default.
        name: What the report calls the checkpoint; the last part of its path by default.
        device: Where the tensors are looked at.
        progress: Told (bytes done, bytes in all, what comes next) between tensors.
        cancelled: Asked at the same places whether to stop.
        found: Told each finding as soon as it is certain: those that need no tensor before the first is read, those
            that one tensor or one layer decides when that was read (`Rule.tells_after`), the others when all were.
            None is taken back; the report tells in one finding what tensors alike of several layers show.

    Raises:
        InvalidValue: An unknown rule; `against` or `reference` beside rules that leave out all their readers;
            `against` in no dialect that is read; or a text that does not go with the vocabulary.
        UnknownCheckpoint, AccessRefused, UnknownFamily, ServiceUnavailable: See `open_checkpoint`. Damage is not
            raised; it is in the report.
        DamagedCheckpoint: A file was changed while it was audited: no report would be about one checkpoint. Also a
            file that cannot be read to its end, where the question leaves out the rule that would report it.
        AuditCancelled: `cancelled` answered true.
    """
    question = question or AuditQuestion()
    rules = _rules_of(question)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint, family=question.family)
    if question.token_ids is not None:
        check_text(checkpoint, question.token_ids)
    tell_found = Told(found, checkpoint, question, rules)
    evidence = gather(
        checkpoint,
        question,
        device=torch.device(device),
        progress=progress or (lambda _done, _total, _message: None),
        cancelled=cancelled or (lambda: False),
        seen=tell_found.seen,
    )
    if question.reference is not None:
        study = reference_study(
            checkpoint,
            question.reference,
            name=question.reference_name,
            layers=evidence.layers,
            digests=evidence.digests if question.hash == "fast" else {},
            unread=evidence.unread,
            tell=_teller(checkpoint.bytes, progress, cancelled),
        )
        evidence = replace(evidence, reference=study)
    merge = None
    if question.parents:
        merge = merge_study(
            checkpoint,
            question.parents,
            layers=evidence.layers,
            digests=evidence.digests if question.hash == "fast" else {},
            unread=evidence.unread,
            tell=_teller(checkpoint.bytes, progress, cancelled),
        )
    if question.captures is not None and evidence.layers:
        evidence = replace(evidence, captures=_captured(checkpoint, question.captures, device, progress, cancelled))
    _require_told(evidence, rules)
    findings: list[Finding] = []
    coverage: dict[str, Coverage] = {}
    for rule in rules:
        mistakes, coverage[rule.name] = apply_rule(rule, evidence)
        findings.extend(mistakes)
        tell_found(mistakes)
    behaviour = None
    if question.token_ids is not None:
        behaviour = behaviour_study(
            evidence,
            findings,
            tuple(coverage.values()),
            token_ids=question.token_ids,
            device=torch.device(device),
            tell=_teller(checkpoint.bytes, progress, cancelled),
            watch=Watch(cancelled=cancelled or (lambda: False)),
        )
        findings = with_behaviour(findings, behaviour, evidence, rules)
        tell_found(findings)
    return Report(
        glassblock=glassblock.__version__,
        checkpoint=AuditedCheckpoint(
            path=name or checkpoint.path.name,
            family=None if checkpoint.family is None else checkpoint.family.name,
            verified=None if checkpoint.family is None else checkpoint.family.verified,
            layers=checkpoint.layers if checkpoint.trunk is not None else None,
            declared_layers=_declared_layers(checkpoint),
            tensors=len(checkpoint.entries),
            bytes=checkpoint.bytes,
        ),
        verdict=_verdict(evidence, findings, coverage, merge),
        findings=tuple(located(finding, checkpoint.entries, checkpoint.duplicates) for finding in findings),
        coverage=tuple(coverage.values()),
        layers=tuple(_layer_metrics(evidence)),
        reference=None if evidence.reference is None else summary_of(evidence.reference),
        merge=None if merge is None else merge_summary_of(merge),
        captures=None if evidence.captures is None else capture_summary(evidence.captures),
        behaviour=None if behaviour is None else behaviour_summary(behaviour),
    )


def _declared_layers(checkpoint: Checkpoint) -> int | None:
    """As the config says; None where it does not, or not in a number, which is a finding of its own."""
    try:
        declared = checkpoint.declared_layers
    except DamagedCheckpoint:
        return None
    return None if declared is None else declared.value


def _captured(
    checkpoint: Checkpoint,
    recording: Recording,
    device: torch.device | str,
    progress: Progress | None,
    cancelled: Callable[[], bool] | None,
) -> CaptureStudy:
    try:
        return capture_study(
            checkpoint,
            recording,
            device=torch.device(device),
            tell=_teller(checkpoint.bytes, progress, cancelled),
            watch=Watch(cancelled=cancelled or (lambda: False)),
        )
    except ComputationCancelled:
        raise AuditCancelled from None


def _teller(total: int, progress: Progress | None, cancelled: Callable[[], bool] | None) -> Callable[[str], None]:
    """Tells what comes next, and stops where that was asked for."""

    def tell(what: str) -> None:
        if cancelled is not None and cancelled():
            raise AuditCancelled
        if progress is not None:
            progress(total, total, what)

    return tell


def _rules_of(question: AuditQuestion) -> tuple[Rule, ...]:
    for name in question.rules or ():
        if name not in RULES:
            raise InvalidValue(
                f"there is no rule {name!r}", field="rules", known=tuple(RULES), hint="Use one of the known names."
            )
    rules = tuple(rule for rule in RULES.values() if question.rules is None or rule.name in question.rules)
    names = {rule.name for rule in rules}
    for what, given, readers in (
        ("against", question.against, AGAINST_RULES),
        ("reference", question.reference, tuple(sorted(REFERENCE_RULES))),
        ("captures", question.captures, tuple(sorted(CAPTURE_RULES))),
    ):
        if given is not None and names.isdisjoint(readers):
            raise InvalidValue(
                f"{what} was given, but the rules leave out all that read it: {', '.join(readers)}",
                field="rules",
                hint=f"Add one of them, or leave out {what}.",
            )
    if question.against is not None:
        dialect_of(question.against)  # refused before anything is read
    if question.captures is not None:
        recorded_stages(question.captures)
    return rules


def _require_told(evidence: Evidence, rules: Iterable[Rule]) -> None:
    """Raise what came over the files during the audit where no rule that was asked would tell it."""
    names = {rule.name for rule in rules}
    for fault in evidence.read_faults:
        if fault.rule not in names:
            raise DamagedCheckpoint(
                fault.message, hint=fault.hint, file=fault.file.name, tensor=fault.tensor, byte=fault.byte
            )


def _verdict(
    evidence: Evidence, findings: Iterable[Finding], coverage: dict[str, Coverage], merge: MergeStudy | None
) -> Verdict:
    """Fail for an error; inconclusive where a question that counts stayed open."""
    if any(finding.level == "error" for finding in findings):
        return "fail"
    return "inconclusive" if _left_open(evidence, coverage, merge) else "pass"


def _left_open(evidence: Evidence, coverage: dict[str, Coverage], merge: MergeStudy | None) -> bool:
    """Whether what was asked could not be answered, no gate was decided, or a rejected rotary order stayed unnamed."""
    question, reference, captures = evidence.question, evidence.reference, evidence.captures
    gates = [coverage[name] for name in LAYOUT_RULES if name in coverage]
    rejected = evidence.rotary.verdict is OrderVerdict.NOT_AS_DECLARED
    return (
        (question.against is not None and not answered(evidence, tuple(coverage)))
        or (reference is not None and not reference.answers)
        or (merge is not None and not merge.tensors)
        or (question.captures is not None and (captures is None or len(unanswered(captures)) > 0))
        or any(asked.undecidable and not asked.checked for asked in gates)
        or (rejected and ROTARY_RULE in coverage and len(coverage[ROTARY_RULE].undecidable) > 0)
    )


def _layer_metrics(evidence: Evidence) -> Iterable[LayerMetrics]:
    for layer in sorted(evidence.layers):
        gate = None if evidence.gates is None else evidence.gates.layers.get(layer)
        numbers = {} if gate is None else layer_metrics(gate)
        yield LayerMetrics(layer=layer, metrics=numbers | norm_metrics(evidence, layer))
