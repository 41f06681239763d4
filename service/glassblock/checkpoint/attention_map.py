"""Which tensors the attention of a layer is made of. Headers only: nothing is read here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from glassblock.checkpoint.attention_row import AttentionRow, LatentAttentionRow
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.fitting import Axis, Wanted, row_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.row_settings import Projection, Setting
from glassblock.checkpoint.settings import Sourced, flag_of

_PLACE = "attention."

_QUERIES = Axis(("heads", "head_dim"))
_KEYS = Axis(("kv_heads", "head_dim"))
_FUSED = Axis(("heads", "head_dim"), then=(Axis(("kv_heads", "head_dim"), times=2),))
_OUTER = Axis(("hidden",))
_LATENT_QUERIES = Axis(("heads", "nope_head_dim"), then=(Axis(("heads", "rope_head_dim")),))
_LATENT_KEYS = Axis(("heads", "nope_head_dim"), then=(Axis(("heads", "v_head_dim")),))
_LATENT_DOWN = Axis(("kv_rank",), then=(Axis(("rope_head_dim",)),))


@dataclass(frozen=True)
class AttentionTensors:
    """Where the tensors of one layer's attention lie.

    Attributes:
        row: Its row.
        weights: Its weights as stored, by the names that its row's projections have: `query`, `fused`, `output`.
        biases: Their biases, where the family or the config says that there are any.
        sinks: One more logit for each head.
    """

    row: AttentionRow | LatentAttentionRow
    weights: Mapping[str, TensorEntry]
    biases: Mapping[str, TensorEntry]
    sinks: TensorEntry | None = None

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """All of them."""
        sinks = () if self.sinks is None else (self.sinks,)
        return (*self.weights.values(), *self.biases.values(), *sinks)


def attention_parts(checkpoint: Checkpoint, row: Architecture, prefix: str) -> Iterator[Wanted]:
    """The tensors that the attention of a layer has by its row; none where the family's is not read.

    Args:
        checkpoint: The checkpoint.
        row: The family's row in this layer.
        prefix: What the names of the layer's tensors begin with.
    """
    if isinstance(row.attention, AttentionRow):
        yield from _heads(checkpoint, row.attention, prefix)
    elif row.attention is not None:
        yield from _latent(checkpoint, row.attention, prefix, narrow=row.norm("q_latent") is not None)


def attention_tensors_of(
    row: AttentionRow | LatentAttentionRow, found: Mapping[tuple[str, str], TensorEntry]
) -> AttentionTensors:
    """What was found of them, by place and kind."""
    by_kind = {
        wanted: {place.removeprefix(_PLACE): entry for (place, kind), entry in found.items() if kind == wanted}
        for wanted in ("weight", "bias", "sinks")
    }
    return AttentionTensors(row, by_kind["weight"], by_kind["bias"], by_kind["sinks"].get("sinks"))


def bias_setting(row: AttentionRow | LatentAttentionRow | None, name: str) -> Setting[bool] | None:
    """What declares a bias of attention, named relative to its layer; None where it is none of them."""
    if row is None:
        return None
    if isinstance(row, LatentAttentionRow):
        parts = (row.query_down, row.key_value_down, row.output)
        return row.bias if any(part.bias == name for part in parts) else None
    fused = None if row.fused is None else row.fused.projection
    flags = ((row.query, row.bias), (row.value, row.bias), (fused, row.bias))
    flags += ((row.key, row.key_bias or row.bias), (row.output, row.output_bias or row.bias))
    return next((flag for part, flag in flags if part is not None and part.bias == name), None)


def _heads(checkpoint: Checkpoint, row: AttentionRow, prefix: str) -> Iterator[Wanted]:
    family, config = row_of(checkpoint), checkpoint.config
    bias = flag_of(config, family, row.bias)
    key_bias = bias if row.key_bias is None else flag_of(config, family, row.key_bias)
    output_bias = bias if row.output_bias is None else flag_of(config, family, row.output_bias)
    fused = None if row.fused is None else row.fused.projection
    for part, projection, rows, columns, declared in (
        ("query", row.query, _QUERIES, _OUTER, bias),
        ("key", row.key, _KEYS, _OUTER, key_bias),
        ("value", row.value, _KEYS, _OUTER, bias),
        ("fused", fused, _FUSED, _OUTER, bias),
        ("output", row.output, _OUTER, _QUERIES, output_bias),
    ):
        if projection is not None:
            yield from _projection(part, projection, prefix, rows, columns, bias=declared, layout=row.layout)
    if row.sinks is not None:
        yield Wanted(f"{_PLACE}sinks", "sinks", prefix + row.sinks, (Axis(("heads",)),))


def _latent(checkpoint: Checkpoint, row: LatentAttentionRow, prefix: str, *, narrow: bool) -> Iterator[Wanted]:
    bias = flag_of(checkpoint.config, row_of(checkpoint), row.bias)
    never = Sourced(value=False, source=f"family {row_of(checkpoint).name}")
    rank, query_rank, values = Axis(("kv_rank",)), Axis(("q_rank",)), Axis(("heads", "v_head_dim"))
    parts = (
        ("key_value_down", row.key_value_down, _LATENT_DOWN, _OUTER, bias),
        ("key_value_up", row.key_value_up, _LATENT_KEYS, rank, never),
        ("output", row.output, _OUTER, values, bias),
    )
    queries = (
        (
            ("query_down", row.query_down, query_rank, _OUTER, bias),
            ("query_up", row.query_up, _LATENT_QUERIES, query_rank, never),
        )
        if narrow
        else (("query", row.query, _LATENT_QUERIES, _OUTER, never),)
    )
    for part, projection, rows, columns, declared in (*queries, *parts):
        yield from _projection(part, projection, prefix, rows, columns, bias=declared)


def _projection(
    part: str,
    projection: Projection,
    prefix: str,
    rows: Axis,
    columns: Axis,
    *,
    bias: Sourced[bool],
    layout: str = "out_in",
) -> Iterator[Wanted]:
    transposed = layout == "in_out"
    axes = (columns, rows) if transposed else (rows, columns)
    place = _PLACE + part
    yield Wanted(place, "weight", prefix + projection.weight, axes, layout="in_out" if transposed else "out_in")
    yield Wanted(place, "bias", prefix + projection.bias, (rows,), declared=bias.value, denied_by=bias.source)
