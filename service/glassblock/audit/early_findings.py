"""What is certain before all tensors are read: what headers, index and config decide, one tensor, or one layer."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from glassblock.audit.capture_findings import CAPTURE_RULES
from glassblock.audit.evidence import Evidence
from glassblock.audit.locations import located
from glassblock.audit.padding import network_entries, wider_than_declared
from glassblock.audit.parts_read import Extent
from glassblock.audit.question import AuditQuestion
from glassblock.audit.reference_findings import REFERENCE_RULES
from glassblock.audit.rule import Rule, findings_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.wire.audits import Finding

MOST_EARLY = 100
"""Findings of one rule that are told of single tensors or layers; the report's one finding is about all of them."""


class Told:
    """Tells each finding once, with the places of its tensors, however often its rule is applied.

    Args:
        found: told the findings; None where nobody wants to know.
        checkpoint: what they are about.
        question: what was asked of it.
        rules: those that were asked.
    """

    def __init__(
        self,
        found: Callable[[Finding], None] | None,
        checkpoint: Checkpoint,
        question: AuditQuestion,
        rules: Iterable[Rule],
    ) -> None:
        self._found = found
        self._checkpoint = checkpoint
        compared = _compared(question)
        alone = [rule for rule in rules if rule.name not in compared]
        self._early_rules: Mapping[Extent, list[Rule]] = {
            "headers": [rule for rule in alone if rule.tells_before_tensors],
            "tensor": [rule for rule in alone if rule.tells_after == "tensor"],
            "layer": [rule for rule in alone if rule.tells_after == "layer"],
        }
        self._known: set[object] = set()
        self._tensors: defaultdict[object, list[frozenset[str]]] = defaultdict(list)
        self._early: Counter[str] = Counter()

    def __call__(self, findings: Iterable[Finding]) -> None:
        """Tell those that were not told yet."""
        if self._found is None:
            return
        for finding in findings:
            what = (finding.rule, finding.layer, finding.expert, finding.tensors, finding.file, finding.message)
            if what not in self._known:
                self._known.add(what)
                self._tensors[_kind(finding)].append(frozenset(finding.tensors))
                self._found(located(finding, self._checkpoint.entries, self._checkpoint.duplicates))

    def seen(self, extent: Extent, show: Callable[[], Evidence]) -> None:
        """Tell what a part of the checkpoint shows that stands whatever the rest holds.

        Args:
            extent: How much of it was seen.
            show: Gives the evidence of that part, with nothing else in it.
        """
        rules = () if self._found is None else self._early_rules[extent]
        if not rules:
            return
        evidence = show() if extent != "headers" else _sure_of_shapes(show())
        for rule in rules:
            if extent == "headers":
                self(findings_of(rule, evidence))
            else:
                self._early_of(rule, findings_of(rule, evidence))

    def _early_of(self, rule: Rule, findings: Iterable[Finding]) -> None:
        """Tell those that none told so far covers, unless there are too many."""
        for finding in findings:
            names = frozenset(finding.tensors)
            covered = bool(names) and any(names <= told for told in self._tensors[_kind(finding)])
            if not covered and self._early[rule.name] < MOST_EARLY:
                self._early[rule.name] += 1
                self((finding,))


def _kind(finding: Finding) -> tuple[object, ...]:
    return finding.rule, finding.level, finding.certainty, finding.expert


def _compared(question: AuditQuestion) -> frozenset[str]:
    """Rules of which something else will prove what the checkpoint alone suggests."""
    by_reference = frozenset[str]() if question.reference is None else REFERENCE_RULES
    return by_reference if question.captures is None else by_reference | CAPTURE_RULES


def _sure_of_shapes(evidence: Evidence) -> Evidence:
    """Without the shapes of networks that are wider than declared: neurons of zeros would make them padding."""
    open_ = {
        entry.name
        for tensors in evidence.layers.values()
        if wider_than_declared(evidence.checkpoint, tensors) is not None
        for entry in network_entries(tensors)
    }
    sure = tuple(fault for fault in evidence.misfits if fault.kind != "shape" or fault.tensor not in open_)
    return replace(evidence, misfits=sure)
