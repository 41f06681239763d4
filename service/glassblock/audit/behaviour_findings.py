"""What a text says, as the report has it: beside the findings of the weights, and where it contradicts them.

A text convicts nothing by itself. What the weights convict gets its word as a line of evidence; what they leave open,
and the text tells beyond the noise, is a warning; where they say otherwise, a note tells both.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import cast

from glassblock.audit.against import formula_of
from glassblock.audit.behaviour_types import BehaviourStudy, Judged, Kind
from glassblock.audit.evidence import Evidence
from glassblock.audit.gate_plans import LAYOUT_RULES
from glassblock.audit.rule import Rule
from glassblock.wire.audits import Finding
from glassblock.wire.behaviour import Behaviour, BehaviourHypothesis, NotAsked

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        **dict.fromkeys(sorted(LAYOUT_RULES), "swap"),
        "config/eps-conflict": "eps",
        "norm/eps-mismatch": "eps",
        "norm/offset": "offset",
        "config/activation-conflict": "activation",
    }
)
"""What a text may say beside the findings of a rule."""

RULE_OF: Mapping[Kind, str] = MappingProxyType(
    {
        "swap": "ffn/gate-up-swapped",
        "eps": "norm/eps-mismatch",
        "offset": "norm/offset",
        "activation": "config/activation-conflict",
    }
)
"""The rule under which a text's own suspicion is told; of a swap in a fused tensor it is `ffn/fused-order`."""

ALWAYS = (
    "A text convicts nothing by itself. Its tokens depend on one another: the standard errors allow for neighbours, "
    "and they speak of this text alone."
)


def with_behaviour(
    findings: Iterable[Finding], study: BehaviourStudy, evidence: Evidence, rules: Sequence[Rule]
) -> list[Finding]:
    """The findings, each with what the text says of it, and what the text alone suspects, in the order of the rules."""
    asked = [(finding, _asked_of(finding, study)) for finding in findings]
    told = [finding if judged is None else _beside(finding, judged) for finding, judged in asked]
    order = {rule.name: place for place, rule in enumerate(rules)}
    if all(judged is not study.best for _, judged in asked if judged is not None):
        told += [finding for finding in _suspected(study, evidence) if finding.rule in order]
    return sorted(told, key=lambda finding: order.get(finding.rule, len(order)))


def behaviour_summary(study: BehaviourStudy) -> Behaviour:
    """The study as the report has it."""
    return Behaviour(
        texts=study.texts,
        tokens=study.tokens,
        mean=study.mean,
        hypotheses=tuple(
            BehaviourHypothesis(
                kind=judged.hypothesis.kind,
                words=judged.hypothesis.words,
                layers=judged.hypothesis.layers,
                value=judged.hypothesis.value,
                weights=judged.hypothesis.weights,
                mean=judged.mean,
                difference=judged.difference.mean,
                standard_error=judged.difference.standard_error,
                reading=judged.reading,
                rivals=tuple(rival.words for rival in judged.rivals),
            )
            for judged in study.judged
        ),
        not_asked=tuple(NotAsked(words=left.words, reason=left.reason) for left in study.left_out),
        forward_passes=study.passes,
        bound=study.bound,
        standard_errors=study.standard_errors,
        not_judged=study.not_judged,
        notes=() if study.not_judged is not None else (*_notes(study), ALWAYS),
    )


def _beside(finding: Finding, judged: Judged) -> Finding:
    """A finding with what the text says of it."""
    return finding.model_copy(update={"evidence": {"behaviour": in_words(judged), **finding.evidence}})


def _asked_of(finding: Finding, study: BehaviourStudy) -> Judged | None:
    kind = KINDS.get(finding.rule)
    mine = [judged for judged in study.judged if judged.hypothesis.kind == kind]
    if kind == "swap":
        return next((judged for judged in mine if judged.hypothesis.layers == (finding.layer,)), None)
    if kind == "offset":  # which way its gains are off, the text may tell
        return max(mine, key=lambda judged: judged.difference.mean, default=None)
    values = {_spelt(finding.evidence.get(key)) for key in ("other", "replayed")}
    return next((judged for judged in mine if judged.hypothesis.value in values), None)


def _spelt(value: object) -> str | None:
    """A value of a finding's evidence as hypotheses spell theirs."""
    stated = cast("Mapping[str, object]", value).get("value") if isinstance(value, Mapping) else value
    if isinstance(stated, float | int) and not isinstance(stated, bool):
        return f"{stated:g}"
    return formula_of(stated) if isinstance(stated, str) else None


def in_words(judged: Judged) -> str:
    """How much likelier, in a sentence."""
    mean, error, count = judged.difference
    noise = "" if error is None else f" ± {error:.2g}"
    moves = "rises" if mean > 0 else "falls"
    told = judged.reading != "undecided"
    doubt = "" if told else f", which is {'no more than chance' if judged.by_chance else 'within the noise'}"
    change = f"{moves} by {abs(mean):.3g}{noise} nats" if mean else "stays as it is"
    return f"{judged.hypothesis.words}: the mean log-likelihood {change} over {count:,} tokens{doubt}"


def _suspected(study: BehaviourStudy, evidence: Evidence) -> Iterator[Finding]:
    """What the text suspects most, where the weights neither tell it already nor say otherwise."""
    best = study.best
    if best is None or best.hypothesis.weights in {"exchanged", "as-named"}:
        return
    hypothesis = best.hypothesis
    rivals = f"; as likely: {', '.join(rival.words for rival in best.rivals)}" if best.rivals else ""
    layer = hypothesis.layers[0] if len(hypothesis.layers) == 1 else None
    rule, tensors = RULE_OF[hypothesis.kind], tuple[str, ...]()
    if hypothesis.layers:
        networks = [network for number in hypothesis.layers for network in evidence.layers[number].networks]
        parts = [part.name for network in networks for role, part in network.weights.items() if role != "down"]
        tensors = tuple(dict.fromkeys(parts))
        rule = "ffn/fused-order" if any(network.row.fused for network in networks) else rule
    yield Finding(
        rule=rule,
        level="warning",
        certainty="statistical",
        layer=layer,
        tensors=tensors,
        message=f"the text is likelier otherwise. {in_words(best)}{rivals}. A text alone convicts nothing",
        evidence={
            "difference": best.difference.mean,
            "standard_error": best.difference.standard_error,
            "tokens": best.difference.tokens,
            "needed_standard_errors": study.standard_errors,
            "layers": list(hypothesis.layers) or None,
            "value": hypothesis.value,
        },
    )


def _notes(study: BehaviourStudy) -> Iterator[str]:
    for judged in study.judged:
        match judged.hypothesis.weights, judged.reading:
            case ("exchanged", "worse"):
                yield f"Contradiction: the weights convict what the text prefers as it stands. {in_words(judged)}."
            case ("as-named", "better"):
                yield f"Contradiction: the weights say as named, and the text prefers otherwise. {in_words(judged)}."
            case ("undecidable", "worse"):
                yield f"The weights leave it open, and the text prefers it as it stands. {in_words(judged)}."
            case ("undecidable", "better"):
                yield f"The weights leave it open, and the text prefers it otherwise. {in_words(judged)}."
            case _:
                continue
    no_witness = [judged.hypothesis.words for judged in study.judged if judged.by_chance]
    if no_witness:
        more = f" and {len(no_witness) - 3:,} more" if len(no_witness) > 3 else ""
        yield (
            f"No witness of {'; '.join(no_witness[:3])}{more}: even as it prefers, the text is no likelier than where "
            f"every token is as likely as any other ({study.chance:.3f} nats). It is unlike anything that the model "
            "was trained on, or more than this is broken."
        )
    if any(judged.hypothesis.weights == "exchanged" for judged in study.judged):
        yield "Every hypothesis was asked alone, with the other convicted layers as they stand: repair, and ask again."
