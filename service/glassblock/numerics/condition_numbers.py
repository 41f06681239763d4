"""The smallest singular value and the condition number of a block's Jacobian at each token, in float64.

The Jacobian of each token is formed. Up to a width of 1024 its singular values are taken; beyond, or on request, its
inverse is known by products with its LU factors, and 1/sigma_d is the largest singular value of that, bracketed like
any other (`singular_bracket`): bidiagonalisation of J itself finds the small end slowly.

Both bounds on sigma_d are moved apart by what rounding may have done to J and its factors, an absolute number relative
to the size of J. A smallest singular value below that is told as between zero and it, and the condition number has no
upper bound: behind a LayerNorm, whose outputs before the gain add up to zero, the true value is zero.
"""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.block_jacobians import Part, block_jacobian, network_in
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.formed_jacobians import formed
from glassblock.numerics.golub_kahan import TokenMatrices, singular_values, uniform_starts
from glassblock.numerics.product_noise import ROUNDING, forming_flops, product_noise
from glassblock.numerics.singular_bracket import LargestBracket, bracket_largest, decomposition_rounding
from glassblock.numerics.spectral_request import DENSE_UP_TO, SpectralRequest
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Wiring

METHODS = ("dense", "inverse")
_EPS = torch.finfo(torch.float64).eps


class ConditionNumbers(NamedTuple):
    """Of each token's Jacobian, float64 `[tokens]`.

    Attributes:
        smallest_lower: Bounds on sigma_d; the lower may be zero.
        smallest_upper: The upper.
        condition_lower: Bounds on sigma_1 / sigma_d; NaN where all of J is zero, and the upper infinite where sigma_d
            may be.
        condition_upper: The upper.
        converged: bool: whether both brackets are as narrow as asked.
        method: A name of `METHODS`.
        exactness: "exact", up to rounding, or "bracketed".
        failure_probability: That the bracket of a token does not hold; 0 for dense.
        seed: Of the starts.
        accumulation: float64.
        flops: Counted for what ran.
    """

    smallest_lower: Tensor
    smallest_upper: Tensor
    condition_lower: Tensor
    condition_upper: Tensor
    converged: Tensor
    method: str
    exactness: str
    failure_probability: float
    seed: int
    accumulation: torch.dtype
    flops: int


def condition_numbers(
    x: Float[Tensor, "tokens d"],
    feed_forward: FeedForward,
    wiring: Wiring,
    *,
    part: Part = Part.BLOCK,
    other: Float[Tensor, "tokens d d"] | None = None,
    request: SpectralRequest | None = None,
    method: str | None = None,
    watch: Watch = UNWATCHED,
) -> ConditionNumbers:
    """Smallest singular value and condition number of the Jacobian of a part of a block at each token.

    The block is given as to `spectral_bracket`; of `request` the certificate is not used. `method` is a name of
    `METHODS`, and None is dense up to a width of 1024. `watch` is told and asked between tokens.

    Raises:
        InvalidValue: A width does not fit, or the method is unknown.
        ComputationCancelled: `watch` asked for it.
    """
    request = request or SpectralRequest()
    tokens, d = x.shape
    method = method or ("dense" if d <= DENSE_UP_TO else "inverse")
    if method not in METHODS:
        raise InvalidValue(f"unknown method {method!r}", hint="Use one of the methods.", field="method", known=METHODS)
    network = network_in(feed_forward, torch.float64)
    starts = uniform_starts(2 * tokens, d, seed=request.seed).to(x.device).view(2, tokens, d)
    bounds: list[Tensor] = []
    flops = 0
    for token in range(tokens):
        watch.at(token, tokens, "tokens")
        row = slice(token, token + 1)
        jacobian = block_jacobian(
            x[row], network, wiring, part=part, other=None if other is None else other[row], dtype=torch.float64
        )
        dense, noise = formed(jacobian), product_noise(jacobian)
        flops += forming_flops(jacobian)
        if method == "dense":
            found, cost = _decomposed(dense, noise)
        else:
            found, cost = _inverted(dense, noise, starts[:, row], request)
        bounds.append(found)
        flops += cost
    smallest_lower, smallest_upper, largest_lower, largest_upper = (
        torch.cat(bounds, dim=1) if bounds else x.new_zeros(4, 0, dtype=torch.float64)
    )
    # Never below one, whatever rounding leaves open.
    lower, upper = (largest_lower / smallest_upper).clamp(min=1.0), largest_upper / smallest_lower
    wide = 1.0 + request.tolerance
    return ConditionNumbers(
        smallest_lower=smallest_lower,
        smallest_upper=smallest_upper,
        condition_lower=lower,
        condition_upper=upper,
        converged=(smallest_upper <= wide * smallest_lower) & (largest_upper <= wide * largest_lower),
        method=method,
        exactness="exact" if method == "dense" else "bracketed",
        failure_probability=0.0 if method == "dense" else 2.0 * request.failure_probability,
        seed=request.seed,
        accumulation=torch.float64,
        flops=flops,
    )


@dataclass(frozen=True, eq=False)
class _Dense:
    matrices: Tensor

    def times(self, v: Tensor) -> Tensor:
        return (self.matrices @ v.unsqueeze(-1)).squeeze(-1)

    def transposed_times(self, v: Tensor) -> Tensor:
        return (self.matrices.mT @ v.unsqueeze(-1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class _Inverse:
    factors: Tensor
    pivots: Tensor

    def times(self, v: Tensor) -> Tensor:
        return _solved(self, v, transposed=False)

    def transposed_times(self, v: Tensor) -> Tensor:
        return _solved(self, v, transposed=True)


def _solved(inverse: _Inverse, v: Tensor, *, transposed: bool) -> Tensor:
    found = cast("Tensor", torch.linalg.lu_solve(inverse.factors, inverse.pivots, v.unsqueeze(-1), adjoint=transposed))
    return found.squeeze(-1)


def _decomposed(dense: Tensor, noise: Tensor) -> tuple[Tensor, int]:
    """Bounds `[4, 1]` on the smallest and the largest singular value of one matrix, and the FLOPs."""
    values = singular_values(dense)
    rounding = ROUNDING * _EPS * (values[:, 0] + noise) + decomposition_rounding(dense.shape[-1]) * values[:, 0]
    smallest, largest = values[:, -1], values[:, 0]
    bounds = [(smallest - rounding).clamp(min=0.0), smallest + rounding, largest - rounding, largest + rounding]
    return torch.stack(bounds), 3 * dense.shape[-1] ** 3


def _inverted(dense: Tensor, noise: Tensor, starts: Tensor, request: SpectralRequest) -> tuple[Tensor, int]:
    """The same with LU factors: two bidiagonalisations."""
    d = dense.shape[-1]
    factors, pivots, _ = cast("tuple[Tensor, Tensor, Tensor]", torch.linalg.lu_factor_ex(dense))
    forward = _bracket(_Dense(dense), starts[0], request, noise=noise)
    # Backward error of the factors: eps times the size of L U, which partial pivoting keeps near that of J, and the
    # roundings of d additions as independent ones.
    frobenius = cast("Tensor", torch.linalg.matrix_norm(dense))
    rounding = ROUNDING * _EPS * d**0.5 * (frobenius + noise)
    flops = 2 * d**3 // 3 + 4 * forward.state.steps * d * d
    if bool((factors.diagonal(dim1=-2, dim2=-1) == 0).any()):
        smallest_lower = torch.zeros_like(rounding)
        smallest_upper = rounding
    else:
        backward = _bracket(_Inverse(factors, pivots), starts[1], request, noise=None)
        flops += 4 * backward.state.steps * d * d
        smallest_lower = (1.0 / backward.upper - rounding).clamp(min=0.0)
        smallest_upper = 1.0 / backward.lower + rounding
    return torch.stack([smallest_lower, smallest_upper, forward.lower, forward.upper]), flops


def _bracket(
    matrices: TokenMatrices, starts: Tensor, request: SpectralRequest, *, noise: Tensor | None
) -> LargestBracket:
    return bracket_largest(
        matrices,
        starts,
        steps=request.steps,
        tolerance=request.tolerance,
        failure_probability=request.failure_probability,
        noise=noise,
        eps=ROUNDING * _EPS,
    )
