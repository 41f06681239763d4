"""In which layers the order of the rows of queries and keys is looked for, and why not in the others."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import Tensor

from glassblock.checkpoint.attention_loading import rotary_row_at, split_heads_of
from glassblock.checkpoint.attention_map import AttentionTensors
from glassblock.checkpoint.attention_row import AttentionRow, RotaryRow
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.fitting import Sizes
from glassblock.checkpoint.layer_parts import LayerTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.rotary_settings import rotary_of
from glassblock.checkpoint.stored_entries import StoredEntry
from glassblock.errors import GlassblockError
from glassblock.numerics.norms import norm_kind_named
from glassblock.numerics.rotary import Arrangement


class Heads(NamedTuple):
    """How many heads of queries and of keys, and the rows of each."""

    queries: int
    keys: int
    width: int


class Turned(NamedTuple):
    """How many rows of a head positions turn, and whether 2i with 2i + 1, rather than the two halves."""

    rows: int
    paired: bool


@dataclass(frozen=True)
class RotaryPlan:
    """The queries and keys of a layer.

    Attributes:
        layer: Its number.
        queries, keys: Where they lie; one tensor where they are fused.
        query_rows, key_rows: Which rows of those they are.
        heads: How many.
        turned: Which rows the family turns together.
        moved_along: Whether there are biases or gains of them, which have an order of their own.
    """

    layer: int
    queries: TensorEntry
    keys: TensorEntry
    query_rows: Tensor
    key_rows: Tensor
    heads: Heads
    turned: Turned
    moved_along: bool

    @property
    def width(self) -> int:
        """How many channels each row has."""
        return self.queries.shape[1]

    @property
    def fused_heads(self) -> tuple[int, ...] | None:
        """Which heads of a fused tensor are queries and keys; None of tensors of their own."""
        if self.keys is not self.queries:
            return None
        rows = torch.cat([self.query_rows, self.key_rows])
        return tuple(cast("list[int]", torch.unique(rows // self.heads.width).tolist()))

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Each tensor once."""
        return (self.queries,) if self.keys is self.queries else (self.queries, self.keys)


def rotary_plans(
    checkpoint: Checkpoint, layers: Mapping[int, LayerTensors], unread: Container[str]
) -> tuple[tuple[RotaryPlan, ...], Mapping[int, str]]:
    """Every layer in which the order may show; of the others, why it is not looked for.

    Args:
        checkpoint: As opened.
        layers: Its layers as `resolve_layers` gives them.
        unread: Names of tensors that cannot be read.
    """
    plans: list[RotaryPlan] = []
    unasked: dict[int, str] = {}
    planner = _Planner(checkpoint, unread)
    for number, tensors in layers.items():
        try:
            plans.append(planner.plan(tensors))
        except _UnaskedError as error:
            unasked[number] = str(error)
        except GlassblockError as error:
            unasked[number] = error.message
    return tuple(plans), unasked


class _UnaskedError(Exception):
    """Why a layer is not looked at."""


class _Planner:
    """What is the same in all layers is worked out once."""

    def __init__(self, checkpoint: Checkpoint, unread: Container[str]) -> None:
        self._checkpoint, self._unread = checkpoint, unread
        self._turned: dict[tuple[int, int], tuple[RotaryRow, Turned]] = {}
        self._rows: dict[tuple[bool, Heads], tuple[Tensor, Tensor]] = {}

    def plan(self, tensors: LayerTensors) -> RotaryPlan:
        """The layer's.

        Raises:
            _UnaskedError, GlassblockError: There is none.
        """
        found, row = tensors.attention, tensors.row.attention
        if found is None or row is None:
            raise _UnaskedError(f"the attention of the family {tensors.row.name} is not read")
        if not isinstance(row, AttentionRow):
            raise _UnaskedError("its queries and keys are made from latents, not from the same channels")
        if row.layout == "in_out":
            raise _UnaskedError("its projections are stored [in, out]")
        rotary, heads = rotary_row_at(self._checkpoint, tensors, row), self._heads
        if rotary is None:
            raise _UnaskedError("positions turn no rows of it")
        if heads is None:
            raise _UnaskedError("nothing says how many heads it has")
        turned = self._turned_by(rotary, tensors, heads.width)
        norms = [norm for norm in (tensors.row.norm("q"), tensors.row.norm("k")) if norm is not None]
        if any(norm_kind_named(norm.kind).centred for norm in norms):
            raise _UnaskedError("the norms of its queries and keys subtract a mean: the order has no symmetry to test")
        if turned.rows % 4:
            raise _UnaskedError(f"{turned.rows} rows of a head turn, and four are compared at a time")
        queries, keys = self._entries(found, row, heads)
        along = any(norm.has_gain for norm in norms) or not found.biases.keys().isdisjoint(("query", "key", "fused"))
        return RotaryPlan(tensors.layer, queries, keys, *self._rows_of(row, heads), heads, turned, along)

    @cached_property
    def _heads(self) -> Heads | None:
        sizes = Sizes(self._checkpoint)
        told = [sizes.of(size) for size in ("heads", "kv_heads", "head_dim")]
        known = [size.value for size in told if size is not None]
        return Heads(*known) if len(known) == len(told) and min(known) > 0 and known[0] % known[1] == 0 else None

    def _turned_by(self, rotary: RotaryRow, tensors: LayerTensors, width: int) -> Turned:
        key = id(rotary), width
        if key not in self._turned:
            of = rotary_of(self._checkpoint, tensors.row, rotary, width)
            # The row too, so that nothing else gets its id.
            self._turned[key] = rotary, Turned(of.dim, of.arrangement is not Arrangement.HALVES)
        return self._turned[key][1]

    def _entries(self, found: AttentionTensors, row: AttentionRow, heads: Heads) -> tuple[TensorEntry, TensorEntry]:
        """Where queries and keys lie, checked."""
        fused = row.fused is not None
        queries, keys = (found.weights.get("fused" if fused else part) for part in ("query", "key"))
        if queries is None or keys is None:
            raise _UnaskedError("it has no queries or no keys of its own")
        counts = (heads.queries + 2 * heads.keys,) * 2 if fused else (heads.queries, heads.keys)
        for entry, count in zip((queries, keys), counts, strict=True):
            if len(entry.shape) != 2 or entry.shape[0] != count * heads.width or not entry.elements:
                raise _UnaskedError(f"{entry.name} is not {count} heads of {heads.width} rows")
            if entry.name in self._unread:
                raise _UnaskedError(f"{entry.name} could not be read")
            if entry.dtype not in FLOAT_CODES and not isinstance(entry, StoredEntry):
                raise _UnaskedError(f"{entry.name} holds {entry.dtype}")
        if queries.shape[1] != keys.shape[1]:
            raise _UnaskedError("its queries and keys read different channels")
        return queries, keys

    def _rows_of(self, row: AttentionRow, heads: Heads) -> tuple[Tensor, Tensor]:
        key = row.fused is None, heads
        if key not in self._rows:
            if row.fused is None:
                self._rows[key] = torch.arange(heads.queries * heads.width), torch.arange(heads.keys * heads.width)
            else:
                every = torch.arange((heads.queries + 2 * heads.keys) * heads.width)
                self._rows[key] = split_heads_of(every, row.fused, *heads)[:2]
        return self._rows[key]
