"""A whole layer: attention and feed-forward network, or mixture of experts, each wired into the residual stream.

In sequence, the second branch reads what the first one left: pre-norm, post-norm, sandwich and branch-output norms as
`wiring` has them. In parallel, both branches read the stream that enters, through one norm that they share (Cohere,
GPT-J, Phi, Falcon) or one each (GPT-NeoX), and the stream receives both.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.attention import Attention, AttentionStages, run_attention
from glassblock.numerics.block import Stages, apply_sublayer, branch_contribution, common_dtype, joined, run_block
from glassblock.numerics.causal_attention import DEFAULT_BYTE_BUDGET
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.latent_attention import LatentAttention, run_latent_attention
from glassblock.numerics.mixture import Mixture, MixtureStages, mixture_dtype, run_mixture
from glassblock.numerics.wiring import Placement, Wiring


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a decoder.

    Attributes:
        attention: Its attention.
        attention_wiring: Norms and residual add around it.
        feed_forward: Its feed-forward network or its mixture of experts.
        feed_forward_wiring: Norms and residual add around it. The layer is parallel where both wirings are PARALLEL;
            a norm that both branches share stands in both.

    Raises:
        InvalidValue: The widths differ, or one wiring alone is parallel, or the two scale the stream differently.
    """

    attention: Attention | LatentAttention
    attention_wiring: Wiring
    feed_forward: FeedForward | Mixture
    feed_forward_wiring: Wiring

    def __post_init__(self) -> None:
        if self.attention.model_width != self.feed_forward.model_width:
            raise InvalidValue(
                f"the attention is {self.attention.model_width} wide and the feed-forward network "
                f"{self.feed_forward.model_width}",
                hint="Both read and return the model width.",
                field="feed_forward",
            )
        wirings = (self.attention_wiring, self.feed_forward_wiring)
        if len({wiring.placement is Placement.PARALLEL for wiring in wirings}) == 2:
            raise InvalidValue(
                f"one branch is wired {self.attention_wiring.placement.value!r} and the other "
                f"{self.feed_forward_wiring.placement.value!r}",
                hint="Branches are parallel together.",
                field="feed_forward_wiring",
            )
        if self.parallel and len({wiring.residual_scale for wiring in wirings}) == 2:
            raise InvalidValue(
                "two parallel branches scale the one stream differently",
                hint="Give both wirings the same residual scale.",
                field="feed_forward_wiring",
            )

    @property
    def parallel(self) -> bool:
        """Whether both branches read the stream that enters."""
        return self.attention_wiring.placement is Placement.PARALLEL


class LayerStages(NamedTuple):
    """What a layer computes on its way, in order.

    Attributes:
        x: `[*batch, tokens, d]`, the residual stream that enters, in the dtype of the computation.
        attention_normed: `[*batch, tokens, d]`, what attention reads. None where it reads `x` itself.
        attention: The stages of attention.
        attention_contribution: `[*batch, tokens, d]`, what its branch adds to the stream.
        middle: `[*batch, tokens, d]`, the stream between the branches. None in a parallel layer.
        feed_forward: The stages of the second branch, from the stream it starts at to the one it leaves. Around a
            mixture, `gate`, `up`, `activated` and `hidden` are None: every expert has its own.
        mixture: The stages of the mixture of experts; None where there is none.
        output: `[*batch, tokens, d]`, the residual stream that leaves.
    """

    x: Tensor
    attention_normed: Tensor | None
    attention: AttentionStages
    attention_contribution: Tensor
    middle: Tensor | None
    feed_forward: Stages
    mixture: MixtureStages | None
    output: Tensor


def run_layer(
    x: Float[Tensor, "*tokens d"],
    layer: Layer,
    *,
    positions: Int[Tensor, " *positions"],
    dtype: torch.dtype | None = None,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
) -> LayerStages:
    """Run one layer and return its stages.

    Args:
        x: `[*batch, tokens, d]`, the residual stream of whole sequences, from their first token.
        layer: Weights and arithmetic.
        positions: `[tokens]`, or one row for each sequence.
        dtype: None computes in float32 at least, and in float64 where any tensor is float64. A given dtype casts all
            tensors to it and runs every operation in it, as a model does.
        byte_budget: About how many bytes the scores and masks of attention may take.

    Raises:
        InvalidValue: The width, the positions or the dtype do not fit.
    """
    compute = dtype or layer_dtype(x, layer)
    x = x.to(compute)
    wiring = layer.attention_wiring.to(compute)
    normed = None if wiring.input_norm is None else wiring.input_norm(x)
    read = x if normed is None else normed
    if isinstance(layer.attention, Attention):
        attention = run_attention(read, layer.attention, positions=positions, dtype=compute, byte_budget=byte_budget)
    else:
        attention = run_latent_attention(
            read, layer.attention, positions=positions, dtype=compute, byte_budget=byte_budget
        )
    contribution = branch_contribution(attention.projected, wiring)
    middle = None if layer.parallel else joined(x, contribution, wiring)
    second, mixture = _second_branch(
        x if middle is None else middle, layer, other=contribution if layer.parallel else None, dtype=compute
    )
    output = cast("Tensor", second.output)  # no stage is left out
    return LayerStages(x, normed, attention, contribution, middle, second, mixture, output)


def layer_output(
    x: Float[Tensor, "*tokens d"],
    layer: Layer,
    *,
    positions: Int[Tensor, " *positions"],
    dtype: torch.dtype | None = None,
    byte_budget: int = DEFAULT_BYTE_BUDGET,
) -> Float[Tensor, "*tokens d"]:
    """The residual stream that leaves, bit for bit that of `run_layer`, whose arguments and errors it has.

    No stage is held longer than the next needs it, for whoever passes many layers.
    """
    compute = dtype or layer_dtype(x, layer)
    x = x.to(compute)
    contribution = _attention_contribution(x, layer, positions=positions, dtype=compute, byte_budget=byte_budget)
    stream, other = (x, contribution) if layer.parallel else (_after_attention(x, contribution, layer), None)
    wiring = layer.feed_forward_wiring.to(compute)
    read = stream if wiring.input_norm is None else wiring.input_norm(stream)
    if isinstance(layer.feed_forward, Mixture):
        down = run_mixture(read, layer.feed_forward, dtype=compute).down
    else:
        down = apply_sublayer(read, layer.feed_forward)
    return joined(stream, branch_contribution(down, wiring), wiring, other=other)


def layer_dtype(x: Tensor, layer: Layer) -> torch.dtype:
    """The widest of float32 and of the dtypes of the input and the layer's tensors, streamed experts left out."""
    if isinstance(layer.feed_forward, Mixture):
        second = mixture_dtype(x, layer.feed_forward)
    else:
        second = common_dtype(x, layer.feed_forward, layer.feed_forward_wiring)
    wirings = (*layer.attention_wiring.tensors, *layer.feed_forward_wiring.tensors)
    return torch.promote_types(second, widest_dtype((*layer.attention.tensors, *wirings)))


def _attention_contribution(
    x: Tensor, layer: Layer, *, positions: Tensor, dtype: torch.dtype, byte_budget: int
) -> Tensor:
    wiring = layer.attention_wiring.to(dtype)
    read = x if wiring.input_norm is None else wiring.input_norm(x)
    if isinstance(layer.attention, Attention):
        stages = run_attention(read, layer.attention, positions=positions, dtype=dtype, byte_budget=byte_budget)
    else:
        stages = run_latent_attention(read, layer.attention, positions=positions, dtype=dtype, byte_budget=byte_budget)
    return branch_contribution(stages.projected, wiring)


def _after_attention(x: Tensor, contribution: Tensor, layer: Layer) -> Tensor:
    return joined(x, contribution, layer.attention_wiring.to(x.dtype))


def _second_branch(
    x: Tensor, layer: Layer, *, other: Tensor | None, dtype: torch.dtype
) -> tuple[Stages, MixtureStages | None]:
    if not isinstance(layer.feed_forward, Mixture):
        return run_block(x, layer.feed_forward, layer.feed_forward_wiring, dtype=dtype, other=other), None
    wiring = layer.feed_forward_wiring.to(dtype)
    normed = None if wiring.input_norm is None else wiring.input_norm(x)
    mixture = run_mixture(x if normed is None else normed, layer.feed_forward, dtype=dtype)
    contribution = branch_contribution(mixture.down, wiring)
    output = joined(x, contribution, wiring, other=other)
    stages = Stages(x=x, normed=normed, down=mixture.down, contribution=contribution, output=output)
    return stages, mixture
