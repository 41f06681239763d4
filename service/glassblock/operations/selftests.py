"""What the audit would find in a checkpoint: each mistake planted in memory, audited, and told."""

from collections.abc import Callable, Sequence
from typing import cast

from glassblock.audit.audit import AuditCancelled, AuditQuestion, audit_checkpoint
from glassblock.audit.mistakes import MISTAKES, Mistake, Planted, plant
from glassblock.audit.rules import RULES
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.patches import patched
from glassblock.errors import CheckpointUnusable, GlassblockError, InvalidValue
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import Coverage, Finding, Report
from glassblock.wire.selftests import Outcome, PlantedMistake, SelftestAnswer, SelftestRequest

Audited = Callable[[Checkpoint], Report]


def selftest(
    store: CheckpointStore,
    request: SelftestRequest,
    *,
    progress: Callable[[int, int, str], None],
    cancelled: Callable[[], bool],
) -> SelftestAnswer:
    """Plant each mistake in a checkpoint, in memory, and audit it; one pass over the checkpoint for each.

    Raises:
        InvalidValue: An unknown rule, or a layer that is not there.
        DamagedCheckpoint, UnknownFamily, FamilyMismatch: The checkpoint is none in which mistakes can be planted.
        UnknownCheckpoint, AccessRefused: There is no such checkpoint here.
        AuditCancelled: `cancelled` answered true.
    """
    checkpoint = store.open(request.checkpoint, family=request.family, family_row=request.family_row)
    family = checkpoint.require_usable()
    layers = _layers(checkpoint, request.layers)
    mistakes = asked_mistakes(request.rules)
    question = AuditQuestion(rules=request.rules, family=request.family, hash=request.digest)

    def audited(of: Checkpoint) -> Report:
        silent: Callable[[int, int, str], None] = lambda _done, _total, _message: None  # noqa: E731
        return audit_checkpoint(
            of, question, name=request.checkpoint, device=store.device, progress=silent, cancelled=cancelled
        )

    progress(0, len(mistakes) + 1, "as it is")
    healthy = audited(checkpoint)
    told: list[PlantedMistake] = []
    for done, mistake in enumerate(mistakes):
        if cancelled():
            raise AuditCancelled
        progress(done + 1, len(mistakes) + 1, mistake.description)
        told.append(_tried(mistake, checkpoint, layers, healthy, audited))
    return SelftestAnswer(
        checkpoint=request.checkpoint,
        family=family.name,
        layers=tuple(layers),
        healthy=tuple(sorted({finding.rule for finding in healthy.findings})),
        mistakes=tuple(told),
    )


def _layers(checkpoint: Checkpoint, asked: Sequence[int] | None) -> Sequence[int]:
    if asked is None:
        return checkpoint.layer_indices
    for layer in asked:
        if layer not in checkpoint.layer_indices:
            first, last = checkpoint.layer_indices[0], checkpoint.layer_indices[-1]
            raise InvalidValue(
                f"there is no layer {layer}", field="layers", hint=f"The first is {first}, the last {last}."
            )
    return sorted(set(asked))


def asked_mistakes(rules: Sequence[str] | None) -> list[Mistake]:
    """Those that any of `rules` is meant for; all of them where None are named.

    Raises:
        InvalidValue: An unknown rule.
    """
    for rule in rules or ():
        if rule not in RULES:
            raise InvalidValue(f"there is no rule {rule!r:.80}", field="rules", known=tuple(RULES))
    return [mistake for mistake in MISTAKES.values() if rules is None or not set(rules).isdisjoint(mistake.rules)]


def _tried(
    mistake: Mistake, checkpoint: Checkpoint, layers: Sequence[int], healthy: Report, audited: Audited
) -> PlantedMistake:
    """One mistake, planted and looked for."""
    planted = plant(mistake, checkpoint, layers)
    if isinstance(planted, str):
        return _told(mistake, "not-applicable", reason=planted)
    try:
        report = audited(patched(checkpoint, planted.patch))
    except CheckpointUnusable as error:
        return _told(mistake, "found-otherwise", reason=f"the audit ends with an error: {error.message}")
    except GlassblockError as error:
        return _told(mistake, "not-applicable", reason=error.message)
    known = {_key(finding) for finding in healthy.findings}
    noted = {finding.rule for finding in healthy.findings}
    # A note that was there with other numbers says nothing of the mistake.
    fired = [
        finding
        for finding in report.findings
        if _key(finding) not in known and (finding.level != "note" or finding.rule not in noted)
    ]
    right = [finding for finding in fired if finding.rule in mistake.rules]
    named = sorted({layer for finding in right for layer in _layers_of(finding)}.intersection(planted.layers))
    meant = [coverage for coverage in report.coverage if coverage.rule in mistake.rules]
    undecided = [
        f"{entry.reason} (would decide: {entry.would_decide})" for coverage in meant for entry in coverage.undecidable
    ]
    if right:
        outcome, reason = _named(planted, named, undecided)
    elif fired:
        outcome, reason = "found-otherwise", None
    else:
        outcome, reason = why_unnoticed(mistake, meant, undecided)
    rules = tuple(dict.fromkeys(finding.rule for finding in fired))
    return _told(mistake, outcome, planted=planted.layers, named=tuple(named), fired=rules, reason=reason)


def _named(planted: Planted, named: Sequence[int], undecided: Sequence[str]) -> tuple[Outcome, str | None]:
    missed = len(planted.layers) - len(named)
    if not missed:
        return "found", None
    why = f": {undecided[0]}" if undecided else ""
    return "found-in-part", f"{missed} of {len(planted.layers)} layers are not named{why}"


def why_unnoticed(mistake: Mistake, meant: Sequence[Coverage], undecided: Sequence[str]) -> tuple[Outcome, str]:
    """What is to be said of a mistake that no rule noticed.

    Args:
        mistake: The one that was planted.
        meant: What the rules that are meant for it looked at.
        undecided: What they left open, in words.
    """
    if undecided:
        return "undecidable", undecided[0]
    if mistake.decided_by is not None:
        return "undecidable", f"would decide: {mistake.decided_by}"
    if not meant:
        return "not-found", "no rule of this version looks for it"
    # Where a rule looked, it does not matter why another one, for files of another kind, did not.
    looked = [coverage for coverage in meant if coverage.checked]
    skipped = [entry.reason for coverage in looked or meant for entry in coverage.skipped]
    return "not-found", skipped[0] if skipped else f"nothing that {(looked or meant)[0].rule} looks at tells it"


def _layers_of(finding: Finding) -> Sequence[int]:
    if finding.layer is not None:
        return (finding.layer,)
    listed = finding.evidence.get("layers")
    return cast("list[int]", listed) if isinstance(listed, list) else ()


def _key(finding: Finding) -> tuple[object, ...]:
    return finding.rule, finding.level, finding.layer, finding.expert, finding.message


def _told(
    mistake: Mistake,
    outcome: Outcome,
    *,
    planted: tuple[int, ...] = (),
    named: tuple[int, ...] = (),
    fired: tuple[str, ...] = (),
    reason: str | None = None,
) -> PlantedMistake:
    return PlantedMistake(
        mistake=mistake.name,
        description=mistake.description,
        rules=tuple(rule for rule in mistake.rules if rule in RULES),
        outcome=outcome,
        planted=planted,
        named=named,
        fired=fired,
        reason=reason,
    )
