"""Rules about quantised weights: codes without their scale, and codes that lie there as if they were the weights."""

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

from glassblock.audit.evidence import Evidence
from glassblock.audit.grain import Grid
from glassblock.audit.names import alike, in_words, only_layer
from glassblock.audit.rule import Checked, Found, Outcome, Rule
from glassblock.audit.tensor_rules import misfit_look
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.fitting import LayerFault
from glassblock.checkpoint.quantisation import declared_quantisation
from glassblock.checkpoint.stored_entries import StoredEntry
from glassblock.checkpoint.stored_weights import is_read, scale_beside
from glassblock.wire.audits import Fix, Skipped

_TOPS: Mapping[Grid, float] = MappingProxyType({"e2m1": 6.0, "e4m3": 448.0, "e4m3fnuz": 240.0, "e5m2": 57344.0})
"""The greatest number of each format. Scales are chosen so that the greatest weight becomes it."""

_CODES: Mapping[str, float] = MappingProxyType(
    {"F8_E4M3": 448.0, "F8_E5M2": 57344.0, "F8_E4M3FNUZ": 240.0, "F8_E5M2FNUZ": 57344.0}
)
_INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
_LEAST_NUMBERS = 256
_LEAST_WHOLE = 7.0  # of symmetric codes of 4 bits
_MOST_WHOLE = 255.0

_AGAIN = Fix(action="convert-again", description="Convert again, with each weight multiplied by its scale.")


def _scale_missing(evidence: Evidence) -> Iterator[Outcome]:
    yield from misfit_look("scale-missing")(evidence)
    beside = {
        entry.dtype
        for tensors in evidence.layers.values()
        for network in tensors.networks
        for entry in network.weights.values()
        if isinstance(entry, StoredEntry) and entry.stored is not None
    }
    entries = evidence.checkpoint.entries
    declared = declared_quantisation(evidence.checkpoint.config)
    # Of a method that is not read nobody here knows what its scales are called, nor whether it has any.
    bare = [
        (fault, entry)
        for fault in evidence.misfits
        if fault.kind == "quantised"
        and (declared is None or is_read(declared))
        and (entry := entries.get(fault.tensor)) is not None
        and scale_beside(entries, entry.name) is None
    ]
    groups = alike(entries) if bare else {}
    same = {name: names for names in groups.values() for name in names}
    ordered = sorted(entries) if bare and declared is None else []
    for fault, entry in bare:
        others = [entries[name].dtype for name in same[entry.name] if name != entry.name]
        if entry.dtype in _CODES:
            scaled = entry.dtype in beside
            yield from _codes_alone(evidence, fault, entry, others if declared is None else [], scaled=scaled)
        elif entry.dtype in _INTEGERS and len(entry.shape) > 1 and declared is None:
            yield _integers_alone(fault, entry, others, ordered)


def _codes_alone(
    evidence: Evidence, fault: LayerFault, entry: TensorEntry, others: list[str], *, scaled: bool
) -> Iterator[Outcome]:
    """Numbers of 8 bits without a scale: a plain cast, unless others have scales, or are wide in the other layers."""
    values, facts = evidence.values.get(entry.name), {"dtype": entry.dtype}
    fix = Fix(action="convert-again", description=fault.hint, tensors=(entry.name,))
    alone = Found(fault.message, fault.layer, (entry.name,), entry.file.name, evidence=facts, fix=fix)
    if scaled:
        yield replace(alone, message=f"{fault.message}, while other weights of that dtype have one")
        return
    wide = [dtype for dtype in others if dtype in FLOAT_CODES]
    if len(wide) > len(others) - len(wide) + 1:  # a cast on purpose reaches half of the layers at least
        yield replace(alone, message=f"{fault.message}, while {_same_weight(wide)}")
    elif values is not None and (most := values.largest) == _CODES[entry.dtype]:
        told = f"its greatest number is {most:g}, the greatest of the format, which is what scaling makes of a weight"
        yield replace(
            alone,
            message=f"{fault.message}; {told}",
            evidence=facts | {"most": most},
            level="warning",
            certainty="statistical",
        )


def _integers_alone(fault: LayerFault, entry: TensorEntry, others: list[str], ordered: list[str]) -> Found:
    """Integers where a weight should be, and nothing that says how large one is: no cast of a weight gives that."""
    wide = [dtype for dtype in others if dtype in FLOAT_CODES]
    # What lies beside the codes under an unknown name may be their scale.
    module = entry.name.removesuffix(".weight")
    near = itertools.takewhile(
        lambda name: name.startswith(module), itertools.islice(ordered, bisect_left(ordered, module), None)
    )
    unknown = tuple(name for name in near if name not in {entry.name, f"{module}.bias", f"{module}_bias"})
    sure = bool(wide) and not unknown
    told = f", while {_same_weight(wide)}" if wide else ""
    told += f"; beside it lies {in_words(unknown)}" if unknown else ""
    return Found(
        f"{fault.message}, and the config declares no quantisation{told}",
        fault.layer,
        (entry.name,),
        entry.file.name,
        evidence={"dtype": entry.dtype},
        fix=Fix(action="convert-again", description=fault.hint, tensors=(entry.name,)),
        level="error" if sure else "warning",
        certainty="proved" if sure else "statistical",
    )


def _same_weight(dtypes: list[str]) -> str:
    kinds = " or ".join(sorted(set(dtypes)))
    return f"the same weight is {kinds} in " + (
        "the other layer" if len(dtypes) == 1 else f"{len(dtypes)} other layers"
    )


def _unapplied(evidence: Evidence) -> Iterator[Outcome]:
    grids = {name: told for name in evidence.grains if (told := _grid_of(evidence, name)) is not None}
    for names in alike(grids).values():
        grid, most = grids[names[0]]
        form = "whole numbers" if grid == "integer" else f"numbers of the format {grid}"
        first = evidence.checkpoint.entries[names[0]]
        yield Found(
            f"{in_words(names)}: called {first.dtype}, but all numbers are {form} up to {most:g}: codes that were "
            "never multiplied by their scale",
            only_layer(names),
            names,
            first.file.name,
            evidence={"grid": grid, "most": most, "dtype": first.dtype},
            fix=_AGAIN,
        )
    yield Checked(sum(len(evidence.checkpoint.entries[name].shape) > 1 for name in evidence.grains))
    quantised = sorted(name for name in evidence.checkpoint.entries if name not in evidence.grains)
    if quantised:
        yield Skipped(reason=f"not stored as plain numbers, or not read: {in_words(tuple(quantised))}")


def _grid_of(evidence: Evidence, name: str) -> tuple[Grid, float] | None:
    """The grid that a matrix lies on and reaches the end of; None where it does not."""
    values, entry = evidence.values[name], evidence.checkpoint.entries[name]
    most = values.largest
    if len(entry.shape) < 2 or entry.elements < _LEAST_NUMBERS or most is None:
        return None
    grids = evidence.grains[name].grids
    for grid, top in _TOPS.items():
        if grid in grids and most == top:
            return grid, most
    return ("integer", most) if "integer" in grids and _LEAST_WHOLE <= most <= _MOST_WHOLE else None


QUANTISATION_RULES: tuple[Rule, ...] = (
    Rule(
        "quant/scale-missing",
        "error",
        "proved",
        what="A quantised weight lacks a scale or a zero point, or has one of another shape or dtype.",
        hurts="The codes are taken for the weights, hundreds of times too large, or the scale is made up.",
        detection="Beside each tensor of codes the names that its form needs are looked up, and their dtypes and "
        "shapes compared with the blocks that the config declares. Codes of 8 bits without any scale, in a file that "
        "declares none, are a finding where others have scales or where most other layers hold the weight wide, and a "
        "warning where they reach the end of the format. Integers without a scale are a finding where other layers "
        "hold the weight wide, else a warning. Nothing is found where a scale lies beside under another "
        "name that writers use, or where the declared method is not read: that is listed as left out.",
        fooled_by="Codes of 8 bits that were cast without a scale on purpose, and that happen to reach the end.",
        report="https://github.com/unslothai/unsloth/issues/6200",
        needs=("family",),
        looks_at="tensors",
        look=_scale_missing,
        tells_before_tensors=True,
    ),
    Rule(
        "quant/scale-unapplied",
        "warning",
        "statistical",
        what="A matrix called float holds the codes of a quantised weight.",
        hurts="Every weight is hundreds or thousands of times too large: perplexity in the millions.",
        detection="Every number lies on the grid of an 8-bit or 4-bit format and the greatest is the format's own "
        "(448, 240, 57,344, 6), or all are whole numbers up to at least 7. A trained weight leaves each grid at once.",
        fooled_by="A table of whole numbers that is meant so. Codes that were rounded again on the way.",
        report="https://github.com/ModelCloud/GPTQModel/pull/2827",
        looks_at="layers",
        look=_unapplied,
        tells_after="tensor",
    ),
)
