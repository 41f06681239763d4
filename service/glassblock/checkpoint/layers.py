"""Loading one layer of a checkpoint: its network, its norms and its wiring, as the family means them.

Weights come out `[out, in]` whatever the file stores: transposing and splitting are views. Only the bytes of
the tensors asked for are read.
"""

import torch
from torch import Tensor

from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.family import ROLES_OF, Architecture, Branch, FeedForwardRow, Role, Setting
from glassblock.checkpoint.fitting import row_of
from glassblock.checkpoint.layer_map import (
    layer_tensors,
    mismatch,
    row_at,
)
from glassblock.checkpoint.layer_parts import Expert, LayerTensors, NetworkTensors, NormTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import final_norm
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.settings import Sourced, branch_scale_of, eps_of, number_of, text_of
from glassblock.checkpoint.stored_entries import read_weight
from glassblock.errors import FamilyMismatch, InvalidValue
from glassblock.numerics.activations import (
    ACTIVATION_ALIASES,
    ACTIVATIONS,
    LEARNED_ACTIVATIONS,
    Activation,
    Gating,
    activation_named,
    gating_named,
    learned_activation,
)
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.fused_layouts import split_rows
from glassblock.numerics.norms import Norm, norm_kind_named
from glassblock.numerics.wiring import Placement, Wiring


def load_feed_forward(
    checkpoint: Checkpoint, layer: int, device: torch.device | str, meter: ReadMeter, *, expert: Expert = None
) -> FeedForward:
    """A feed-forward network of a layer, in the file's dtypes; gate and up of a fused tensor are views of it,
    but for one in blocks.

    Args:
        checkpoint: The checkpoint.
        layer: Its number.
        device: Where the tensors go.
        meter: Counts what is read.
        expert: Which network of a mixture; of a stack only its slices are read. None in a dense layer.

    Raises:
        InvalidValue: There is no such layer, or no such network in it.
        FamilyMismatch: Its tensors do not fit, or the config names an unknown activation, or blocks of this family
            are not run here.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    if expert is None:  # what is not run of a family is how its blocks are wired; an expert alone is not wired
        runnable(checkpoint, layer)
    return feed_forward_of(checkpoint, layer_tensors(checkpoint, layer), device, meter, expert=expert)


def feed_forward_of(
    checkpoint: Checkpoint,
    tensors: LayerTensors,
    device: torch.device | str,
    meter: ReadMeter,
    *,
    expert: Expert = None,
) -> FeedForward:
    """As `load_feed_forward`, of a layer whose tensors were looked up before."""
    network = tensors.network(expert)
    family, row, config = tensors.row, network.row, checkpoint.config
    first, last = row.layouts
    weights = {
        part: out_in(read_weight(entry, device, meter), last if part == "down" else first)
        for part, entry in network.weights.items()
    }
    biases = {part: read_tensor(entry, device, meter) for part, entry in network.biases.items()}
    gate, up = weights.get("gate"), weights.get("up")
    gate_bias, up_bias = biases.get("gate"), biases.get("up")
    layout = network.fused_layout
    if layout is not None:
        gate, up = split_rows(weights["fused"], layout)
        if "fused" in biases:
            gate_bias, up_bias = split_rows(biases["fused"], layout)
    if up is None:
        raise FamilyMismatch(f"the family {family.name} names no up projection")
    hidden_norm = tensors.norms.get("ffn_hidden") if expert is None else None
    return FeedForward(
        gate,
        up,
        weights["down"],
        gate_bias,
        up_bias,
        biases.get("down"),
        _activation(checkpoint, network, device, meter),
        gating_of(checkpoint, row),
        hidden_norm=None if hidden_norm is None else norm_of(checkpoint, hidden_norm, device, meter),
        gate_scale=_number(config, family, row.gate_scale),
        down_scale=_number(config, family, row.down_scale),
        gate_sparsity=row.gate_sparsity,
    )


def load_wiring(
    checkpoint: Checkpoint, layer: int, device: torch.device | str, meter: ReadMeter, *, expert: Expert = None
) -> Wiring:
    """The norms of a layer's feed-forward block and how it joins the residual stream.

    Of one expert alone, in a family whose blocks are not run here, no more than the norm of what it reads.

    Raises:
        InvalidValue, FamilyMismatch, DamagedCheckpoint, UnknownFamily: As `load_feed_forward`.
    """
    if expert is None:
        runnable(checkpoint, layer)
    tensors = layer_tensors(checkpoint, layer)
    if expert is not None and tensors.network(expert).row.outer != "hidden":
        raise FamilyMismatch(
            f"layer {layer}: expert {expert} reads what a projection of the mixture makes, not the normed stream",
            hint="An audit of the checkpoint works all the same.",
        )
    if tensors.row.not_run is None:
        return wiring_of(checkpoint, tensors, device, meter)
    own = "shared_in" if expert == "shared" else "experts_in"
    norm = tensors.norms.get(own) or tensors.norms.get("experts_in") or tensors.norms.get("ffn_in")
    if norm is None:
        runnable(checkpoint, layer)
        raise FamilyMismatch(f"the family {tensors.row.name} names no norm in front of its experts")
    return Wiring(Placement.PRE, input_norm=norm_of(checkpoint, norm, device, meter))


def wiring_of(
    checkpoint: Checkpoint,
    tensors: LayerTensors,
    device: torch.device | str,
    meter: ReadMeter,
    *,
    branch: Branch = "ffn",
) -> Wiring:
    """The norms around one branch of a layer, and how it joins the residual stream."""
    row, config = tensors.row, checkpoint.config
    first = branch == "ffn"

    def norm(role: Role) -> Norm | None:
        found = tensors.norms.get(role)
        return None if found is None else norm_of(checkpoint, found, device, meter)

    gain = tensors.branch_gain if first else None
    return Wiring(
        row.placement if first or row.attention_placement is None else row.attention_placement,
        *(norm(role) for role in ROLES_OF[branch]),
        residual_scale=number_of(config, row, row.residual_scale).value,
        branch_scale=branch_scale_of(config, row, row.branch_scale, checkpoint.layers).value,
        branch_gain=None if gain is None else read_tensor(gain, device, meter),
        branches_first=row.branches_first,
    )


def runnable(checkpoint: Checkpoint, layer: int | None = None) -> Architecture:
    """The family of a checkpoint whose blocks can be run, as it is in a layer where one is given.

    Raises:
        FamilyMismatch: Blocks of this family are not run here.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    row = checkpoint.require_usable()
    row = row if layer is None else row_at(checkpoint, layer)
    if row.not_run is not None:
        where = "" if layer is None else f"layer {layer}: "
        raise FamilyMismatch(
            f"{where}blocks of the family {row.name} are not run here: {row.not_run}",
            hint="An audit of the checkpoint works all the same.",
        )
    return row


def load_norm(
    checkpoint: Checkpoint, layer: int | None, role: str, device: torch.device | str, meter: ReadMeter
) -> Norm:
    """One norm with its tensors and its epsilon.

    Args:
        checkpoint: The checkpoint.
        layer: Its layer; not used for `final`.
        role: A role of the family's norms, such as `ffn_in` or `final`.
        device: Where its tensors go.
        meter: Counts what is read.

    Raises:
        InvalidValue: The family has no norm in that role, or there is no such layer.
        FamilyMismatch, DamagedCheckpoint, UnknownFamily: As `load_feed_forward`.
    """
    row = checkpoint.require_usable()
    row = row if layer is None or role == "final" else row_at(checkpoint, layer)
    if row.norm(role) is None:
        raise InvalidValue(
            f"the family {row.name} has no norm in the role {role!r}",
            field="norm",
            known=row.roles,
            hint="Use one of its roles.",
        )
    if role == "final":
        found, faults = final_norm(checkpoint)
        for fault in faults:
            raise mismatch(fault)
    else:
        if layer is None:
            raise InvalidValue(f"the norm {role!r} needs a layer", field="layer", hint="Say which layer.")
        found = next(norm for norm in layer_tensors(checkpoint, layer).norms.values() if norm.row.role == role)
    if found is None:
        raise FamilyMismatch(f"the family {row.name} has no norm after its last layer")
    if found.row.per_head:
        raise FamilyMismatch(
            f"the norm {role!r} of the family {row.name} is one norm for each head, not one alone",
            hint="Choose another norm.",
        )
    return norm_of(checkpoint, found, device, meter)


def activation_of(checkpoint: Checkpoint, row: FeedForwardRow | None = None) -> Sourced[str]:
    """The name of the activation, as the config spells it, and where it comes from.

    Args:
        checkpoint: The checkpoint.
        row: The network that is meant; None for the one that speaks for the family.

    Raises:
        FamilyMismatch: It is unknown; the known names are with the error.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    family = checkpoint.require_usable()
    name = text_of(checkpoint.config, family, (row or family.network).activation)
    known = (*ACTIVATIONS, *ACTIVATION_ALIASES, *LEARNED_ACTIVATIONS)
    if name.value not in known:
        raise FamilyMismatch(
            f"{name.source} is {name.value!r:.80}, which is no known activation",
            file="config.json",
            known=known,
            hint="Correct the config.",
        )
    return name


def gating_of(checkpoint: Checkpoint, row: FeedForwardRow) -> Gating:
    """How gate and up of a network meet.

    Raises:
        FamilyMismatch: The config declares a number there that no gating can have.
        DamagedCheckpoint: It holds no number there.
    """
    family = row_of(checkpoint)
    numbers = {name: number_of(checkpoint.config, family, setting) for name, setting in row.gating_parameters.items()}
    limit, alpha = (numbers[name].value if name in numbers else None for name in ("limit", "alpha"))
    try:
        return gating_named(row.gating, limit=limit, alpha=alpha)
    except InvalidValue as error:
        file = None if checkpoint.config is None else checkpoint.config.path.name
        raise FamilyMismatch(error.message, file=file, hint="Correct the config.") from error


def _activation(
    checkpoint: Checkpoint, network: NetworkTensors, device: torch.device | str, meter: ReadMeter
) -> Activation:
    name = activation_of(checkpoint, network.row).value
    if name not in LEARNED_ACTIVATIONS:
        return activation_named(name)
    return learned_activation(
        name, {parameter: read_tensor(entry, device, meter) for parameter, entry in network.activation.items()}
    )


def _number(config: ConfigFile | None, row: Architecture, setting: Setting[float] | None) -> float:
    return 1.0 if setting is None else number_of(config, row, setting).value


def out_in(weight: Tensor, layout: str) -> Tensor:
    """A weight as `[out, in]`, a view of it where it is stored the other way round."""
    return weight.T if layout == "in_out" else weight


def norm_of(checkpoint: Checkpoint, norm: NormTensors, device: torch.device | str, meter: ReadMeter) -> Norm:
    """A norm with its tensors, on one axis, and its epsilon."""
    row = checkpoint.require_usable()
    entries = norm.heads if norm.gain is None else (norm.gain,)
    gains = [read_tensor(entry, device, meter).flatten() for entry in entries]
    gain = torch.cat(gains) if len(gains) > 1 else next(iter(gains), None)
    bias = None if norm.bias is None else read_tensor(norm.bias, device, meter)
    eps = eps_of(checkpoint.config, row, norm.row.eps).value
    return Norm(norm_kind_named(norm.row.kind), gain, bias, eps)
