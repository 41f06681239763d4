"""The Jacobian of a block, known by its products.

Write F for the feed-forward network, h for its hidden units, W_g, W_u and W_d for its weights. At the input n of F

    M = W_d (diag(dh/dg) W_g + diag(dh/du) W_u)        plain: W_d diag(dh/du) W_u

and with the Jacobians R of the norm that F reads through and L of the norm on its left (`norm_factors`; the identity
where there is none), beta the branch's scale and alpha that of the stream,

    FEED_FORWARD    M                        of `down` by what F reads
    BRANCH          beta L M R               of `contribution` by x: F with its norms
    BLOCK           alpha I + beta L M R     of `output` by x
                    L (alpha I + beta M)     in a POST block, whose norm stands after the residual add

which is `shift I + L (inner I + scale M R)` in every case. Nothing here is d by d (`formed_jacobians` makes the dense
matrix). The stages are those of `block.Stages`. Where a clamp or an activation has a kink, the derivative is the one
that PyTorch's backward takes there.

Computed in the dtype of `x`, which is float32 at least (`common_dtype`), and on its device. Norms are those of exact
arithmetic, not of an engine (`norm_jacobians`): a float32 row whose squares overflow has a Jacobian all the same.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from glassblock.errors import InvalidValue
from glassblock.numerics.block import check_sublayer, common_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norm_factors import NormFactors, lengths, norm_factors
from glassblock.numerics.norms import Norm
from glassblock.numerics.wiring import Placement, Wiring


class Part(StrEnum):
    """Which function of a block is differentiated."""

    FEED_FORWARD = "feed_forward"  # F alone, by what it reads
    BRANCH = "branch"  # F with its norms and the branch's scale, by x
    BLOCK = "block"  # the residual block, by x


@dataclass(frozen=True, eq=False)
class BlockJacobian:
    """The Jacobian of one part of a block at each of some tokens, as an operator.

    Attributes:
        feed_forward: With its weights in the dtype of the computation.
        slopes: `[branches, tokens, m]`, dh/dg and dh/du; dh/du alone in a plain network.
        left: L, or None for the identity.
        right: R, or None for the identity.
        shift, inner, scale: The numbers of the module's formula.
        other: `[tokens, d, d]`, the Jacobian of a parallel branch, or None.
        point: `[tokens, d]`, what the function is differentiated by.
        amplification: `[tokens]`, float64: by how much the forward pass up to the norms magnifies rounding.
    """

    feed_forward: FeedForward
    slopes: Tensor
    left: NormFactors | None
    right: NormFactors | None
    shift: float
    inner: float
    scale: float
    other: Tensor | None
    point: Tensor
    amplification: Tensor

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.point.shape[0]

    @property
    def width(self) -> int:
        """d."""
        return self.point.shape[1]

    @property
    def product_flops(self) -> int:
        """FLOPs of one product with one token, those of the weights."""
        return 2 * (len(self.slopes) + 1) * self.slopes.shape[-1] * self.width

    def times(self, v: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens d"]:
        """J v for each token."""
        moved = self.scale * self.core_times(v if self.right is None else self.right.times(v)) + self.inner * v
        if self.left is not None:
            moved = self.left.times(moved)
        found = self.shift * v + moved
        return found if self.other is None else found + torch.einsum("tij,tj->ti", self.other, v)

    def transposed_times(self, v: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens d"]:
        """J^T v for each token."""
        pulled = v if self.left is None else self.left.transposed_times(v)
        inner = self.core_transposed_times(pulled)
        if self.right is not None:
            inner = self.right.transposed_times(inner)
        found = self.shift * v + self.inner * pulled + self.scale * inner
        return found if self.other is None else found + torch.einsum("ti,tij->tj", v, self.other)

    def along_point(self, *, core_along: Float[Tensor, "tokens d"] | None = None) -> "AlongPoint":
        """J x / |x|, with x the point; NaN where it is zero.

        `core_along` is M diag(gamma) v_1 for the direction v_1 of the row under the norm on the right, float64, where
        it is known already.

        What a norm leaves of its row, R x = gamma (eps/s^2) n, is multiplied in at the end and in float64: it neither
        cancels nor vanishes, and is exactly zero where eps is.
        """
        largest = self.point.abs().amax(-1, keepdim=True)
        unit = (self.point / largest).double()
        length = lengths(unit, keepdim=True)
        direction = unit / length
        if self.right is None:
            core = self.core_times(direction.to(self.point.dtype)).double()
        else:
            if core_along is None:
                core_along = self.core_times(self.right.gamma * self.right.directions[0]).double()
            left_over = self.right.kept[0].unsqueeze(-1) / length / largest.double()
            core = core_along * lengths(self.right.normed.double(), keepdim=True) * left_over
        moved = self.scale * core + self.inner * direction
        amplification = _ratio(abs(self.scale) * lengths(core) + abs(self.inner), lengths(moved))
        if self.left is not None:
            whole = lengths(self.left.gamma * moved) / self.left.s
            moved = self.left.times(moved)
            amplification = amplification * _ratio(whole, lengths(moved))
        found = self.shift * direction + moved
        amplification = amplification * _ratio(abs(self.shift) + lengths(moved), lengths(found))
        if self.other is not None:
            added = torch.einsum("tij,tj->ti", self.other.double(), direction)
            found, whole = found + added, lengths(found) + lengths(added)
            amplification = amplification * _ratio(whole, lengths(found))
        # A point of zero has no direction, and no precision brings it one.
        amplification = torch.where((self.point == 0).all(-1), torch.ones_like(amplification), amplification)
        return AlongPoint(found, amplification)

    def core_times(self, v: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens d"]:
        """M v for each token."""
        network = self.feed_forward
        hidden = self.slopes[-1] * functional.linear(v, network.up)
        if network.gate is not None:
            hidden = hidden + self.slopes[0] * functional.linear(v, network.gate)
        return functional.linear(hidden, network.down)

    def core_transposed_times(self, v: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens d"]:
        """M^T v for each token."""
        network = self.feed_forward
        hidden = v @ network.down
        found = (self.slopes[-1] * hidden) @ network.up
        return found if network.gate is None else found + (self.slopes[0] * hidden) @ network.gate

    def of_tokens(self, chosen: slice | Tensor) -> "BlockJacobian":
        """The Jacobian at some of the tokens."""
        return BlockJacobian(
            self.feed_forward,
            self.slopes[:, chosen],
            None if self.left is None else _norm_of_tokens(self.left, chosen),
            None if self.right is None else _norm_of_tokens(self.right, chosen),
            self.shift,
            self.inner,
            self.scale,
            None if self.other is None else self.other[chosen],
            self.point[chosen],
            self.amplification[chosen],
        )


class AlongPoint(NamedTuple):
    """J x / |x|, float64 `[tokens, d]`, and by how much its sums magnify rounding, float64 `[tokens]`."""

    product: Tensor
    amplification: Tensor


def block_jacobian(
    x: Float[Tensor, "tokens d"],
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    part: Part = Part.BLOCK,
    other: Float[Tensor, "tokens d d"] | None = None,
    dtype: torch.dtype | None = None,
) -> BlockJacobian:
    """The Jacobian of a part of a block at each token: one forward pass, and the slopes of the hidden units.

    Args:
        x: The residual stream that enters.
        feed_forward: The network.
        wiring: Norms and residual add.
        part: What is differentiated.
        other: The Jacobian of the other branch of a PARALLEL block, added to that of BLOCK.
        dtype: None computes in float32 at least, and in float64 where any tensor is.

    Raises:
        InvalidValue: A width does not fit, `dtype` is narrower than float32, or `other` goes with no such block.
    """
    if other is not None and (wiring.placement is not Placement.PARALLEL or part is not Part.BLOCK):
        raise InvalidValue(
            f"{part.value!r} of the placement {wiring.placement.value!r} has no second branch beside this one",
            hint="Leave `other` out, or ask for the block of the placement 'parallel'.",
            field="other",
        )
    if dtype is not None and dtype not in {torch.float32, torch.float64}:
        raise InvalidValue(f"a Jacobian cannot be had in {dtype}", hint="Use float32 or float64.", field="dtype")
    check_sublayer(x, feed_forward)
    refuse_unlike(feed_forward, wiring)
    dtype = dtype or common_dtype(x, feed_forward, wiring)
    x, network, wiring = x.detach().to(dtype), network_in(feed_forward, dtype), wiring.to(dtype)
    right = None if wiring.input_norm is None else norm_factors(x, wiring.input_norm)
    read = x if right is None else right.output
    hidden, slopes = _hidden_and_slopes(read, network)
    amplification = torch.ones(x.shape[0], dtype=torch.float64, device=x.device)
    if right is not None:
        amplification = right.amplification
    if part is Part.FEED_FORWARD:
        return BlockJacobian(network, slopes, None, None, 0.0, 0.0, 1.0, None, read, amplification)
    alpha, beta = wiring.residual_scale, wiring.branch_scale
    left, left_norm = None, sides(wiring, part)[0]
    post = left_norm is not None and left_norm is wiring.residual_norm
    if left_norm is not None:
        f, noise = functional.linear(hidden, network.down, network.down_bias), _sum_noise(hidden, network)
        if post:
            f, noise = alpha * x + beta * f, abs(beta) * noise + abs(alpha) * lengths(x.double())
        left = norm_factors(f, left_norm)
        noise = noise + torch.finfo(dtype).smallest_normal  # below it numbers have fewer bits
        # Relative to what the norm divides by: a row far below eps is as good as zero.
        reached = left.s * x.shape[-1] ** 0.5
        amplification = torch.maximum(torch.maximum(amplification, left.amplification), noise / reached)
    return BlockJacobian(
        network,
        slopes,
        left,
        right,
        shift=alpha if part is Part.BLOCK and not post else 0.0,
        inner=alpha if post else 0.0,
        scale=beta,
        other=None if other is None else other.detach().to(dtype),
        point=x,
        amplification=amplification,
    )


def refuse_unlike(feed_forward: FeedForward, wiring: Wiring) -> None:
    """Refuse a block that the formula of this module does not describe.

    Raises:
        InvalidValue: Something stands between neurons and stream that is no product with a weight.
    """
    if not feed_forward.neuronwise or wiring.branch_gain is not None:
        raise InvalidValue(
            "the closed form of the Jacobian covers no norm of the hidden units, no multipliers inside the network and"
            " no gain on its branch, and this block has one",
            hint="Ask for the part 'norm' or 'layer', or for a block without.",
            field="part",
        )


def sides(wiring: Wiring, part: Part) -> tuple[Norm | None, Norm | None]:
    """The norms to the left and to the right of M in the Jacobian of a part."""
    if part is Part.FEED_FORWARD:
        return None, None
    if part is Part.BLOCK and wiring.residual_norm is not None:
        return wiring.residual_norm, None
    return wiring.output_norm, wiring.input_norm


def network_in(feed_forward: FeedForward, dtype: torch.dtype) -> FeedForward:
    """The network with every tensor in `dtype`; a tensor that has it already is not copied."""

    def cast_to(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().to(dtype)

    # Not made anew: whatever else a network has must reach `refuse_unlike`.
    return replace(
        feed_forward,
        gate=cast_to(feed_forward.gate),
        up=feed_forward.up.detach().to(dtype),
        down=feed_forward.down.detach().to(dtype),
        gate_bias=cast_to(feed_forward.gate_bias),
        up_bias=cast_to(feed_forward.up_bias),
        down_bias=cast_to(feed_forward.down_bias),
        hidden_norm=None if feed_forward.hidden_norm is None else feed_forward.hidden_norm.to(dtype),
    )


def _norm_of_tokens(factors: NormFactors, chosen: slice | Tensor) -> NormFactors:
    return NormFactors(
        gamma=factors.gamma,
        s=factors.s[chosen],
        directions=factors.directions[:, chosen],
        kept=factors.kept[:, chosen],
        output=factors.output[chosen],
        normed=factors.normed[chosen],
        amplification=factors.amplification[chosen],
    )


def _hidden_and_slopes(n: Float[Tensor, "*batch d"], network: FeedForward) -> tuple[Tensor, Tensor]:
    """The hidden units `[*batch, m]` and their derivatives by gate and up, or up alone, `[branches, *batch, m]`."""
    inputs = [functional.linear(n, network.up, network.up_bias)]
    if network.gate is not None:
        inputs.insert(0, functional.linear(n, network.gate, network.gate_bias))
    # The hidden units are elementwise in gate and up, so the gradient of their sum holds every derivative.
    with torch.inference_mode(mode=False), torch.enable_grad():
        leaves = [branch.detach().clone().requires_grad_() for branch in inputs]
        if network.gate is None:
            hidden = network.activation(leaves[0])
        else:
            _, hidden = network.gating.combine(leaves[0], leaves[1], network.activation)
        slopes = torch.stack(torch.autograd.grad(hidden.sum(), leaves))
    return hidden.detach(), slopes


def _sum_noise(hidden: Tensor, network: FeedForward) -> Tensor:
    """Length that the network's output would have if its neurons added up like independent ones, float64 `[tokens]`."""
    columns = lengths(network.down, dim=0)
    total = lengths((hidden * columns).double())
    if network.down_bias is None:
        return total
    return torch.hypot(total, lengths(network.down_bias.double()))


def _ratio(whole: Tensor, rest: Tensor) -> Tensor:
    """1 where both are zero: nothing plus nothing is exact."""
    return torch.where(whole == 0, torch.ones_like(whole), whole / rest)
