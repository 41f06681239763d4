"""The largest singular value of many matrices, each known by its products, between bounds.

Below: the largest Ritz value. Above: the lower of the probabilistic bound (`golub_kahan`) and, where the Frobenius norm
is known, sqrt(||J||_F^2 - sum over i >= 2 of theta_i^2), which is certain, for Ritz values interlace. A small residual
is no bound: it says that some singular value is near, which may be the second. So the steps end when the bracket is as
narrow as asked. Both bounds are moved apart by what rounding may have done to the products.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.golub_kahan import (
    Bidiagonal,
    TokenMatrices,
    golub_kahan,
    largest_singular_value_bound,
    least_component_inverse,
)
from glassblock.numerics.watching import UNWATCHED, Watch

_FIRST_CHECK = 8
_CHECK_EVERY = 4


class LargestBracket(NamedTuple):
    """Bounds on the largest singular value of each matrix; float64 `[tokens]`.

    Attributes:
        lower: Certain.
        upper: Infinite where nothing is known. Zero where J takes the start to zero and its products round nothing.
        certain: bool: whether `upper` is certain.
        converged: bool: upper <= (1 + tolerance) lower.
        rounding: What both bounds were moved by.
        state: What the last step had found.
    """

    lower: Tensor
    upper: Tensor
    certain: Tensor
    converged: Tensor
    rounding: Tensor
    state: Bidiagonal


def bracket_largest(
    matrices: TokenMatrices,
    starts: Float[Tensor, "tokens d"],
    *,
    steps: int,
    tolerance: float,
    failure_probability: float | None,
    frobenius: Float[Tensor, " tokens"] | None = None,
    noise: Float[Tensor, " tokens"] | None = None,
    eps: float,
    watch: Watch = UNWATCHED,
) -> LargestBracket:
    """Bidiagonalise until every bracket is narrow enough or can never be, or the steps are used up.

    Args:
        matrices: One for each token.
        starts: Uniform on the sphere, in the dtype of the computation.
        steps: At most so many; never more than d.
        tolerance: How narrow, relative.
        failure_probability: Of the probabilistic bound for each token; None uses the Frobenius bound alone.
        frobenius: Upper bounds on the Frobenius norms, where they are known; their own rounding is in them.
        noise: The size of the terms that products are sums of, beside the largest singular value itself.
        eps: Relative rounding of the products.
        watch: Told and asked between steps.

    Raises:
        ComputationCancelled: `watch` asked for it.
    """
    steps = min(steps, starts.shape[-1])
    upper = torch.full(starts.shape[:1], torch.inf, dtype=torch.float64, device=starts.device)
    certain = torch.ones_like(upper, dtype=torch.bool)
    for state in golub_kahan(matrices, starts, steps=steps):
        watch.at(state.steps - 1, steps, "bidiagonalisation")
        last = state.steps == steps
        if not last and (state.steps < _FIRST_CHECK or state.steps % _CHECK_EVERY):
            continue
        ritz = state.ritz_values()
        rounding = eps * (ritz[:, 0] if noise is None else ritz[:, 0] + noise)
        rounding = rounding + decomposition_rounding(state.steps) * ritz[:, 0]
        # Every bound holds, so the lowest yet does.
        if frobenius is not None:
            bound = frobenius_bound(frobenius, ritz, rounding=rounding) + rounding
            upper, certain = torch.minimum(upper, bound), certain | (bound <= upper)
        if failure_probability is not None:
            d = starts.shape[-1]
            bound = largest_singular_value_bound(state, ritz, d=d, failure_probability=failure_probability)
            # A start that J takes to zero, or to rounding, has a component |xi| along the top direction all the same.
            unseen = rounding * least_component_inverse(d, failure_probability)
            bound = torch.where(ritz[:, 0] == 0, unseen, bound) + rounding
            upper, certain = torch.minimum(upper, bound), certain & (upper <= bound)
        lower = (ritz[:, 0] - rounding).clamp(min=0.0)
        converged = upper <= (1.0 + tolerance) * lower
        # Rounding grows with the Ritz value, and no step narrows what it leaves open; nor does one narrow NaN.
        hopeless = ~(lower + 2.0 * rounding <= (1.0 + tolerance) * lower)
        if last or bool((converged | hopeless).all()):
            return LargestBracket(lower, upper, certain, converged, rounding, state)
    raise AssertionError


def decomposition_rounding(n: int) -> float:
    """Relative to the largest, what the computed singular values of an n by n float64 matrix may be off by.

    LAPACK states p(n) eps with p a modest polynomial; n eps is met where all of them nearly coincide.
    """
    return n * torch.finfo(torch.float64).eps


def frobenius_bound(
    frobenius: Float[Tensor, " tokens"], ritz: Float[Tensor, "tokens k"], *, rounding: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """sqrt(||J||_F^2 - sum over i >= 2 of theta_i^2), each theta less what rounding may have added to it."""
    unit = torch.where(frobenius > 0, frobenius, torch.ones_like(frobenius)).unsqueeze(-1)
    rest = ((ritz[:, 1:] - rounding.unsqueeze(-1)).clamp(min=0.0) / unit).square().sum(-1)
    # Never below the largest Ritz value, which rounding alone can bring about.
    return (frobenius * (1.0 - rest).clamp(min=0.0).sqrt()).maximum(ritz[:, 0])
