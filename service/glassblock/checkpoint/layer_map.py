"""Which tensors a layer is made of, and whether they fit the config. Headers only: nothing is read here."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from glassblock.checkpoint.absences import count_faults, experts_missing
from glassblock.checkpoint.attention_map import attention_parts, attention_tensors_of
from glassblock.checkpoint.family import Architecture, Role
from glassblock.checkpoint.fitting import LayerFault, Sizes, layer_prefix, look_up, row_of
from glassblock.checkpoint.layer_parts import (
    LayerTensors,
    NetworkTensors,
    networks_of,
    norm_in,
)
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import (
    wanted_outside,
)
from glassblock.checkpoint.settings import Sourced, blocks_of, eps_of
from glassblock.checkpoint.variants import row_in
from glassblock.checkpoint.wanted_tensors import biases_of, wanted_in_layer
from glassblock.errors import DamagedCheckpoint, FamilyMismatch, InvalidValue


def layer_tensors(checkpoint: Checkpoint, layer: int) -> LayerTensors:
    """Where the tensors of a layer lie, once those of its networks and norms are there and fit.

    Raises:
        InvalidValue: There is no such layer.
        FamilyMismatch: A tensor is missing, has another shape than the config says, or is quantised.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    return _checked(checkpoint, layer, whole=False)


def whole_layer_tensors(checkpoint: Checkpoint, layer: int) -> LayerTensors:
    """As `layer_tensors`, once those of its attention are there and fit as well.

    Raises:
        FamilyMismatch: Also where attention of this family is not read here.
        InvalidValue, DamagedCheckpoint, UnknownFamily: As `layer_tensors`.
    """
    return _checked(checkpoint, layer, whole=True)


def _checked(checkpoint: Checkpoint, layer: int, *, whole: bool) -> LayerTensors:
    checkpoint.require_usable()
    _check_layer(checkpoint, layer)
    if whole and row_at(checkpoint, layer).attention is None:
        raise FamilyMismatch(
            f"layer {layer}: the attention of the family {row_of(checkpoint).name} is not read here",
            hint="Run its feed-forward block on hidden states of your own.",
        )
    tensors, faults, more = _resolved(checkpoint, layer, Sizes(checkpoint))
    for fault in (*faults, *(more if whole else ())):
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
    tensors, faults, more = _resolved(checkpoint, layer, sizes or Sizes(checkpoint))
    return tensors, (*faults, *more)


def _resolved(
    checkpoint: Checkpoint, layer: int, sizes: Sizes
) -> tuple[LayerTensors, tuple[LayerFault, ...], tuple[LayerFault, ...]]:
    """A layer's tensors, what is wrong with those of its networks and norms, and with those of its attention."""
    prefix = layer_prefix(checkpoint, layer)
    row = row_at(checkpoint, layer)
    wanted = tuple(wanted_in_layer(checkpoint, row, prefix, sizes))
    found, faults = look_up(checkpoint, wanted, sizes, layer)
    parts = tuple(attention_parts(checkpoint, row, prefix))
    attended, more = look_up(checkpoint, parts, sizes, layer)
    asked_for = {item.name for item in (*wanted, *parts) if item.declared}  # as a router's correction, say
    denied = {
        item.name: item.denied_by
        for item in (*wanted, *parts)
        if not item.declared and item.name in checkpoint.entries and item.name not in asked_for
    }
    if row.mixture is not None:
        faults = experts_missing(row.mixture, faults, found, checkpoint, layer=layer)
    networks = tuple(networks_of(row, found, lambda fused: blocks_of(checkpoint.config, row, fused.blocks)))
    faults = (*faults, *_cut_faults(networks, layer))
    tensors = LayerTensors(
        layer=layer,
        prefix=prefix,
        row=row,
        networks=networks,
        router={kind: entry for (place, kind), entry in found.items() if place == "router"},
        norms={norm.role: norm_in(norm, found) for norm in row.norms if norm.role != "final"},
        branch_gain=found.get(("branch", "branch-gain")),
        undeclared=tuple(checkpoint.entries[name] for name in denied),
        denied_by=MappingProxyType(denied),
        has_bias=_has_bias(checkpoint, row),
        attention=None if row.attention is None else attention_tensors_of(row.attention, attended),
    )
    return tensors, faults, more


def _has_bias(checkpoint: Checkpoint, row: Architecture) -> Sourced[bool]:
    """Of the layer's first network; a layer may have none."""
    network = next(iter(row.networks), None)
    if network is None:
        return Sourced(value=False, source=f"family {row.name}: a layer without a network")
    return biases_of(checkpoint, network)[0]


def _cut_faults(networks: Iterable[NetworkTensors], layer: int) -> Iterator[LayerFault]:
    """Fused tensors that cannot be cut into the blocks that they are said to lie in, each once."""
    told: set[str] = set()
    for network in networks:
        entry, blocks = network.weights.get("fused"), network.blocks
        if entry is None or blocks is None or not network.fused_rows or network.fused_layout or entry.name in told:
            continue
        told.add(entry.name)
        message = (
            f"{entry.name} has {network.fused_rows} rows, which cannot be cut into {blocks.value} blocks of gate and up"
            f" ({blocks.source})"
        )
        yield LayerFault("shape", layer, entry.name, entry.file, message, "Correct the number of blocks.")


def row_at(checkpoint: Checkpoint, layer: int) -> Architecture:
    """The family's row as it is in one layer."""

    def shape(name: str) -> tuple[int, ...] | None:
        entry = checkpoint.entries.get(name)
        return None if entry is None else entry.shape

    return row_in(row_of(checkpoint), checkpoint.config, layer, prefix=layer_prefix(checkpoint, layer), shape=shape)


def shape_faults(checkpoint: Checkpoint) -> tuple[LayerFault, ...]:
    """Everything that does not fit between the config and the tensors of all layers, embedding, head and last norm.

    Empty when the family or the names' prefix is unknown, or a size in the config is unusable: each is a fault of
    its own.
    """
    return resolve_layers(checkpoint)[1]


def resolve_layers(checkpoint: Checkpoint) -> tuple[Mapping[int, LayerTensors], tuple[LayerFault, ...]]:
    """The tensors of every layer, and the `shape_faults`, from one look at the names.

    None of both when the family or the names' prefix is unknown, or a size in the config is unusable.
    """
    layers: dict[int, LayerTensors] = {}
    if checkpoint.family is None or checkpoint.trunk is None:
        return MappingProxyType(layers), ()
    try:
        sizes = Sizes(checkpoint)
        faults = [] if checkpoint.has_unread_files else [*count_faults(checkpoint)]
        for layer in checkpoint.layer_indices:
            layers[layer], found = resolve_layer(checkpoint, layer, sizes=sizes)
            faults.extend(found)
        last = layers[checkpoint.layer_indices[-1]].row if checkpoint.layer_indices else None
        faults.extend(look_up(checkpoint, tuple(wanted_outside(checkpoint, sizes, last)), sizes, None)[1])
    except DamagedCheckpoint:
        return MappingProxyType({}), ()
    kept = tuple(fault for fault in faults if not checkpoint.explains_absence(fault.tensor))
    return MappingProxyType(layers), kept


def eps_sources(checkpoint: Checkpoint) -> Mapping[Role, Sourced[float]]:
    """The epsilon of each norm, and where it comes from.

    Raises:
        DamagedCheckpoint: The config holds no usable number there.
        UnknownFamily, FamilyMismatch: See `Checkpoint.require_usable`.
    """
    row = checkpoint.require_usable()
    return {norm.role: eps_of(checkpoint.config, row, norm.eps) for norm in row.norms}


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
