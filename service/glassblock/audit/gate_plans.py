"""Which networks the test of gate and up is put to, and why not the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from glassblock.audit.evidence import Unasked
from glassblock.checkpoint.entries import FLOAT_CODES
from glassblock.checkpoint.family import Architecture, FeedForwardRow
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.checkpoint.layers import gating_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import text_of
from glassblock.checkpoint.stored_entries import StoredEntry, codes_like_numbers
from glassblock.errors import DamagedCheckpoint, InvalidValue
from glassblock.numerics.activations import activation_named
from glassblock.numerics.fused_layouts import RowLayout, candidate_groups

LAYOUT_RULES = frozenset({"ffn/gate-up-swapped", "ffn/fused-order", "ffn/fused-layout"})
"""The rules that tell which rows of a layer are gate and which are up."""

GATE_RULE_NAMES = LAYOUT_RULES | {"ffn/mispaired-neurons"}
"""The rules that look at the evidence about gates: separate ones, fused ones, and how neurons are paired."""

ALPHA = 1e-3
"""Family-wise error of the gate and up rules over one checkpoint."""

_DEQUANTISED = "the weights before they were quantised, or dequantised"
_CAPTURES = "captured gate and hidden activations of a layer, or a trusted reference checkpoint"


@dataclass(frozen=True)
class GatePlan:
    """One gated network to test.

    Attributes:
        layer: The layer it belongs to.
        network: Its tensors.
        companions: Names of the biases of gate and up.
        neurons, width: m and d.
    """

    layer: int
    network: NetworkTensors
    companions: tuple[str, ...]
    neurons: int
    width: int

    @property
    def fused(self) -> RowLayout | None:
        """How the rows of gate and up lie in one tensor; None where each has its own."""
        return self.network.fused_layout

    @property
    def tests(self) -> int:
        """How many tensors the test may have to reject or not: two, for every way in which a fused one may be cut."""
        return 2 if self.fused is None else 2 * len(candidate_groups(self.neurons, self.fused.groups))

    @property
    def stored(self) -> bool:
        """Whether a weight is quantised, so that its numbers do not lie in the file."""
        return any(isinstance(entry, StoredEntry) for entry in self.network.weights.values())

    @property
    def names(self) -> tuple[str, str, str]:
        """Names of gate, up and down; the first two are one where they are fused."""
        weights = self.network.weights
        if "fused" in weights:
            return weights["fused"].name, weights["fused"].name, weights["down"].name
        return weights["gate"].name, weights["up"].name, weights["down"].name


def gate_plans(
    checkpoint: Checkpoint, layers: Mapping[int, LayerTensors], unread: Mapping[str, str]
) -> tuple[tuple[GatePlan, ...], dict[int, tuple[Unasked, ...]]]:
    """The networks to test, and per layer of a gated family why others are not."""
    family = checkpoint.family
    if family is None or checkpoint.trunk is None or not any(network.gated for network in family.networks):
        return (), {}
    plans: list[GatePlan] = []
    unasked: dict[int, tuple[Unasked, ...]] = {}
    refusals: dict[int, Unasked | None] = {}
    # What is called a plain dtype and holds codes is no tensor of numbers, but can be the codes of a stored weight.
    codes = codes_like_numbers(checkpoint.entries)
    lost = {name: reason for name, reason in unread.items() if reason != codes.get(name)}
    for layer in checkpoint.layer_indices:
        tensors = layers.get(layer)
        if tensors is None:
            unasked[layer] = (Unasked("the config does not say which tensors the layer is made of"),)
            continue
        reasons: list[Unasked] = []
        for network in tensors.networks:
            if not network.row.gated:
                continue
            if id(network.row) not in refusals:
                refusals[id(network.row)] = _refusal(checkpoint, family, network.row)
            reason = refusals[id(network.row)] or _unfit(network, lost)
            if reason is None:
                plans.append(_plan(layer, network))
            else:
                reasons.append(replace(reason, fused=network.row.fused is not None))
        if not tensors.networks:
            reasons.append(Unasked("it has no feed-forward network"))
        if reasons:
            unasked[layer] = _grouped(reasons)
    return tuple(plans), unasked


def _plan(layer: int, network: NetworkTensors) -> GatePlan:
    down = network.weights["down"].shape
    outer, inner = down[::-1] if network.row.layouts[1] == "in_out" else down
    companions = tuple(entry.name for part, entry in network.biases.items() if part != "down")
    return GatePlan(layer, network, companions, inner, outer)


def _grouped(reasons: Sequence[Unasked]) -> tuple[Unasked, ...]:
    """One of many experts' reasons is told, with their number."""
    if len(reasons) < 2:
        return tuple(reasons)
    first = reasons[0]
    return (replace(first, reason=f"{len(reasons)} of its networks are not tested, the first because {first.reason}"),)


def _refusal(checkpoint: Checkpoint, family: Architecture, network: FeedForwardRow) -> Unasked | None:
    """Why the symmetry does not hold for this family's arithmetic, so that the test would say nothing."""
    try:
        name = text_of(checkpoint.config, family, network.activation)
        activation = activation_named(name.value)
        gating = gating_of(checkpoint, network)
    except (DamagedCheckpoint, InvalidValue) as error:
        return Unasked(error.message, "a config that names a known activation")
    if activation.formula == "identity":
        return Unasked(f"bilinear network ({name.source} is {name.value}): exchanging gate and up changes nothing")
    if activation.odd:
        return Unasked(
            f"odd activation ({name.source} is {name.value}): the gate has the same sign symmetry as up", _CAPTURES
        )
    if not gating.up_sign_symmetric:
        return Unasked(
            f"the gating {gating.name} is not odd in up, so the signs of up are no fair coins under either naming",
            _CAPTURES,
        )
    return None


def _unfit(tensors: NetworkTensors, unread: Mapping[str, str]) -> Unasked | None:
    """Why the tensors of this network cannot be tested."""
    network = tensors.row
    needed = ("fused", "down") if network.fused is not None else ("gate", "up", "down")
    entries = {part: entry for part, entry in tensors.weights.items() if part in needed}
    absent = [part for part in needed if part not in entries]
    if absent:
        return Unasked(f"the layer has no {' and no '.join(absent)} projection")
    for part, entry in entries.items():
        stored = entry.stored if isinstance(entry, StoredEntry) else None
        if entry.dtype not in FLOAT_CODES and stored is None:
            return Unasked(f"its {part} is stored as {entry.dtype}, in no form that is read", _DEQUANTISED)
        for name in (entry.name,) if stored is None else (piece.name for piece in stored.entries):
            if name in unread:
                return Unasked(unread[name])
    first, last = network.layouts
    shapes = {
        part: entry.shape[::-1] if (last if part == "down" else first) == "in_out" else entry.shape
        for part, entry in entries.items()
    }
    inner, outer = (shapes["down"] + (0, 0))[1::-1] if len(shapes["down"]) == 2 else (0, 0)
    rows = {"fused": 2 * inner, "gate": inner, "up": inner}
    if not inner or not outer or any(shapes[part] != (rows[part], outer) for part in needed[:-1]):
        told = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in entries.values())
        return Unasked(f"the shapes do not belong together: {told}")
    if network.fused is not None and tensors.fused_layout is None:
        return Unasked(f"the rows of {entries['fused'].name} cannot be cut into the blocks that are declared")
    return None
