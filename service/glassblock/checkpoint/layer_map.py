"""Which tensors a layer is made of, and whether they fit the config. Headers only: nothing is read here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from glassblock.checkpoint.attention_map import AttentionTensors, attention_parts, attention_tensors_of
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import Architecture, FeedForwardRow, MixtureRow, NormRow, Role
from glassblock.checkpoint.fitting import Axis, LayerFault, Sizes, Wanted, entry_for, fault_of, row_of, trunk_prefix
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import Sourced, eps_of, flag_of, number_of
from glassblock.checkpoint.storage import StorageFault
from glassblock.checkpoint.variants import row_in
from glassblock.errors import DamagedCheckpoint, FamilyMismatch, InvalidValue

Part = Literal["gate", "up", "fused", "down"]
Expert = int | Literal["shared"] | None
"""Which network of a layer: the dense one (None), a routed expert by its number, or the shared one."""

PARTS: tuple[Part, ...] = ("gate", "up", "fused", "down")
MAX_EXPERTS = 65_536
"""Experts looked for in one layer, whatever a config declares."""


@dataclass(frozen=True, slots=True)
class NormTensors:
    """One norm: its row, and where its gain and bias lie."""

    row: NormRow
    gain: TensorEntry | None
    bias: TensorEntry | None


@dataclass(frozen=True)
class NetworkTensors:
    """Where the tensors of one feed-forward network lie.

    Attributes:
        expert: Which network of its layer it is.
        row: Its row.
        weights: Its weights as stored: `gate`, `up`, `down`; or `fused`, `down`. Of an expert in a stack, its slice.
        biases: Their biases, where the family or the config says that there are any.
        activation: The tensors of a learned activation, by parameter.
    """

    expert: Expert
    row: FeedForwardRow
    weights: Mapping[Part, TensorEntry]
    biases: Mapping[Part, TensorEntry]
    activation: Mapping[str, TensorEntry] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class LayerTensors:
    """Where the tensors of one layer lie.

    Attributes:
        layer: Its number.
        prefix: What its names begin with.
        row: The family's row as it is in this layer.
        networks: Its feed-forward networks: the dense one, or the routed experts by number and then the shared one.
        router: Tensors of the mixture beside its networks: `weight`, `bias`, `correction`, `shared_gate`,
            `output_bias`.
        norms: The norms by role.
        branch_gain: The vector that multiplies what the feed-forward branch adds.
        undeclared: Biases in the file that by family and config should not be there; nothing uses them.
        has_bias: Whether its networks have biases, and who says so.
        attention: Where the tensors of its attention lie, as far as they were found; None where the family's is not
            read.
    """

    layer: int
    prefix: str
    row: Architecture
    networks: tuple[NetworkTensors, ...]
    router: Mapping[str, TensorEntry]
    norms: Mapping[Role, NormTensors]
    branch_gain: TensorEntry | None
    undeclared: tuple[TensorEntry, ...]
    has_bias: Sourced[bool]
    attention: AttentionTensors | None = None

    @property
    def dense(self) -> NetworkTensors | None:
        """Its dense network, in a layer that has one."""
        return next((network for network in self.networks if network.expert is None), None)

    @property
    def weights(self) -> Mapping[Part, TensorEntry]:
        """Weights of its dense network; none in a mixture."""
        return {} if self.dense is None else self.dense.weights

    @property
    def biases(self) -> Mapping[Part, TensorEntry]:
        """Biases of its dense network; none in a mixture."""
        return {} if self.dense is None else self.dense.biases

    def network(self, expert: Expert) -> NetworkTensors:
        """The network asked for.

        Raises:
            InvalidValue: The layer has no such network.
        """
        for network in self.networks:
            if network.expert == expert:
                return network
        known = [network.expert for network in self.networks if network.expert is not None]
        if not self.networks:
            raise InvalidValue(
                f"layer {self.layer} has no feed-forward network", field="layer", hint="Choose another layer."
            )
        if not known:
            raise InvalidValue(f"layer {self.layer} is dense: it has no experts", field="expert", hint="Leave it out.")
        routed = sum(isinstance(name, int) for name in known)
        shared = ' or "shared"' if "shared" in known else ""
        problem = "is a mixture of experts" if expert is None else f"has no expert {expert}"
        raise InvalidValue(
            f"layer {self.layer} {problem}", field="expert", hint=f"Give a number from 0 to {routed - 1}{shared}."
        )

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """Its tensors that are used by its networks and norms; of experts in stacks, their slices."""
        networks = (
            entry
            for network in self.networks
            for part in (network.weights, network.biases, network.activation)
            for entry in part.values()
        )
        norms = (entry for norm in self.norms.values() for entry in (norm.gain, norm.bias) if entry is not None)
        gain = () if self.branch_gain is None else (self.branch_gain,)
        return (*networks, *self.router.values(), *norms, *gain)


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
    wanted = tuple(_layer_tensors(checkpoint, row, prefix, sizes))
    found, faults = _look_up(checkpoint, wanted, sizes, layer)
    parts = tuple(attention_parts(checkpoint, row, prefix))
    attended, more = _look_up(checkpoint, parts, sizes, layer)
    undeclared = tuple(
        checkpoint.entries[item.name] for item in wanted if not item.declared and item.name in checkpoint.entries
    )
    if row.mixture is not None:
        faults = _experts_missing(checkpoint, row.mixture, faults, found, layer)
    network = row.feed_forward or row.network
    tensors = LayerTensors(
        layer=layer,
        prefix=prefix,
        row=row,
        networks=tuple(_networks(row, found)),
        router={kind: entry for (place, kind), entry in found.items() if place == "router"},
        norms={
            norm.role: NormTensors(norm, found.get((norm.role, "gain")), found.get((norm.role, "norm-bias")))
            for norm in row.norms
            if norm.role != "final"
        },
        branch_gain=found.get(("branch", "branch-gain")),
        undeclared=undeclared,
        has_bias=flag_of(checkpoint.config, row, network.bias),
        attention=None if row.attention is None else attention_tensors_of(row.attention, attended),
    )
    return tensors, faults, more


def _experts_missing(
    checkpoint: Checkpoint,
    row: MixtureRow,
    faults: tuple[LayerFault, ...],
    found: Mapping[tuple[str, str], TensorEntry],
    layer: int,
) -> tuple[LayerFault, ...]:
    """The faults, with those of experts none of whose tensors is there told as one.

    Where the router has a row for each expert that is there, it is the config that counts more, which its shape tells.
    """
    missing = {fault.tensor for fault in faults if fault.kind in {"missing-tensor", "missing-bias"}}
    if row.arrangement != "separate" or not missing:
        return faults
    prefix, experts = layer_prefix(checkpoint, layer), row.experts
    parts = [part for part in (experts.gate, experts.up, experts.fused, experts.down) if part is not None]
    present = {int(place.partition(".")[0]) for place, _ in found if place[:1].isdecimal()}
    owners = {
        full: number
        for number in range(max(present, default=-1) + 1 + len(missing))
        if number not in present
        for part in parts
        for name in (part.weight, part.bias)
        if (full := prefix + name.replace("{j}", str(number))) in missing
    }
    if not owners:
        return faults
    absent = sorted(set(owners.values()))
    kept = tuple(fault for fault in faults if fault.tensor not in owners)
    router = found.get(("router", "weight"))
    rows = None if router is None or len(router.shape) != 2 else router.shape[row.router_layout == "in_out"]
    if rows is not None and not row.idle and present == set(range(rows)):
        return kept
    told = f"expert {absent[0]} has" if len(absent) == 1 else f"experts {_ranges(absent)} have"
    routed = "" if rows is None else f"; the router has a row for each of {rows}"
    first = next(fault for fault in faults if owners.get(fault.tensor) == absent[0])
    message = f"layer {layer}: {told} no tensor in any file, {len(present)} others have{routed}"
    return (*kept, LayerFault("experts-missing", layer, first.tensor, checkpoint.path, message, first.hint))


def _ranges(numbers: list[int]) -> str:
    """`0 to 3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


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
        faults = [] if checkpoint.has_unread_files else [*_count_faults(checkpoint)]
        for layer in checkpoint.layer_indices:
            layers[layer], found = resolve_layer(checkpoint, layer, sizes=sizes)
            faults.extend(found)
        faults.extend(_look_up(checkpoint, tuple(_outer_tensors(checkpoint)), sizes, None)[1])
    except DamagedCheckpoint:
        return MappingProxyType({}), ()
    kept = tuple(fault for fault in faults if not checkpoint.explains_absence(fault.tensor))
    return MappingProxyType(layers), kept


def final_norm(checkpoint: Checkpoint) -> tuple[NormTensors | None, tuple[LayerFault, ...]]:
    """The norm after the last layer, and what is wrong with it; None where the family has none."""
    row = row_of(checkpoint)
    return _outer_norm(checkpoint, row.norm("final"))


def embedding_norm(checkpoint: Checkpoint) -> tuple[NormTensors | None, tuple[LayerFault, ...]]:
    """The norm of the embedding rows, and what is wrong with it; None where the family has none."""
    return _outer_norm(checkpoint, row_of(checkpoint).embedding_norm)


def _outer_norm(checkpoint: Checkpoint, norm: NormRow | None) -> tuple[NormTensors | None, tuple[LayerFault, ...]]:
    if norm is None:
        return None, ()
    wanted = tuple(_norm_tensors(norm, trunk_prefix(checkpoint)))
    found, faults = _look_up(checkpoint, wanted, Sizes(checkpoint), None)
    return NormTensors(norm, found.get((norm.role, "gain")), found.get((norm.role, "norm-bias"))), faults


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
    return checkpoint.entries.get(embedding_name(checkpoint) or "")


def embedding_name(checkpoint: Checkpoint) -> str | None:
    """Full name of the token embedding; None in a family that reads no tokens."""
    row, trunk = row_of(checkpoint), checkpoint.trunk
    if trunk is not None and trunk.embedding is not None:
        return trunk.embedding
    return None if row.embedding is None else trunk_prefix(checkpoint) + row.embedding


def trunk_entry(checkpoint: Checkpoint, name: str) -> TensorEntry | None:
    """A tensor named relative to the trunk, where the file holds it."""
    return checkpoint.entries.get(trunk_prefix(checkpoint) + name)


def head_entry(checkpoint: Checkpoint) -> TensorEntry | None:
    """The output head, where the file holds one of its own."""
    head = None if checkpoint.trunk is None else checkpoint.trunk.head
    return None if head is None else checkpoint.entries.get(head)


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
        entry = entry_for(checkpoint, item)
        fault = fault_of(checkpoint, item, entry, sizes, layer)
        # Where a weight is missing, its bias going with it is no second fault.
        if fault is not None and not (entry is None and item.place in absent):
            faults.append(fault)
        if entry is None:
            absent.add(item.place)
        elif item.declared:
            found[item.place, item.kind] = entry.entry if isinstance(entry, StorageFault) else entry
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


def _layer_tensors(checkpoint: Checkpoint, row: Architecture, prefix: str, sizes: Sizes) -> Iterator[Wanted]:
    if row.feed_forward is not None:
        yield from _network_tensors(checkpoint, row.feed_forward, prefix, "")
    if row.mixture is not None:
        yield from _mixture_tensors(checkpoint, row.mixture, prefix, sizes)
    for norm in row.norms:
        if norm.role != "final":
            yield from _norm_tensors(norm, prefix)
    if row.branch_gain is not None:
        yield Wanted("branch", "branch-gain", prefix + row.branch_gain, (Axis(("hidden",)),))


def _mixture_tensors(checkpoint: Checkpoint, row: MixtureRow, prefix: str, sizes: Sizes) -> Iterator[Wanted]:
    outer, experts = Axis(("hidden",)), Axis((row.count,))
    axes = (experts, outer) if row.router_layout == "out_in" else (outer, experts)
    yield Wanted("router", "weight", prefix + row.router.weight, None if row.idle else axes)
    has_bias = flag_of(checkpoint.config, row_of(checkpoint), row.router_bias).value
    yield Wanted("router", "bias", prefix + row.router.bias, None if row.idle else (experts,), declared=has_bias)
    if row.correction is not None:
        entry = checkpoint.entries.get(prefix + row.correction)
        flat = entry is None or len(entry.shape) == 1  # ERNIE stores it with a leading axis of one
        corrected = (experts,) if flat else (Axis(()), experts)
        name = prefix + row.correction
        yield Wanted("router", "correction", name, None if row.idle else corrected, optional=True)
    if row.arrangement == "separate":
        for expert in range(_expert_count(checkpoint, row, prefix, sizes)):
            yield from _network_tensors(checkpoint, row.experts, prefix, str(expert))
    else:
        yield from _network_tensors(checkpoint, row.experts, prefix, row.arrangement, stack=row)
    if row.shared is not None:
        yield from _network_tensors(checkpoint, row.shared, prefix, "shared")
    if row.shared_gate is not None:
        yield Wanted("router", "shared_gate", prefix + row.shared_gate, (Axis(()), outer))
    if row.output_bias is not None:
        yield Wanted("router", "output_bias", prefix + row.output_bias, (outer,))


def _expert_count(checkpoint: Checkpoint, row: MixtureRow, prefix: str, sizes: Sizes) -> int:
    declared = sizes.of(row.count)
    if declared is not None:
        return min(declared.value, MAX_EXPERTS)
    router = checkpoint.entries.get(prefix + row.router.weight)
    if router is not None and len(router.shape) == 2 and not row.idle:
        return min(router.shape[row.router_layout == "in_out"], MAX_EXPERTS)
    template = prefix + row.experts.down.weight
    return next(j for j in range(MAX_EXPERTS) if template.replace("{j}", str(j)) not in checkpoint.entries)


def _network_tensors(
    checkpoint: Checkpoint, row: FeedForwardRow, prefix: str, network: str, *, stack: MixtureRow | None = None
) -> Iterator[Wanted]:
    """The tensors of one network, or of a stack of them; `network` is put in front of each part's name."""
    family = row_of(checkpoint)
    has_bias = flag_of(checkpoint.config, family, row.bias).value
    down_bias = has_bias if row.down_bias is None else flag_of(checkpoint.config, family, row.down_bias).value
    first, last = row.layouts
    inner, outer, both = Axis(row.width), Axis((row.outer,)), Axis(row.width, times=2)
    for part, projection, rows, columns, layout, declared in (
        ("gate", row.gate, inner, outer, first, has_bias),
        ("up", row.up, inner, outer, first, has_bias),
        ("fused", row.fused, both, outer, first, has_bias),
        ("down", row.down, outer, inner, last, down_bias),
    ):
        if projection is None:
            continue
        axes = (rows, columns) if layout == "out_in" else (columns, rows)
        bias = (rows,)
        if stack is not None and stack.arrangement == "stacked":
            axes, bias = (Axis((stack.count,)), *axes), (Axis((stack.count,)), rows)
        elif stack is not None:
            inside = axes[0].sizes
            axes = (Axis(None if inside is None else (stack.count, *inside), times=axes[0].times), axes[1])
        place = f"{network}.{part}"
        weight, bias_name = (prefix + name.replace("{j}", network) for name in (projection.weight, projection.bias))
        yield Wanted(place, "weight", weight, axes, layout="out_in" if layout == "out_in" else "in_out")
        yield Wanted(place, "bias", bias_name, bias, declared=declared)
    for parameter, name in row.activation_tensors.items():
        yield Wanted(f"{network}.{parameter}", "activation", prefix + name.replace("{j}", network), None)


def _networks(row: Architecture, found: Mapping[tuple[str, str], TensorEntry]) -> Iterator[NetworkTensors]:
    """The networks of a layer, with whatever of their tensors was found."""
    if row.feed_forward is not None:
        yield _network(row.feed_forward, None, "", found)
    if row.mixture is None:
        return
    arrangement = row.mixture.arrangement
    if arrangement == "separate":
        numbers = {int(place.partition(".")[0]) for place, _ in found if place[:1].isdecimal()}
        for number in sorted(numbers):
            yield _network(row.mixture.experts, number, str(number), found)
    else:
        yield from _unstacked(
            _network(row.mixture.experts, None, arrangement, found), found.get(("router", "weight")), row.mixture
        )
    if row.mixture.shared is not None:
        yield _network(row.mixture.shared, "shared", "shared", found)


def _network(
    row: FeedForwardRow, expert: Expert, key: str, found: Mapping[tuple[str, str], TensorEntry]
) -> NetworkTensors:
    return NetworkTensors(
        expert,
        row,
        {part: found[f"{key}.{part}", "weight"] for part in PARTS if (f"{key}.{part}", "weight") in found},
        {part: found[f"{key}.{part}", "bias"] for part in PARTS if (f"{key}.{part}", "bias") in found},
        {
            parameter: found[f"{key}.{parameter}", "activation"]
            for parameter in row.activation_tensors
            if (f"{key}.{parameter}", "activation") in found
        },
    )


def _unstacked(stack: NetworkTensors, router: TensorEntry | None, row: MixtureRow) -> Iterator[NetworkTensors]:
    """The experts of a stack, each with its slices. Their number is the first axis', or the router's."""
    entries = (*stack.weights.values(), *stack.biases.values())
    if not entries:
        return
    if row.arrangement == "stacked":
        count = min(entry.shape[0] for entry in entries if entry.shape)
    else:
        count = 0 if router is None else router.shape[0 if row.router_layout == "out_in" else -1]
    if not 0 < count <= MAX_EXPERTS or any(not entry.shape or entry.shape[0] % count for entry in entries):
        return
    for expert in range(count):
        yield NetworkTensors(
            expert,
            stack.row,
            {part: entry.part(expert, count) for part, entry in stack.weights.items()},
            {part: entry.part(expert, count) for part, entry in stack.biases.items()},
            stack.activation,
        )


def _norm_tensors(norm: NormRow, prefix: str) -> Iterator[Wanted]:
    axes = tuple(Axis((size,)) for size in norm.width) if norm.per_head else (Axis(norm.width),)
    if norm.has_gain:
        yield Wanted(norm.role, "gain", prefix + norm.gain, axes)
    yield Wanted(norm.role, "norm-bias", prefix + norm.bias, axes, declared=norm.has_bias)


def _outer_tensors(checkpoint: Checkpoint) -> Iterator[Wanted]:
    row, prefix = row_of(checkpoint), trunk_prefix(checkpoint)
    axes = (Axis(("vocab",)), Axis(("hidden",)))
    embedding = embedding_name(checkpoint)
    if embedding is not None:
        yield Wanted("embedding", "weight", embedding, axes)
    if checkpoint.trunk is not None and checkpoint.trunk.head is not None:
        # Whether a head must be there is the question of the tie, which is not one of shapes.
        yield Wanted("head", "weight", checkpoint.trunk.head, axes, optional=True)
    if row.positions is not None:
        yield Wanted("positions", "positions", prefix + row.positions.name, (Axis(None), Axis(("hidden",))))
    for norm in (row.embedding_norm, row.norm("final")):
        if norm is not None:
            yield from _norm_tensors(norm, prefix)


def _count_faults(checkpoint: Checkpoint) -> Iterator[LayerFault]:
    declared, shown = checkpoint.declared_layers, checkpoint.layer_indices
    if declared is None:
        return
    extra_layers = int(number_of(checkpoint.config, row_of(checkpoint), row_of(checkpoint).extra_layers).value)
    # Without building the range: a config may declare any number.
    if shown[-1] == len(shown) - 1 and 0 <= len(shown) - declared.value <= max(0, extra_layers):
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
