"""Whether the difference of two weights is of low rank but for rounding: what a merged adapter leaves behind.

A random range of the difference is taken (Halko, Martinsson and Tropp 2011, algorithm 4.1 with one power step), and the
rank is the number of its singular values that have to be taken away before no more is left than rounding leaves.
"""

from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

MOST_RANK = 128
"""Ranks looked for; of weights with fewer than four times as many rows or columns, a quarter of those."""

_ABOVE = 1.15  # times the expected rounding: its own spread, and what a base that was rounded once more adds
_LEAST_SIGNAL = 2.0  # times the rounding, below which the difference is no more than that


def rounding_noise(values: Float[Tensor, "*shape"]) -> float:
    """Sum of squares that rounding to their dtype leaves in numbers: ulp^2 / 12 each, as if it were uniform."""
    info = torch.finfo(values.dtype)
    wide = values.to(torch.float64).abs().clamp_min(info.smallest_normal)
    _, exponents = torch.frexp(wide)
    ulps = torch.ldexp(torch.full_like(wide, info.eps), exponents - 1)
    return float(ulps.square_().sum()) / 12.0


def low_rank(first: Float[Tensor, "m n"], second: Float[Tensor, "m n"], *, seed: int) -> int | None:
    """The rank of first - second, where all but that rank is rounding of the two dtypes; None where it is not low.

    Args:
        first, second: Two weights, or the same rows of both.
        seed: Of the random range.
    """
    difference = first.to(torch.float64) - second.to(torch.float64)  # float32's rounding is far below its own sums
    most = min(MOST_RANK, min(difference.shape) // 4)
    total = float(difference.square().sum())
    noise = rounding_noise(first) + rounding_noise(second)
    if most < 1 or not total > _LEAST_SIGNAL**2 * noise:
        return None
    generator = torch.Generator().manual_seed(seed)
    probes = torch.randn(difference.shape[1], most, generator=generator, dtype=torch.float64).to(difference.device)
    basis = _orthonormal(difference @ probes)
    basis = _orthonormal(difference @ (difference.T @ basis))
    values = cast("Tensor", torch.linalg.svdvals(basis.T @ difference))
    left = total
    for rank, value in enumerate(cast("list[float]", values.tolist()), start=1):
        left -= value * value
        if left <= _ABOVE**2 * noise:
            return rank
    return None


def _orthonormal(columns: Tensor) -> Tensor:
    return cast("tuple[Tensor, Tensor]", torch.linalg.qr(columns))[0]
