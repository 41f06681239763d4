"""What a reference checkpoint proves, as findings under the rules that name such mistakes."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from glassblock.audit.evidence import Evidence
from glassblock.audit.names import in_words
from glassblock.audit.reference_types import Difference, FunctionKind, ReferenceStudy
from glassblock.audit.rule import Checked, Found, Outcome
from glassblock.wire.audits import (
    Fix,
    FormDifference,
    FunctionDifference,
    LayerCosine,
    ReferenceSummary,
    Undecidable,
)

LISTED = 1_000
"""Differences and names in a summary, of each kind."""

EXAMPLES = 3


class Named(NamedTuple):
    """A rule, the action of its repair and what that does."""

    rule: str
    action: str
    repair: str


NAMED: Mapping[FunctionKind, Named] = MappingProxyType(
    {
        "swapped": Named("ffn/gate-up-swapped", "swap-tensors", "Exchange the two names."),
        "fused-order": Named("ffn/fused-order", "swap-halves", "Exchange the two halves."),
        "fused-layout": Named("ffn/fused-layout", "reorder-rows", "Put the rows in the reference's order."),
        "mispaired": Named("ffn/mispaired-neurons", "convert-again", "Convert the layer again from the reference."),
        "transposed": Named("tensor/transposed", "transpose", "Exchange its axes."),
        "offset": Named("norm/offset", "add-to-gains", "Bring the gains back to the family's convention."),
        "role": Named("norm/role", "convert-again", "Write each norm under the name of its own role."),
        "experts-exchanged": Named(
            "moe/experts-exchanged", "renumber-experts", "Write each expert under its own number."
        ),
        "rotary-order": Named(
            "attention/rotary-order", "reorder-heads", "Put the rows of every head in the family's order."
        ),
        "unrelated": Named("tensor/untrained", "convert-again", "Convert the tensor again from the reference."),
    }
)
"""The rules of the differences that are mistakes by themselves. Other numbers alone are told and are none."""

REFERENCE_RULES: frozenset[str] = frozenset(named.rule for named in NAMED.values())
_ONLY_HERE = frozenset({"norm/offset", "tensor/transposed", "tensor/untrained"})
"""Rules that nothing but a comparison answers, so that its counts are theirs."""

_MOST_OTHER = 0.5
"""Share of tensors with other numbers below which one that is unrelated is a mistake: above it all were trained on."""


def reference_look(rule: str) -> Callable[[Evidence], Iterator[Outcome]]:
    """What a rule says of a reference; nothing where none was given."""

    def look(evidence: Evidence) -> Iterator[Outcome]:
        study = evidence.reference
        if study is None:
            return
        if not study.answers:
            yield Undecidable(
                reason=f"{study.name}: {study.words}", would_decide="a reference that is the same model, or its source"
            )
            return
        for difference in study.function:
            named = NAMED.get(_as_function(difference.kind))
            if named is None or named.rule != rule:
                continue
            if difference.kind == "unrelated" and len(study.function) > _MOST_OTHER * study.mapped:
                continue
            yield _found(difference, named, study)
        if rule in _ONLY_HERE:
            yield Checked(study.mapped)

    return look


def _as_function(kind: Any) -> FunctionKind:
    return kind


def _found(difference: Difference, named: Named, study: ReferenceStudy) -> Found:
    facts: dict[str, Any] = {"reference": study.name, "counterparts": list(difference.there)}
    facts |= {} if difference.cosine is None else {"cosine": difference.cosine}
    facts |= {} if difference.add is None else {"add": difference.add}
    facts |= {} if difference.homes is None else {"homes": {str(own): home for own, home in difference.homes.items()}}
    facts |= {} if difference.moves is None else difference.moves.facts
    facts |= {} if difference.relative is None else {"relative_difference": difference.relative}
    proved = difference.proved or difference.kind == "unrelated"
    names, beside = in_words(difference.here), in_words(tuple(dict.fromkeys(difference.there)))
    return Found(
        f"{names}: {difference.words} ({study.name}: {beside})",
        layer=difference.layer,
        expert=difference.expert if isinstance(difference.expert, int) else None,
        tensors=difference.here,
        evidence=facts,
        fix=Fix(action=named.action, description=named.repair, tensors=difference.here),
        level="error",
        certainty="proved" if proved else "statistical",
    )


def summary_of(study: ReferenceStudy) -> ReferenceSummary:
    """The comparison as the report has it."""
    grouped: dict[tuple[str, str], list[Difference]] = {}
    for difference in study.form:
        grouped.setdefault((difference.kind, difference.words), []).append(difference)
    return ReferenceSummary(
        checkpoint=study.name,
        family=study.family,
        relation=study.relation,
        words=study.words,
        mapped=study.mapped,
        same=study.same,
        form=tuple(
            FormDifference(
                kind=kind,
                words=words,
                tensors=sum(len(difference.here) for difference in group),
                examples=tuple(
                    f"{found.here[0]} = {found.there[0] if found.there else '?'}" for found in group[:EXAMPLES]
                ),
            )
            for (kind, words), group in grouped.items()
        ),
        function=tuple(
            FunctionDifference(
                kind=found.kind,
                words=found.words,
                layer=found.layer,
                expert=found.expert,
                tensors=found.here,
                counterparts=found.there,
                relative_difference=found.relative,
                cosine=found.cosine,
            )
            for found in study.function[:LISTED]
        ),
        unmatched=study.only_here[:LISTED],
        unmatched_there=study.only_there[:LISTED],
        unread=study.unread[:LISTED],
        profile=tuple(LayerCosine(layer=layer, least=least) for layer, least in study.profile),
    )
