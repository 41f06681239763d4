"""Which of two stated epsilons a third source bears out: only then may a repair set it, since no weight carries one."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from glassblock.audit.against import ONE_FLOAT32, differences_of_kind, own_settings, their_settings
from glassblock.audit.evidence import Evidence
from glassblock.checkpoint.config import as_epsilon, find
from glassblock.checkpoint.settings import eps_of
from glassblock.errors import DamagedCheckpoint


class Witness(NamedTuple):
    """An epsilon that somebody states for one norm, and who."""

    role: str
    value: float
    source: str


def same_eps(one: float, other: float) -> bool:
    """Whether two epsilons are one float32 number."""
    return math.isclose(one, other, rel_tol=ONE_FLOAT32)


def decision(
    evidence: Evidence, roles: Sequence[str], values: tuple[float, float], *, but: str | None = None
) -> Witness | None:
    """Who bears out one of two values for all of these norms; None where nobody does, or two contradict each other.

    Args:
        evidence: All of it.
        roles: Of the norms.
        values: The two.
        but: A witness that is a party itself: `against` or `reference`.
    """
    heard = [witness for name, witness in _witnesses(evidence) if witness.role in roles and name != but]
    if not heard or {witness.role for witness in heard} != set(roles):
        return None
    first = heard[0]
    agreed = all(same_eps(witness.value, first.value) for witness in heard)
    meant = next((value for value in values if same_eps(value, first.value)), None)
    return first._replace(value=meant) if agreed and meant is not None else None


def contradicted(evidence: Evidence, witness: Witness, *, but: str) -> bool:
    """Whether another witness than `but` states another epsilon for the same norm."""
    return any(
        other.role == witness.role and name != but and not same_eps(other.value, witness.value)
        for name, other in _witnesses(evidence)
    )


def key_of(evidence: Evidence, role: str) -> str | None:
    """The dotted key of config.json that states the epsilon of a norm, or would."""
    config, row = evidence.checkpoint.config, evidence.family
    norm = row.norm(role)
    if config is None or norm is None or not norm.eps.keys:
        return None
    stated = find(config, row, norm.eps.keys)
    if stated is not None:
        return stated.key
    nested = next((f"{name}." for name in row.nested if isinstance(config.values.get(name), dict)), "")
    return nested + norm.eps.keys[0]


def reference_epsilons(evidence: Evidence) -> Iterator[Witness]:
    """What the config of a reference that is the same model states, norm by norm."""
    study, reference = evidence.reference, evidence.question.reference
    if study is None or reference is None or not study.answers:
        return
    if reference.family is None or reference.config is None or reference.path == evidence.checkpoint.path:
        return
    for norm in reference.family.norms:
        try:
            eps = eps_of(reference.config, reference.family, norm.eps)
        except DamagedCheckpoint:
            continue
        if not eps.defaulted and evidence.family.norm(norm.role) is not None:
            yield Witness(norm.role, eps.value, f"{study.name}: {eps.source}")


def _witnesses(evidence: Evidence) -> Iterator[tuple[str, Witness]]:
    """Who states an epsilon: no default, and nobody who errs about what model it is, or is the checkpoint itself."""
    theirs, own = their_settings(evidence), evidence.checkpoint.config
    itself = own is not None and evidence.question.against == dict(own.values)
    if theirs is not None and not itself and not differences_of_kind(evidence, own_settings(evidence), theirs):
        for norm in evidence.family.norms:
            told = theirs.settings.get(f"eps.{norm.role}")
            value = None if told is None else as_epsilon(told.value)
            if told is not None and value is not None and not told.defaulted:
                yield "against", Witness(norm.role, value, told.source)
    yield from (("reference", witness) for witness in reference_epsilons(evidence))
    for norm in evidence.family.norms:
        if not norm.eps.keys:
            # The models' own code has the number, and no config can change it.
            yield "family", Witness(norm.role, norm.eps.default, f"family {evidence.family.name}")
