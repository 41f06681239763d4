"""The largest and the smallest singular value of a norm's Jacobian at each row, whatever its gain.

With the factors J = diag(gamma) Pi / s of `norm_factors` and k directions v with what is kept of them, rho,

    s^2 J J^T = D - U U^T,    D = diag(gamma^2),    U = [gamma v sqrt(1 - rho^2)]

a diagonal matrix less one of rank k (1 for RMSNorm, 2 for LayerNorm). How many eigenvalues lie above t is counted
without forming anything (Haynsworth 1968, inertia additivity of the block matrix [[D - t, U], [U^T, I]]):

    n_+(D - U U^T - t) = n_+(D - t) + n_+(I - U^T (D - t)^-1 U) - k

and the largest lies between the (k+1)-th and the first of gamma^2, so that bisection finds it: the secular equation
of Golub (1973), solved for every row at once in O(d) a step.

The smallest is that of the inverse, s Pi^-1 diag(1 / gamma), where what is left of the row, rho = eps/s^2, stands in
the denominator and nothing cancels. It is zero for LayerNorm, for eps = 0, and where a gain is zero.
"""

from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.norm_factors import NormFactors, lengths, norm_factors
from glassblock.numerics.norms import Norm

_HALVINGS = 80


class ExtremeSingularValues(NamedTuple):
    """Of each row's Jacobian, float64 `[tokens]`: exact up to rounding, some sqrt(d) eps of the largest.

    Where the row lies along a channel whose gain outweighs all others, that much more: (max |gamma| / s / largest)^2.
    """

    largest: Tensor
    smallest: Tensor


def norm_singular_values(x: Float[Tensor, "tokens d"], norm: Norm) -> ExtremeSingularValues:
    """The extreme singular values at each row, in float64.

    >>> from glassblock.numerics.norms import norm_kind_named
    >>> unit = Norm(norm_kind_named("rms_noweight"), None, None, 0.5)
    >>> norm_singular_values(torch.tensor([[1.0, 2.0]]), unit)  # 1/s, and eps/s^3, with s^2 = 3
    ExtremeSingularValues(largest=tensor([0.5774], dtype=torch.float64), smallest=tensor([0.0962], dtype=torch.float64))

    Raises:
        InvalidValue: The norm is of another width.
    """
    factors = norm_factors(x.detach().double(), norm.to(torch.float64))
    return ExtremeSingularValues(_largest(factors) / factors.s, _smallest(factors) / factors.s)


def _largest(factors: NormFactors) -> Tensor:
    """Of diag(gamma) Pi."""
    weight = factors.gamma.square()
    removed = (1.0 - factors.kept.square()).clamp(min=0.0).sqrt()
    update = factors.gamma * factors.directions * removed.unsqueeze(-1)
    k = len(update)
    if len(weight) < k:  # LayerNorm of one channel: nothing is left
        return torch.zeros_like(factors.s)
    if len(weight) == k:  # one direction, [1] or [1, -1] / sqrt 2, whether the row has any length along it or not
        return lengths(factors.gamma) / k**0.5 * factors.kept[0]
    ordered = weight.sort(descending=True).values
    tokens = factors.s.shape[0]
    high = ordered[0].expand(tokens)
    low = ordered[k].expand(tokens)
    identity = torch.eye(k, dtype=weight.dtype, device=weight.device)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        gaps = weight - middle.unsqueeze(-1)
        # A pole is passed on the side where its own eigenvalue has been counted.
        gaps = torch.where(gaps == 0, torch.finfo(gaps.dtype).tiny, gaps)
        schur = identity - torch.einsum("ktd,ltd->tkl", update / gaps, update)
        schur = schur.nan_to_num(nan=0.0, posinf=1e300, neginf=-1e300)  # beside a pole; the sign is what is counted
        eigenvalues = cast("Tensor", torch.linalg.eigvalsh(schur))
        above = (gaps > 0).sum(-1) + (eigenvalues > 0).sum(-1) - k > 0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return ((low + high) / 2).sqrt()


def _smallest(factors: NormFactors) -> Tensor:
    """Of diag(gamma) Pi: one over the largest singular value of Pi^-1 diag(1 / gamma)."""
    kept = factors.kept[0]
    singular = (kept == 0) | bool((factors.gamma == 0).any()) | (len(factors.directions) > 1)
    safe = torch.where(singular, torch.ones_like(kept), kept)
    inverse = torch.where(factors.gamma == 0, torch.ones_like(factors.gamma), factors.gamma).reciprocal()
    weight = inverse.square()
    # diag(1 / gamma^2) + c w w^T, with w = v / gamma: every eigenvalue moves up, the largest by c |w|^2 at most.
    update = (inverse * factors.directions[0]).square()
    c = safe.square().reciprocal() - 1.0
    largest = weight.max()
    low = largest.expand(kept.shape)
    high = largest + c * update.sum(-1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        gaps = (middle.unsqueeze(-1) - weight).clamp(min=torch.finfo(weight.dtype).tiny)
        above = c * (update / gaps).sum(-1) > 1.0
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    found = ((low + high) / 2).rsqrt()
    return torch.where(singular, torch.zeros_like(found), found)
