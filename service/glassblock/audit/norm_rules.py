"""Rules about norms: gains that are absent or another norm's, their precision, and the epsilon that was applied."""

from collections.abc import Iterator

from glassblock.audit.evidence import Evidence, GainMoments
from glassblock.audit.names import alike, in_words, only_layer
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.audit.tensor_rules import ENTERING, misfit_look
from glassblock.numerics.norms import NormArithmetic, norm_kind_named
from glassblock.wire.audits import Fix, Skipped, Undecidable

_FOLDED = 0.25
"""Least stored gain of 1 + w from which the 1 seems to be in it: of trained ones some are near 0, or below."""

_FEWEST_GAINS = 4
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
    for name, (found, kind) in _kinds(evidence):
        yield name, (found, kind.offset)


def _kinds(evidence: Evidence) -> Iterator[tuple[str, tuple[GainMoments, NormArithmetic]]]:
    for tensors in evidence.layers.values():
        for norm in tensors.norms.values():
            found = None if norm.gain is None else evidence.gains.get(norm.gain.name)
            if norm.gain is not None and found is not None:
                yield norm.gain.name, (found, norm_kind_named(norm.row.kind))


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


def _role(evidence: Evidence) -> Iterator[Outcome]:
    yield from misfit_look("missing-norm")(evidence)
    yield from _copied_gains(evidence)
    yield from _constant_role(evidence)


def _copied_gains(evidence: Evidence) -> Iterator[Found]:
    """Two norms of a layer whose gains are equal byte for byte, and not one number throughout."""
    for layer, tensors in evidence.layers.items():
        alike_gains: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
        for norm in tensors.norms.values():
            moments = None if norm.gain is None else evidence.gains.get(norm.gain.name)
            digest = None if norm.gain is None else evidence.digests.get(norm.gain.name)
            if norm.gain is not None and moments is not None and digest and moments.most > moments.least:
                alike_gains.setdefault((norm.gain.dtype, norm.gain.shape, digest), []).append(norm.gain.name)
        for names in alike_gains.values():
            if len(set(names)) > 1:
                yield _suspect(f"layer {layer}: {in_words(tuple(names))} are equal byte for byte", layer, tuple(names))


def _constant_role(evidence: Evidence) -> Iterator[Found]:
    """A role whose gains are all zeros, or all ones, in every layer, where those of another role are trained."""
    roles: dict[str, dict[str, GainMoments]] = {}
    for tensors in evidence.layers.values():
        for role, norm in tensors.norms.items():
            moments = None if norm.gain is None else evidence.gains.get(norm.gain.name)
            if norm.gain is not None and moments is not None:
                roles.setdefault(role, {})[norm.gain.name] = moments
    constant = {role: gains for role, gains in roles.items() if all(one.least == one.most for one in gains.values())}
    if constant.keys() == roles.keys():
        return
    entering = roles.keys() & ENTERING
    if entering <= constant.keys():  # multiplied into the matrices behind them, as before a rotation
        constant = {role: gains for role, gains in constant.items() if role not in entering}
    for gains in constant.values():
        names = tuple(gains)
        stored = {evidence.values[name].most for name in names if name in evidence.values}
        if len(names) > 1 and stored in ({0.0}, {1.0}):
            told = f"{in_words(names)}: every gain is {stored.pop():g} in all layers, where other norms are trained"
            yield _suspect(told, only_layer(names), names)


def folded_gains(evidence: Evidence) -> Iterator[Outcome]:
    """Gains of 1 + w of which none is near 0: the 1 may be in them already, so that it is added twice.

    The least of all gains tells, not a mean: gains grow large under either convention. Where the models' own code
    begins at w = 1, as transformers does in Nemotron, nothing tells.
    """
    entries = evidence.checkpoint.entries
    kinds = _kinds(evidence)
    found = {
        name: moments.least - kind.offset
        for name, (moments, kind) in kinds
        if (kind.offset, kind.initial) == (1.0, 0.0)
    }
    if len(found) < _FEWEST_GAINS or evidence.reference is not None or evidence.captures is not None:
        return
    yield Checked(len(found))
    least = min(found.values())
    if least >= _FOLDED:
        names = tuple(found)
        yield Found(
            f"{in_words(names)}: the family adds 1 to its gains, but the least of all that are stored is {least:.3g}, "
            "where some should be near 0: the 1 may be in them already",
            only_layer(names),
            names,
            entries[names[0]].file.name,
            evidence={"least": least, "most": max(evidence.gains[name].most for name in names) - 1, "offset": 1.0},
            fix=Fix(action="convert-again", description="Convert again without adding 1, or take it away."),
            level="warning",
            certainty="statistical",
        )


def _suspect(told: str, layer: int | None, names: tuple[str, ...]) -> Found:
    return Found(
        f"{told}: the gain of one role may have been written under the name of another, or not at all",
        layer,
        names,
        evidence={"tensors": len(names)},
        fix=Fix(action="convert-again", description="Write each norm under the name of its own role.", tensors=names),
        level="warning",
        certainty="statistical",
    )


def _eps_mismatch(evidence: Evidence) -> Iterator[Outcome]:
    if evidence.captures is not None:
        return  # they are told of as every rule tells of them
    yield Undecidable(
        reason="no tensor of the checkpoint carries the epsilon that a norm was run with",
        would_decide="captured input and output of a norm (--captures), of its rows with the least energy; another "
        "engine's config (--against) or the original (--reference) shows a difference",
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
        looks_at="layers",
        look=_role,
        tells_before_tensors=True,
        tells_after="layer",
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
        looks_at="layers",
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
        looks_at="layers",
        look=_precision,
        tells_after="layer",
    ),
)
