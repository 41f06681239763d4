"""What a comparison with several checkpoints says, in words and as the report has it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from glassblock.audit.merge_study import MergeStudy, Mixed, MixKind
from glassblock.audit.reference_map import layer_of_key
from glassblock.numerics.mixes import spherical_share
from glassblock.wire.audits import CoefficientRange, MergedLayer, MergeSource, MergeSummary, MixGroup

LISTED = 1_000
EXAMPLES = 3
STEADY = 0.005
"""Spread of a coefficient over all tensors within which it is called one number."""

_WORDS: dict[MixKind, str] = {
    "shared": "equal in all of them",
    "copy": "follow one of them alone",
    "mix": "a linear mix, but for rounding",
    "near": "near a linear mix, and none",
    "neither": "neither a copy nor a mix",
}


def merge_summary_of(study: MergeStudy) -> MergeSummary:
    """The comparison as the report has it."""
    return MergeSummary(
        references=study.names,
        words=_words(study),
        mapped=len(study.tensors),
        groups=tuple(_groups(study)),
        layers=tuple(_layers(study)),
        unmatched=study.unmatched[:LISTED],
        unread=study.unread[:LISTED],
    )


def _groups(study: MergeStudy) -> Iterator[MixGroup]:
    for kind, words in _WORDS.items():
        parents = {one.parents for one in study.tensors if one.kind == kind} if kind == "copy" else {None}
        for which in sorted(parents, key=str):
            some = [one for one in study.tensors if one.kind == kind and which in (None, one.parents)]
            if not some:
                continue
            told = words if which is None else f"equal to {_and(study.names[number] for number in which)}"
            examples = tuple(dict.fromkeys(one.name for one in some))[:EXAMPLES]
            yield MixGroup(
                kind=kind,
                words=told,
                tensors=len(some),
                coefficients=_ranges(study, some) if kind in {"mix", "near"} else (),
                largest_residual=max((one.mix.residual for one in some if one.mix is not None), default=None),
                examples=examples,
            )


def _layers(study: MergeStudy) -> Iterator[MergedLayer]:
    for layer in (None, *sorted({number for one in study.tensors if (number := layer_of_key(one.key)) is not None})):
        some = study.of_layer(layer)
        if not some:
            continue
        kinds = list(dict.fromkeys(one.kind for one in some if one.kind != "shared")) or ["shared"]
        followed = {number for one in some if one.kind in {"copy", "mix", "near"} for number in one.parents}
        yield MergedLayer(
            layer=layer,
            kind=kinds[0] if len(kinds) == 1 else "several",
            sources=tuple(
                MergeSource(reference=study.names[source.parent], layer=source.layer)
                for source in (() if layer is None else study.sources.get(layer, ()))
                if source.parent in followed or not followed
            ),
            tensors=len(some),
            coefficients=_ranges(study, [one for one in some if one.kind in {"mix", "near"}]),
            largest_residual=max((one.mix.residual for one in some if one.mix is not None), default=None),
        )


def _ranges(study: MergeStudy, some: Iterable[Mixed]) -> tuple[CoefficientRange, ...]:
    """Of matrices, where there are some: their many numbers tell a coefficient best."""
    values: dict[int, list[tuple[float, float]]] = {}
    for one in some:
        if one.mix is not None and len(one.mix.coefficients) == len(one.parents):
            for number, value, error in zip(one.parents, one.mix.coefficients, one.mix.errors, strict=True):
                values.setdefault(number, []).append((value, error))
    return tuple(
        CoefficientRange(
            reference=study.names[number],
            least=min(value for value, _ in found),
            most=max(value for value, _ in found),
            largest_error=max(error for _, error in found),
        )
        for number, found in sorted(values.items())
    )


def _words(study: MergeStudy) -> str:
    """The relation in a sentence."""
    told = [one for one in study.tensors if one.kind != "shared"]
    if not study.tensors:
        return "no tensor has a counterpart in any of them"
    if not told:
        return f"all {len(study.tensors)} tensors are equal in all of them"
    kinds = {one.kind for one in told}
    if kinds == {"copy"}:
        return _stacked(study) or f"every tensor is a copy of one of them: {_counts(study, told)}"
    mixed = sorted({number for one in told if one.kind == "mix" for number in one.parents})
    if kinds == {"mix"}:
        names = _and(study.names[number] for number in mixed)
        return _one_mix(study, told) or f"a linear mix of {names}, with other coefficients in places"
    if "mix" in kinds and not kinds & {"near", "neither"}:
        names = _and(study.names[number] for number in mixed)
        return f"a mix of {names} in places, a copy in others: {_counts(study, told)}"
    return f"not a linear mix throughout: {_counts(study, told)}"


def _counts(study: MergeStudy, told: Sequence[Mixed]) -> str:
    parts: list[str] = []
    for number, name in enumerate(study.names):
        count = sum(one.kind == "copy" and one.parents == (number,) for one in told)
        parts += [f"{count} from {name}"] if count else []
    for kind, word in (("mix", "mixed"), ("near", "nearly mixed"), ("neither", "neither")):
        count = sum(one.kind == kind for one in told)
        parts += [f"{count} {word}"] if count else []
    several = sum(one.kind == "copy" and len(one.parents) > 1 for one in told)
    return ", ".join([*parts, f"{several} equal in several"] if several else parts)


class _Run(NamedTuple):
    start: int
    parents: tuple[int, ...]
    shift: int


def _stacked(study: MergeStudy) -> str | None:
    """Layers of several models on top of each other, as runs; None where layers are mixed within themselves."""
    whose: dict[int, _Run] = {}
    for layer in study.sources:
        parents = {one.parents for one in study.of_layer(layer) if one.kind == "copy"}
        if len(parents) != 1:
            return None
        (only,) = parents
        source = next((source.layer for source in study.sources[layer] if source.parent == only[0]), layer)
        whose[layer] = _Run(layer, only, source - layer)
    if not whose:
        return None
    runs: list[str] = []
    for (parents, shift), of_run in groupby(whose.values(), key=lambda run: (run.parents, run.shift)):
        numbers = [run.start for run in of_run]
        where = _span(numbers[0], numbers[-1])
        there = f" ({_span(numbers[0] + shift, numbers[-1] + shift)} there)" if shift else ""
        runs.append(f"{where} from {_and(study.names[number] for number in parents)}{there}")
    if len({run.parents for run in whose.values()}) == 1 and all(run.shift == 0 for run in whose.values()):
        return None
    return f"layers stacked: {'; '.join(runs)}"


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _one_mix(study: MergeStudy, told: Sequence[Mixed]) -> str | None:
    """One set of coefficients for all tensors, or one t of SLERP; None where they vary."""
    mixes = [one.mix for one in told if one.mix is not None]
    if len({one.parents for one in told}) > 1 or len(mixes) < len(told):
        return None
    names = [study.names[number] for number in told[0].parents]
    # A coefficient of few numbers is known as well as its error says, and no better.
    shares = [spherical_share(mix, slack=STEADY + 4 * max(mix.errors)) for mix in mixes]
    turned = [share for share in shares if share is not None]
    if len(turned) * 2 > len(shares):
        low, high = min(turned), max(turned)
        t = f"t = {low:.3f}" if high - low <= 4 * STEADY else f"t from {low:.3f} to {high:.3f}"
        return f"a spherical mix (SLERP) of {names[0]} and {names[1]}, {t}"
    middles: list[float] = []
    for number in range(len(names)):
        weights = [1 / (mix.errors[number] ** 2 + 1e-18) for mix in mixes]
        values = [mix.coefficients[number] for mix in mixes]
        middle = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
        middles.append(middle)
        for mix in mixes:
            if abs(mix.coefficients[number] - middle) > STEADY + 6 * mix.errors[number]:
                return None
    told_sum = " + ".join(f"{middle:.3f} {name}" for middle, name in zip(middles, names, strict=True))
    return f"a linear mix throughout: {told_sum.replace('+ -', '- ')}"


def _and(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
