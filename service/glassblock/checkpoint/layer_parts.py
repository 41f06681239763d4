"""What a layer is made of, once it is known where each of its tensors lies. Headers only: nothing is read here."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from glassblock.checkpoint.attention_map import AttentionTensors
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.family import Architecture, FeedForwardRow, FusedProjection, MixtureRow, NormRow, Role
from glassblock.checkpoint.settings import Sourced
from glassblock.errors import InvalidValue
from glassblock.numerics.fused_layouts import RowLayout

Part = Literal["gate", "up", "fused", "down"]
Expert = int | Literal["shared"] | None
"""Which network of a layer: the dense one (None), a routed expert by its number, or the shared one."""

PARTS: tuple[Part, ...] = ("gate", "up", "fused", "down")
MAX_EXPERTS = 65_536
"""Experts looked for in one layer, whatever a config declares."""

MAX_HEADS = 4_096
"""Heads with norms of their own looked for in one layer."""


@dataclass(frozen=True, slots=True)
class NormTensors:
    """One norm: its row, and where its gain and bias lie; `heads` in their place where every head has a gain apart."""

    row: NormRow
    gain: TensorEntry | None
    bias: TensorEntry | None
    heads: tuple[TensorEntry, ...] = ()

    @property
    def entries(self) -> tuple[TensorEntry, ...]:
        """All of its tensors."""
        return (*(entry for entry in (self.gain, self.bias) if entry is not None), *self.heads)


@dataclass(frozen=True)
class NetworkTensors:
    """Where the tensors of one feed-forward network lie.

    Attributes:
        expert: Which network of its layer it is.
        row: Its row.
        weights: Its weights as stored: `gate`, `up`, `down`; or `fused`, `down`. Of an expert in a stack, its slice.
        biases: Their biases, where the family or the config says that there are any.
        activation: The tensors of a learned activation, by parameter.
        blocks: In how many blocks the rows of a fused weight lie, and who says so; None without one.
    """

    expert: Expert
    row: FeedForwardRow
    weights: Mapping[Part, TensorEntry]
    biases: Mapping[Part, TensorEntry]
    activation: Mapping[str, TensorEntry] = field(default_factory=lambda: MappingProxyType({}))
    blocks: Sourced[int] | None = None

    @property
    def fused_rows(self) -> int:
        """How many rows its fused weight has; 0 without one that is a matrix."""
        entry = self.weights.get("fused")
        if entry is None or len(entry.shape) != 2:
            return 0
        return entry.shape[self.row.layouts[0] == "in_out"]

    @property
    def fused_layout(self) -> RowLayout | None:
        """How the rows of its fused weight and bias lie; None without one, or where its blocks do not come out."""
        if self.row.fused is None or not self.fused_rows:
            return None
        return self.row.fused.layout(self.fused_rows, blocks=1 if self.blocks is None else self.blocks.value)


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
        denied_by: Who says so of each, by its name.
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
    denied_by: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
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
        norms = (entry for norm in self.norms.values() for entry in norm.entries)
        gain = () if self.branch_gain is None else (self.branch_gain,)
        return (*networks, *self.router.values(), *norms, *gain)


def networks_of(
    row: Architecture,
    found: Mapping[tuple[str, str], TensorEntry],
    blocks_of: Callable[[FusedProjection], Sourced[int]],
) -> Iterator[NetworkTensors]:
    """The networks of a layer, with whatever of their tensors was found, by place and kind.

    Args:
        row: The family's row as it is in the layer.
        found: Its tensors.
        blocks_of: In how many blocks the rows of a fused tensor lie.
    """
    for network in _networks_of(row, found):
        fused = network.row.fused
        yield network if fused is None else replace(network, blocks=blocks_of(fused))


def _networks_of(row: Architecture, found: Mapping[tuple[str, str], TensorEntry]) -> Iterator[NetworkTensors]:
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
        count = min((entry.shape[0] for entry in entries if entry.shape), default=0)
    else:
        count = 0 if router is None or not router.shape else router.shape[0 if row.router_layout == "out_in" else -1]
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


def norm_in(norm: NormRow, found: Mapping[tuple[str, str], TensorEntry]) -> NormTensors:
    """One norm, with whatever of its tensors was found, by place and kind."""
    heads = {
        int(place.removeprefix(f"{norm.role}.")): entry
        for (place, kind), entry in found.items()
        if norm.apart and kind == "gain" and place.startswith(f"{norm.role}.")
    }
    gain, bias = found.get((norm.role, "gain")), found.get((norm.role, "norm-bias"))
    return NormTensors(norm, gain, bias, tuple(heads[head] for head in sorted(heads)))
