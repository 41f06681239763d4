"""Rules about norms that take more than names: the precision of their gains, and the epsilon that was applied."""

from collections.abc import Iterator

from glassblock.audit.evidence import Evidence, GainMoments
from glassblock.audit.names import alike, in_words, only_layer
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.numerics.norms import norm_kind_named
from glassblock.audit.tensor_rules import misfit_look
from glassblock.wire.audits import Fix, Skipped, Undecidable

_FEWEST_LAYERS = 2  # before a role can be constant in every one of them
_HALF = {"BF16": "bfloat16", "F16": "float16"}


def _precision(evidence: Evidence) -> Iterator[Outcome]:
    gains = dict(_gains(evidence))
    if not gains:
        yield Skipped(reason="no gain of a layer's norm could be read")
        return
    entries = evidence.checkpoint.entries
    coarse = {
        name: found
        for name, (found, offset) in gains.items()
        if offset and found.rounded and entries[name].dtype in _HALF
    }
    if coarse:
        names = tuple(coarse)
        dtype = _HALF[entries[names[0]].dtype]
        count, every = sum(found.rounded for found in coarse.values()), sum(found.elements for found in coarse.values())
        worst = max(found.most_rounded for found in coarse.values())
        yield Found(
            f"{in_words(names)}: {count:,} of {every:,} gains become others, by up to {worst:.2g} of their size, where "
            f"the 1 is added in {dtype}: it must be added in float32",
            only_layer(names),
            names,
            entries[names[0]].file.name,
            evidence={"rounded": count, "elements": every, "most": worst, "dtype": dtype},
        )
    yield from _truncated(evidence, gains)
    yield Checked(len(gains))


def _gains(evidence: Evidence) -> Iterator[tuple[str, tuple[GainMoments, float]]]:
    """The gains that were measured, each with what its kind adds."""
    for tensors in evidence.layers.values():
        for norm in tensors.norms.values():
            found = None if norm.gain is None else evidence.gains.get(norm.gain.name)
            if norm.gain is not None and found is not None:
                yield norm.gain.name, (found, norm_kind_named(norm.row.kind).offset)


def _truncated(evidence: Evidence, gains: dict[str, tuple[GainMoments, float]]) -> Iterator[Outcome]:
    """Gains in float32 that bfloat16 would hold as well, beside matrices that it would not."""
    entries, grains = evidence.checkpoint.entries, evidence.grains
    wide = [name for name in grains if entries[name].dtype == "F32" and len(entries[name].shape) > 1]
    if all(grains[name].narrow for name in wide):
        return
    narrow = {
        name
        for name, (found, _) in gains.items()
        if entries[name].dtype == "F32" and grains[name].narrow and found.most > found.least
    }
    for names in alike(sorted(narrow)).values():
        yield Found(
            f"{in_words(names)}: float32, but no number has a bit that bfloat16 lacks, where the matrices have them: "
            "the gains were rounded on the way",
            only_layer(names),
            names,
            entries[names[0]].file.name,
            evidence={"tensors": len(names), "zero_low_bits": 16},
        )


def _eps_mismatch(evidence: Evidence) -> Iterator[Outcome]:
    if evidence.captures is not None:
        return  # they are told of as every rule tells of them
    yield Undecidable(
        reason="no tensor of the checkpoint carries the epsilon that a norm was run with",
        would_decide="captured input and output of a norm (--captures), of its rows with the least energy",
    )


NORM_RULES: tuple[Rule, ...] = (
    Rule(
        "norm/role",
        "error",
        "proved",
        what="A norm that the family applies in a layer has no gain (or no bias) in any file, or another norm's.",
        hurts="It runs with a gain of one, or the name was given to a norm in another place.",
        detection="The family's norm names, role by role, are looked up for every layer. A warning: two gains of a "
        "layer are equal byte for byte, or those of one role are all zeros or all ones in every layer, where others "
        "are trained.",
        fooled_by="Two norms of one layer exchanged: both names are there. A norm that was never trained on purpose.",
        report="https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/4200",
        needs=("family",),
        look=_role,
    ),
    Rule(
        "norm/eps-mismatch",
        "error",
        "proved",
        what="A norm was run with another epsilon than the config declares.",
        hurts="Every row of small energy is scaled wrongly, most of all those of the embedding.",
        detection="From the rows of least energy of a captured norm, candidates are replayed against the rounding "
        "floor. Without captures it cannot be told: `config/eps-conflict` compares what is declared.",
        fooled_by="Rows so large that every candidate gives the same bits; then it is undecidable.",
        report="https://github.com/ggml-org/llama.cpp/pull/2384",
        needs=("family",),
        look=_eps_mismatch,
    ),
    Rule(
        "norm/precision",
        "note",
        "risk",
        what="Gains lose digits where they are stored, or where an engine adds the 1 in their own dtype.",
        hurts="Small, and everywhere: a gain of 1 + w with w in bfloat16 has more digits than bfloat16 holds.",
        detection="Gains in half precision are added to 1 both ways. Gains in float32 that bfloat16 would hold, beside "
        "matrices that it would not, were rounded once.",
        fooled_by="Gains that are short numbers on purpose.",
        report="https://github.com/google/gemma_pytorch/pull/37",
        needs=("family",),
        look=_precision,
    ),
)
