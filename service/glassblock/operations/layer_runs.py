"""Runs of attention, of a mixture of experts and of a whole layer, each as its stages by name."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.attention import Attention, AttentionStages, run_attention
from glassblock.numerics.block import branch_contribution, joined
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.latent_attention import LatentAttention, run_latent_attention
from glassblock.numerics.layer import Layer, layer_dtype, run_layer
from glassblock.numerics.mixture import Mixture, MixtureStages, mixture_dtype, run_mixture
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations.overrides import overridden_network, overridden_wiring
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import COMPUTE_DTYPES, require_last_axis
from glassblock.wire.blocks import BlockRunRequest, Overrides
from glassblock.wire.values import RunStage, Stage


@dataclass(frozen=True)
class Entering:
    """What a part is run on.

    Attributes:
        x: `[..., d]`; of attention whole sequences, `[..., tokens, d]`.
        token_ids: The text it was made from.
        other: What attention adds beside a parallel block.
    """

    x: Tensor
    token_ids: Tensor | None = None
    other: Tensor | None = None

    @classmethod
    def after_attention(
        cls, states: Tensor, layer: Layer, token_ids: Tensor, *, dtype: torch.dtype | None
    ) -> "Entering":
        """What the feed-forward block of a layer is run on, of what enters the layer."""
        compute = dtype or layer_dtype(states, layer)
        x = states.to(compute)
        wiring = layer.attention_wiring.to(compute)
        _, _, contribution = attended(x, layer.attention, wiring, compute)
        if layer.parallel:
            return cls(x, token_ids, contribution)
        return cls(joined(x, contribution, wiring), token_ids)


@dataclass(frozen=True)
class Ran:
    """What a run gave.

    Attributes:
        stages: By name, in order; `x` is always there.
        wiring: The norms and the add of the branch that is told of.
        parameters: Stored numbers of what was run.
        hidden_elements: Elements between the two halves of its networks.
        recombined: How far stages make the next.
        notes: What was assumed.
    """

    stages: Mapping[RunStage, Tensor]
    wiring: Wiring
    parameters: int = 0
    hidden_elements: int = 0
    recombined: Mapping[Stage, float] = field(default_factory=dict["Stage", float])
    notes: tuple[str, ...] = ()


def run_attention_part(
    store: CheckpointStore, checkpoint: Checkpoint, request: BlockRunRequest, entering: Entering, meter: ReadMeter
) -> Ran:
    """The attention of a layer with its norms; `output` is the stream after it.

    Raises:
        InvalidValue: x is no sequence of the model's width, or an override concerns the network.
        FamilyMismatch: The attention of this layer is not read here.
    """
    _refuse_network_overrides(request.overrides)
    attention, declared = store.attention(request.checkpoint, checkpoint, request.layer, meter)
    wiring, notes = overridden_wiring(declared, request.overrides)
    _require_sequence(entering.x, attention.model_width, request)
    compute = _compute(request) or widest_dtype((entering.x, *attention.tensors, *wiring.tensors))
    x, wired = entering.x.to(compute), wiring.to(compute)
    if wired.input_norm is not None:
        check_norm_defined(x, wired.input_norm, field="x")
    normed, stages, contribution = attended(x, attention, wired, compute)
    named = _present(
        {
            "x": x,
            "attention_normed": normed,
            **_attention_stages(stages),
            "attention_contribution": contribution,
            "output": joined(x, contribution, wired),
        }
    )
    return Ran(named, wiring, parameters=sum(tensor.numel() for tensor in attention.tensors), notes=notes)


def run_mixture_part(loaded: tuple[Mixture, Wiring], request: BlockRunRequest, entering: Entering) -> Ran:
    """The mixture of experts of a layer with its norms.

    Raises:
        InvalidValue: x is not of the model's width, or an override has no meaning for its experts.
    """
    mixture, wiring = loaded
    seen: dict[int, FeedForward] = {}
    changed = _changed_mixture(mixture, request.overrides, seen)
    wiring, notes = overridden_wiring(wiring, request.overrides)
    require_last_axis("x", entering.x, mixture.model_width, f"d_model of {request.checkpoint}")
    compute = _compute(request) or torch.promote_types(mixture_dtype(entering.x, mixture), widest_dtype(wiring.tensors))
    x, wired = entering.x.to(compute), wiring.to(compute)
    if wired.input_norm is not None:
        check_norm_defined(x, wired.input_norm, field="x")
    normed = None if wired.input_norm is None else wired.input_norm(x)
    stages = run_mixture(x if normed is None else normed, changed, dtype=compute)
    contribution = branch_contribution(stages.down, wired)
    named = _present(
        {
            "x": x,
            "normed": normed,
            **_mixture_stages(stages),
            "down": stages.down,
            "contribution": contribution,
            "output": joined(x, contribution, wired, other=entering.other),
        }
    )
    return Ran(
        named,
        wiring,
        parameters=_mixture_parameters(changed, seen),
        hidden_elements=_mixture_elements(changed, stages, seen, x),
        notes=notes,
    )


def run_whole_layer(
    store: CheckpointStore, checkpoint: Checkpoint, request: BlockRunRequest, entering: Entering, meter: ReadMeter
) -> Ran:
    """A whole layer: attention, then the network or the mixture, or both side by side.

    Overrides change the feed-forward block, as they do alone.

    Raises:
        InvalidValue: x is no sequence of the model's width, or an override cannot be used.
        FamilyMismatch: Some part of this layer is not run here.
    """
    layer = store.layer(request.checkpoint, checkpoint, request.layer, meter)
    wiring, notes = overridden_wiring(layer.feed_forward_wiring, request.overrides)
    if (wiring.placement is Placement.PARALLEL) != layer.parallel:
        raise InvalidValue(
            "one branch of a layer cannot be parallel alone", field="overrides.placement", hint="leave it out"
        )
    seen: dict[int, FeedForward] = {}
    second = layer.feed_forward
    changed = (
        _changed_mixture(second, request.overrides, seen)
        if isinstance(second, Mixture)
        else overridden_network(second, request.overrides)
    )
    layer = Layer(layer.attention, layer.attention_wiring, changed, wiring)
    _require_sequence(entering.x, layer.attention.model_width, request)
    compute = _compute(request) or layer_dtype(entering.x, layer)
    positions = torch.arange(entering.x.shape[-2], device=entering.x.device)
    stages = run_layer(entering.x, layer, positions=positions, dtype=compute)
    block = stages.feed_forward
    named = _present(
        {
            "x": stages.x,
            "attention_normed": stages.attention_normed,
            **_attention_stages(stages.attention),
            "attention_contribution": stages.attention_contribution,
            "middle": stages.middle,
            "normed": block.normed,
            "gate": block.gate,
            "up": block.up,
            "activated": block.activated,
            "hidden": block.hidden,
            **({} if stages.mixture is None else _mixture_stages(stages.mixture)),
            "down": block.down,
            "contribution": block.contribution,
            "output": stages.output,
        }
    )
    parameters = sum(tensor.numel() for tensor in layer.attention.tensors)
    if isinstance(changed, Mixture):
        mixture = cast("MixtureStages", stages.mixture)
        parameters += _mixture_parameters(changed, seen)
        elements = _mixture_elements(changed, mixture, seen, stages.x)
    else:
        parameters += changed.parameters
        elements = stages.x[..., 0].numel() * changed.width
    return Ran(named, wiring, parameters=parameters, hidden_elements=elements, notes=notes)


def attended(
    x: Tensor, attention: Attention | LatentAttention, wiring: Wiring, dtype: torch.dtype
) -> tuple[Tensor | None, AttentionStages, Tensor]:
    """What attention reads where that is not x, its stages, and what its branch adds."""
    normed = None if wiring.input_norm is None else wiring.input_norm(x)
    read = x if normed is None else normed
    positions = torch.arange(x.shape[-2], device=x.device)
    if isinstance(attention, Attention):
        stages = run_attention(read, attention, positions=positions, dtype=dtype)
    else:
        stages = run_latent_attention(read, attention, positions=positions, dtype=dtype)
    return normed, stages, branch_contribution(stages.projected, wiring)


def _changed_mixture(mixture: Mixture, overrides: Overrides, seen: dict[int, FeedForward]) -> Mixture:
    """The mixture with every expert changed; what is asked for is noted by shape alone."""

    def expert(number: int) -> FeedForward:
        network = overridden_network(mixture.expert(number), overrides)
        seen[number] = _outline(network)
        return network

    shared = None if mixture.shared is None else overridden_network(mixture.shared, overrides)
    return replace(mixture, experts=expert, shared=shared)


def _outline(network: FeedForward) -> FeedForward:
    """The same network on no device: its shapes, without its numbers."""
    tensors = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")
    held = {name: cast("Tensor | None", getattr(network, name)) for name in tensors}
    return replace(network, **{name: None if tensor is None else tensor.to("meta") for name, tensor in held.items()})


def _mixture_parameters(mixture: Mixture, seen: Mapping[int, FeedForward]) -> int:
    own = (mixture.router, mixture.router_bias, mixture.correction, mixture.shared_gate)
    shared = 0 if mixture.shared is None else mixture.shared.parameters
    experts = sum(network.parameters for network in seen.values())
    return sum(tensor.numel() for tensor in own if tensor is not None) + shared + experts


def _mixture_elements(mixture: Mixture, stages: MixtureStages, seen: Mapping[int, FeedForward], x: Tensor) -> int:
    width = max((network.width for network in seen.values()), default=0)
    shared = 0 if mixture.shared is None else mixture.shared.width
    return stages.chosen.numel() * width + x[..., 0].numel() * shared


def _attention_stages(stages: AttentionStages) -> dict[str, Tensor]:
    return {f"attention_{name}": tensor for name, tensor in stages._asdict().items()}


def _mixture_stages(stages: MixtureStages) -> dict[str, Tensor | None]:
    return {name: tensor for name, tensor in stages._asdict().items() if name != "down"}


def _present(stages: Mapping[str, Tensor | None]) -> dict[RunStage, Tensor]:
    return {cast("RunStage", name): tensor for name, tensor in stages.items() if tensor is not None}


def _compute(request: BlockRunRequest) -> torch.dtype | None:
    return COMPUTE_DTYPES[request.overrides.dtype] if request.overrides.dtype else None


def _require_sequence(x: Tensor, width: int, request: BlockRunRequest) -> None:
    require_last_axis("x", x, width, f"d_model of {request.checkpoint}")
    if x.ndim < 2:
        raise InvalidValue(
            f"x has shape {list(x.shape)}: attention reads sequences", field="x", hint="send [..., tokens, d_model]"
        )


def _refuse_network_overrides(overrides: Overrides) -> None:
    given = {
        "activation": overrides.activation is not None,
        "swap": overrides.swap,
        "width": overrides.width is not None,
        "placement": overrides.placement is not None,
    }
    for name, asked in given.items():
        if asked:
            raise InvalidValue(
                f"{name} changes the feed-forward block, and the part is attention",
                field=f"overrides.{name}",
                hint="leave it out, or run the layer",
            )
