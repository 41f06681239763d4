"""One block: a norm, a sublayer and the residual add, with every stage returned.

The wirings are those of `glassblock.numerics.wiring`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.feed_forward import FeedForward, read_of_gate
from glassblock.numerics.linear import apply_linear
from glassblock.numerics.wiring import Placement, Wiring


class Stages(NamedTuple):
    """Every tensor of a block, in the order of its computation; None where it was not computed or does not exist.

    Attributes:
        x: `[*batch, d]`, the residual stream that enters, in the dtype of the computation.
        normed: `[*batch, d]`, what the feed-forward network reads. None where it reads `x` itself.
        gate: `[*batch, m]`, gate projection as it returns, before any clamp. None in a plain network.
        up: `[*batch, m]`, up projection as it returns; in a plain network the pre-activation.
        activated: `[*batch, m]`, the activated gate, or the activated `up` of a plain network.
        hidden: `[*batch, m]`, what `down` reads. In a plain network the same as `activated`.
        down: `[*batch, d]`, what the feed-forward network returns.
        contribution: `[*batch, d]`, what the branch adds to the stream: `down` after the branch's norm and multiplier.
        output: `[*batch, d]`, the residual stream that leaves, after the norm of a POST block.
    """

    x: Tensor | None = None
    normed: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    activated: Tensor | None = None
    hidden: Tensor | None = None
    down: Tensor | None = None
    contribution: Tensor | None = None
    output: Tensor | None = None


STAGES: tuple[str, ...] = Stages._fields
_NEED_NO_WEIGHTS = frozenset({"x", "normed"})


def run_block(
    x: Float[Tensor, "*batch d"],
    feed_forward: FeedForward | None,
    wiring: Wiring,
    *,
    until: str = "output",
    dtype: torch.dtype | None = None,
    other: Float[Tensor, "*batch d"] | None = None,
) -> Stages:
    """Run one feed-forward block and return its stages.

    Args:
        x: The residual stream.
        feed_forward: May be None when `until` is `x` or `normed`, which need no weights.
        wiring: Norms and residual add.
        until: The last stage to compute; later ones are None.
        dtype: None computes in float32 at least, and in float64 where any tensor is float64. A given dtype casts `x`,
            weights and norms to it and runs every operation in it, as an engine does: that is how the bits of a
            model in bfloat16 or float16 are had.
        other: What a parallel branch adds to the stream; PARALLEL only.

    Raises:
        InvalidValue: A width does not fit, a name or dtype is not known, or a needed argument is missing.
    """
    _check_request(x, feed_forward, wiring, until=until, dtype=dtype, other=other)
    compute = dtype or common_dtype(x, feed_forward, wiring)
    collected: dict[str, Tensor | None] = {}
    running = _run(x.to(compute), feed_forward, wiring.to(compute), other=None if other is None else other.to(compute))
    for name, tensor in running:
        collected[name] = tensor
        if name == until:
            break
    return Stages(**collected)


def residual_output(
    x: Float[Tensor, "*batch d"], sublayer: Float[Tensor, "out in"] | FeedForward, wiring: Wiring
) -> Float[Tensor, "*batch d"]:
    """The output of a block around a matrix A, for F(n) = A n, or around a feed-forward network.

    In float32 at least, and in float64 where any tensor is float64. Without a second branch.

    Raises:
        InvalidValue: The matrix is not square of the width of `x`, or the network is of another width.
    """
    check_sublayer(x, sublayer)
    dtype = common_dtype(x, sublayer, wiring)
    wired = wiring.to(dtype)
    stream = residual_stream(x.to(dtype), sublayer, wired)
    return stream if wired.residual_norm is None else wired.residual_norm(stream)


def residual_stream(
    x: Float[Tensor, "*batch d"], sublayer: Float[Tensor, "out in"] | FeedForward, wiring: Wiring
) -> Float[Tensor, "*batch d"]:
    """The stream after the residual add and before a POST block's norm, in the dtype of `x`."""
    normed = x if wiring.input_norm is None else wiring.input_norm(x)
    return _add(x, branch_contribution(apply_sublayer(normed, sublayer), wiring), wiring, other=None)


def branch_contribution(branch: Float[Tensor, "*batch d"], wiring: Wiring) -> Float[Tensor, "*batch d"]:
    """What the residual stream receives of a branch: after the branch's norm, multiplier and gain."""
    normed = branch if wiring.output_norm is None else wiring.output_norm(branch)
    scaled = normed if wiring.branch_scale == 1.0 else normed * wiring.branch_scale
    return scaled if wiring.branch_gain is None else scaled * wiring.branch_gain.to(scaled.dtype)


def joined(
    x: Float[Tensor, "*batch d"],
    contribution: Float[Tensor, "*batch d"],
    wiring: Wiring,
    *,
    other: Float[Tensor, "*batch d"] | None = None,
) -> Float[Tensor, "*batch d"]:
    """The residual stream that leaves: x with the contributions of its branches, after the norm of a POST block."""
    stream = _add(x, contribution, wiring, other=other)
    return stream if wiring.residual_norm is None else wiring.residual_norm(stream)


def apply_sublayer(
    n: Float[Tensor, "*batch d"], sublayer: Float[Tensor, "out in"] | FeedForward
) -> Float[Tensor, "*batch d"]:
    """What the sublayer returns for its input `n`, in the dtype of `n`."""
    if isinstance(sublayer, Tensor):
        return apply_linear(n, sublayer)
    *_, (_, down) = _run_feed_forward(n, sublayer)
    return down


def check_sublayer(x: Tensor, sublayer: Tensor | FeedForward) -> None:
    """Refuse a matrix or network that does not map the width of `x` to itself.

    Raises:
        InvalidValue: Naming both shapes.
    """
    d = x.shape[-1]
    shape = list(sublayer.shape) if isinstance(sublayer, Tensor) else [sublayer.model_width] * 2
    if shape != [d, d]:
        raise InvalidValue(
            f"the sublayer has shape {shape} and the input has shape {list(x.shape)}",
            hint=f"It must be [{d}, {d}], for it is added to the input.",
            field="matrix" if isinstance(sublayer, Tensor) else "x",
        )


def common_dtype(x: Tensor, sublayer: Tensor | FeedForward | None, wiring: Wiring) -> torch.dtype:
    """The widest of float32 and of the dtypes of the input, the sublayer's weights and the wiring's tensors."""
    weights = sublayer.tensors if isinstance(sublayer, FeedForward) else (sublayer,)
    return widest_dtype((x, *weights, *wiring.tensors))


def _run(
    x: Tensor, feed_forward: FeedForward | None, wiring: Wiring, *, other: Tensor | None
) -> Iterator[tuple[str, Tensor | None]]:
    yield "x", x
    normed = None if wiring.input_norm is None else wiring.input_norm(x)
    yield "normed", normed
    if feed_forward is None:
        return
    down = x
    for name, tensor in _run_feed_forward(x if normed is None else normed, feed_forward):
        yield name, tensor
        down = tensor
    contribution = branch_contribution(down, wiring)
    yield "contribution", contribution
    yield "output", joined(x, contribution, wiring, other=other)


def _run_feed_forward(n: Tensor, feed_forward: FeedForward) -> Iterator[tuple[str, Tensor]]:
    if feed_forward.gate is None:
        up = apply_linear(n, feed_forward.up, feed_forward.up_bias)
        yield "up", up
        hidden = feed_forward.activation(up)
        yield "activated", hidden
    else:
        gate = apply_linear(n, feed_forward.gate, feed_forward.gate_bias)
        yield "gate", gate
        up = apply_linear(n, feed_forward.up, feed_forward.up_bias)
        yield "up", up
        activated, hidden = feed_forward.gating.combine(read_of_gate(gate, feed_forward), up, feed_forward.activation)
        yield "activated", activated
    hidden = hidden if feed_forward.hidden_norm is None else feed_forward.hidden_norm.to(hidden.dtype)(hidden)
    yield "hidden", hidden
    down = apply_linear(hidden, feed_forward.down, feed_forward.down_bias)
    yield "down", down if feed_forward.down_scale == 1.0 else down * feed_forward.down_scale


def _add(x: Tensor, contribution: Tensor, wiring: Wiring, *, other: Tensor | None) -> Tensor:
    stream = x if wiring.residual_scale == 1.0 else x * wiring.residual_scale
    if other is None:
        return stream + contribution
    if wiring.branches_first:
        return (other + contribution) + stream
    return (stream + other) + contribution


def _check_request(
    x: Tensor,
    feed_forward: FeedForward | None,
    wiring: Wiring,
    *,
    until: str,
    dtype: torch.dtype | None,
    other: Tensor | None,
) -> None:
    if until not in STAGES:
        raise InvalidValue(f"unknown stage {until!r}", hint="Use one of the stages.", field="until", known=STAGES)
    if dtype is not None and not dtype.is_floating_point:
        raise InvalidValue(f"a block cannot run in {dtype}", hint="Give a floating-point dtype.", field="dtype")
    if feed_forward is None and until not in _NEED_NO_WEIGHTS:
        raise InvalidValue(
            f"the stage {until!r} needs the weights of the feed-forward network",
            hint="Pass them, or ask for x or normed alone.",
            field="feed_forward",
        )
    if other is not None and wiring.placement is not Placement.PARALLEL:
        raise InvalidValue(
            f"the placement {wiring.placement.value!r} has no second branch beside this one",
            hint="Leave `other` out, or use the placement 'parallel'.",
            field="other",
        )
    if feed_forward is not None and x.shape[-1:] != (feed_forward.model_width,):
        raise InvalidValue(
            f"the input has shape {list(x.shape)} and the feed-forward network is {feed_forward.model_width} wide",
            hint="The last axis is the model width.",
            field="x",
        )
