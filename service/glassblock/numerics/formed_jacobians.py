"""The dense Jacobian of a block at each token, formed from its factors; for oracles, and where it is the cheapest way.

`block_jacobians` gives the factors: shift I + L (inner I + scale M R). d^2 numbers a token, and m d while M is formed.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.block_jacobians import BlockJacobian
from glassblock.numerics.norm_factors import NormFactors


def formed(jacobian: BlockJacobian) -> Float[Tensor, "tokens d d"]:
    """The dense Jacobian of each token."""
    dense = branch_formed(jacobian, core_formed(jacobian))
    dense = dense / branch_divisor(jacobian)[:, None, None].to(dense.dtype)
    diagonal = dense.diagonal(dim1=-2, dim2=-1)
    diagonal += jacobian.shift
    return dense if jacobian.other is None else dense + jacobian.other


def branch_formed(jacobian: BlockJacobian, core: Float[Tensor, "tokens d d"]) -> Float[Tensor, "tokens d d"]:
    """L (inner I + scale M R) for each token from its M, times `branch_divisor`."""
    dense = core
    if jacobian.right is not None:
        dense = _project_rows(dense * jacobian.right.gamma, jacobian.right)
    dense = jacobian.scale * dense
    if jacobian.inner != 0.0:  # there is no norm on the right then
        diagonal = dense.diagonal(dim1=-2, dim2=-1)
        diagonal += jacobian.inner
    if jacobian.left is not None:
        dense = jacobian.left.gamma.unsqueeze(-1) * _project_rows(dense.mT, jacobian.left).mT
    return dense


def branch_divisor(jacobian: BlockJacobian) -> Float[Tensor, " tokens"]:
    """The product of what the norms divide by, float64."""
    divisor = torch.ones(jacobian.tokens, dtype=torch.float64, device=jacobian.point.device)
    for norm in (jacobian.left, jacobian.right):
        divisor = divisor if norm is None else divisor * norm.s
    return divisor


def core_formed(jacobian: BlockJacobian) -> Float[Tensor, "tokens d d"]:
    """M for each token: 2 m d^2 FLOPs."""
    network = jacobian.feed_forward
    inner = jacobian.slopes[-1].unsqueeze(-1) * network.up
    if network.gate is not None:
        inner = torch.addcmul(inner, jacobian.slopes[0].unsqueeze(-1), network.gate)
    return network.down @ inner


def _project_rows(dense: Tensor, factors: NormFactors) -> Tensor:
    """X Pi for each token's matrix X `[tokens, r, d]`."""
    for direction, kept in zip(factors.directions, factors.kept, strict=True):
        along = dense @ direction.unsqueeze(-1)
        dense = dense - along * ((1.0 - kept).to(dense.dtype).unsqueeze(-1) * direction).unsqueeze(-2)
    return dense
