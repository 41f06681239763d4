"""Mistakes as patches: what a self-test plants in a checkpoint, in memory, to see what an audit of it would find.

Each row says which rules are meant for it. Rows for mistakes that no rule of this version looks for are kept: a
measure of what is missed counts them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from glassblock.audit.gate_fixes import exchanged_rows, relaid_rows, swap_of
from glassblock.audit.names import only_layer
from glassblock.audit.rotary_plans import rotary_plans
from glassblock.checkpoint.changes import Add, Cast, InHeads, Put, Reorder, Shuffle, Transpose
from glassblock.checkpoint.config import declared_flags, find
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.fitting import trunk_prefix
from glassblock.checkpoint.layer_map import resolve_layer, resolve_layers
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import final_norm, head_entry
from glassblock.checkpoint.patches import Alter, Declare, Drop, Edit, LoseEnd, LoseFile, Patch, Rename, Stand
from glassblock.checkpoint.settings import eps_of, tied_of
from glassblock.errors import GlassblockError
from glassblock.numerics.fused_layouts import RowLayout


@dataclass(frozen=True)
class Planted:
    """A patch, and the layers that it breaks; none for a mistake of no layer."""

    patch: Patch
    layers: tuple[int, ...] = ()


Plant = Callable[[Checkpoint, Sequence[int]], Planted | str]
"""A checkpoint and the layers to plant in, to a patch; or, in words, why the mistake cannot be made there."""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        name: In a word.
        description: What goes wrong where it happens.
        rules: Rules of the audit that are meant for it, of this version or a later one.
        plant: How it is made.
        decided_by: What would tell it, where weights and config cannot: then silence is no fault of a rule.
    """

    name: str
    description: str
    rules: tuple[str, ...]
    plant: Plant
    decided_by: str | None = None


def plant(mistake: Mistake, checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    """The patch that makes a mistake; or, in words, why it cannot be made there."""
    try:
        return mistake.plant(checkpoint, layers)
    except GlassblockError as error:
        return error.message


def _middle(layers: Sequence[int]) -> int:
    return layers[len(layers) // 2]


def _layer(checkpoint: Checkpoint, layer: int) -> LayerTensors:
    return resolve_layer(checkpoint, layer)[0]


def _swaps(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    """Gate and up exchanged: by name where they are two tensors, by halves where they are one; in every expert."""
    names: dict[str, str] = {}
    edits: list[Edit] = []
    planted: list[int] = []
    for layer in layers:
        found = False
        for network in _layer(checkpoint, layer).networks:
            weights = network.weights
            if "gate" in weights and "up" in weights and weights["gate"].name in checkpoint.entries:
                names |= swap_of(checkpoint, weights["gate"].name, weights["up"].name).names
                found = True
            elif network.fused_layout is not None and weights["fused"].name in checkpoint.entries:
                exchange = exchanged_rows(network.fused_rows, network.fused_layout)
                edits.append(Alter(weights["fused"].name, (_on_rows(network, exchange),)))
                found = True
        planted.extend([layer] if found else [])
    if not planted:
        return "no network here has a gate"
    # Slices of one stack name it once each.
    unique = list(dict.fromkeys(edits))
    return Planted((*unique, *([Rename(MappingProxyType(names))] if names else [])), tuple(planted))


def _on_rows(network: NetworkTensors, change: Reorder) -> Reorder:
    """A change of the rows of a fused weight, on the axis that has them."""
    return replace(change, axis=-1 if network.row.layouts[0] == "in_out" else -2)


def _one_swap(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    return _swaps(checkpoint, (_middle(layers),))


def _interleaved(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    for network in _layer(checkpoint, layer).networks:
        entry, declared, rows = network.weights.get("fused"), network.fused_layout, network.fused_rows
        if entry is not None and declared is not None and entry.name in checkpoint.entries:
            in_turn = relaid_rows(rows, declared, RowLayout(rows // 2))
            return Planted((Alter(entry.name, tuple(_on_rows(network, change) for change in in_turn)),), (layer,))
    return "gate and up are not one tensor here"


def _rotary_order(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    plans, unasked = rotary_plans(checkpoint, resolve_layers(checkpoint)[0], ())
    edits: list[Edit] = []
    for plan in plans:
        half = plan.turned.rows // 2
        change = InHeads(-2, plan.heads.width, (half, 2) if plan.turned.paired else (2, half), plan.fused_heads)
        edits += [Alter(entry.name, (change,)) for entry in plan.entries if entry.name in checkpoint.entries]
    return Planted(tuple(edits)) if edits else next(iter(unasked.values()), "queries and keys are stored as codes")


def _eps(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    config, family = checkpoint.config, checkpoint.family
    if config is None or family is None:
        return "there is no config"
    edits: list[Edit] = []
    for norm in family.norms:
        stated = find(config, family, norm.eps.keys)
        if stated is not None:
            edits.append(Declare(stated.key, eps_of(config, family, norm.eps).value / 10))
    return Planted(tuple(dict.fromkeys(edits))) if edits else "no epsilon is declared"


def _gains(checkpoint: Checkpoint, layers: Sequence[int], value: float) -> Planted | str:
    gains = [
        norm.gain.name
        for layer in layers
        for norm in _layer(checkpoint, layer).norms.values()
        if norm.gain is not None and norm.gain.dtype in FLOAT_CODES
    ]
    if not gains:
        return "no norm here has a gain"
    return Planted(tuple(Alter(name, (Add(value),)) for name in gains), tuple(layers))


def _mispaired(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    for network in _layer(checkpoint, layer).networks:
        entry = network.weights.get("down")
        if entry is not None and entry.name in checkpoint.entries and entry.dtype in FLOAT_CODES:
            axis = -2 if network.row.layouts[1] == "in_out" else -1
            return Planted((Alter(entry.name, (Shuffle(axis, seed=0),)),), (layer,))
    return "no projection back is stored as plain numbers"


def _matrices(checkpoint: Checkpoint, layer: int) -> Iterator[TensorEntry]:
    prefix = _layer(checkpoint, layer).prefix
    for name, entry in checkpoint.entries.items():
        if name.startswith(prefix) and len(entry.shape) == 2 and entry.dtype in FLOAT_CODES:
            yield entry


def _square(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    for entry in _matrices(checkpoint, layer):
        if entry.shape[0] == entry.shape[1] > 1:
            return Planted((Alter(entry.name, (Transpose(),)),), (layer,))
    return "no matrix is square"


def _oblong(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    for network in _layer(checkpoint, layer).networks:
        entry = network.weights.get("down")
        if entry is None or entry.name not in checkpoint.entries or entry.dtype not in FLOAT_CODES:
            continue
        if len(entry.shape) == 2 and entry.shape[0] != entry.shape[1]:
            return Planted((Alter(entry.name, (Transpose(),)),), (layer,))
    return "no projection back is oblong"


def _twice(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    others = [other for other in checkpoint.layer_indices if other != layer]
    if not others:
        return "there is one layer only"
    one, other = _layer(checkpoint, layer).prefix, _layer(checkpoint, others[-1]).prefix
    alike = [
        (name, other + name[len(one) :])
        for name, entry in checkpoint.entries.items()
        if name.startswith(one)
        and (source := checkpoint.entries.get(other + name[len(one) :])) is not None
        and (source.shape, source.dtype) == (entry.shape, entry.dtype)
    ]
    return Planted(tuple(Stand(name, source) for name, source in alike), (layer,)) if alike else "no layers are alike"


def _not_a_number(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    for entry in _matrices(checkpoint, layer):
        return Planted((Alter(entry.name, (Put(entry.elements // 2, float("nan")),)),), (layer,))
    return "no matrix is stored as plain numbers"


def _cut_off(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    last = max(checkpoint.entries.values(), key=lambda entry: entry.stop, default=None)
    return "there is no tensor" if last is None else Planted((LoseEnd(last.file.name, 1),))


def _no_shard(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    shards = tuple(checkpoint.containers)
    return Planted((LoseFile(shards[len(shards) // 2]),)) if len(shards) > 1 else "all weights lie in one file"


def _no_tensor(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    for network in _layer(checkpoint, layer).networks:
        entry = network.weights.get("down")
        if entry is not None and entry.name in checkpoint.entries:
            return Planted((Drop(entry.name),), (layer,))
    return "no network here has a projection back"


def _no_final_norm(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    norm, _faults = final_norm(checkpoint)
    return "the family has none" if norm is None or norm.gain is None else Planted((Drop(norm.gain.name),))


def _norms_exchanged(checkpoint: Checkpoint, layers: Sequence[int]) -> Planted | str:
    layer = _middle(layers)
    gains = [norm.gain for norm in _layer(checkpoint, layer).norms.values() if norm.gain is not None]
    for first, second in pairwise(gains):
        if first.shape == second.shape and only_layer((first.name, second.name)) is not None:
            names = MappingProxyType({first.name: second.name, second.name: first.name})
            return Planted((Rename(names),), (layer,))
    return "no two norms of a layer are alike"


def _tie(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    config, family = checkpoint.config, checkpoint.family
    if config is None or family is None or not family.tied.keys:
        return "the family has no flag for it"
    if checkpoint.trunk is None or checkpoint.trunk.head is None:
        return "the family has no output head"
    tied = tied_of(config, family).value
    stated = [key for name in family.tied.keys for key in declared_flags(config, name)] or [family.tied.keys[0]]
    if tied and head_entry(checkpoint) is not None:
        return "the head is tied and stored as well, so the flag changes nothing"
    return Planted(tuple(Declare(key, value=not tied) for key in stated))


def _fewer_layers(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    config, family = checkpoint.config, checkpoint.family
    if config is None or family is None or checkpoint.declared_layers is None:
        return "there is no config"
    stated = find(config, family, family.sizes["layers"].keys)
    if stated is None or not isinstance(stated.value, int) or stated.value < 2:
        return "no number of layers is declared"
    return Planted((Declare(stated.key, stated.value - 1),))


def _half_precision(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    wide = [entry.name for entry in checkpoint.entries.values() if entry.dtype in {"BF16", "F32"}]
    return Planted(tuple(Alter(name, (Cast("F16"),)) for name in wide)) if wide else "nothing is stored wider"


def _no_head(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    head = head_entry(checkpoint)
    return "the head is not stored" if head is None else Planted((Drop(head.name),))


def _embedding_without_numbers(checkpoint: Checkpoint, _: Sequence[int]) -> Planted | str:
    prefix = trunk_prefix(checkpoint)
    for entry in checkpoint.entries.values():
        outside = entry.name.startswith(prefix) and only_layer((entry.name,)) is None
        if outside and len(entry.shape) == 2 and entry.dtype in FLOAT_CODES:
            return Planted((Alter(entry.name, (Put(0, float("inf")),)),))
    return "no embedding is stored as plain numbers"


_GATES = ("ffn/gate-up-swapped", "ffn/fused-order")

_NO_EPS = "captured norms, or another engine's config (--against): no tensor carries an epsilon"
_COMPARED = "a reference checkpoint (--reference): the rows of small or hardly trained models show no order"
_CAPTURED = "captured tensors of the layer: both names are there, and gains have no mark of their place"

MISTAKES: Mapping[str, Mistake] = MappingProxyType(
    {
        mistake.name: mistake
        for mistake in (
            Mistake("swap", "gate and up exchanged in one layer", _GATES, _one_swap),
            Mistake("swap-everywhere", "gate and up exchanged in every layer", _GATES, _swaps),
            Mistake(
                "interleaved", "rows of the fused tensor alternating in one layer", ("ffn/fused-layout",), _interleaved
            ),
            Mistake(
                "mispaired", "columns of down in another order than the neurons", ("ffn/mispaired-neurons",), _mispaired
            ),
            Mistake(
                "rotary-order",
                "rows of queries and keys in the other rotary order",
                ("attention/rotary-order",),
                _rotary_order,
                _COMPARED,
            ),
            Mistake(
                "eps",
                "every epsilon in the config a tenth of what it was",
                ("config/eps-conflict", "norm/eps-mismatch"),
                _eps,
                _NO_EPS,
            ),
            Mistake(
                "offset-added", "1 added to every gain of a norm", ("norm/offset",), lambda c, n: _gains(c, n, 1.0)
            ),
            Mistake(
                "offset-taken", "1 taken from every gain of a norm", ("norm/offset",), lambda c, n: _gains(c, n, -1.0)
            ),
            Mistake("norms-exchanged", "two norms of one layer exchanged", ("norm/role",), _norms_exchanged, _CAPTURED),
            Mistake("square-transposed", "a square matrix stored transposed", ("tensor/transposed",), _square),
            Mistake("transposed", "an oblong matrix stored transposed", ("config/shape",), _oblong),
            Mistake("layer-twice", "one layer holding the numbers of another", ("tensor/duplicate",), _twice),
            Mistake("nan", "one number of one matrix is NaN", ("tensor/non-finite",), _not_a_number),
            Mistake(
                "infinity",
                "one number of the embedding is infinite",
                ("tensor/non-finite",),
                _embedding_without_numbers,
            ),
            Mistake("truncated", "the last byte of a weight file gone", ("container/truncated",), _cut_off),
            Mistake("no-shard", "a shard gone", ("index/missing-shard",), _no_shard),
            Mistake("no-tensor", "one matrix gone", ("ffn/missing-tensor", "moe/experts-missing"), _no_tensor),
            Mistake("no-final-norm", "the norm after the last layer gone", ("norm/final-missing",), _no_final_norm),
            Mistake("no-head", "the output head gone", ("config/tied-head",), _no_head),
            Mistake("tie", "the flag that ties head and embedding reversed", ("config/tied-head",), _tie),
            Mistake("fewer-layers", "one layer less in the config than is stored", ("config/shape",), _fewer_layers),
            Mistake("float16", "all weights stored as float16", ("config/dtype-conflict",), _half_precision),
        )
    }
)
"""Every mistake that is planted, by name."""
