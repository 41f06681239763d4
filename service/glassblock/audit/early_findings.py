"""What is certain before all tensors are read: what headers, index and config decide, and what is not finite."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from types import MappingProxyType

from glassblock.audit.evidence import Evidence
from glassblock.audit.locations import located
from glassblock.audit.padding import wider_than_declared
from glassblock.audit.question import AuditQuestion
from glassblock.audit.rule import Rule, apply_rule
from glassblock.audit.structure_rules import CONTAINER_RULES, INDEX_RULES
from glassblock.audit.values import TensorValues
from glassblock.checkpoint.layer_map import resolve_layers
from glassblock.checkpoint.opened import Checkpoint
from glassblock.wire.audits import Finding

HEADER_RULES = frozenset(rule.name for rule in (*CONTAINER_RULES, *INDEX_RULES))
"""Rules that look at files and their headers, and at no tensor."""

NON_FINITE = "tensor/non-finite"


class Told:
    """Tells each finding once, with the places of its tensors, however often its rule is applied.

    Args:
        found: told the findings; None where nobody wants to know.
    """

    def __init__(self, found: Callable[[Finding], None] | None, checkpoint: Checkpoint) -> None:
        self._found = found
        self._checkpoint = checkpoint
        self._known: set[object] = set()

    def __call__(self, findings: Iterable[Finding]) -> None:
        """Tell those that were not told yet."""
        if self._found is None:
            return
        for finding in findings:
            what = (finding.rule, finding.layer, finding.expert, finding.tensors, finding.file, finding.message)
            if what not in self._known:
                self._known.add(what)
                self._found(located(finding, self._checkpoint.entries, self._checkpoint.duplicates))


def header_findings(checkpoint: Checkpoint, question: AuditQuestion, rules: Iterable[Rule]) -> Iterable[Finding]:
    """What those of `rules` find that need no tensor."""
    nothing_read = _nothing_read(checkpoint, question)
    rules = tuple(rules)
    yield from _found_by((rule for rule in rules if rule.name in HEADER_RULES), nothing_read)
    if question.reference is not None or question.captures is not None:
        return  # what they prove takes the place of what the checkpoint alone suggests
    layers, misfits = resolve_layers(checkpoint)
    sure = [rule for rule in rules if rule.tells_before_tensors]
    if any(wider_than_declared(checkpoint, tensors) is not None for tensors in layers.values()):
        sure = [rule for rule in sure if rule.name != "config/shape"]  # zero neurons would make it another finding
    yield from _found_by(sure, replace(nothing_read, layers=layers, misfits=misfits))


def _found_by(rules: Iterable[Rule], evidence: Evidence) -> Iterable[Finding]:
    for rule in rules:
        yield from apply_rule(rule, evidence)[0]


def tensor_findings(
    checkpoint: Checkpoint, question: AuditQuestion, rules: Iterable[Rule], name: str, values: TensorValues
) -> Iterable[Finding]:
    """What those of `rules` find in one tensor, whatever the others hold: only the rule of non-finite numbers can.

    The report tells such tensors of several layers in one finding; here each has its own.
    """
    for rule in rules:
        if rule.name == NON_FINITE and values.non_finite:
            alone = replace(_nothing_read(checkpoint, question), values=MappingProxyType({name: values}))
            yield from apply_rule(rule, alone)[0]


def _nothing_read(checkpoint: Checkpoint, question: AuditQuestion) -> Evidence:
    return Evidence(
        checkpoint=checkpoint,
        question=question,
        misfits=(),
        layers=MappingProxyType({}),
        values=MappingProxyType({}),
        unread=MappingProxyType({}),
        read_faults=(),
        gates=None,
        embedding=None,
        head_is_embedding=None,
        equal_copies=MappingProxyType({}),
        idle_neurons=MappingProxyType({}),
        gains=MappingProxyType({}),
    )
