"""A checkpoint beside a reference: which tensors are equal, which only look different, which compute something else.

Tensors meet by what they are in the model, then by the hash of their bytes. Equal bytes end the question; otherwise
both are read in pieces, and a network whose numbers differ is looked for under other orders of its rows. Two
pieces are in memory at a time; of a weight stored the other way round, or quantised, the whole matrix.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping

from glassblock.audit.readable import unreadable
from glassblock.audit.reference_bytes import ByteEquality
from glassblock.audit.reference_changes import changed_ranks, changes_in_words
from glassblock.audit.reference_experts import explain_moved_experts
from glassblock.audit.reference_explanations import explain_network, judge_part, tell_norm_roles
from glassblock.audit.reference_map import (
    Key,
    Part,
    expert_of_key,
    heads_of,
    is_of_network,
    known_alike,
    layer_of_key,
    parts_of,
)
from glassblock.audit.reference_pairs import Pairs
from glassblock.audit.reference_relation import CLOSE, LEAST_ELEMENTS, relation_of
from glassblock.audit.reference_rotary import explain_rotary_order
from glassblock.audit.reference_types import ReferenceStudy
from glassblock.checkpoint.layer_map import resolve_layers
from glassblock.checkpoint.layer_parts import Expert, LayerTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter

Tell = Callable[[str], object]


def reference_study(
    checkpoint: Checkpoint,
    reference: Checkpoint,
    *,
    name: str,
    layers: Mapping[int, LayerTensors],
    digests: Mapping[str, str],
    unread: Mapping[str, str],
    tell: Tell,
) -> ReferenceStudy:
    """Compare every tensor of a checkpoint with its counterpart.

    Args:
        checkpoint: The checkpoint.
        reference: The other one.
        name: What the other one is called.
        layers: The checkpoint's layers.
        digests: xxh3_128 of its tensors' bytes, where known.
        unread: Its tensors that cannot be read.
        tell: Told what comes next; may raise to stop.

    Raises:
        Whatever `tell` raises. What cannot be read is in the study.
    """
    before = checkpoint
    checkpoint, reference = known_alike(checkpoint, reference)
    layers = layers if checkpoint is before else resolve_layers(checkpoint)[0]
    their_layers = resolve_layers(reference)[0]
    # Where of one of them nothing is known but names, names meet, and bytes.
    known_both = bool(layers and their_layers)
    mine = parts_of(checkpoint, layers if known_both else {}, heads=heads_of(reference))
    its = parts_of(reference, their_layers if known_both else {}, heads=heads_of(checkpoint))
    their_broken = unreadable(reference)
    known = {
        (tensor, entry.start, entry.stop): digest
        for tensor, digest in digests.items()
        if (entry := checkpoint.entries.get(tensor)) is not None
    }
    meter = ReadMeter()
    pairs = Pairs(ByteEquality(known, meter), meter)
    pairs.unread += [f"{tensor}: {reason}" for tensor, reason in sorted(their_broken.items())]
    both = mine.keys() & its.keys()
    pairs.lost |= {key for key in both if mine[key].name in unread or its[key].name in their_broken}
    mine = {key: part for key, part in mine.items() if key not in pairs.lost and part.name not in unread}
    its = {key: part for key, part in its.items() if key not in pairs.lost and part.name not in their_broken}
    _pair_by_bytes(pairs.bytes_of, mine, its)
    for layer in (None, *sorted({number for key in mine if (number := layer_of_key(key)) is not None})):
        tell("the reference" if layer is None else f"layer {layer} in the reference")
        _compare(
            pairs,
            layer,
            {key: part for key, part in mine.items() if layer_of_key(key) == layer},
            {key: part for key, part in its.items() if layer_of_key(key) == layer},
        )
    family = reference.family
    return _finished(pairs, name, None if family is None else family.name, mine, its)


def _pair_by_bytes(bytes_of: ByteEquality, mine: dict[Key, Part], its: dict[Key, Part]) -> None:
    """Give tensors whose part in the model is not known the key of one with the same bytes."""
    loose = [key for key in mine if key not in its]
    free = [key for key in its if key not in mine]
    by_size: dict[tuple[str, int], list[Key]] = defaultdict(list)
    for key in free:
        by_size[its[key].entry.dtype, its[key].entry.bytes].append(key)
    for key in loose:
        part = mine[key]
        for other in by_size.get((part.entry.dtype, part.entry.bytes), ()):
            if (
                (_nameless(key) or _nameless(other))
                and part.plain
                and its[other].plain
                and bytes_of.equal(part, its[other])
            ):
                its[key] = its.pop(other)
                by_size[part.entry.dtype, part.entry.bytes].remove(other)
                break


def _compare(pairs: Pairs, layer: int | None, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
    """One layer, or what lies outside of all."""
    if layer is not None:
        _compare_networks(pairs, layer, mine, its)
    for key, part in mine.items():
        if not is_of_network(key) and key in its:
            pairs.meet(key, part, its[key])
    explain_rotary_order(pairs, mine, its)
    tell_norm_roles(pairs, mine, its)
    for key in (key for key in mine if key in its):
        if key in pairs.measured and key not in pairs.same:
            judge_part(pairs, key, mine[key], its[key])
        elif key in pairs.misshapen:
            shapes = f"{list(mine[key].stored_shape)} here and {list(its[key].stored_shape)} there"
            pairs.tell("shape", f"shape {shapes}", key, mine[key], its[key])


def _compare_networks(pairs: Pairs, layer: int, mine: Mapping[Key, Part], its: Mapping[Key, Part]) -> None:
    """The networks of a layer: those that are not equal are looked for under other orders."""
    homes: dict[Expert, list[Key]] = defaultdict(list)
    for key in mine:
        if is_of_network(key) and key in its:
            homes[expert_of_key(key)].append(key)
    # Every part is compared, also after one that differs.
    equal: dict[Expert, list[bool]] = {
        expert: [pairs.meet(key, mine[key], its[key]) for key in keys] for expert, keys in homes.items()
    }
    differing: list[Expert] = [expert for expert, parts in equal.items() if not all(parts)]
    moved = explain_moved_experts(pairs, layer, mine, its, differing)
    for expert in differing:
        if expert not in moved:
            explain_network(pairs, layer, expert, mine, its)


def _finished(
    pairs: Pairs, name: str, family: str | None, mine: Mapping[Key, Part], its: Mapping[Key, Part]
) -> ReferenceStudy:
    """The whole comparison, with its relation."""
    met = pairs.mapped | pairs.lost
    only_here = tuple(sorted({part.name for key, part in mine.items() if key not in met}))
    covered = {its[key].name for key in met if key in its}
    only_there = tuple(sorted({part.name for part in its.values()} - covered))
    lacking = [name for name in only_there if not _is_buffer(name)] + [
        name for name in only_here if not _is_buffer(name)
    ]
    matrices = [key for key in pairs.mapped if mine[key].shape[1] > 1]
    layers = len({layer_of_key(key) for key in matrices} - {None})
    changed = [found for found in pairs.differences if found.kind == "differs" and (found.cosine or 0.0) >= CLOSE]
    ranks = changed_ranks(changed, mine, its, pairs.meter)
    relation, words = relation_of(
        pairs.differences,
        mapped=len(pairs.mapped),
        matrices=len(matrices),
        misshapen=sum(key in pairs.misshapen for key in matrices),
        layers=layers,
        lacking=len(lacking),
        unread=len(pairs.lost),
        changes=changes_in_words(changed, ranks, mapped=len(pairs.mapped), layers=layers),
    )
    differences = () if relation in ("other-model", "unanswered") else tuple(pairs.differences)
    profile: dict[int, float] = {}
    for key, likeness in pairs.measured.items():
        layer = layer_of_key(key)
        if layer is not None and likeness.elements >= LEAST_ELEMENTS and not math.isnan(likeness.cosine):
            profile[layer] = min(profile.get(layer, 1.0), likeness.cosine)
    return ReferenceStudy(
        name=name,
        family=family,
        relation=relation,
        words=words,
        mapped=len(pairs.mapped),
        same=len(pairs.same),
        differences=differences,
        only_here=only_here,
        only_there=only_there,
        unread=tuple(pairs.unread),
        profile=tuple(sorted(profile.items())),
    )


def _nameless(key: Key) -> bool:
    return key[0] == "tensor" or (len(key) == 4 and key[2] == "tensor")


def _is_buffer(name: str) -> bool:
    """Whether a tensor is made by the models' code from the config, so that its absence changes nothing."""
    return name.endswith(("inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "position_ids", ".attn.bias"))
