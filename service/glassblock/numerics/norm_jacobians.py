"""Closed-form Jacobians of RMSNorm and LayerNorm, with gain and offset.

Write xc for the row (LayerNorm: minus its mean), s = sqrt(mean(xc^2) + eps), n = xc / s for the normed row and gamma
for the gain with its offset. Then

    RMSNorm     J = diag(gamma) (I - n n^T / d) / s
    LayerNorm   J = diag(gamma) (I - 1 1^T / d - n n^T / d) / s

which is the textbook I/s - x x^T/(d s^3) written in n: nothing is squared but numbers of the order of one, so rows far
from one neither overflow nor vanish. Since |n|^2 = d (1 - eps/s^2), the radial direction keeps J xc = gamma eps xc/s^3:
it is zero only when eps is, and is computed from eps/s^2 without cancellation. A norm's bias has no part in it.

These are the derivatives of the function in exact arithmetic, the same for every kind of one function; where a kind's
own arithmetic overflows (float32 rows beyond 1e19) they describe the function, not that accident. All is computed in
float32 at least; float64 stays float64. Rows on which the norm is not defined must be refused beforehand
(`norms.check_norm_defined`).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.norm_factors import norm_factors
from glassblock.numerics.norms import Norm


def norm_jacobian(x: Float[Tensor, "*batch d"], norm: Norm) -> Float[Tensor, "*batch d d"]:
    """The dense Jacobian of each row; d^2 numbers a row, so for small d.

    >>> from glassblock.numerics.norms import norm_kind_named
    >>> unit = Norm(norm_kind_named("rms_noweight"), None, None, 0.0)
    >>> norm_jacobian(torch.tensor([3.0, 4.0], dtype=torch.float64), unit)
    tensor([[ 0.1810, -0.1358],
            [-0.1358,  0.1018]], dtype=torch.float64)
    """
    row = _row_of(x, norm)
    d = x.shape[-1]
    inner = torch.eye(d, dtype=row.n.dtype, device=x.device) - row.n.unsqueeze(-1) * row.n.unsqueeze(-2) / d
    if norm.kind.centred:
        inner = inner - 1.0 / d
    return row.gamma.unsqueeze(-1) * inner / row.s.unsqueeze(-1)


def norm_jacobian_along_row(x: Float[Tensor, "*batch d"], norm: Norm) -> Float[Tensor, "*batch d"]:
    """J x = gamma eps xc / s^3: what is left of the radial direction, exactly zero when eps is."""
    row = _row_of(x, norm)
    return row.gamma * row.radial * row.n


def norm_jacobian_frobenius(x: Float[Tensor, "*batch d"], norm: Norm) -> Float[Tensor, "*batch"]:
    """||J||_F for each row, in O(d).

    From the rows of the projection: sum gamma^2 (1 - centred/d) - (1 + eps/s^2)/d sum gamma^2 n^2, over s^2.
    """
    row = _row_of(x, norm)
    d = x.shape[-1]
    weight = row.gamma.square()
    # Each channel is the squared norm of a row of the projection, which in exact arithmetic is not negative. Where it
    # is zero, rounding may fall below; the clamp hides no more than that, an absolute error near 1e-8 |gamma|/s in
    # float64 and 1e-3 |gamma|/s in float32.
    channel = 1.0 - row.n.square() * (1.0 + row.radial) / d
    if norm.kind.centred:
        channel = channel - 1.0 / d
    return (weight * channel).sum(-1).clamp(min=0).sqrt() / row.s.squeeze(-1)


def norm_jacobian_trace(x: Float[Tensor, "*batch d"], norm: Norm) -> Float[Tensor, "*batch"]:
    """Trace of J for each row: the sum over gamma (1 - n^2/d - centred/d), over s."""
    row = _row_of(x, norm)
    d = x.shape[-1]
    channel = 1.0 - row.n.square() / d
    if norm.kind.centred:
        channel = channel - 1.0 / d
    return (row.gamma * channel).sum(-1) / row.s.squeeze(-1)


class _Row(NamedTuple):
    """n `[*batch, d]`; s and radial = eps/s^2 `[*batch, 1]`; gamma `[d]`."""

    n: Tensor
    s: Tensor
    radial: Tensor
    gamma: Tensor


def _row_of(x: Tensor, norm: Norm) -> _Row:
    dtype = torch.promote_types(x.dtype, torch.float32)
    if norm.gain is not None:
        dtype = torch.promote_types(dtype, norm.gain.dtype)
    factors = norm_factors(x.to(dtype).reshape(math.prod(x.shape[:-1]), x.shape[-1]), norm)
    s, radial = (each.to(dtype).reshape(*x.shape[:-1], 1) for each in (factors.s, factors.kept[0]))
    return _Row(n=factors.normed.reshape(x.shape), s=s, radial=radial, gamma=factors.gamma)
