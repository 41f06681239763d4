"""The Jacobian of a norm at each row, in the factors that products and norms of block Jacobians are made of.

    J = diag(gamma) Pi / s,    Pi = I - sum_k (1 - rho_k) v_k v_k^T

with orthonormal v_k: v_1 along the row (LayerNorm: the row minus its mean), rho_1 = eps/s^2, which is what is left of
that direction; for LayerNorm also v_2 along ones, rho_2 = 0. So Pi^2 has rho_k^2 for rho_k, and whatever lies along
the row is kept in a term of its own and never found as a difference of large numbers.

Rows are taken in units of their largest entry, so that neither a row near overflow nor one near zero loses its squares
(`norm_jacobians` says more). A zero row has v_1 = 0 and Pi = I, or I - v_2 v_2^T. Where eps is zero too, s is zero.
"""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.norms import Norm


class NormFactors(NamedTuple):
    """The factors of a norm's Jacobian at each row.

    Attributes:
        gamma: `[d]`, the gain with its offset.
        s: `[tokens]`, float64: sqrt(mean square + eps) of the (centred) row. float64 holds 1/s for every float32 row.
        directions: `[k, tokens, d]`, the v_k; k is 1, or 2 for LayerNorm.
        kept: `[k, tokens]`, float64: the rho_k. J x = gamma rho_1 n, with n the row normed: exactly zero where eps is.
        normed: `[tokens, d]`, the row normed, without gain and bias.
        output: `[tokens, d]`, the same with gain and bias: what a sublayer reads.
        amplification: `[tokens]`, float64: by how much centring the row magnifies a relative error of it, >= 1.
    """

    gamma: Tensor
    s: Tensor
    directions: Tensor
    kept: Tensor
    normed: Tensor
    output: Tensor
    amplification: Tensor

    def project(self, v: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens d"]:
        """Pi v for each row; Pi is symmetric."""
        along = (self.directions * v).sum(-1) * (1.0 - self.kept).to(v.dtype)
        return v - (along.unsqueeze(-1) * self.directions).sum(0)

    def times(self, v: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens d"]:
        """J v for each row."""
        return self.gamma * self.project(v) / self.s.unsqueeze(-1).to(v.dtype)

    def transposed_times(self, v: Float[Tensor, "tokens d"]) -> Float[Tensor, "tokens d"]:
        """J^T v for each row."""
        return self.project(self.gamma * v) / self.s.unsqueeze(-1).to(v.dtype)


def norm_factors(x: Float[Tensor, "tokens d"], norm: Norm) -> NormFactors:
    """The factors at each row, in the dtype of `x`.

    Raises:
        InvalidValue: The norm is of another width.
    """
    d = x.shape[-1]
    if norm.width is not None and norm.width != d:
        raise InvalidValue(
            f"the norm has {norm.width} channels and the tensor has shape {list(x.shape)}",
            hint="The last axis is the width.",
            field="x",
        )
    largest = x.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, torch.ones_like(largest))
    unit = x / largest
    if norm.kind.centred:
        centred = unit - unit.mean(-1, keepdim=True)
        # The rounded mean of equal numbers need not be that number.
        centred = torch.where((unit == unit[..., :1]).all(-1, keepdim=True), torch.zeros_like(unit), centred)
    else:
        centred = unit
    length = lengths(centred, keepdim=True)
    first = centred / torch.where(length > 0, length, torch.ones_like(length))
    rms = largest.double() * length.double() / d**0.5
    s = torch.hypot(rms, torch.full_like(rms, norm.eps).sqrt())
    kept = norm.eps / s / s
    ones = torch.ones(d, dtype=x.dtype, device=x.device)
    gamma = ones if norm.gain is None else norm.gain.to(x.dtype) + norm.kind.offset
    # |n| = sqrt(d) rms / s, a number of the order of one whatever the row.
    normed = first * (rms / s * d**0.5).to(x.dtype)
    directions, rho = first.unsqueeze(0), kept.mT
    if norm.kind.centred:
        directions = torch.stack([first, (ones / d**0.5).expand_as(first)])
        rho = torch.cat([rho, torch.zeros_like(rho)])
    before = lengths(unit).double() * largest.squeeze(-1).double() / d**0.5
    return NormFactors(
        gamma=gamma,
        s=s.squeeze(-1),
        directions=directions,
        kept=rho,
        normed=normed,
        output=gamma * normed if norm.bias is None else gamma * normed + norm.bias.to(x.dtype),
        amplification=(before / s.squeeze(-1)).clamp(min=1.0) if norm.kind.centred else torch.ones_like(s.squeeze(-1)),
    )


def lengths(v: Tensor, *, dim: int = -1, keepdim: bool = False) -> Tensor:
    """Euclidean lengths along one axis."""
    return cast("Tensor", torch.linalg.vector_norm(v, dim=dim, keepdim=keepdim))


def lengths_of_any_size(v: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """The same in float64, also where squares do not fit it."""
    largest = v.abs().amax(-1).double()
    unit = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return lengths(v.double() / unit.unsqueeze(-1)) * unit
