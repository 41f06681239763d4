"""A checkpoint beside several: which layers come from which, and of which numbers each tensor is mixed.

A merge by weights, SLERP and task arithmetic are linear in each tensor, so the coefficients are found by least squares
(`numerics.mixes`); layers stacked from several models are found first, by a few rows of each.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glassblock.audit.readable import unreadable
from glassblock.audit.reference_bytes import ByteEquality
from glassblock.audit.reference_map import Key, Part, heads_of, known_alike, layer_of_key, parts_of
from glassblock.checkpoint.layer_map import resolve_layers
from glassblock.checkpoint.layer_parts import LayerTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import GlassblockError
from glassblock.numerics.mixes import Mix, Products, fitted, independent, no_products, one_tensor, refined, unlike

PIECE = 1 << 19
"""Numbers of a piece of each side."""

PROBED = 3
"""Matrices of a layer, of each of which so many rows are looked at to find its counterpart."""

PROBED_ROWS = 4
RELATED = 0.5
"""Cosine of some rows above which a layer is a version of another. Unrelated ones lie at 0."""

ROUNDINGS = 3
"""A mix in the dtype of the result rounds two products and their sum."""

RESOLVED = 1e-6
"""Residual below which sums of float64 squares tell nothing: they leave about 1e-13 where parents are much alike."""

CHANCE = 100.0
"""F statistic up to which further parents explain no more than rounding, whose size follows that of the numbers: a few
large ones decide, and the statistic scatters several times as widely as for equal noise."""

MixKind = Literal["shared", "copy", "mix", "near", "neither"]


@dataclass(frozen=True)
class Mixed:
    """One tensor, or a part of one.

    Attributes:
        key: Which part of the model.
        name: Of the tensor.
        kind: Equal in all, to rounding where all of them hold the same numbers; a copy of one, or of several that do; a
            mix but for rounding; nearly one; or nothing of the kind.
        parents: Numbers of those that have it.
        mix: The fit; None for copies by their bytes, and where nothing has its shape.
    """

    key: Key
    name: str
    kind: MixKind
    parents: tuple[int, ...]
    mix: Mix | None = None


class Source(NamedTuple):
    """A layer of a parent."""

    parent: int
    layer: int


@dataclass(frozen=True)
class MergeStudy:
    """The whole comparison.

    Attributes:
        names: What the parents are called.
        tensors: What became of each tensor.
        sources: For each layer those of the parents that it is a version of.
        unmatched: Tensors that no parent has.
        unread: What could not be read, and why.
    """

    names: tuple[str, ...]
    tensors: tuple[Mixed, ...]
    sources: Mapping[int, tuple[Source, ...]]
    unmatched: tuple[str, ...]
    unread: tuple[str, ...]

    def of_layer(self, layer: int | None) -> tuple[Mixed, ...]:
        """Its tensors."""
        return tuple(one for one in self.tensors if layer_of_key(one.key) == layer)


@dataclass
class _Parent:
    parts: dict[Key, Part]
    equality: ByteEquality
    probes: dict[int, dict[Key, Tensor]] = field(default_factory=dict[int, dict[Key, Tensor]])


def merge_study(
    checkpoint: Checkpoint,
    parents: Sequence[tuple[str, Checkpoint]],
    *,
    layers: Mapping[int, LayerTensors],
    digests: Mapping[str, str],
    unread: Mapping[str, str],
    tell: Callable[[str], object],
) -> MergeStudy:
    """Compare every tensor of a checkpoint with those of all parents.

    Args:
        checkpoint: The checkpoint.
        parents: What each is called, and the checkpoint itself.
        layers: The layers of the first one.
        digests: xxh3_128 of its tensors' bytes, where known.
        unread: Its tensors that cannot be read.
        tell: Told what comes next; may raise to stop.
    """
    known = {
        (tensor, entry.start, entry.stop): digest
        for tensor, digest in digests.items()
        if (entry := checkpoint.entries.get(tensor)) is not None
    }
    meter, lost = ReadMeter(), list[str]()
    opened: list[_Parent] = []
    mine: dict[Key, Part] = {}
    for name, other in parents:
        here, there = known_alike(checkpoint, other)
        its_layers = resolve_layers(there)[0]
        both = bool(layers and its_layers)
        if not mine:
            mine = parts_of(here, layers if both else {}, heads=heads_of(there))
        broken = unreadable(there)
        lost += [f"{name}: {tensor}: {reason}" for tensor, reason in sorted(broken.items())]
        parts = parts_of(there, its_layers if both else {}, heads=heads_of(here))
        parts = {key: part for key, part in parts.items() if part.name not in broken}
        opened.append(_Parent(parts, ByteEquality(known, meter)))
    mine = {key: part for key, part in mine.items() if part.name not in unread}
    comparison = _Comparison(mine, opened, meter, lost)
    for layer in (None, *sorted({number for key in mine if (number := layer_of_key(key)) is not None})):
        tell("the references" if layer is None else f"layer {layer} in the references")
        comparison.compare(layer)
    names = tuple(name for name, _ in parents)
    unmatched = tuple(dict.fromkeys(comparison.unmatched))
    return MergeStudy(names, tuple(comparison.tensors), comparison.sources, unmatched, tuple(lost))


@dataclass
class _Comparison:
    mine: dict[Key, Part]
    parents: list[_Parent]
    meter: ReadMeter
    lost: list[str]
    tensors: list[Mixed] = field(default_factory=list[Mixed])
    sources: dict[int, tuple[Source, ...]] = field(default_factory=dict[int, tuple[Source, ...]])
    unmatched: list[str] = field(default_factory=list[str])

    def compare(self, layer: int | None) -> None:
        keys = [key for key in self.mine if layer_of_key(key) == layer]
        sources = None if layer is None else tuple(self._sources(layer, keys))
        if layer is not None and sources is not None:
            self.sources[layer] = sources
        for key in keys:
            part = self.mine[key]
            counterparts: dict[int, Part] = {}
            for number, parent in enumerate(self.parents):
                theirs = _moved(key, sources, number)
                found = None if theirs is None else parent.parts.get(theirs)
                if found is not None and found.shape == part.shape:
                    counterparts[number] = found
            if not counterparts:
                self.unmatched.append(part.name)
                continue
            try:
                self.tensors.append(self._mixed(key, part, counterparts))
            except GlassblockError as error:
                self.lost.append(f"{part.name}: {error.message}")
            finally:
                for one in (part, *counterparts.values()):
                    one.let_go()

    def _sources(self, layer: int, keys: Sequence[Key]) -> Iterator[Source]:
        """The layers that this one is a version of: one of each parent at most, the nearest."""
        matrices = [key for key in keys if self.mine[key].shape[1] > 1]
        # Several, since one may be what a merge, or a mistake, has exchanged.
        places = [place * (len(matrices) - 1) // (PROBED - 1) for place in range(PROBED)] if matrices else []
        probed = dict.fromkeys(matrices[place] for place in places)
        owns: dict[Key, Tensor] = {}
        for key in probed:
            with suppress(GlassblockError):  # told where the tensor is compared
                owns[key] = _unit(self.mine[key], self.meter)
        for number, parent in enumerate(self.parents):
            near: dict[int, float] = {}
            for key, own in owns.items():
                for other, probe in self._probes(parent, key).items():
                    if probe.shape == own.shape:
                        near[other] = max(near.get(other, -1.0), float((own * probe).sum()))
            best = max(near, key=near.__getitem__, default=None)
            if best is None or near[best] < RELATED:
                continue
            same = near.get(layer, -1.0)
            yield Source(number, layer if same >= near[best] else best)

    def _probes(self, parent: _Parent, key: Key) -> dict[int, Tensor]:
        found: dict[int, Tensor] = {}
        for other, part in parent.parts.items():
            number = layer_of_key(other)
            if number is None or (other[0], *other[2:]) != (key[0], *key[2:]):
                continue
            held = parent.probes.setdefault(number, {})
            short = (key[0], *key[2:])
            if short not in held:
                try:
                    held[short] = _unit(part, self.meter)
                except GlassblockError:
                    held[short] = torch.zeros(0, dtype=torch.float64)
            found[number] = held[short]
        return found

    def _mixed(self, key: Key, part: Part, counterparts: Mapping[int, Part]) -> Mixed:
        equal = tuple(
            number
            for number, other in counterparts.items()
            if part.plain and other.plain and self.parents[number].equality.equal(part, other)
        )
        if equal:
            kind: MixKind = "shared" if len(equal) == len(self.parents) > 1 else "copy"
            return Mixed(key, part.name, kind, equal)
        order = tuple(counterparts)
        products = self._products(part, [counterparts[number] for number in order])
        if products.mix == 0:
            zero = tuple(order[place] for place, own in enumerate(products.gram.diagonal()) if own == 0)
            kind = "shared" if len(zero) == len(self.parents) > 1 else "copy" if zero else "neither"
            return Mixed(key, part.name, kind, zero or order)
        places = independent(products)  # one tensor several times, in several dtypes, counts once
        numbers = tuple(order[place] for place in places)
        fit = products.of(places)
        mix = fitted(fit) if places else None
        if mix is None:
            return Mixed(key, part.name, "neither", order)
        floor = max(ROUNDINGS * torch.finfo(_float(part.dtype)).eps / 2, RESOLVED)
        if floor < mix.residual <= mix.resolution:
            chosen = [counterparts[number] for number in numbers]
            mix = refined(mix, self._products(part, chosen, less=mix.coefficients), whole=products.mix)
        if mix.residual > floor:
            return Mixed(key, part.name, "near" if mix.residual < RELATED else "neither", numbers, mix)
        alone = [number for place, number in enumerate(numbers) if _is_copy(fit, mix, place, floor)]
        # Of two that are much alike it may be a copy of either, to rounding: the nearer one.
        nearest = min(alone, key=lambda number: unlike(fit, numbers.index(number)), default=None)
        if nearest is None:
            return Mixed(key, part.name, "mix", numbers, mix)
        one = order.index(nearest)
        same = tuple(number for place, number in enumerate(order) if place == one or one_tensor(products, one, place))
        return Mixed(key, part.name, "shared" if len(same) == len(self.parents) > 1 else "copy", same, mix)

    def _products(self, part: Part, others: Sequence[Part], *, less: Sequence[float] = ()) -> Products:
        """Of all pieces; of the tensor less these shares of the others, where they are given."""
        products, (rows, width) = no_products(len(others)), part.shape
        step = max(1, PIECE // max(width, 1))
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            mine, *theirs = (_numbers(one, start, stop, self.meter) for one in (part, *others))
            for share, its in zip(less, theirs, strict=False):
                mine -= share * its
            products = products.and_then(mine, theirs)
        return products


def _is_copy(products: Products, mix: Mix, place: int, floor: float) -> bool:
    """Whether one parent alone, as it stands, explains the tensor as well as all of them do."""
    others = sum(map(abs, mix.coefficients)) - abs(mix.coefficients[place])
    if abs(mix.coefficients[place] - 1) <= floor and others <= floor:
        return True
    apart = unlike(products, place)
    if apart <= RESOLVED:
        return True
    # Rounding is fitted a little better by more parents, by chance: an F statistic of so many restrictions.
    gained = (apart**2 - mix.residual**2) * products.elements
    return apart <= floor and gained <= CHANCE * len(mix.coefficients) * mix.residual**2


def _moved(key: Key, sources: Sequence[Source] | None, parent: int) -> Key | None:
    """The key of the counterpart; None where that parent has no version of the layer."""
    if sources is None:
        return key
    layer = next((source.layer for source in sources if source.parent == parent), None)
    return None if layer is None else (key[0], layer, *key[2:])


def _unit(part: Part, meter: ReadMeter) -> Tensor:
    rows = part.rows(0, min(PROBED_ROWS, part.shape[0]), meter).double().flatten().clone()
    length = math.sqrt(float(rows.square().sum()))
    part.let_go()
    return rows / length if length > 0 else rows


def _numbers(part: Part, start: int, stop: int, meter: ReadMeter) -> Tensor:
    """A copy: pieces of several tensors are held at once."""
    return part.rows(start, stop, meter).to(torch.float64, copy=True) + part.offset


def _float(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point else torch.float32
