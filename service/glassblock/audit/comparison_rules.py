"""Rules that only a comparison answers: with another engine's config, another checkpoint, or captured tensors.

`with_comparisons` also adds what a comparison says to the rules that look at the checkpoint alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from glassblock.audit.activation_keys import unknown_activation, unread_activation
from glassblock.audit.against import AGAINST_RULES, EPS_RULE, against_look, narrower_storage
from glassblock.audit.capture_findings import CAPTURE_RULES, capture_look, decided, leaves_weights, with_captures
from glassblock.audit.evidence import Evidence
from glassblock.audit.norm_rules import folded_gains
from glassblock.audit.orientation_rule import orientation_look
from glassblock.audit.reference_findings import REFERENCE_RULES, reference_look
from glassblock.audit.rule import Found, Outcome, Rule
from glassblock.wire.audits import Skipped, Undecidable

_ALONE = ("config/activation-conflict", "config/dtype-conflict", "norm/offset", "norm/kind-conflict")
"""Rules whose own words speak of the comparison."""

NEITHER = "no other engine's config, no reference and no captures were given that it could be told by"

SEVERAL = "of several references it is told which tensors are made of which; what one of them proves, it proves alone"


def with_comparisons(rule: Rule) -> Rule:
    """The rule, saying also what another engine's config, a reference checkpoint and captures show, where given."""
    looks: list[Callable[[Evidence], Iterator[Outcome]]] = []
    if rule.name in AGAINST_RULES and rule.name != EPS_RULE:
        looks.append(against_look(rule.name))
    if rule.name in REFERENCE_RULES:
        looks.append(reference_look(rule.name))
    if rule.name in CAPTURE_RULES:
        looks.append(capture_look(rule.name))

    # Captures are replayed whatever the weights are stored as: rows of separate tensors can be mixed up as well.
    lenient = tuple(need for need in rule.needs if need == "family") if rule.name in CAPTURE_RULES else rule.needs

    def look(evidence: Evidence) -> Iterator[Outcome]:
        lacking = next((reason for need in rule.needs if (reason := evidence.lacks(need)) is not None), None)
        if lacking is not None:
            yield from tuple(capture_look(rule.name)(evidence)) or (Skipped(reason=lacking),)
            return
        own = tuple(rule.look(evidence))
        compared = with_captures(own, [outcome for other in looks for outcome in other(evidence)])
        # What a reference or captures prove of a layer is not told once more as what its weights suggest.
        proved = {
            (found.layer, found.expert)
            for found in compared
            if isinstance(found, Found) and found.tensors and not leaves_weights(found)
        }
        for outcome in own:
            if isinstance(outcome, Undecidable) and decided(evidence, rule.name, outcome.layer):
                continue
            if not (isinstance(outcome, Found) and (outcome.layer, outcome.expert) in proved):
                yield outcome
        yield from compared

    if not looks:
        return rule
    also = " ".join(text for name, text in _ALSO.items() if rule.name in name and text not in rule.detection)
    return replace(rule, look=look, needs=lenient, detection=f"{rule.detection} {also}".strip())


_ALSO = {
    tuple(set(AGAINST_RULES) - {EPS_RULE, *_ALONE}): (
        "Another engine's config (--against) that says otherwise is an error of its own, a conflict."
    ),
    tuple(REFERENCE_RULES - {*_ALONE, "tensor/transposed", "tensor/untrained"}): (
        "Where a reference checkpoint is given (--reference), equal rows there prove it."
    ),
    tuple(
        CAPTURE_RULES - {"norm/eps-mismatch"}
    ): "Tensors captured in an engine (--captures) are replayed under every mistake, which proves it or clears it.",
}


def _unasked(
    *, against: bool = False, reference: bool = False, captures: bool = False
) -> Callable[[Evidence], Iterator[Outcome]]:
    """Says that nobody asked; the comparisons themselves are added to every rule alike."""

    def look(evidence: Evidence) -> Iterator[Outcome]:
        question = evidence.question
        if reference and question.parents:
            yield Skipped(reason=SEVERAL)
            return
        given = (against and question.against is not None) or (reference and evidence.reference is not None)
        if not (given or (captures and evidence.captures is not None)):
            yield Skipped(reason=NEITHER)

    return look


def _activation(evidence: Evidence) -> Iterator[Outcome]:
    yield from unknown_activation(evidence)
    yield from unread_activation(evidence)
    yield from _unasked(against=True, captures=True)(evidence)


def _dtype(evidence: Evidence) -> Iterator[Outcome]:
    yield from narrower_storage(evidence)
    yield from _unasked(against=True)(evidence)


def _offset(evidence: Evidence) -> Iterator[Outcome]:
    yield from folded_gains(evidence)
    yield from _unasked(against=True, reference=True, captures=True)(evidence)


def _turned(evidence: Evidence) -> Iterator[Outcome]:
    study = evidence.reference
    if study is not None and study.answers:
        return  # it decides, whatever the weights suggest
    if evidence.orientation.any:
        yield from orientation_look(evidence)
    else:
        yield from _unasked(reference=True, captures=True)(evidence)


COMPARISON_RULES: tuple[Rule, ...] = (
    Rule(
        "config/activation-conflict",
        "error",
        "conflict",
        what="Two engines would apply different activations, or clamp differently where gate and up meet.",
        hurts="Every neuron is bent otherwise; a clamp that is left out shows in the tails alone.",
        detection="The activation and the clamp of the config are held against another engine's, through the table of "
        "aliases; a key that is absent from a whole config is its default. The largest difference of the two is told. "
        "Another key of the config itself that says otherwise, and that only other engines read, is a warning; so is a "
        "name that the family's own code takes for another activation, and one that is no known activation.",
        fooled_by="An engine that applies another activation than its config says.",
        report="https://github.com/sgl-project/sglang/pull/39920",
        needs=("family",),
        look=_activation,
        tells_before_tensors=True,
    ),
    Rule(
        "config/dtype-conflict",
        "error",
        "conflict",
        what="An engine would run the model in float16, where its config or its tensors have a dtype of wider range.",
        hurts="Activations beyond 65,504 become infinite, then NaN: empty text, or one character for ever.",
        detection="The dtype of the config, or else of the tensors, is held against another engine's. Any other "
        "difference is a note: it rounds, and nothing overflows. A note, too, is a config that says bfloat16 where "
        "every weight is stored as float16; where weights are of several dtypes, or hold codes, nothing is said.",
        fooled_by="A model whose activations stay small: that takes captured tensors to tell.",
        report="https://github.com/huggingface/transformers/issues/9295",
        needs=("family",),
        look=_dtype,
        tells_before_tensors=True,
    ),
    Rule(
        "norm/offset",
        "error",
        "proved",
        what="A gain is stored as w where it is used as 1 + w, or the reverse, or the 1 is added twice.",
        hurts="Loads cleanly and answers garbage from the first token, or fluently about something else.",
        detection="Two copies of a gain, here and in a reference of the same convention, differ by exactly 1: proved. "
        "Another engine's config says that it adds another number: a conflict. A family adds 1 to gains "
        "of which none is stored near 0: a warning.",
        fooled_by="Nothing, with a reference; without, gains that training moved up throughout. A change of convention "
        "between two formats is no finding.",
        report="https://github.com/ml-explore/mlx-lm/pull/1623",
        needs=("family",),
        looks_at="layers",
        look=_offset,
    ),
    Rule(
        "norm/kind-conflict",
        "error",
        "conflict",
        what="Another engine would run LayerNorm where the family has RMSNorm, or the other way round.",
        hurts="The mean is subtracted, or not, in every layer.",
        detection="The arithmetic of the family's norms is held against what another engine's config says.",
        fooled_by="An engine that runs another norm than its config says.",
        report="https://github.com/NVIDIA/Megatron-LM/issues/5844",
        needs=("family",),
        looks_at="layers",
        look=_unasked(against=True, captures=True),
        tells_before_tensors=True,
    ),
    Rule(
        "tensor/transposed",
        "error",
        "proved",
        what="A square weight lies there with its axes exchanged.",
        hurts="No shape tells, and the layer computes something else.",
        detection="Every row of the weight is a column of the same weight in a reference. Without one, of a gated "
        "network with a square weight: neurons have no order, so their random permutations give an exact p-value for "
        "what is seen when one weight is read the other way round (squared cosines with the other two, lengths in "
        "step). Below the level shared by all square weights that is a warning; where neither reading shows anything, "
        "undecidable.",
        fooled_by="A reference: nothing. The weights alone: a copy whose neurons are numbered like its channels. Of "
        "gate, up and down all turned together, of plain networks and of attention they tell nothing.",
        report="https://github.com/huggingface/transformers/issues/47031",
        needs=("family",),
        look=_turned,
    ),
    Rule(
        "tensor/untrained",
        "error",
        "proved",
        what="A tensor has nothing to do with its counterpart in a reference that is otherwise the same model.",
        hurts="A converter that copied nothing left random or stale numbers there, and reported success.",
        detection="Most tensors equal the reference's, and the cosine of this one with its own is that of noise.",
        fooled_by="A part that was trained anew on purpose, such as another head.",
        report="https://github.com/NVIDIA/Megatron-LM/issues/5844",
        needs=("family",),
        look=_unasked(reference=True),
    ),
)
