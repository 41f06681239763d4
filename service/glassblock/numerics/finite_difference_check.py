"""A block's Jacobian against the block itself: its product with one direction, and a central finite difference.

In float64, whatever the dtype of the norms that it stands beside: it proves formula, wiring and weights, not the
rounding. Central differences at h and 2 h are combined to fourth order (Richardson), with h cbrt(eps) of the row's
size. The difference that is left, 1e-10 relative for most rows and some 1e-8 for rows that are far from what the block
is made for, belongs to the finite difference. A kink within a step (a ReLU, a clamp) shows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.block import apply_sublayer, branch_contribution, residual_output
from glassblock.numerics.block_jacobians import Part, block_jacobian, network_in
from glassblock.numerics.coupled_jacobian import TokenFunction, push_forward
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.golub_kahan import uniform_starts
from glassblock.numerics.norm_factors import lengths, norm_factors
from glassblock.numerics.norms import Norm
from glassblock.numerics.wiring import Wiring

_STEP = torch.finfo(torch.float64).eps ** (1 / 3)


class FiniteDifferenceCheck(NamedTuple):
    """Of each token, float64 `[tokens]`: |J v - difference| / |difference|, and the step along v, |v| = 1.

    Zero where both vanish.
    """

    relative_difference: Tensor
    step: Tensor


def check_block(
    x: Float[Tensor, "tokens d"], feed_forward: FeedForward, wiring: Wiring, *, part: Part = Part.BLOCK, seed: int = 0
) -> FiniteDifferenceCheck:
    """The products of `block_jacobian` with one direction for each token against differences of the block.

    Args:
        x: The residual stream that enters.
        feed_forward: The network.
        wiring: Norms and residual add; a parallel branch is taken as constant.
        part: What is differentiated.
        seed: Of the directions, uniform on the sphere.
    """
    wide, network, wired = x.detach().double(), network_in(feed_forward, torch.float64), wiring.to(torch.float64)
    jacobian = block_jacobian(wide, network, wired, part=part, dtype=torch.float64)

    def function(row: Tensor) -> Tensor:
        if part is Part.FEED_FORWARD:
            return apply_sublayer(row, network)
        if part is Part.BLOCK:
            return residual_output(row, network, wired)
        normed = row if wired.input_norm is None else wired.input_norm(row)
        return branch_contribution(apply_sublayer(normed, network), wired)

    v = uniform_starts(*wide.shape, seed=seed).to(wide.device)
    eps = max((norm.eps for norm in wired.norms if norm is not None), default=0.0)
    return _compared(function, jacobian.point, v, jacobian.times(v), eps=eps)


def check_norm(x: Float[Tensor, "tokens d"], norm: Norm, *, seed: int = 0) -> FiniteDifferenceCheck:
    """The same for the norm alone."""
    wide, wired = x.detach().double(), norm.to(torch.float64)
    v = uniform_starts(*wide.shape, seed=seed).to(wide.device)
    return _compared(wired, wide, v, norm_factors(wide, wired).times(v), eps=norm.eps)


def check_states(function: TokenFunction, x: Float[Tensor, "tokens d"], *, seed: int = 0) -> FiniteDifferenceCheck:
    """The same for a function that couples tokens: one direction over all of them, one number.

    Each token is moved by as much as it is large, so that a massive one does not decide the step of all.
    """
    wide = x.detach().double()
    v = uniform_starts(*wide.shape, seed=seed).to(wide.device) * lengths(wide, keepdim=True)
    v = v / lengths(v.reshape(1, -1)) if bool(v.any()) else uniform_starts(*wide.shape, seed=seed).to(wide.device)

    def flat(states: Tensor) -> Tensor:
        return function(states.view(wide.shape)).reshape(1, -1)

    product = push_forward(function, wide, v).reshape(1, -1)
    return _compared(flat, wide.reshape(1, -1), v.reshape(1, -1), product, eps=0.0)


def _compared(
    function: Callable[[Tensor], Tensor], point: Tensor, v: Tensor, product: Tensor, *, eps: float
) -> FiniteDifferenceCheck:
    # A row far below eps is as good as zero to a norm: the function bends at the scale of sqrt(d eps) then.
    size = lengths(point).clamp(min=(point.shape[-1] * eps) ** 0.5)
    step = _STEP * torch.where(size > 0, size, torch.ones_like(size))
    move = step.unsqueeze(-1) * v
    near, far = (function(point + k * move) - function(point - k * move) for k in (1.0, 2.0))
    difference = (8.0 * near - far) / (12.0 * step.unsqueeze(-1))
    apart, whole = lengths(product - difference), lengths(difference)
    return FiniteDifferenceCheck(torch.where(apart == 0, torch.zeros_like(apart), apart / whole), step)
