"""The rule about the order in which the rows of queries and keys lie within a head."""

import math
from collections.abc import Iterator
from typing import Any

from glassblock.audit.evidence import Evidence
from glassblock.audit.names import in_words
from glassblock.audit.reference_types import HeadMoves, Into
from glassblock.audit.rotary_study import ROTARY_RULE, RotaryStudy
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.numerics.rotary_order import LEVEL, OrderVerdict
from glassblock.wire.audits import Fix, Skipped, Undecidable


def _look(evidence: Evidence) -> Iterator[Outcome]:
    study = evidence.rotary
    yield from _unasked(study)
    if not study.plans:
        return
    reference = evidence.reference
    compared = reference is not None and reference.answers
    proved = reference is not None and any(found.kind == "rotary-order" for found in reference.function)
    verdict = study.verdict
    if (verdict is OrderVerdict.UNDECIDABLE and not compared) or (
        verdict is OrderVerdict.NOT_AS_DECLARED and not proved
    ):
        yield _open(study)
        return
    # A reference is held against every layer; the weights alone say one thing of the model.
    yield Checked(len(study.plans) if compared else 1)
    if verdict is OrderVerdict.OTHER and not proved:
        yield _found(evidence, study)


def _unasked(study: RotaryStudy) -> Iterator[Skipped]:
    """Of layers that were not looked at; one reason that all have is told once."""
    reasons = set(study.unasked.values())
    if not study.plans and len(reasons) == 1:
        yield Skipped(reason=next(iter(reasons)))
        return
    yield from (Skipped(layer=layer, reason=reason) for layer, reason in study.unasked.items())


def _open(study: RotaryStudy) -> Skipped | Undecidable:
    declared, other = study.against_declared, study.against_other
    least = declared.least_log10_p
    if least > math.log10(LEVEL):
        few = f"{declared.terms} comparisons of four rows are too few: of one mind they would give p = {10**least:.1g}"
        return Skipped(reason=f"{few}, and {LEVEL:.0e} is asked")
    numbers = f"z = {declared.z:.1f} against the family's order, {other.z:.1f} against the other one"
    if study.verdict is OrderVerdict.NOT_AS_DECLARED:
        reason = (
            "not all layers were trained in the order that the family turns, or the rows were put into an order when "
            f"they were begun: some layers may lie in the other order ({numbers})"
        )
    elif declared.noise and other.noise:
        reason = f"the rows of queries and keys show neither order of a head ({numbers})"
    else:
        reason = f"the rows of queries and keys do not show one order of a head clearly ({numbers})"
    return Undecidable(reason=reason, would_decide="a reference checkpoint (--reference)")


def _found(evidence: Evidence, study: RotaryStudy) -> Found:
    names = tuple(entry.name for plan in study.plans for entry in plan.entries)
    first = study.plans[0].turned
    orders: tuple[Into, Into] = ("halves", "pairs")
    declared, stored = orders[::-1] if first.paired else orders
    rows = {"halves": f"i and i + {first.rows // 2}", "pairs": "2i and 2i + 1"}
    family, plan = evidence.checkpoint.family, study.plans[0]
    moves = HeadMoves(((plan.heads.width, first.rows, declared),), plan.fused_heads)
    against, other = study.against_declared, study.against_other
    facts: dict[str, Any] = {
        "declared": declared,
        "stored": stored,
        "log10_p": against.log10_p,
        "level": LEVEL,
        "z": against.z,
        "z_other": other.z,
        "comparisons": against.terms,
        "layers": len(study.plans),
        **moves.facts,
        "moved_along": any(plan.moved_along for plan in study.plans),
    }
    return Found(
        f"the rows of queries and keys were trained as {stored} of a head, {rows[stored]} turned together, and "
        f"{'the family' if family is None else family.name} turns {declared}, {rows[declared]} (p = "
        f"1e{against.log10_p:.0f} over {len(study.plans)} layers; {in_words(names)})",
        tensors=names,
        evidence=facts,
        fix=Fix(action="reorder-heads", description="Put the rows of every head in the family's order.", tensors=names),
        # Nobody has run a row that says `source only`: then it may be the row that is wrong.
        level="error" if family is not None and family.verified == "executed" else "warning",
    )


ROTARY_RULES: tuple[Rule, ...] = (
    Rule(
        ROTARY_RULE,
        "error",
        "statistical",
        what="The rows of queries and keys lie in the other rotary order: pairs for halves, or halves for pairs.",
        hurts="Positions turn rows together that were not trained so: text that falls apart within a few words.",
        detection="Turning two rows that positions turn together by 90 degrees changes nothing, so such turns are fair "
        "coins. Rows a and b enter the scores through q_a k_a + q_b k_b and q_a k_b - q_b k_a alone, which training "
        "moves, so the determinant of their four products is large. Four rows can be paired in three ways, of which a "
        "turn exchanges two if the family's order is right: the other order may not stand out. The p-value over all "
        "layers together is certified (Hoeffding), 1e-9 is asked, and nothing may speak against the other order. It "
        "decides the model as a whole, and no single layer. Where the family's order is rejected and something speaks "
        "against the other one too, that is left open, and the verdict is inconclusive. Where nobody has run the "
        "family's code it is a warning.",
        fooled_by="Queries and keys initialised row by row in some order. One of the two in the other order alone: "
        "that is left open. A few layers in another order than the rest: the model as a whole is told as the rest is. "
        "A reference tells both. Latent attention and norms that subtract a mean are refused.",
        report="https://github.com/huggingface/transformers/pull/31788",
        needs=("family",),
        looks_at="layers",
        look=_look,
    ),
)
