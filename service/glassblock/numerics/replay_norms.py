"""A block's norms under a hypothesis, with the roundings that an engine would give them."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.hypotheses import Hypothesis
from glassblock.numerics.norms import GainOrder, Norm


@dataclass(frozen=True, eq=False)
class ReplayedNorm:
    """A norm as an engine runs it.

    Attributes:
        norm: With its tensors.
        eps_outside: Epsilon stands outside the root: x / (sqrt(mean square) + eps).
        twice: The rows are normalised without gain and bias first, and rounded.
    """

    norm: Norm
    eps_outside: bool = False
    twice: bool = False

    def __call__(
        self, x: Float[Tensor, "*batch d"], dtype: torch.dtype, *, backwards: bool = False
    ) -> Float[Tensor, "*batch d"]:
        """Normalise the rows of `x` with the norm's tensors in `dtype`, and return them in it.

        Args:
            x: The rows, in the type that they reach the norm in.
            dtype: Of the engine.
            backwards: Sum the channels in the reverse order.
        """
        norm = self.norm.to(dtype)
        if backwards:
            x = x.flip(-1)
            gain, bias = (None if tensor is None else tensor.flip(-1) for tensor in (norm.gain, norm.bias))
            norm = replace(norm, gain=gain, bias=bias)
        if self.twice:
            x = _by(Norm(replace(norm.kind, gain=GainOrder.NONE), None, None, norm.eps), x, outside=self.eps_outside)
        normed = _by(norm, x, outside=self.eps_outside).to(dtype)
        return normed.flip(-1) if backwards else normed


def replayed_norm(norm: Norm, role: str, hypothesis: Hypothesis) -> ReplayedNorm:
    """The norm in that role (`input`, `output`, `residual`) as the hypothesis has it."""
    if hypothesis.norms not in {"every", role}:
        return ReplayedNorm(norm)
    kind, bias = norm.kind, norm.bias
    has_gain = norm.gain is not None
    if hypothesis.norm_kind == "layernorm" and not kind.centred:
        kind = replace(kind, centred=True, gain=GainOrder.FUSED if has_gain else GainOrder.NONE)
    elif hypothesis.norm_kind == "rmsnorm" and kind.centred:
        kind = replace(kind, centred=False, gain=GainOrder.AFTER_CAST if has_gain else GainOrder.NONE)
        bias = None
    if has_gain and not kind.centred and hypothesis.cast != "declared":
        kind = replace(kind, gain=GainOrder.BEFORE_CAST if hypothesis.cast == "before" else GainOrder.AFTER_CAST)
    if has_gain:
        kind = replace(kind, offset=kind.offset + hypothesis.offset)
    if hypothesis.norm_bias == "dropped":
        bias = None
    eps = norm.eps if hypothesis.eps is None else hypothesis.eps
    place, passes = hypothesis.eps_place, hypothesis.norm_passes
    return ReplayedNorm(Norm(kind, norm.gain, bias, eps), place == "outside", passes == "twice")


def _by(norm: Norm, x: Tensor, *, outside: bool) -> Tensor:
    return _outside(x, norm) if outside else norm(x)


def _outside(x: Tensor, norm: Norm) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm.kind.centred:
        wide = wide - wide.mean(-1, keepdim=True)
    normed = wide / (wide.square().mean(-1, keepdim=True).sqrt() + norm.eps)
    if norm.gain is None:
        return normed.to(x.dtype)
    if norm.kind.gain in {GainOrder.AFTER_CAST, GainOrder.WEIGHT_DTYPE}:
        return (norm.gain + norm.kind.offset) * normed.to(x.dtype)
    normed = (norm.gain.to(wide.dtype) + norm.kind.offset) * normed
    return (normed if norm.bias is None else normed + norm.bias.to(wide.dtype)).to(x.dtype)
