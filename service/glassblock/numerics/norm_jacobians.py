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

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.norm_factors import rows_in_units
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


def norm_jacobian_times(
    x: Float[Tensor, "*batch d"], norm: Norm, v: Float[Tensor, "*batch d"]
) -> Float[Tensor, "*batch d"]:
    """J v for each row, in O(d)."""
    row = _row_of(x, norm)
    return row.gamma * _project(row, v.to(row.n.dtype), norm) / row.s


def times_norm_jacobian(
    v: Float[Tensor, "*batch d"], x: Float[Tensor, "*batch d"], norm: Norm
) -> Float[Tensor, "*batch d"]:
    """J^T v, which is v J read as a row, for each row, in O(d)."""
    row = _row_of(x, norm)
    return _project(row, row.gamma * v.to(row.n.dtype), norm) / row.s


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


def norm_jacobian_singular_values(x: Float[Tensor, "*batch d"], norm: Norm) -> Float[Tensor, "*batch d"]:
    """Singular values of J for each row, descending, where every |gamma| is the same number g.

    RMSNorm: g/s (d - 1 times) and g eps/s^3 along x. LayerNorm: g/s (d - 2 times), g eps/s^3 along xc, and 0 along 1.

    Raises:
        InvalidValue: The gain varies: there is no closed form then (`norm_jacobian_spectral_bounds` brackets).
    """
    row = _row_of(x, norm)
    size = row.gamma.abs()
    if bool((size != size[0]).any()):
        raise InvalidValue(
            "the singular values of a norm with a varying gain have no closed form",
            hint="Ask for the Frobenius norm or the spectral bounds, or use a constant gain.",
            field="gain",
        )
    d = x.shape[-1]
    largest = size[0] / row.s
    values = largest.expand(*x.shape[:-1], d).clone()
    if not norm.kind.centred:
        values[..., d - 1] *= row.radial.squeeze(-1)
        return values
    values[..., d - 1] = 0.0
    if d > 1:
        values[..., d - 2] *= row.radial.squeeze(-1)
    return values


class SpectralBounds(NamedTuple):
    """Bounds on the largest singular value, each `[*batch]`."""

    lower: Tensor
    upper: Tensor


def norm_jacobian_spectral_bounds(x: Float[Tensor, "*batch d"], norm: Norm) -> SpectralBounds:
    """Certain bounds on the largest singular value of J for each row, in O(d).

    |gamma|_(k)/s <= sigma_1 <= |gamma|_(1)/s, with |gamma|_(k) the k-th largest and k = 2 for RMSNorm, 3 for LayerNorm:
    among k channels there is a direction that the projection, which removes k - 1, leaves as it is. The lower bound is
    zero where d < k.
    """
    row = _row_of(x, norm)
    s = row.s.squeeze(-1)
    size = row.gamma.abs().sort(descending=True).values
    k = 3 if norm.kind.centred else 2
    lower = size[k - 1] / s if len(size) >= k else torch.zeros_like(s)
    return SpectralBounds(lower=lower, upper=size[0] / s)


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
    unit, largest = rows_in_units(x.to(dtype), norm)
    if norm.kind.centred:
        unit = unit - unit.mean(-1, keepdim=True)
    rms = largest * unit.square().mean(-1, keepdim=True).sqrt()
    root_eps = torch.full_like(rms, norm.eps, dtype=torch.float64).sqrt().to(dtype)
    s = torch.hypot(rms, root_eps)
    if norm.gain is None:
        gamma = torch.ones(x.shape[-1], dtype=dtype, device=x.device)
    else:
        gamma = norm.gain.to(dtype) + norm.kind.offset
    return _Row(n=unit * (largest / s), s=s, radial=(root_eps / s).square(), gamma=gamma)


def _project(row: _Row, v: Tensor, norm: Norm) -> Tensor:
    d = v.shape[-1]
    along = (row.n * v).sum(-1, keepdim=True) / d
    projected = v - row.n * along
    return projected - v.mean(-1, keepdim=True) if norm.kind.centred else projected
