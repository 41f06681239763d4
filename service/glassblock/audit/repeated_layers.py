"""Layers that hold the numbers of another: copied to deepen a model, or read twice by a conversion.

Only the hashes are compared. Layers are shared and repeated on purpose too, so this is never more than a note.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from glassblock.audit.evidence import Evidence
from glassblock.audit.rule import Found

_SHOWN = 3


class _Content(NamedTuple):
    """What one tensor of a layer holds."""

    name: str
    matrix: bool
    constant: bool
    weight: bool
    stored: tuple[str, tuple[int, ...], str]
    """Dtype, shape and hash: equal where two tensors are alike byte for byte."""


def repeated_layers(evidence: Evidence) -> Iterator[Found]:
    """One note that names all layers of which every matrix is another's; equal gains and biases alone are none."""
    contents = dict(_contents(evidence))
    kept: dict[str, set[object]] = defaultdict(set)
    for content in contents.values():
        for part, held in content.items():
            kept[part].add(held.stored)
    homes: dict[frozenset[object], list[int]] = defaultdict(list)
    for layer, content in contents.items():
        matrices = {part: held for part, held in content.items() if held.matrix}
        # Masks and tables are the same in every layer, zeros and ones in layers that were never filled.
        if any(not held.constant and (held.weight or len(kept[part]) > 1) for part, held in matrices.items()):
            homes[frozenset((part, held.stored) for part, held in matrices.items())].append(layer)
    groups = [layers for layers in homes.values() if len(layers) > 1]
    if not groups:
        return
    whole = all(_stored(contents[layer]) == _stored(contents[layers[0]]) for layers in groups for layer in layers)
    yield Found(
        f"layers {_in_words(groups)} are equal byte for byte in every {'tensor' if whole else 'matrix'}: the model "
        "shares or repeats them on purpose, or one was written in place of another",
        tensors=tuple(held.name for layers in groups for layer in layers[1:] for held in contents[layer].values()),
        evidence={"layers": sorted(layer for layers in groups for layer in layers), "equal": groups},
        level="note",
        certainty="risk",
    )


def _contents(evidence: Evidence) -> Iterator[tuple[int, dict[str, _Content]]]:
    """What each layer holds, by name within it; those of which some was not read are left out."""
    names = sorted(evidence.checkpoint.entries)
    for layer, tensors in evidence.layers.items():
        prefix = tensors.prefix
        own = takewhile(lambda name, of=prefix: name.startswith(of), islice(names, bisect_left(names, prefix), None))
        weights = {entry.name for network in tensors.networks for entry in network.weights.values()}
        found = {name.removeprefix(prefix): _content(evidence, name, weight=name in weights) for name in own}
        known = {part: content for part, content in found.items() if content is not None}
        if len(known) == len(found):
            yield layer, known


def _content(evidence: Evidence, name: str, *, weight: bool) -> _Content | None:
    entry, values, digest = evidence.checkpoint.entries[name], evidence.values.get(name), evidence.digests.get(name)
    if values is None or digest is None:
        return None
    constant = not values.any_nonzero or values.least == values.most is not None
    return _Content(name, len(entry.shape) > 1, constant, weight, (entry.dtype, entry.shape, digest))


def _stored(content: dict[str, _Content]) -> dict[str, object]:
    return {part: held.stored for part, held in content.items()}


def _in_words(groups: Sequence[Sequence[int]]) -> str:
    """`5 and 6`, or `8 and 24, 9 and 25, 10 and 26 (and 13 more such)`."""
    told = ", ".join(_and(layers) for layers in groups[:_SHOWN])
    return told if len(groups) <= _SHOWN else f"{told} (and {len(groups) - _SHOWN} more such)"


def _and(layers: Sequence[int]) -> str:
    return f"{', '.join(map(str, layers[:-1]))} and {layers[-1]}"
