"""Queries and keys as they go by: what their products show of the rows that positions turn together.

Of each layer some channels of queries and keys are held until both are there, then sixteen numbers for every four rows
of a head. A sum over all layers decides (`numerics/rotary_order.py`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from glassblock.audit.network_sketch import Rows, Tap
from glassblock.audit.rotary_plans import RotaryPlan
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.stored_entries import StoredEntry
from glassblock.errors import CheckpointUnusable, UnknownCheckpoint
from glassblock.numerics.rotary_order import (
    NO_SIGNS,
    FairSigns,
    OrderVerdict,
    fair_signs,
    judged,
    order_terms,
    partner_products,
)

LEAST_CHANNELS, SHARE, MOST_CHANNELS = 128, 8, 1024
"""Held of each row: the first 128, or an eighth where that is more. Any channels will do; fewer cost power."""

MOST_HEADS = 2
"""Heads of queries looked at for each head of keys. More of them say much the same."""

ROTARY_RULE = "attention/rotary-order"


@dataclass(frozen=True)
class RotaryStudy:
    """What the products of queries and keys show.

    Attributes:
        plans: The layers that were looked at.
        against_declared: What speaks against the order that the family has, for the other one; over all these layers.
        against_other: What speaks against the other order, for the family's.
        unasked: Why the other layers were not looked at.
    """

    plans: tuple[RotaryPlan, ...] = ()
    against_declared: FairSigns = NO_SIGNS
    against_other: FairSigns = NO_SIGNS
    unasked: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def verdict(self) -> OrderVerdict:
        """Of the model as a whole; of no single layer."""
        return judged(self.against_declared, self.against_other)


class RotarySketches:
    """The queries and keys of all layers while they go by."""

    def __init__(self, plans: tuple[RotaryPlan, ...], unasked: Mapping[int, str]) -> None:
        spare = _Spare()
        self._sketches = [_Sketch(plan, spare) for plan in plans]
        self._unasked = dict(unasked)

    def taps(self) -> Iterator[tuple[TensorEntry, Tap]]:
        """The taps on all tensors that go by as numbers."""
        for sketch in self._sketches:
            for entry in sketch.plan.entries:
                if not isinstance(entry, StoredEntry):
                    yield entry, sketch.tap(entry)

    def dequantise(
        self,
        pieces: Callable[[TensorEntry], Iterator[Tensor]],
        lost: Callable[[CheckpointUnusable | UnknownCheckpoint], str],
    ) -> None:
        """Feed what went by as codes.

        Args:
            pieces: Reads a tensor once more, as numbers, in whole rows.
            lost: Told of a tensor that could not be read; gives the reason in words.
        """
        for sketch in self._sketches:
            for entry in sketch.plan.entries:
                if isinstance(entry, StoredEntry):
                    tap, start = sketch.tap(entry), 0
                    try:
                        for piece in pieces(entry):
                            rows = piece.view(-1, entry.shape[1])
                            tap.take(Rows.of(rows), start)
                            start += len(rows)
                    except (CheckpointUnusable, UnknownCheckpoint) as error:
                        self._unasked[sketch.plan.layer] = lost(error)
                    else:
                        tap.done()

    def study(self) -> RotaryStudy:
        """What all layers show together."""
        for sketch in self._sketches:
            if sketch.products is None:
                self._unasked.setdefault(sketch.plan.layer, "its queries or keys could not be read")
        # Layers that are copies have one coin, so that each counts once.
        alone = {sketch.products.numpy().tobytes(): sketch for sketch in self._sketches if sketch.products is not None}
        terms = [_terms(alike) for alike in _alike(alone.values())]
        if not terms:
            return RotaryStudy(unasked=self._unasked)
        declared, other = (fair_signs(torch.cat(side)) for side in zip(*terms, strict=True))
        seen = tuple(sketch.plan for sketch in self._sketches if sketch.products is not None)
        return RotaryStudy(seen, declared, other, self._unasked)


class _Spare:
    """Room for rows, used again by the next layer: what is allocated between two pieces costs more than the copy."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, int], list[Tensor]] = {}

    def take(self, rows: int, channels: int) -> Tensor:
        """`[rows, channels]` of whatever was there."""
        free = self._free.get((rows, channels))
        return free.pop() if free else torch.empty(rows, channels)

    def give(self, room: Tensor) -> None:
        """Nobody reads it any more."""
        self._free.setdefault((room.shape[0], room.shape[1]), []).append(room)


class _Sketch:
    """One layer's."""

    def __init__(self, plan: RotaryPlan, spare: _Spare) -> None:
        self.plan, self._spare = plan, spare
        self.products: Tensor | None = None
        self._channels = min(plan.width, max(LEAST_CHANNELS, plan.width // SHARE), MOST_CHANNELS)
        self._held: dict[str, Tensor] = {}
        self._whole: set[str] = set()

    def tap(self, entry: TensorEntry) -> Tap:
        return Tap(0, entry.shape[0], partial(self._take, entry), partial(self._done, entry))

    def _take(self, entry: TensorEntry, rows: Rows, start: int) -> None:
        if entry.name not in self._held:
            self._held[entry.name] = self._spare.take(entry.shape[0], self._channels)
        self._held[entry.name][start : start + len(rows)] = rows.numbers[:, : self._channels]

    def _done(self, entry: TensorEntry) -> None:
        self._whole.add(entry.name)
        plan = self.plan
        if len(self._whole) < len(plan.entries):
            return
        queries, keys = (self._held[of.name] for of in (plan.queries, plan.keys))
        if plan.keys is plan.queries:
            queries, keys = queries[plan.query_rows], keys[plan.key_rows]
        keys = keys.view(plan.heads.keys, plan.heads.width, -1)
        queries = queries.view(plan.heads.keys, -1, plan.heads.width, self._channels)[:, :MOST_HEADS]
        self.products = partner_products(queries, keys, plan.turned.rows)
        while self._held:
            self._spare.give(self._held.popitem()[1])


def _alike(sketches: Iterable[_Sketch]) -> Iterable[list[_Sketch]]:
    """Those that can be looked at together: an audit has little time for each."""
    groups: dict[tuple[tuple[int, ...], bool], list[_Sketch]] = {}
    for sketch in sketches:
        if sketch.products is not None:
            groups.setdefault((tuple(sketch.products.shape), sketch.plan.turned.paired), []).append(sketch)
    return groups.values()


def _terms(sketches: list[_Sketch]) -> tuple[Tensor, Tensor]:
    """Those against the declared order, and those against the other one."""
    products = torch.stack([sketch.products for sketch in sketches if sketch.products is not None])
    against_halves, against_pairs = (side.flatten() for side in order_terms(products))
    return (against_pairs, against_halves) if sketches[0].plan.turned.paired else (against_halves, against_pairs)
