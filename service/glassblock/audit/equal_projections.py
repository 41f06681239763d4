"""Projections of one module that hold the same numbers: one was written under the names of both.

Gate and up, keys and values, queries and keys are projections of one input; training makes no two of them equal. The
hashes tell of tensors with names of their own. Of a fused tensor the lengths of its neurons say where the two halves
may be equal, and only such a one is read once more.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from glassblock.audit.evidence import Evidence
from glassblock.audit.names import in_words
from glassblock.audit.neuron_numbers import Key, NeuronNumbers, is_noise
from glassblock.audit.rule import Found
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layer_parts import Expert, LayerTensors, NetworkTensors
from glassblock.errors import CheckpointUnusable, UnknownCheckpoint
from glassblock.numerics.fused_layouts import split_groups
from glassblock.wire.audits import Fix

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_AS_LONG = 1e-5
"""Relative difference of two lengths that are equal but for the order in which squares were added in float32."""


class _Equal(NamedTuple):
    """Projections of one module that are equal."""

    layer: int
    expert: Expert
    names: tuple[str, ...]
    trained: bool


def equal_projections(evidence: Evidence) -> Iterator[Found]:
    """Projections of a module that are equal byte for byte, and not one number throughout.

    An error where the same ones differ in another layer or expert. Where they are equal wherever they are, it was
    meant so, or the converter did it everywhere: a warning of trained gates, else a note.
    """
    homes: dict[tuple[str, ...], int] = defaultdict(int)
    equal: dict[tuple[tuple[str, ...], tuple[str, ...]], list[_Equal]] = defaultdict(list)
    for layer, tensors in evidence.layers.items():
        for members, expert, trained in _modules(evidence, tensors):
            homes[_kinds(members)] += 1
            for names in _alike(evidence, members):
                equal[_kinds(members), _kinds(names)].append(_Equal(layer, expert, names, trained))
        for network in tensors.networks:
            if "fused" not in network.weights:
                continue
            names = (network.weights["fused"].name,)
            homes[_kinds(names)] += 1
            if (layer, network.expert) in evidence.equal_halves:
                trained = _is_trained(evidence, layer, network)
                equal[_kinds(names), _kinds(names)].append(_Equal(layer, network.expert, names, trained))
    for (home, _), found in equal.items():
        yield from _everywhere(found) if len(found) >= homes[home] else _somewhere(found)


def equal_halves(
    layers: Mapping[int, LayerTensors],
    numbers: Mapping[Key, NeuronNumbers],
    pieces: Callable[[TensorEntry], Iterator[Tensor]],
    lost: Callable[[CheckpointUnusable | UnknownCheckpoint], object],
) -> frozenset[Key]:
    """The networks whose fused tensor holds one projection twice.

    Args:
        layers: The tensors of every layer.
        numbers: The neurons of the networks that were weighed.
        pieces: Reads a weight once more, in whole rows.
        lost: Told why one cannot be read once more.
    """
    found: set[Key] = set()
    for layer, tensors in layers.items():
        for network in tensors.networks:
            known = numbers.get((layer, network.expert))
            if "fused" not in network.weights or known is None or not _may_be_equal(known):
                continue
            try:
                if _halves_are_equal(network, pieces):
                    found.add((layer, network.expert))
            except (CheckpointUnusable, UnknownCheckpoint) as error:
                lost(error)
    return frozenset(found)


def _may_be_equal(known: NeuronNumbers) -> bool:
    spread, loudest = known.spread, known.loudest
    gate, up = spread.get("gate"), spread.get("up")
    if gate is None or up is None or loudest is None or loudest.gate is None:
        return False
    return math.isclose(gate, up, rel_tol=1e-3) and math.isclose(loudest.gate, loudest.up, rel_tol=_AS_LONG)


def _halves_are_equal(network: NetworkTensors, pieces: Callable[[TensorEntry], Iterator[Tensor]]) -> bool:
    entry, layout = network.weights["fused"], network.fused_layout
    if layout is None:
        return False
    width, groups = entry.shape[-1], layout.groups
    if network.row.layouts[0] == "in_out":
        columns = (piece.view(-1, width).T for piece in pieces(entry))
        return all(torch.equal(*split_groups(piece, groups)) for piece in columns)
    if 2 * groups < entry.shape[0]:
        runs = [entry.part(number, 2 * groups) for number in range(2 * groups)]
        pairs = (zip(pieces(one), pieces(other), strict=True) for one, other in zip(runs[::2], runs[1::2], strict=True))
        return all(torch.equal(first, second) for pair in pairs for first, second in pair)
    kept: Tensor | None = None  # the first of two rows, where a piece ends between them
    for piece in pieces(entry):
        rows = piece.view(-1, width) if kept is None else torch.cat([kept, piece.view(-1, width)])
        even = len(rows) // 2 * 2
        if not torch.equal(rows[0:even:2], rows[1:even:2]):
            return False
        kept = rows[even:].clone()
    return True


def _modules(evidence: Evidence, tensors: LayerTensors) -> Iterator[tuple[tuple[TensorEntry, ...], Expert, bool]]:
    """Each module's projections, weights and biases apart; which expert it is, and whether it was trained."""
    used: set[str] = set()
    for network in tensors.networks:
        used.update(entry.name for part in (network.weights, network.biases) for entry in part.values())
        trained = _is_trained(evidence, tensors.layer, network)
        for part in (network.weights, network.biases):
            yield tuple(entry for role, entry in part.items() if role in {"gate", "up"}), network.expert, trained
    if tensors.attention is None:
        return
    homes: dict[tuple[str, str], list[TensorEntry]] = defaultdict(list)
    for part, entries in (("weight", tensors.attention.weights), ("bias", tensors.attention.biases)):
        for entry in entries.values():
            if entry.name not in used:
                homes[entry.name.rpartition(".")[0].rpartition(".")[0], part].append(entry)
    yield from ((tuple(members), None, False) for members in homes.values())


def _alike(evidence: Evidence, members: Iterable[TensorEntry]) -> Iterator[tuple[str, ...]]:
    groups: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for entry in members:
        values, digest = evidence.values.get(entry.name), evidence.digest_of(entry)
        if values is None or digest is None or not values.any_nonzero or values.least == values.most is not None:
            continue
        groups[entry.dtype, entry.shape, digest].append(entry.name)
    yield from (tuple(names) for names in groups.values() if len(names) > 1)


def _is_trained(evidence: Evidence, layer: int, network: NetworkTensors) -> bool:
    known = evidence.neurons.get((layer, network.expert))
    return known is not None and not is_noise(known)


def _kinds(members: Iterable[TensorEntry | str]) -> tuple[str, ...]:
    names = (member if isinstance(member, str) else member.name for member in members)
    return tuple(_NUMBER.sub("{}", name) for name in names)


def _told(first: _Equal, others: int) -> str:
    names = first.names
    expert = f" of expert {first.expert}" if isinstance(first.expert, int) and len(names) == 1 else ""
    if len(names) == 1:
        told = f"gate and up in {names[0]}{expert} are equal number for number"
    else:
        told = f"{in_words(names)} are equal byte for byte"
    return told if not others else f"{told}, as are those of {others} more expert{'s' if others > 1 else ''}"


def _somewhere(found: list[_Equal]) -> Iterator[Found]:
    for layer in dict.fromkeys(one.layer for one in found):
        here = [one for one in found if one.layer == layer]
        names = tuple(dict.fromkeys(name for one in here for name in one.names))
        expert = here[0].expert
        yield Found(
            f"layer {layer}: {_told(here[0], len(here) - 1)}, and differ elsewhere: one was written in place of the "
            "other",
            layer,
            names,
            expert=expert if isinstance(expert, int) and len(here) == 1 else None,
            evidence={"tensors": len(names), "experts": [one.expert for one in here if one.expert is not None]},
            fix=_again(names),
        )


def _everywhere(found: list[_Equal]) -> Iterator[Found]:
    every = tuple(dict.fromkeys(name for one in found for name in one.names))
    trained = any(one.trained for one in found)
    layers = {one.layer for one in found}
    where = f"in all {len(layers)} layers" if len(layers) > 1 else f"in layer {found[0].layer}"
    reason = "one was written in place of the other" if trained else "they are one on purpose, or were written so"
    yield Found(
        f"{_told(found[0], 0)}, and so {where}: {reason}",
        found[0].layer if len(layers) == 1 else None,
        every,
        evidence={"tensors": len(every)},
        fix=_again(every) if trained else None,
        level="warning" if trained else "note",
        certainty="statistical" if trained else "risk",
    )


def _again(names: tuple[str, ...]) -> Fix:
    return Fix(action="convert-again", description="Convert these projections again from the source.", tensors=names)
