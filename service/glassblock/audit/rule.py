"""What a rule is: a row that says what it needs and explains itself, and a function that only looks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from glassblock.audit.evidence import Evidence, Need
from glassblock.audit.names import cut_names
from glassblock.wire.audits import Certainty, Coverage, Finding, Fix, Level, Skipped, Undecidable


@dataclass(frozen=True)
class Found:
    """One mistake. The rule's row gives its name, and its level and certainty where these are None."""

    message: str
    layer: int | None = None
    tensors: tuple[str, ...] = ()
    file: str | None = None
    byte: int | None = None
    expert: int | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict[str, Any])
    fix: Fix | None = None
    level: Level | None = None
    certainty: Certainty | None = None


@dataclass(frozen=True)
class Checked:
    """So many files, tensors or layers were decided."""

    count: int = 1


Outcome = Found | Checked | Undecidable | Skipped

LooksAt = Literal["checkpoint", "layers", "tensors"]
"""What a rule looks at one by one: see `Rule.looks_at`."""

TellsAfter = Literal["tensor", "layer", "all"]
"""What of a checkpoint a rule has to see: see `Rule.tells_after`."""


@dataclass(frozen=True)
class Rule:
    """One row of the rule table.

    Attributes:
        name: `group/mistake`.
        level: The highest level of its findings.
        certainty: How sure a finding of that level is.
        what: The mistake it names.
        hurts: What goes wrong when nobody notices.
        detection: How it is found.
        fooled_by: What would deceive it.
        report: A public report where it happened.
        look: Evidence in, outcomes out; it reads no file and changes nothing.
        needs: Evidence without which it is skipped.
        tells_before_tensors: Whether what it finds with names, shapes and config alone stands whatever the tensors
            hold. It may find more in them.
        tells_after: Of what it has to see every number so that a finding stands whatever the rest holds: one tensor
            alone, one layer alone, or all tensors. It is then shown these and nothing else, and what the report tells
            of several in one finding is told of each; a tensor outside the layers is shown alone.
        looks_at: Each layer, or whatever a layer holds (of one that is there in part it has not looked at all), or
            neither: files, or the checkpoint as a whole.
    """

    name: str
    level: Level
    certainty: Certainty
    what: str
    hurts: str
    detection: str
    fooled_by: str
    report: str
    look: Callable[[Evidence], Iterable[Outcome]]
    needs: tuple[Need, ...] = ()
    tells_before_tensors: bool = False
    tells_after: TellsAfter = "all"
    looks_at: LooksAt = "checkpoint"


def apply_rule(rule: Rule, evidence: Evidence) -> tuple[tuple[Finding, ...], Coverage]:
    """Findings of one rule and what it looked at. Evidence that is missing is told as a skip."""
    for need in rule.needs:
        reason = evidence.lacks(need)
        if reason is not None:
            return (), Coverage(rule=rule.name, checked=0, skipped=(Skipped(reason=reason),))
    outcomes = tuple(rule.look(evidence))
    findings = tuple(_findings(rule, outcomes))
    coverage = Coverage(
        rule=rule.name,
        checked=sum(outcome.count for outcome in outcomes if isinstance(outcome, Checked)),
        undecidable=tuple(_cut(outcome) for outcome in outcomes if isinstance(outcome, Undecidable)),
        skipped=tuple(_skipped(rule, evidence, outcomes)),
    )
    return findings, coverage


def findings_of(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Findings of one rule alone."""
    if all(evidence.lacks(need) is None for need in rule.needs):
        yield from _findings(rule, rule.look(evidence))


def _findings(rule: Rule, outcomes: Iterable[Outcome]) -> Iterator[Finding]:
    return (_finding(rule, outcome) for outcome in outcomes if isinstance(outcome, Found))


def _skipped(rule: Rule, evidence: Evidence, outcomes: Sequence[Outcome]) -> Iterator[Skipped]:
    """What the rule left out, and the layers that it could not see because a shard was not read."""
    hidden = evidence.hidden
    half = frozenset(hidden.half)
    told = [outcome for outcome in outcomes if isinstance(outcome, Skipped)]
    # What is said of a layer that is there as a whole is not owed to the shard.
    elsewhere = {skip.reason for skip in told if skip.layer not in half}
    kept = [skip for skip in told if skip.layer not in half or skip.reason in elsewhere]
    yield from map(_cut, kept)
    owed = {skip.layer for skip in told if skip.layer is not None} - {skip.layer for skip in kept}
    # A rule that asked nothing of any layer has said why.
    if any(isinstance(outcome, Checked) and outcome.count for outcome in outcomes) or owed:
        owed.update(hidden.half if rule.looks_at == "tensors" else ())
        owed.update(hidden.whole if rule.looks_at != "checkpoint" else ())
    open_ = {outcome.layer for outcome in outcomes if isinstance(outcome, Undecidable)} | {skip.layer for skip in kept}
    yield from (Skipped(layer=layer, reason=hidden.reason) for layer in sorted(owed - open_))


Unsure = TypeVar("Unsure", Undecidable, Skipped)


def _cut(outcome: Unsure) -> Unsure:
    reason = cut_names(outcome.reason)
    return outcome if reason == outcome.reason else outcome.model_copy(update={"reason": reason})


def _finding(rule: Rule, found: Found) -> Finding:
    return Finding(
        rule=rule.name,
        level=found.level or rule.level,
        certainty=found.certainty or rule.certainty,
        layer=found.layer,
        expert=found.expert,
        tensors=found.tensors,
        file=found.file,
        byte=found.byte,
        message=cut_names(found.message, found.tensors),
        evidence=dict(found.evidence),
        fix=found.fix,
    )
