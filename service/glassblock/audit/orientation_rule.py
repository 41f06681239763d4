"""What square projections show of their own orientation, as outcomes of the rule about exchanged axes."""

from collections.abc import Iterator

from glassblock.audit.evidence import Evidence
from glassblock.audit.orientation_types import TurnedWeight
from glassblock.audit.rule import Checked, Found, Outcome
from glassblock.wire.audits import Fix, Skipped, Undecidable

_WOULD_DECIDE = "hidden and down of the layer captured from the original model, or a trusted reference"


def orientation_look(evidence: Evidence) -> Iterator[Outcome]:
    """Weights that are turned, square ones that cannot be told, and how many lie as they should."""
    study = evidence.orientation
    for turned in study.turned:
        yield _found(turned)
    for one in study.open:
        verb, whose = ("is", "its") if len(one.tensors) == 1 else ("are", "their")
        reason = f"{' and '.join(one.tensors)} {verb} square, so no shape tells {whose} axes apart, and {one.reason}"
        yield Undecidable(layer=one.layer, reason=reason, would_decide=_WOULD_DECIDE)
    yield from (Skipped(layer=layer, reason=reason) for layer, reason in study.unread)
    yield Checked(study.upright + len(study.turned))


def _found(turned: TurnedWeight) -> Found:
    names, others = " and ".join(turned.tensors), " and ".join(turned.others)
    test, whose = turned.test, "its" if len(turned.tensors) == 1 else "their"
    told = (
        f"layer {turned.layer}: {names}: by all appearance {whose} axes are exchanged: read the other way round "
        f"{whose} neurons are those of {others} (permutations of the neurons: p = {test.p:.1e}, "
        f"{test.z:.0f} deviations)"
    )
    if turned.either:
        lie = "is what lies" if len(turned.either) == 1 else "are what lie"
        told += f"; or else {' and '.join(turned.either)} {lie} so"
    return Found(
        told,
        turned.layer,
        turned.tensors,
        expert=turned.network if isinstance(turned.network, int) else None,
        evidence={
            "p": test.p,
            "z": test.z,
            "permutations": test.draws,
            "level": turned.level,
            "or_else": list(turned.either),
        },
        fix=Fix(action="transpose", description=f"Exchange {whose} axes.", tensors=turned.tensors),
        level="warning",
        certainty="statistical",
    )
