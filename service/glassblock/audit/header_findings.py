"""What headers and the index alone decide, told before the first tensor is read."""

from collections.abc import Callable, Iterable
from types import MappingProxyType

from glassblock.audit.evidence import Evidence
from glassblock.audit.locations import located
from glassblock.audit.question import AuditQuestion
from glassblock.audit.rule import Rule, apply_rule
from glassblock.audit.structure_rules import CONTAINER_RULES, INDEX_RULES
from glassblock.checkpoint.opened import Checkpoint
from glassblock.wire.audits import Finding

HEADER_RULES = frozenset(rule.name for rule in (*CONTAINER_RULES, *INDEX_RULES))
"""Rules that look at files and their headers, and at no tensor."""


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
            what = (finding.rule, finding.layer, finding.expert, finding.tensors, finding.file, finding.byte)
            if what not in self._known:
                self._known.add(what)
                self._found(located(finding, self._checkpoint.entries, self._checkpoint.duplicates))


def header_findings(checkpoint: Checkpoint, question: AuditQuestion, rules: Iterable[Rule]) -> Iterable[Finding]:
    """What those of `rules` find that need no tensor."""
    nothing_read = Evidence(
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
    for rule in rules:
        if rule.name in HEADER_RULES:
            yield from apply_rule(rule, nothing_read)[0]
