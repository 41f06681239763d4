"""Which tensors a layer is made of, and whether they fit the config. Headers only: nothing is read here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import Architecture, NormRow, Role
from glassblock.checkpoint.fitting import Axis, LayerFault, Sizes, Wanted, fault_of, row_of, trunk_prefix
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import Sourced, eps_of, flag_of
from glassblock.errors import DamagedCheckpoint, FamilyMismatch, InvalidValue

Part = Literal["gate", "up", "fused", "down"]


@dataclass(frozen=True, slots=True)
class NormTensors:
    """One norm: its row, and where its gain and bias lie."""

    row: NormRow
    gain: TensorEntry | None
    bias: TensorEntry | None


@dataclass(frozen=True)
class LayerTensors:
    """Where the tensors of one layer lie.

    Attributes:
        layer: Its number.
        prefix: What its names begin with.
        weights: The feed-forward network's weights as stored: `gate`, `up`, `down`; or `fused`, `down`.
        biases: Their biases, where the family or the config says that there are any.
        norms: The norms by role.
        undeclared: Biases in the file that by family and config should not be there; nothing uses them.
        has_bias: Whether the network has biases, and who says so.
    """

    layer: int
    prefix: str
    weights: Mapping[Part, TensorEntry]
    biases: Mapping[Part, TensorEntry]
    norms: Mapping[Role, NormTensors]
    undeclared: tuple[TensorEntry, ...]
    has_bias: Sourced[bool]

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """All its tensors that are used."""
        norms = (entry for norm in self.norms.values() for entry in (norm.gain, norm.bias) if entry is not None)
        return (*self.weights.values(), *self.biases.values(), *norms)


def layer_tensors(checkpoint: Checkpoint, layer: int) -> LayerTensors:
    """Where the tensors of a layer lie, once all of them are there and fit.

    Raises:
        InvalidValue: There is no such layer.
        FamilyMismatch: A tensor is missing, has another shape than the config says, or is quantised.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    checkpoint.require_usable()
    _check_layer(checkpoint, layer)
    tensors, faults = resolve_layer(checkpoint, layer)
    for fault in faults:
        raise mismatch(fault)
    return tensors


def mismatch(fault: LayerFault) -> FamilyMismatch:
    """The error that a layer's fault is to whoever wants to run it."""
    return FamilyMismatch(fault.message, hint=fault.hint, tensor=fault.tensor, file=fault.file.name)


def resolve_layer(
    checkpoint: Checkpoint, layer: int, *, sizes: Sizes | None = None
) -> tuple[LayerTensors, tuple[LayerFault, ...]]:
    """As `layer_tensors`, with everything wrong as values.

    Args:
        checkpoint: A checkpoint with a family and a trunk.
        layer: One of its `layer_indices`.
        sizes: What other layers told about sizes, for checkpoints without a config.

    Raises:
        DamagedCheckpoint: The config holds a size or flag of the wrong type.
    """
    row, prefix = row_of(checkpoint), layer_prefix(checkpoint, layer)
    has_bias = flag_of(checkpoint.config, row, row.feed_forward.bias)
    wanted = tuple(_feed_forward_tensors(row, prefix, has_bias=has_bias.value)) + tuple(
        wanted for norm in row.norms if norm.role != "final" for wanted in _norm_tensors(norm, prefix)
    )
    found, faults = _look_up(checkpoint, wanted, sizes or Sizes(checkpoint), layer)
    undeclared = tuple(
        checkpoint.entries[item.name] for item in wanted if not item.declared and item.name in checkpoint.entries
    )
    parts: tuple[Part, ...] = ("gate", "up", "fused", "down")
    tensors = LayerTensors(
        layer=layer,
        prefix=prefix,
        weights={part: found[part, "weight"] for part in parts if (part, "weight") in found},
        biases={part: found[part, "bias"] for part in parts if (part, "bias") in found},
        norms={
            norm.role: NormTensors(norm, found.get((norm.role, "gain")), found.get((norm.role, "norm-bias")))
            for norm in row.norms
            if norm.role != "final"
        },
        undeclared=undeclared,
        has_bias=has_bias,
    )
    return tensors, faults


def shape_faults(checkpoint: Checkpoint) -> tuple[LayerFault, ...]:
    """Everything that does not fit between the config and the tensors of all layers, embedding, head and last norm.

    Empty when the family or the names' prefix is unknown, or a size in the config is unusable: each is a fault of
    its own.
    """
    if checkpoint.family is None or checkpoint.trunk is None:
        return ()
    try:
        sizes = Sizes(checkpoint)
        faults = [] if checkpoint.has_unread_files else [*_count_faults(checkpoint)]
        for layer in checkpoint.layer_indices:
            faults.extend(resolve_layer(checkpoint, layer, sizes=sizes)[1])
        faults.extend(_look_up(checkpoint, tuple(_outer_tensors(checkpoint)), sizes, None)[1])
    except DamagedCheckpoint:
        return ()
    return tuple(fault for fault in faults if not checkpoint.explains_absence(fault.tensor))


def final_norm(checkpoint: Checkpoint) -> tuple[NormTensors | None, tuple[LayerFault, ...]]:
    """The norm after the last layer, and what is wrong with it; None where the family has none."""
    row = row_of(checkpoint)
    norm = row.norm("final")
    if norm is None:
        return None, ()
    wanted = tuple(_norm_tensors(norm, trunk_prefix(checkpoint)))
    found, faults = _look_up(checkpoint, wanted, Sizes(checkpoint), None)
    return NormTensors(norm, found.get(("final", "gain")), found.get(("final", "norm-bias"))), faults


def eps_sources(checkpoint: Checkpoint) -> Mapping[Role, Sourced[float]]:
    """The epsilon of each norm, and where it comes from.

    Raises:
        DamagedCheckpoint: The config holds no usable number there.
        UnknownFamily, FamilyMismatch: See `Checkpoint.require_usable`.
    """
    row = checkpoint.require_usable()
    return {norm.role: eps_of(checkpoint.config, row, norm.eps) for norm in row.norms}


def embedding_entry(checkpoint: Checkpoint) -> TensorEntry | None:
    """The token embedding, where the file holds it."""
    return checkpoint.entries.get(trunk_prefix(checkpoint) + row_of(checkpoint).embedding)


def head_entry(checkpoint: Checkpoint) -> TensorEntry | None:
    """The output head, where the file holds one of its own."""
    return None if checkpoint.trunk is None else checkpoint.entries.get(checkpoint.trunk.head)


def layer_prefix(checkpoint: Checkpoint, layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return trunk_prefix(checkpoint) + row_of(checkpoint).layer.format(i=layer)


def _look_up(
    checkpoint: Checkpoint, wanted: tuple[Wanted, ...], sizes: Sizes, layer: int | None
) -> tuple[dict[tuple[str, str], TensorEntry], tuple[LayerFault, ...]]:
    """The entries found by place and kind, and what is wrong with them. A bias follows its weight in `wanted`."""
    found: dict[tuple[str, str], TensorEntry] = {}
    faults: list[LayerFault] = []
    absent: set[str] = set()
    for item in wanted:
        entry = checkpoint.entries.get(item.name)
        fault = fault_of(checkpoint, item, entry, sizes, layer)
        # Where a weight is missing, its bias going with it is no second fault.
        if fault is not None and not (entry is None and item.place in absent):
            faults.append(fault)
        if entry is None:
            absent.add(item.place)
        elif item.declared:
            found[item.place, item.kind] = entry
    return found, tuple(faults)


def _check_layer(checkpoint: Checkpoint, layer: int) -> None:
    declared = checkpoint.declared_layers
    shown = checkpoint.layer_indices
    if declared is not None and 0 <= layer < declared.value and layer not in shown:
        raise FamilyMismatch(
            f"layer {layer} has no tensors, though {declared.source} is {declared.value}",
            hint="Download the checkpoint again, or correct the config.",
        )
    if layer not in shown:
        raise InvalidValue(
            f"layer {layer} is out of range: the checkpoint has the layers {shown[0]} to {shown[-1]}",
            field="layer",
            hint="Count layers from 0.",
        )


def _feed_forward_tensors(row: Architecture, prefix: str, *, has_bias: bool) -> Iterator[Wanted]:
    network = row.feed_forward
    inner, outer = Axis(("intermediate",)), Axis(("hidden",))
    both = Axis(("intermediate",), times=2)
    for part, projection, rows, columns in (
        ("gate", network.gate, inner, outer),
        ("up", network.up, inner, outer),
        ("fused", network.fused, both, outer),
        ("down", network.down, outer, inner),
    ):
        if projection is not None:
            axes = (rows, columns) if network.layout == "out_in" else (columns, rows)
            yield Wanted(part, "weight", prefix + projection.weight, axes)
            yield Wanted(part, "bias", prefix + projection.bias, (rows,), declared=has_bias)


def _norm_tensors(norm: NormRow, prefix: str) -> Iterator[Wanted]:
    axes = (Axis(norm.width),)
    yield Wanted(norm.role, "gain", prefix + norm.gain, axes)
    yield Wanted(norm.role, "norm-bias", prefix + norm.bias, axes, declared=norm.has_bias)


def _outer_tensors(checkpoint: Checkpoint) -> Iterator[Wanted]:
    row, prefix = row_of(checkpoint), trunk_prefix(checkpoint)
    axes = (Axis(("vocab",)), Axis(("hidden",)))
    yield Wanted("embedding", "weight", prefix + row.embedding, axes)
    if checkpoint.trunk is not None:
        # Whether a head must be there is the question of the tie, which is not one of shapes.
        yield Wanted("head", "weight", checkpoint.trunk.head, axes, optional=True)
    final = row.norm("final")
    if final is not None:
        yield from _norm_tensors(final, prefix)


def _count_faults(checkpoint: Checkpoint) -> Iterator[LayerFault]:
    declared, shown = checkpoint.declared_layers, checkpoint.layer_indices
    # Without building the range: a config may declare any number.
    if declared is None or (len(shown) == declared.value and shown[-1] == declared.value - 1):
        return
    absent = next((layer for layer in range(min(declared.value, len(shown) + 1)) if layer not in shown), None)
    extra = next((layer for layer in shown if layer >= declared.value), None)
    what = f"layer {absent} is absent" if absent is not None else f"layer {extra} is there as well"
    yield LayerFault(
        "shape",
        absent if absent is not None else extra,
        layer_prefix(checkpoint, absent if absent is not None else shown[-1]) + "*",
        checkpoint.path,
        f"{declared.source} is {declared.value}, but the tensors show {len(shown)} layers: {what}",
        "Correct the config, or download the checkpoint again.",
    )
