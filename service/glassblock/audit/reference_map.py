"""The tensors of a checkpoint by what they are in the model, so that two naming dialects meet.

Every part (one expert's gate, one head projection, a norm) has a key, and reads as rows `[out, in]` in the dtype it is
stored in, whatever lies in the file: fused, stacked, transposed, its rows in the order of another rotary convention.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, cast

import torch
from torch import Tensor

from glassblock.checkpoint.attention_loading import rotary_at, split_heads_of
from glassblock.checkpoint.attention_map import AttentionTensors
from glassblock.checkpoint.attention_row import AttentionRow
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.fitting import Sizes
from glassblock.checkpoint.layer_parts import Expert, LayerTensors, NetworkTensors, NormTensors
from glassblock.checkpoint.name_fits import find_trunk
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import embedding_entry, embedding_norm, final_norm, head_entry
from glassblock.checkpoint.reading import TORCH_DTYPES, ReadMeter, read_tensor
from glassblock.checkpoint.settings import tied_of
from glassblock.checkpoint.stored_entries import READ_AS, StoredEntry, read_weight
from glassblock.errors import GlassblockError
from glassblock.numerics.fused_layouts import split_rows
from glassblock.numerics.norms import norm_kind_named
from glassblock.numerics.rotary import Arrangement

Key = tuple[int | str | None, ...]
"""`("layer", 3, "network", None, "gate")`, `("layer", 3, "norm", "ffn_in")`, `("embedding",)`, `("tensor", name)`."""

Heads = Mapping[str, int]
"""Numbers of heads and their width, by size, where the other checkpoint tells them."""


class HeadRows(NamedTuple):
    """The rows of a head of queries or keys.

    Attributes:
        width: How many.
        turned: How many of them positions turn, from the first.
        paired: Whether 2i and 2i + 1 are turned together, rather than the two halves.
        queries: How many heads of queries there are.
    """

    width: int
    turned: int
    paired: bool
    queries: int

    @property
    def to_halves(self) -> Tensor | None:
        """The order that brings them into the convention of halves; None where they lie so."""
        return order_of(self.width, self.turned, halves=True) if self.paired else None


def order_of(width: int, turned: int, *, halves: bool) -> Tensor:
    """`[width]`, the order that brings rows from pairs into halves, or from halves into pairs; the rest stays."""
    rows = torch.arange(turned).view(*((turned // 2, 2) if halves else (2, turned // 2)))
    return torch.cat([rows.T.flatten(), torch.arange(turned, width)])


@dataclass
class Part:
    """One tensor of the model.

    Attributes:
        entry: Where it lies, or the tensor that it is a part of.
        transposed: Whether that is stored `[in, out]`.
        index: Which rows of it, in this order; None for all as they lie.
        offset: What is added to it where it is used.
        forms: What of this the file has otherwise than the plain form: words.
        head: Of queries and keys and of what has one number for each of their rows: the rows of a head, where positions
            turn any.
    """

    entry: TensorEntry
    transposed: bool = False
    index: Tensor | None = None
    offset: float = 0.0
    forms: tuple[str, ...] = ()
    head: HeadRows | None = None
    _held: Tensor | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Of the tensor that it lies in."""
        return self.entry.name

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """`[rows, width]` as read, or `[n]` of a vector."""
        shape = tuple(length for length in self.entry.shape) or (1,)
        if self.transposed and len(shape) == 2:
            shape = (shape[1], shape[0])
        return shape if self.index is None else (len(self.index), *shape[1:])

    @property
    def shape(self) -> tuple[int, int]:
        """As rows; a vector is a column of them."""
        shape = self.stored_shape
        return shape[0], prod(shape[1:])

    @property
    def elements(self) -> int:
        """How many numbers."""
        return prod(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the numbers as read."""
        return READ_AS if isinstance(self.entry, StoredEntry) else TORCH_DTYPES[self.entry.dtype]

    @property
    def plain(self) -> bool:
        """Whether it is its bytes in the file, so that equal bytes are equal parts."""
        return not self.transposed and self.index is None and not isinstance(self.entry, StoredEntry)

    @property
    def streamed(self) -> bool:
        """Whether rows can be read without reading all."""
        return not self.transposed and not isinstance(self.entry, StoredEntry)

    def rows(self, start: int, stop: int, meter: ReadMeter) -> Tensor:
        """`[stop - start, width]`. What cannot be read in rows is read once and held until `let_go`.

        Raises:
            GlassblockError: It cannot be read.
        """
        wanted = None if self.index is None else self.index[start:stop]
        if not self.streamed:
            if self._held is None:
                whole = read_weight(self.entry, "cpu", meter)
                whole = whole.T if self.transposed and whole.ndim == 2 else whole
                self._held = whole.reshape(whole.shape[0] if whole.ndim else 1, -1)
            return self._held[start:stop] if wanted is None else self._held[wanted]
        if wanted is None:
            return self._read(start, stop, meter)
        # Rows of one head, or of two projections in turn, lie near each other: the run that holds them is read.
        low, high = int(wanted.min()), int(wanted.max()) + 1
        if high - low <= 4 * (stop - start):
            return self._read(low, high, meter)[wanted - low]
        return torch.cat([self._read(row, row + 1, meter) for row in cast("list[int]", wanted.tolist())])

    def _read(self, start: int, stop: int, meter: ReadMeter) -> Tensor:
        count, width = (self.entry.shape or (1,))[0], self.shape[1]
        step = self.entry.bytes // count
        low = self.entry.start + start * step
        piece = replace(self.entry, shape=(stop - start, width), start=low, stop=low + (stop - start) * step)
        return read_tensor(piece, "cpu", meter)

    def let_go(self) -> None:
        """Forget what is held."""
        self._held = None


def parts_of(
    checkpoint: Checkpoint, layers: Mapping[int, LayerTensors], *, heads: Heads | None = None
) -> dict[Key, Part]:
    """Every readable tensor of a checkpoint, by key.

    Args:
        checkpoint: As opened.
        layers: Its layers as `resolve_layers` gives them; none where the family is unknown.
        heads: Numbers of heads for a checkpoint whose files do not tell them.
    """
    parts: dict[Key, Part] = {}
    if layers and checkpoint.family is not None and checkpoint.trunk is not None:
        for key, part in (
            *_outer(checkpoint),
            *(pair for layer in layers.values() for pair in _layer(checkpoint, layer, heads or {})),
        ):
            if _readable(part.entry):
                parts.setdefault(key, part)
    known = {part.name for part in parts.values()}
    prefixes = {tensors.prefix: number for number, tensors in layers.items()}
    for name, entry in checkpoint.entries.items():
        if name in known or not _readable(entry):
            continue
        home = next((prefix for prefix in prefixes if prefix and name.startswith(prefix)), None)
        key: Key = ("tensor", name) if home is None else ("layer", prefixes[home], "tensor", name[len(home) :])
        parts[key] = Part(entry)
    return parts


def known_alike(one: Checkpoint, other: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Both with a family: one whose own is unknown is read as the other's where its names are those."""
    return _known_as(one, other), _known_as(other, one)


def _known_as(checkpoint: Checkpoint, other: Checkpoint) -> Checkpoint:
    if (checkpoint.family is not None and checkpoint.trunk is not None) or other.family is None:
        return checkpoint
    trunk, layers = find_trunk(other.family, checkpoint.entries)
    if trunk is None:
        return checkpoint
    return replace(checkpoint, family=other.family, trunk=trunk, layer_indices=layers, config=other.config)


def layer_of_key(key: Key) -> int | None:
    """The layer that a key speaks of."""
    return key[1] if key[0] == "layer" and isinstance(key[1], int) else None


def is_of_network(key: Key) -> bool:
    """Whether a key names a part of a feed-forward network."""
    return len(key) == 5 and key[2] == "network"


def expert_of_key(key: Key) -> Expert:
    """Of the key of a network or of its part: which network of a mixture; None for the only one, or another key."""
    expert = key[3] if len(key) > 3 and key[2] == "network" else None
    return expert if isinstance(expert, int) else "shared" if expert == "shared" else None


def network_parts(layer: int, expert: Expert, parts: Mapping[Key, Part]) -> dict[str, Part]:
    """The parts of one network by role."""
    home = ("layer", layer, "network", expert)
    return {str(key[4]): part for key, part in parts.items() if key[:4] == home}


def heads_of(checkpoint: Checkpoint) -> dict[str, int]:
    """Numbers of heads and their width, as far as the files tell them."""
    if checkpoint.family is None:
        return {}
    sizes, found = Sizes(checkpoint), dict[str, int]()
    for size in ("heads", "kv_heads", "head_dim"):
        try:
            told = sizes.of(size)
        except GlassblockError:
            continue  # a fault of the config, told by its own rule
        if told is not None:
            found[size] = told.value
    return found


def _readable(entry: TensorEntry) -> bool:
    return entry.elements > 0 and (entry.dtype in FLOAT_CODES or isinstance(entry, StoredEntry) or _integers(entry))


def _integers(entry: TensorEntry) -> bool:
    return entry.dtype in TORCH_DTYPES and not TORCH_DTYPES[entry.dtype].is_complex


def _outer(checkpoint: Checkpoint) -> Iterator[tuple[Key, Part]]:
    embedding, head = embedding_entry(checkpoint), head_entry(checkpoint)
    if embedding is not None:
        yield ("embedding",), Part(embedding)
    if head is not None:
        yield ("head",), Part(head)
    elif (
        embedding is not None
        and checkpoint.trunk is not None
        and checkpoint.trunk.head is not None
        and _tied(checkpoint)
    ):
        yield ("head",), Part(embedding, forms=("the head is the embedding",))
    for find_norm in (final_norm, embedding_norm):
        try:
            norm = find_norm(checkpoint)[0]
        except GlassblockError:
            continue  # a size of the config is no number, which is a fault of its own: it meets by its name
        if norm is not None:
            yield from _norm(("norm", norm.row.role), norm, None)


def _tied(checkpoint: Checkpoint) -> bool:
    try:
        return checkpoint.family is not None and tied_of(checkpoint.config, checkpoint.family).value
    except GlassblockError:
        return False


def _layer(checkpoint: Checkpoint, layer: LayerTensors, heads: Heads) -> Iterator[tuple[Key, Part]]:
    home: Key = ("layer", layer.layer)
    for network in layer.networks:
        yield from _network((*home, "network", network.expert), network)
    mixture = layer.row.mixture
    for kind, entry in layer.router.items():
        transposed = kind == "weight" and mixture is not None and mixture.router_layout == "in_out"
        yield (*home, "router", kind), Part(entry, transposed)
    head = _head_rows(checkpoint, layer, {**heads, **heads_of(checkpoint)})
    for norm in layer.norms.values():
        by_row = norm.row.role in ("q", "k") and (norm.row.width or ())[-1:] == ("head_dim",)
        turned = head if by_row else None
        yield from _norm((*home, "norm", norm.row.role), norm, turned)
    if layer.branch_gain is not None:
        yield (*home, "branch-gain"), Part(layer.branch_gain)
    if layer.attention is not None:
        yield from _attention((*home, "attention"), layer.attention, head, {**heads, **heads_of(checkpoint)})


def _network(home: Key, network: NetworkTensors) -> Iterator[tuple[Key, Part]]:
    (first, last), layout = network.row.layouts, network.fused_layout
    for part, entry in network.weights.items():
        transposed = (last if part == "down" else first) == "in_out"
        if part != "fused" or layout is None:
            yield (*home, part), Part(entry, transposed, forms=("transposed",) if transposed else ())
            continue
        halves = split_rows(torch.arange(network.fused_rows), layout)
        for half, index in zip(("gate", "up"), halves, strict=True):
            yield (*home, half), Part(entry, transposed, index, forms=("fused",))
    for part, entry in network.biases.items():
        if part != "fused" or layout is None or entry.shape != (network.fused_rows,):
            yield (*home, f"{part}-bias"), Part(entry)
            continue
        halves = split_rows(torch.arange(entry.elements), layout)
        for half, index in zip(("gate", "up"), halves, strict=True):
            yield (*home, f"{half}-bias"), Part(entry, index=index, forms=("fused",))
    for parameter, entry in network.activation.items():
        yield (*home, parameter), Part(entry)


def _norm(key: Key, norm: NormTensors, head: HeadRows | None) -> Iterator[tuple[Key, Part]]:
    offset = norm_kind_named(norm.row.kind).offset
    if norm.gain is not None:
        rows = norm.gain.elements
        head = None if head is None or rows % head.width else head
        order = None if head is None else head.to_halves
        yield key, Part(norm.gain, index=None if order is None else within_heads(order, rows), offset=offset, head=head)
    if norm.bias is not None:
        yield (*key, "bias"), Part(norm.bias)


def _attention(
    home: Key, attention: AttentionTensors, head: HeadRows | None, heads: Heads
) -> Iterator[tuple[Key, Part]]:
    row, order = attention.row, None if head is None else head.to_halves
    transposed = isinstance(row, AttentionRow) and row.layout == "in_out"
    for suffix, entries in (("", attention.weights), ("-bias", attention.biases)):
        for part, entry in entries.items():
            turned = transposed and not suffix
            rows = (entry.shape[-1] if turned else entry.shape[0]) if entry.shape else 0
            if part == "fused" and isinstance(row, AttentionRow) and row.fused is not None:
                split = _split(row, rows, heads)
                if split is not None:
                    for name, index in zip(("query", "key", "value"), split, strict=True):
                        inner = (
                            index[within_heads(order, len(index))] if order is not None and name != "value" else index
                        )
                        of_heads = None if name == "value" else head
                        yield (*home, name + suffix), Part(entry, turned, inner, forms=("fused",), head=of_heads)
                    continue
            of_heads = head if head is not None and part in ("query", "key") and rows % head.width == 0 else None
            index = None if order is None or of_heads is None else within_heads(order, rows)
            forms = ("rotary",) if index is not None else ()
            yield (*home, part + suffix), Part(entry, turned, index, forms=forms, head=of_heads)
    if attention.sinks is not None:
        yield (*home, "sinks"), Part(attention.sinks)


def _split(row: AttentionRow, rows: int, heads: Heads) -> tuple[Tensor, Tensor, Tensor] | None:
    queries, keys, width = (heads.get(size, 0) for size in ("heads", "kv_heads", "head_dim"))
    if row.fused is None or not queries or not keys or rows != (queries + 2 * keys) * width or queries % keys:
        return None
    return split_heads_of(torch.arange(rows), row.fused, queries, keys, width)


def _head_rows(checkpoint: Checkpoint, layer: LayerTensors, heads: Heads) -> HeadRows | None:
    """The rows of a head of queries and keys; None where positions turn none, or nothing tells."""
    row, width = layer.row.attention, heads.get("head_dim")
    if not isinstance(row, AttentionRow) or width is None:
        return None
    try:
        rotary = rotary_at(checkpoint, layer, row, width)
    except GlassblockError:
        return None  # a fault of the config, told by its own rule
    if rotary is None:
        return None
    return HeadRows(width, rotary.dim, rotary.arrangement is not Arrangement.HALVES, heads.get("heads", 0))


def within_heads(order: Tensor, rows: int) -> Tensor:
    """The same order in every head."""
    return (torch.arange(0, rows, len(order))[:, None] + order).flatten()
