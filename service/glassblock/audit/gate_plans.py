"""Which layers the test of gate and up is put to, and why not to the others."""

from collections.abc import Mapping
from dataclasses import dataclass

from glassblock.audit.evidence import Unasked
from glassblock.checkpoint.family import Architecture, FusedProjection
from glassblock.checkpoint.fitting import FLOAT_CODES
from glassblock.checkpoint.layers import LayerTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import number_of, text_of
from glassblock.errors import DamagedCheckpoint, InvalidValue
from glassblock.numerics.activations import activation_named, gating_named

GATE_RULE_NAMES = frozenset({"ffn/gate-up-swapped", "ffn/fused-order"})
"""The rules that ask which projection is the gate; a layer can be asked one of them."""

ALPHA = 1e-3
"""Family-wise error of the gate and up rules over one checkpoint."""

_DEQUANTISED = "the weights before they were quantised, or dequantised"
_CAPTURES = "captured gate and hidden activations of a layer, or a trusted reference checkpoint"


@dataclass(frozen=True)
class GatePlan:
    """The tensors of one layer, and how gate and up come out of them."""

    tensors: LayerTensors
    fused: FusedProjection | None
    transposed: bool


def gate_plans(
    checkpoint: Checkpoint, layers: Mapping[int, LayerTensors], unread: Mapping[str, str]
) -> tuple[dict[int, GatePlan], dict[int, Unasked]]:
    """The layers to test, and the others of a gated family with the reason."""
    family = checkpoint.family
    if family is None or checkpoint.trunk is None or not family.feed_forward.gated:
        return {}, {}
    refusal = _refusal(checkpoint, family)
    plans: dict[int, GatePlan] = {}
    unasked: dict[int, Unasked] = {}
    for layer in checkpoint.layer_indices:
        tensors = layers.get(layer)
        if tensors is None:
            unasked[layer] = Unasked("the config does not say which tensors the layer is made of")
            continue
        reason = refusal or _unfit(tensors, family, unread)
        if reason is None:
            network = family.feed_forward
            plans[layer] = GatePlan(tensors, network.fused, transposed=network.layout == "in_out")
        else:
            unasked[layer] = reason
    return plans, unasked


def _refusal(checkpoint: Checkpoint, family: Architecture) -> Unasked | None:
    """Why the symmetry does not hold for this family's arithmetic, so that the test would say nothing."""
    network = family.feed_forward
    try:
        name = text_of(checkpoint.config, family, network.activation)
        activation = activation_named(name.value)
        numbers = {
            key: number_of(checkpoint.config, family, setting).value
            for key, setting in network.gating_parameters.items()
        }
        gating = gating_named(network.gating, limit=numbers.get("limit"), alpha=numbers.get("alpha"))
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


def _unfit(tensors: LayerTensors, family: Architecture, unread: Mapping[str, str]) -> Unasked | None:
    """Why the tensors of this layer cannot be tested."""
    network = family.feed_forward
    needed = ("fused", "down") if network.fused is not None else ("gate", "up", "down")
    entries = {part: entry for part, entry in tensors.weights.items() if part in needed}
    absent = [part for part in needed if part not in entries]
    if absent:
        return Unasked(f"the layer has no {' and no '.join(absent)} projection")
    for entry in entries.values():
        if entry.name in unread:
            return Unasked(unread[entry.name])
        if entry.dtype not in FLOAT_CODES:
            return Unasked(f"{entry.name} is stored as {entry.dtype}: quantised weights are not read yet", _DEQUANTISED)
    shapes = {part: entry.shape for part, entry in entries.items()}
    if network.layout == "in_out":
        shapes = {part: shape[::-1] for part, shape in shapes.items()}
    inner, outer = (shapes["down"] + (0, 0))[1::-1] if len(shapes["down"]) == 2 else (0, 0)
    rows = {"fused": 2 * inner, "gate": inner, "up": inner}
    if not inner or not outer or any(shapes[part] != (rows[part], outer) for part in needed[:-1]):
        told = ", ".join(f"{entry.name} {list(entry.shape)}" for entry in entries.values())
        return Unasked(f"the shapes do not belong together: {told}")
    return None
