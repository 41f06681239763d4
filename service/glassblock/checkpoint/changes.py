"""Changes of a tensor's elements as data, and entries that are read through them: patches without a byte written.

A change says what a tensor becomes; nothing is computed until it is read. An `AlteredEntry` stands where the patched
file would have the tensor: its offsets are that file's, its numbers come from the file that is there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import assert_never, cast

import torch
from torch import Tensor

from glassblock.checkpoint.entries import DTYPE_BITS, TensorEntry


@dataclass(frozen=True, slots=True)
class Reorder:
    """An axis laid out anew: seen as axes of `sizes`, of which `flip` is reversed, in the order `onto`.

    `Reorder(-2, (2, m), flip=0)` exchanges halves, `Reorder(-2, (m, 2), onto=(1, 0))` brings alternating rows into
    two halves, `Reorder(-2, (t, 2, m // t), onto=(1, 0, 2))` the blocks of `t` ranks.

    Attributes:
        axis: Counted from the last one, which is -1.
        sizes: Their product is the axis' length.
        onto: For each new axis the old one.
        flip: The axis of `sizes` that is reversed first.
    """

    axis: int
    sizes: tuple[int, ...]
    onto: tuple[int, ...] | None = None
    flip: int | None = None


@dataclass(frozen=True, slots=True)
class Shuffle:
    """An axis in an order drawn by `seed`: what a permutation of neurons on one side alone does."""

    axis: int
    seed: int


@dataclass(frozen=True, slots=True)
class Transpose:
    """The last two axes exchanged."""


@dataclass(frozen=True, slots=True)
class Add:
    """A number added to every element, in float32 and rounded once."""

    value: float


@dataclass(frozen=True, slots=True)
class Cast:
    """Every element in another dtype, by the format's code."""

    dtype: str


@dataclass(frozen=True, slots=True)
class Put:
    """One element, counted in row-major order, set to a value."""

    element: int
    value: float


@dataclass(frozen=True, slots=True)
class Within:
    """A new order for some slices of the first axis alone: some experts of a stack."""

    slices: tuple[int, ...]
    change: Reorder


@dataclass(frozen=True, slots=True)
class InHeads:
    """The rows of heads laid anew: of every `width` numbers of an axis the first, seen as two axes that are exchanged.

    `InHeads(-2, 64, (32, 2))` brings rows from pairs (2i, 2i + 1) into halves (i, i + 32), `(2, 32)` brings them back.

    Attributes:
        axis: Counted from the last one, which is -1.
        width: Rows of a head.
        sizes: Their product is the number of rows that move.
        heads: Which heads; None for all.
    """

    axis: int
    width: int
    sizes: tuple[int, int]
    heads: tuple[int, ...] | None = None


Change = Reorder | Shuffle | Transpose | Add | Cast | Put | Within | InHeads


@dataclass(frozen=True, slots=True)
class AlteredEntry(TensorEntry):
    """A tensor of a patched file: where it would lie, and what it is made of.

    A part of it (other `start`, `stop` and `shape`) is that part of what the changes make.

    Attributes:
        base: Where the first byte of the whole tensor would lie.
        source: The tensor as it lies there.
        changes: What becomes of it, in order.
    """

    base: int = 0
    source: TensorEntry | None = None
    changes: tuple[Change, ...] = ()

    @property
    def window(self) -> tuple[int, int]:
        """The bytes meant, counted from the whole tensor's first."""
        return self.start - self.base, self.stop - self.base


def altered(source: TensorEntry, *changes: Change, start: int | None = None, name: str | None = None) -> AlteredEntry:
    """The entry of `source` after the changes, at the offset `start` of the patched file.

    Raises:
        ValueError: A change does not fit the shape.
    """
    start = source.start if start is None else start
    name = source.name if name is None else name
    if isinstance(source, AlteredEntry) and source.source is not None and source.window == (0, source.bytes):
        # One list of changes in place of a chain of entries, where nothing was cut out in between.
        source, changes = source.source, (*source.changes, *changes)
    shape, dtype = source.shape, source.dtype
    for change in changes:
        shape, dtype = _shape_after(shape, change), change.dtype if isinstance(change, Cast) else dtype
    length = source.bytes if dtype == source.dtype else prod(shape) * DTYPE_BITS[dtype] // 8
    return AlteredEntry(
        name=name,
        dtype=dtype,
        shape=shape,
        file=source.file,
        start=start,
        stop=start + length,
        identity=source.identity,
        base=start,
        source=source,
        changes=changes,
    )


def unmoved(entry: TensorEntry) -> TensorEntry:
    """The tensor as it lies there, under the entry's name, where nothing of it is changed but its place."""
    while isinstance(entry, AlteredEntry) and not entry.changes and entry.source is not None:
        source, (first, last) = entry.source, entry.window
        entry = replace(
            source, name=entry.name, shape=entry.shape, start=source.start + first, stop=source.start + last
        )
    return entry


def sought(entry: AlteredEntry) -> tuple[TensorEntry, int]:
    """The part of the source that is enough for an entry, and how many bytes of what comes of it precede the entry."""
    assert entry.source is not None  # noqa: S101  every maker gives one; the default is the dataclass's
    source, (first, last) = entry.source, entry.window
    rows = source.shape[0] if source.shape else 0
    if not rows or not source.bytes or not all(_keeps_rows(change, len(source.shape)) for change in entry.changes):
        return source, first
    made = source.bytes if entry.dtype == source.dtype else source.elements * DTYPE_BITS[entry.dtype] // 8
    row, made_row = source.bytes // rows, made // rows
    low, high = first // made_row, -(-last // made_row)
    start = source.start + low * row
    part = replace(source, shape=(high - low, *source.shape[1:]), start=start, stop=start + (high - low) * row)
    return part, first - low * made_row


def row_bytes(entry: AlteredEntry) -> int | None:
    """Length of the pieces in which the changes can be made, along the first axis; None where all is needed at once."""
    source = entry.source
    if source is None or not source.shape or not source.shape[0]:
        return None
    if not all(_keeps_rows(change, len(source.shape)) for change in entry.changes):
        return None
    return source.elements * DTYPE_BITS[entry.dtype] // 8 // source.shape[0]


def _keeps_rows(change: Change, axes: int) -> bool:
    """Whether a change can be made to one slice of the first axis after the other."""
    match change:
        case Reorder() | Shuffle() | InHeads():
            return axes + change.axis > 0
        case Transpose():
            return axes > 2
        case Add() | Cast():
            return True
        case Put() | Within():
            return False
    assert_never(change)


def changed(tensor: Tensor, change: Change, dtypes: Mapping[str, torch.dtype]) -> Tensor:
    """The tensor after one change, contiguous.

    Args:
        tensor: As it lies there.
        change: What becomes of it.
        dtypes: torch's dtype of each of the format's codes.
    """
    match change:
        case Add():
            wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
            return (wide + change.value).to(tensor.dtype)
        case Cast():
            return tensor.to(dtypes[change.dtype])
        case Put():
            copy = tensor.clone()
            copy.view(-1)[change.element] = change.value
            return copy
        case _:
            return _rearranged(tensor, change)


def _rearranged(tensor: Tensor, change: Reorder | Shuffle | Transpose | Within | InHeads) -> Tensor:
    match change:
        case Reorder():
            return _reordered(tensor, change)
        case Shuffle():
            order = torch.randperm(tensor.shape[change.axis], generator=torch.Generator().manual_seed(change.seed))
            return tensor.index_select(change.axis % tensor.ndim, order.to(tensor.device))
        case InHeads():
            order = _order_in_heads(tensor.shape[change.axis], change)
            return tensor.index_select(change.axis % tensor.ndim, order.to(tensor.device))
        case Transpose():
            return tensor.transpose(-1, -2).contiguous()
        case Within():
            copy = tensor.clone()
            for index in change.slices:
                copy[index] = _reordered(copy[index], change.change)
            return copy
    assert_never(change)


def _order_in_heads(length: int, change: InHeads) -> Tensor:
    order = torch.arange(length).view(-1, change.width)
    heads = slice(None) if change.heads is None else torch.tensor(change.heads)
    moved = order[heads, : prod(change.sizes)]
    order[heads, : prod(change.sizes)] = moved.view(-1, *change.sizes).transpose(1, 2).reshape(moved.shape)
    return order.flatten()


def _reordered(tensor: Tensor, change: Reorder) -> Tensor:
    axis = change.axis % tensor.ndim
    lead, rest = tensor.shape[:axis], tensor.shape[axis + 1 :]
    parts = tensor.reshape(*lead, *change.sizes, *rest)
    if change.flip is not None:
        parts = parts.flip(axis + change.flip)
    if change.onto is not None:
        inner = [axis + old for old in change.onto]
        behind = range(axis + len(change.sizes), parts.ndim)
        parts = parts.permute(*range(axis), *inner, *behind)
    return parts.reshape(tensor.shape).contiguous()


def _shape_after(shape: tuple[int, ...], change: Change) -> tuple[int, ...]:
    match change:
        case Reorder() | Shuffle():
            length = shape[change.axis] if -len(shape) <= change.axis < 0 else None
            if length is None or (isinstance(change, Reorder) and prod(change.sizes) != length):
                raise ValueError(f"{change} does not fit the shape {list(shape)}")
            return shape
        case InHeads():
            length = shape[change.axis] if -len(shape) <= change.axis < 0 else 0
            last = max(change.heads, default=-1) if change.heads is not None else -1
            fits = change.width > 0 and length % change.width == 0 and prod(change.sizes) <= change.width
            if not length or not fits or last * change.width >= length:
                raise ValueError(f"{change} does not fit the shape {list(shape)}")
            return shape
        case Transpose():
            if len(shape) < 2:
                raise ValueError(f"the shape {list(shape)} cannot be transposed")
            return cast("tuple[int, ...]", (*shape[:-2], shape[-1], shape[-2]))
        case Within():
            _shape_after(shape[1:], change.change)
            return shape
        case Add() | Cast() | Put():
            return shape
    assert_never(change)
