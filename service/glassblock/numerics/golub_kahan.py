"""Golub-Kahan bidiagonalisation of many matrices at once, each known by its products.

For each token's matrix J (Golub and Kahan 1965), from a start v_1 of length one,

    alpha_j u_j = J v_j - beta_(j-1) u_(j-1)        beta_j v_(j+1) = J^T u_j - alpha_j v_j
    J V_k = U_k B_k        J^T U_k = V_k B_k^T + beta_k v_(k+1) e_k^T

with B_k upper bidiagonal: alpha on the diagonal, beta above it. Every new vector is orthogonalised twice against all
earlier ones, so that U and V are orthonormal to rounding and no Ritz value comes twice. The singular values of B_k
(Ritz values) interlace those of J: the i-th is never above the i-th of J.

A start uniform on the sphere misses no direction but with a probability that can be stated
(`largest_singular_value_bound`). Where the process ends early, the start lies in a subspace that J keeps to itself; the
vectors are zero from there on, and so are alpha and beta.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.norm_factors import lengths, lengths_of_any_size

# A remainder this much shorter than the largest alpha or beta, in units of the dtype's eps, is rounding.
_NOTHING = 64.0


@runtime_checkable
class TokenMatrices(Protocol):
    """A square matrix for each token, known by its products with one vector each, `[tokens, d]`."""

    def times(self, v: Tensor) -> Tensor:
        """J v for each token."""
        ...

    def transposed_times(self, v: Tensor) -> Tensor:
        """J^T v for each token."""
        ...


@dataclass(frozen=True, eq=False)
class Bidiagonal:
    """What k steps have found.

    Attributes:
        alpha: `[tokens, k]`, float64.
        beta: `[tokens, k]`, float64; beta_k belongs to the next vector.
        left: `[tokens, k, d]`, the u_j.
        right: `[tokens, k, d]`, the v_j.
        floor: `[tokens]`, float64: what counts as zero.
    """

    alpha: Tensor
    beta: Tensor
    left: Tensor
    right: Tensor
    floor: Tensor

    @property
    def steps(self) -> int:
        """k."""
        return self.alpha.shape[1]

    def matrix(self) -> Float[Tensor, "tokens k k"]:
        """B_k."""
        return torch.diag_embed(self.alpha) + torch.diag_embed(self.beta[:, :-1], offset=1)

    def ritz_values(self) -> Float[Tensor, "tokens k"]:
        """Singular values of B_k, descending; float64."""
        return singular_values(self.matrix())

    def top_vectors(self) -> tuple[Tensor, Tensor]:
        """Left and right Ritz vectors of the largest value, `[tokens, d]` each, J right = theta left."""
        u, _, vh = singular_decomposition(self.matrix())
        left = torch.einsum("tkd,tk->td", self.left, u[:, :, 0].to(self.left.dtype))
        return left, torch.einsum("tkd,tk->td", self.right, vh[:, 0].to(self.right.dtype))


def golub_kahan(matrices: TokenMatrices, start: Float[Tensor, "tokens d"], *, steps: int) -> Iterator[Bidiagonal]:
    """The state after 1, 2, ... steps, at most `steps` and at most d; two products a step.

    Args:
        matrices: One matrix for each token.
        start: A vector of length one for each, in the dtype of the computation.
        steps: At most so many.

    The tensors of a state are views that later steps leave as they are.
    """
    tokens, d = start.shape
    steps = min(steps, d)
    left, right = (start.new_zeros(tokens, steps, d) for _ in range(2))
    alpha, beta = (torch.zeros(tokens, steps, dtype=torch.float64, device=start.device) for _ in range(2))
    largest = torch.zeros(tokens, dtype=torch.float64, device=start.device)
    nothing = _NOTHING * torch.finfo(start.dtype).eps
    v = start
    for j in range(steps):
        right[:, j] = v
        u = matrices.times(v)
        if j > 0:
            u = u - beta[:, j - 1 : j].to(u.dtype) * left[:, j - 1]
        u = _orthogonalised(u, left[:, :j])
        alpha[:, j], u = _length_and_direction(u, nothing * largest)
        largest = torch.maximum(largest, alpha[:, j])
        left[:, j] = u
        v = matrices.transposed_times(u) - alpha[:, j : j + 1].to(u.dtype) * v
        v = _orthogonalised(v, right[:, : j + 1])
        beta[:, j], v = _length_and_direction(v, nothing * largest)
        largest = torch.maximum(largest, beta[:, j])
        k = j + 1
        yield Bidiagonal(alpha[:, :k], beta[:, :k], left[:, :k], right[:, :k], nothing * largest)


def uniform_starts(tokens: int, d: int, *, seed: int) -> Float[Tensor, "tokens d"]:
    """Vectors uniform on the unit sphere, float64, on the CPU: the same for one seed whatever the device."""
    drawn = torch.randn(
        tokens, d, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64, device="cpu"
    )
    return drawn / lengths(drawn, keepdim=True)


def largest_singular_value_bound(
    found: Bidiagonal, ritz: Float[Tensor, "tokens k"], *, d: int, failure_probability: float
) -> Float[Tensor, " tokens"]:
    """An upper bound on the largest singular value of each matrix, wrong with at most the given probability.

    Van Dorsselaer, Hochstenbach and Van der Vorst, "Computing probabilistic bounds for extreme eigenvalues of
    symmetric matrices with the Lanczos method" (2001), for J^T J. The start has a component |xi| along the top right
    singular vector, and P(|xi| < p / sqrt(2 d / pi)) <= p for a start uniform on the sphere. With q_k the Lanczos
    polynomial, |xi| q_k(sigma_1^2) <= 1, so sigma_1^2 is at most the root t > theta_1^2 of

        sum_j log(t - theta_j^2) = sum_j log(alpha_j beta_j) + log(sqrt(2 d / pi) / p)

    One start has one xi: the bounds after any numbers of steps hold all together with probability 1 - p.
    Infinite where J takes the start to zero.
    """
    largest, floor = ritz[:, :1], found.floor.unsqueeze(-1)
    # After an early end there is nothing, and what ended it was rounding, of which no more is known than the floor.
    counted = (found.right != 0).any(-1)
    alpha = found.alpha.maximum(floor)
    beta = torch.where(found.alpha > 0, found.beta.maximum(floor), largest)
    logs = torch.where(counted, (alpha / largest).log() + (beta / largest).log(), torch.zeros_like(alpha))
    target = logs.sum(-1) + math.log(least_component_inverse(d, failure_probability))
    # The steps that do not count have left zeros at the end of the Ritz values.
    real = torch.arange(ritz.shape[1], device=ritz.device) < counted.sum(-1, keepdim=True)
    gaps = (1.0 - ritz / largest) * (1.0 + ritz / largest)
    # In y = log(t / theta_1^2 - 1), where the sum grows from below any target to above it.
    low, high = torch.full_like(target, -200.0), torch.full_like(target, 200.0)
    for _ in range(64):
        middle = (low + high) / 2
        terms = (middle.exp().unsqueeze(-1) + gaps).log()
        above = torch.where(real, terms, torch.zeros_like(terms)).sum(-1) > target
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    bound = largest.squeeze(-1) * (1.0 + high.exp()).sqrt()
    return torch.where(largest.squeeze(-1) > 0, bound, torch.full_like(bound, math.inf))


def least_component_inverse(d: int, failure_probability: float) -> float:
    """sqrt(2 d / pi) / p: one over what a start's component along any direction is below with probability at most p."""
    return math.sqrt(2.0 * d / math.pi) / failure_probability


def singular_values(matrices: Float[Tensor, "*batch n n"]) -> Float[Tensor, "*batch n"]:
    """Of dense matrices, descending; NaN for one that holds a number that is not finite."""
    finite = matrices.isfinite().all(-1).all(-1)
    values = cast("Tensor", torch.linalg.svdvals(_zero_unless(finite, matrices)))
    return torch.where(finite[..., None], values, torch.nan)


def singular_decomposition(matrices: Float[Tensor, "*batch n n"]) -> tuple[Tensor, Tensor, Tensor]:
    """U, the singular values descending, and V^T; values of NaN where a number of the matrix is not finite."""
    finite = matrices.isfinite().all(-1).all(-1)
    u, values, vh = cast("tuple[Tensor, Tensor, Tensor]", torch.linalg.svd(_zero_unless(finite, matrices)))
    return u, torch.where(finite[..., None], values, torch.nan), vh


def _zero_unless(finite: Tensor, matrices: Tensor) -> Tensor:
    """A matrix that is not finite makes torch raise, and costs the others of its batch their answer."""
    return matrices if bool(finite.all()) else torch.where(finite[..., None, None], matrices, 0.0)


def _orthogonalised(v: Tensor, basis: Tensor) -> Tensor:
    """v less its components along the basis `[tokens, k, d]`, twice: twice is enough (Kahan; Parlett 1980)."""
    if basis.shape[1] == 0:
        return v
    for _ in range(2):
        along = basis @ v.unsqueeze(-1)
        v = v - (basis.mT @ along).squeeze(-1)
    return v


def _length_and_direction(v: Tensor, nothing: Tensor) -> tuple[Tensor, Tensor]:
    length = lengths_of_any_size(v)
    length = torch.where(length > nothing, length, torch.zeros_like(length))
    divisor = torch.where(length > 0, length, torch.ones_like(length)).unsqueeze(-1)
    direction = torch.where(length.unsqueeze(-1) > 0, v.double() / divisor, 0.0).to(v.dtype)
    return length, direction
