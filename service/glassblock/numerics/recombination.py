"""How far the captured stages of a block recombine, each from the ones before it."""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.block import Stages
from glassblock.numerics.feed_forward import FeedForward, read_of_gate
from glassblock.numerics.wiring import Wiring

# Numbers of a weight that are held in float64 at once: 128 MiB.
_CHUNK = 2**24


def recombination_error(
    stages: Stages, feed_forward: FeedForward, wiring: Wiring, *, other: Float[Tensor, "*batch d"] | None = None
) -> dict[str, Float[Tensor, ""]]:
    """How far the stages recombine: largest |difference| over largest |recomputed number|, for each stage after `x`.

    Every stage is computed again in float64 from its captured predecessors, summing the weights in the reverse order,
    so that it shares neither the precision nor the order of the forward pass. A run in float32 recombines to about
    1e-6, one in bfloat16 to its rounding; tensors that do not belong together miss by the order of one.

    `activated` and `hidden` are recomputed from the captured `gate` and `up`, and `output` from the captured `x` and
    `hidden`, so that `output` alone tells whether the parts make the whole. A stage whose predecessors are missing is
    left out. Where either tensor holds NaN, or both hold infinities, the error is NaN.

    Args:
        stages: As `block.run_block` returned them, or captured elsewhere.
        feed_forward: The weights they came from.
        wiring: The norms and scales they came from.
        other: What the parallel branch added, if there was one.

    Returns:
        0-d float64 tensors by the name of the stage, in the order of the stages.
    """
    wide = Stages(*(None if stage is None else stage.to(torch.float64) for stage in stages))
    recomputed = _recompute(wide, feed_forward, wiring.to(torch.float64), other)
    captured = wide._asdict()
    return {name: _relative(captured[name], again) for name, again in recomputed if captured[name] is not None}


def _recompute(
    stages: Stages, feed_forward: FeedForward, wiring: Wiring, other: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    if stages.x is not None and wiring.input_norm is not None:
        yield "normed", wiring.input_norm(stages.x)
    yield from _recompute_hidden(stages, feed_forward, read=stages.normed if wiring.input_norm else stages.x)
    if stages.hidden is None:
        return
    down = feed_forward.down_scale * _apply_backwards(feed_forward.down, feed_forward.down_bias, stages.hidden)
    yield "down", down
    if stages.down is not None:
        yield "contribution", _contribution(stages.down, wiring)
    if stages.x is not None:
        stream = _contribution(down, wiring) + wiring.residual_scale * stages.x
        if other is not None:
            stream = stream + other.to(stream.dtype)
        yield "output", stream if wiring.residual_norm is None else wiring.residual_norm(stream)


def _recompute_hidden(
    stages: Stages, feed_forward: FeedForward, *, read: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    if read is not None:
        if feed_forward.gate is not None:
            yield "gate", _apply_backwards(feed_forward.gate, feed_forward.gate_bias, read)
        yield "up", _apply_backwards(feed_forward.up, feed_forward.up_bias, read)
    if stages.up is None:
        return
    if feed_forward.gate is None:
        activated = hidden = feed_forward.activation(stages.up)
    elif stages.gate is not None:
        gate = read_of_gate(stages.gate, feed_forward)
        activated, hidden = feed_forward.gating.combine(gate, stages.up, feed_forward.activation)
    else:
        return
    norm = feed_forward.hidden_norm
    yield from (("activated", activated), ("hidden", hidden if norm is None else norm.to(hidden.dtype)(hidden)))


def _contribution(down: Tensor, wiring: Wiring) -> Tensor:
    scaled = wiring.branch_scale * (down if wiring.output_norm is None else wiring.output_norm(down))
    return scaled if wiring.branch_gain is None else scaled * wiring.branch_gain


def _apply_backwards(weight: Tensor, bias: Tensor | None, values: Tensor) -> Tensor:
    backwards = values.flip(-1)
    rows = max(1, _CHUNK // weight.shape[1])
    parts = (weight[start : start + rows] for start in range(0, len(weight), rows))
    applied = torch.cat([backwards @ part.to(values.dtype).flip(-1).mT for part in parts], dim=-1)
    return applied if bias is None else applied + bias.to(values.dtype)


def _relative(captured: Tensor, recomputed: Tensor) -> Tensor:
    if recomputed.numel() == 0:
        return recomputed.new_zeros(())
    difference = (captured - recomputed).abs().amax()
    reference = recomputed.abs().amax()
    # Against an all-zero reference there is no scale: zero stays zero, and any difference is infinitely large.
    return torch.where(difference == 0, difference, difference / reference)
