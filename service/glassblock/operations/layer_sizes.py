"""Sizes of what one layer is made of, from headers: for estimates made before anything is read."""

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from glassblock.checkpoint.attention_map import AttentionTensors
from glassblock.checkpoint.attention_row import AttentionRow
from glassblock.checkpoint.entries import DTYPE_BITS, TensorEntry
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.checkpoint.stored_entries import StoredEntry

READ_AS_BYTES = 4
"""Of an element of a weight that was stored quantised."""


class NetworkSize(NamedTuple):
    """A feed-forward network.

    Attributes:
        d: model width.
        m: hidden width.
        gated: whether there is a gate.
        read: bytes in the file.
        held: bytes on the device.
        item: bytes of its widest element there.
    """

    d: int
    m: int
    gated: bool
    read: int
    held: int
    item: int

    @property
    def elements(self) -> int:
        """Numbers of its matrices."""
        return (3 if self.gated else 2) * self.m * self.d


class AttentionSize(NamedTuple):
    """An attention.

    Attributes:
        d: model width.
        rows: numbers that its projections return for one token, the last one's d left out, and what that one reads.
        queries: those of the queries.
        elements: numbers of its matrices.
        read: bytes in the file.
        held: bytes on the device.
        item: bytes of its widest element there.
        written_out: whether scores are written out, in parts of a fixed size.
        masked: whether there may be a window, and so a mask, beside keys and values for every head.
    """

    d: int
    rows: int
    queries: int
    elements: int
    read: int
    held: int
    item: int
    written_out: bool
    masked: bool


class Cost(NamedTuple):
    """Bytes held to the end, the largest temporary beside them, and FLOPs of products of matrices."""

    held: int
    transient: int
    flops: int

    @property
    def bytes(self) -> int:
        """At the peak."""
        return self.held + self.transient


def network_cost(size: NetworkSize, rows: int, item: int, *, recombined: int) -> Cost:
    """Running a feed-forward block with every stage kept, its weights not counted.

    Args:
        size: of its network.
        rows: that it is run on.
        item: bytes of an element in the dtype of the computation.
        recombined: rows that are computed again in float64.
    """
    d, m = size.d, size.m
    wide = 4 if size.gated else 2
    held = rows * item * (wide * m + 4 * d)
    # The statistics of a stage pass through float64; of a float64 stage through two copies with its mask.
    statistics = rows * max(m, d) * (17 if item == 8 else 8)
    again = recombined * (wide * m + 5 * d) * 8 + (2 * 8 * min(m * d, 2**24) if recombined else 0)
    cast = m * d * item if item != size.item else 0
    flops = 2 * rows * size.elements + 2 * recombined * m * d
    return Cost(held, max(statistics, again, cast), flops)


SCORE_BYTES = 2**28
"""What scores and masks may take where they are written out (`causal_attention`)."""


MASK_BYTES = 5
"""Of a mask, for each pair of tokens (`causal_attention`)."""


def attention_cost(size: AttentionSize, batch: int, tokens: int, item: int) -> Cost:
    """Running attention with its norms and every stage kept, its weights not counted."""
    rows, d = batch * tokens, size.d
    held = rows * item * (size.rows + 4 * d)
    statistics = rows * max(size.queries, d) * (17 if item == 8 else 8)
    scores = min(SCORE_BYTES, 4 * batch * heads_of(size) * tokens * tokens * max(4, item)) if size.written_out else 0
    if size.masked and not size.written_out:
        scores = min(SCORE_BYTES, MASK_BYTES * tokens * tokens) + 2 * rows * size.queries * item
    cast = size.queries * d * item if item != size.item else 0
    flops = 2 * rows * size.elements + 4 * batch * tokens * tokens * size.queries
    return Cost(held, max(statistics, scores, cast), flops)


def heads_of(size: AttentionSize) -> int:
    """How many heads there are at most, of 64 rows each."""
    return max(1, size.queries // 64)


def network_size(network: NetworkTensors) -> NetworkSize:
    """Of one network, dense or an expert."""
    down = network.weights["down"].shape
    d, m = down if network.row.layouts[1] == "out_in" else reversed(down)
    weights = (*network.weights.values(), *network.biases.values(), *network.activation.values())
    gated = "gate" in network.weights or "fused" in network.weights
    return NetworkSize(d, m, gated, read_bytes(weights), held_bytes(weights), _item(weights))


def attention_size(attention: AttentionTensors, d: int) -> AttentionSize:
    """Of the attention of one layer."""
    entries, row = attention.entries, attention.row
    elements = sum(prod(entry.shape) for entry in attention.weights.values())
    plain = isinstance(row, AttentionRow)
    # In latent attention the narrow projections widen again: their larger side counts.
    wide = sum(max(entry.shape, default=0) for entry in attention.weights.values())
    rows = elements // d if plain else 2 * wide
    output = attention.weights.get("output")
    queries = d if output is None else prod(output.shape) // d
    written_out = not isinstance(row, AttentionRow) or bool(row.softcap.keys or row.sinks)
    read, held = read_bytes(entries), held_bytes(entries)
    masked = isinstance(row, AttentionRow) and bool(row.window.keys)
    return AttentionSize(d, rows, queries, elements, read, held, _item(entries), written_out, masked)


def read_bytes(entries: Iterable[TensorEntry]) -> int:
    """Bytes in the files; of what is quantised with the scales and zeros beside the codes."""
    return sum(_in_file(entry) for entry in entries)


def held_bytes(entries: Iterable[TensorEntry]) -> int:
    """Bytes on the device: as stored, or as what is quantised is dequantised to, its codes beside it meanwhile."""
    return sum(
        _in_file(entry) + (READ_AS_BYTES * prod(entry.shape) if isinstance(entry, StoredEntry) else 0)
        for entry in entries
    )


class BlockSize(NamedTuple):
    """The dense network of a layer with its norms, as it is kept between requests.

    Attributes:
        held: bytes on the device, those of the attention's norms among them.
        reading: bytes beside them at most while it is read: codes of what is quantised, one weight in another layout.
    """

    held: int
    reading: int


def block_size(tensors: LayerTensors) -> BlockSize:
    """Of the block of one layer that is kept.

    Raises:
        InvalidValue: the layer has no dense network.
    """
    weights = tuple(tensors.network(None).weights.values())
    held, at_rest = sum(map(_at_rest, tensors.entries)), list(map(_at_rest, weights))
    return BlockSize(held, max(held_bytes(weights) - sum(at_rest), *at_rest))


def _at_rest(entry: TensorEntry) -> int:
    return READ_AS_BYTES * prod(entry.shape) if isinstance(entry, StoredEntry) else entry.bytes


def _in_file(entry: TensorEntry) -> int:
    if not isinstance(entry, StoredEntry) or entry.stored is None:
        return entry.bytes
    whole = sum(part.bytes for part in entry.stored.entries)
    return whole * prod(entry.shape) // max(1, prod(entry.stored.shape))


def _item(entries: Iterable[TensorEntry]) -> int:
    sizes = [READ_AS_BYTES if isinstance(entry, StoredEntry) else DTYPE_BITS[entry.dtype] // 8 for entry in entries]
    return max(sizes, default=READ_AS_BYTES)
