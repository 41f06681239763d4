"""One audit: a checkpoint and a question in, a report out."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import glassblock
from glassblock.audit.evidence import Evidence
from glassblock.audit.gate_plans import GATE_RULE_NAMES
from glassblock.audit.gate_rules import layer_metrics
from glassblock.audit.gather import Progress, gather
from glassblock.audit.question import AuditCancelled, AuditQuestion
from glassblock.audit.rule import Rule, apply_rule
from glassblock.audit.rules import RULES
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.errors import DamagedCheckpoint, InvalidValue
from glassblock.wire.audits import AuditedCheckpoint, Coverage, Finding, LayerMetrics, Report, Verdict

__all__ = ["AuditCancelled", "AuditQuestion", "Progress", "audit_checkpoint"]

_EPS_RULE = "config/eps-conflict"


def audit_checkpoint(
    checkpoint: Checkpoint | Path | str,
    question: AuditQuestion | None = None,
    *,
    name: str | None = None,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    cancelled: Callable[[], bool] | None = None,
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

    Raises:
        InvalidValue: An unknown rule, or `against` beside rules that leave out its only reader.
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
    evidence = gather(
        checkpoint,
        question,
        device=torch.device(device),
        progress=progress or (lambda _done, _total, _message: None),
        cancelled=cancelled or (lambda: False),
    )
    _require_told(evidence, rules)
    findings: list[Finding] = []
    coverage: dict[str, Coverage] = {}
    for rule in rules:
        found, coverage[rule.name] = apply_rule(rule, evidence)
        findings.extend(found)
    return Report(
        glassblock=glassblock.__version__,
        checkpoint=AuditedCheckpoint(
            path=name or checkpoint.path.name,
            family=None if checkpoint.family is None else checkpoint.family.name,
            verified=None if checkpoint.family is None else checkpoint.family.verified,
            layers=checkpoint.layers if checkpoint.trunk is not None else None,
            tensors=len(checkpoint.entries),
            bytes=checkpoint.bytes,
        ),
        verdict=_verdict(evidence, findings, coverage),
        findings=tuple(findings),
        coverage=tuple(coverage.values()),
        layers=tuple(_layer_metrics(evidence)),
    )


def _rules_of(question: AuditQuestion) -> tuple[Rule, ...]:
    for name in question.rules or ():
        if name not in RULES:
            raise InvalidValue(
                f"there is no rule {name!r}", field="rules", known=tuple(RULES), hint="Use one of the known names."
            )
    rules = tuple(rule for rule in RULES.values() if question.rules is None or rule.name in question.rules)
    if question.against is not None and all(rule.name != _EPS_RULE for rule in rules):
        raise InvalidValue(
            f"a config to compare with was given, but the rules leave out {_EPS_RULE}, which compares it",
            field="rules",
            hint=f"Add {_EPS_RULE}, or leave out against.",
        )
    return rules


def _require_told(evidence: Evidence, rules: Iterable[Rule]) -> None:
    """Raise what came over the files during the audit where no rule that was asked would tell it."""
    names = {rule.name for rule in rules}
    for fault in evidence.read_faults:
        if fault.rule not in names:
            raise DamagedCheckpoint(
                fault.message, hint=fault.hint, file=fault.file.name, tensor=fault.tensor, byte=fault.byte
            )


def _verdict(evidence: Evidence, findings: Iterable[Finding], coverage: dict[str, Coverage]) -> Verdict:
    """Fail for an error; inconclusive where what was asked could not be answered."""
    if any(finding.level == "error" for finding in findings):
        return "fail"
    if evidence.question.against is not None:
        answered = coverage[_EPS_RULE]
        if answered.undecidable or not answered.checked:
            return "inconclusive"
    for name in GATE_RULE_NAMES:
        asked = coverage.get(name)
        if asked is not None and asked.undecidable and not asked.checked:
            return "inconclusive"
    return "pass"


def _layer_metrics(evidence: Evidence) -> Iterable[LayerMetrics]:
    if evidence.gates is None:
        return
    for layer, gate in evidence.gates.layers.items():
        yield LayerMetrics(layer=layer, metrics=layer_metrics(gate.statistics, gate.judgement.verdict))
