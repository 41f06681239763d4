"""How much rounding a product with a block's Jacobian may hold: the size of the terms that it is a sum of."""

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.block_jacobians import BlockJacobian
from glassblock.numerics.formed_jacobians import branch_divisor
from glassblock.numerics.norm_factors import lengths

# Units of eps, relative to the terms, that the sums of hundreds to thousands of products are off by: blocked sums and
# independent roundings stay well within it.
ROUNDING = 16.0
# What numbers near the smallest normal one may be off by, in units of it, over eps: they lose bits before anything is
# multiplied, and the slope of silu is zero where exp(-g) overflows, some 30 units too early.
_UNDERFLOW = 2.0**26


def forming_flops(jacobian: BlockJacobian) -> int:
    """FLOPs of one token's dense Jacobian."""
    return 2 * jacobian.slopes.shape[-1] * jacobian.width**2


def product_noise(jacobian: BlockJacobian) -> Float[Tensor, " tokens"]:
    """The size of the terms whose sum J v is, for v of length one; float64.

    The stream; what the norms take away from M; the neurons of M as if they were orthogonal, for their rounding is
    independent; and all of it again as often as the forward pass has magnified rounding (`BlockJacobian`). In float32
    also what numbers too small for all their bits leave out.
    """
    network, left, right = jacobian.feed_forward, jacobian.left, jacobian.right
    gains = [None if norm is None else norm.gamma for norm in (left, right)]
    columns = lengths(network.down if gains[0] is None else gains[0].unsqueeze(-1) * network.down, dim=0)
    weights = [network.up] if network.gate is None else [network.gate, network.up]
    rows = [lengths(weight if gains[1] is None else weight * gains[1]) for weight in weights]
    each = torch.stack([slope.abs() * row for slope, row in zip(jacobian.slopes, rows, strict=True)]).sum(0) * columns
    size = lengths(each.double())
    if right is not None:
        for v in right.directions:
            moved = jacobian.core_times(right.gamma * v)
            size = size + lengths((moved if left is None else left.gamma * moved).double())
    size = abs(jacobian.scale) * size
    if left is not None:
        size = size + abs(jacobian.inner) * left.gamma.abs().max()
        for v in left.directions:
            pulled = jacobian.core_transposed_times(v)
            pulled = pulled if right is None else right.project(right.gamma * pulled)
            pulled = jacobian.scale * pulled + jacobian.inner * v
            size = size + lengths((left.gamma * v).double()) * lengths(pulled.double())
    size = (size / branch_divisor(jacobian)) * jacobian.amplification + abs(jacobian.shift)
    if jacobian.point.dtype is torch.float32:
        paths = sum(((1 + slope.abs()) * (1 + row)).double() for slope, row in zip(jacobian.slopes, rows, strict=True))
        underflow = _UNDERFLOW * torch.finfo(torch.float32).smallest_normal * (1 + (paths * (1 + columns)).sum(-1))
        for norm in (left, right):
            underflow = underflow if norm is None else underflow / norm.s.clamp(max=1.0)
        size = size + underflow
    return size if jacobian.other is None else size + lengths(jacobian.other.double().flatten(1))
