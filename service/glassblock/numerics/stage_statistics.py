"""A captured tensor in six numbers."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class StageStatistics(NamedTuple):
    """0-d tensors: float64, then int64 and bool.

    Attributes:
        mean: Over the finite values; NaN where there are none, as for the next three.
        rms: Root of the mean square over the finite values.
        min: Smallest finite value.
        max: Largest finite value.
        non_finite: How many values are NaN or infinite.
        fp16_overflow: Whether any value, infinities included, is beyond float16's largest number, 65504.
    """

    mean: Float[Tensor, ""]
    rms: Float[Tensor, ""]
    min: Float[Tensor, ""]
    max: Float[Tensor, ""]
    non_finite: Int[Tensor, ""]
    fp16_overflow: Bool[Tensor, ""]


def stage_statistics(values: Float[Tensor, "*shape"]) -> StageStatistics:
    """Summarise a tensor of any shape, summing in float64.

    Sums are taken in units of the largest magnitude, so that the squares of float64 values do not overflow either.
    """
    if values.numel() and values.dtype != torch.float64:  # float64 holds the squares of every narrower type
        smallest, largest = values.aminmax()  # NaN and infinities show in the extremes
        if bool(smallest.isfinite() & largest.isfinite()):
            return _of_finite(values, smallest.to(torch.float64), largest.to(torch.float64))
    finite = values.isfinite()
    count = finite.sum()
    nan = torch.full((), torch.nan, dtype=torch.float64, device=values.device)
    if values.numel() == 0:
        return StageStatistics(nan, nan, nan, nan, count, torch.zeros_like(count, dtype=torch.bool))
    smallest = torch.where(finite, values, torch.inf).amin().to(torch.float64)
    largest = torch.where(finite, values, -torch.inf).amax().to(torch.float64)
    unit = torch.maximum(smallest.abs(), largest.abs())
    unit = torch.where((unit > 0) & unit.isfinite(), unit, 1.0)
    scaled = torch.where(finite, values, 0.0).to(torch.float64) / unit
    any_finite = count > 0
    return StageStatistics(
        mean=torch.where(any_finite, unit * (scaled.sum() / count), nan),
        rms=torch.where(any_finite, unit * (scaled.square().sum() / count).sqrt(), nan),
        min=torch.where(any_finite, smallest, nan),
        max=torch.where(any_finite, largest, nan),
        non_finite=values.numel() - count,
        fp16_overflow=(values.abs() > torch.finfo(torch.float16).max).any(),
    )


def _of_finite(values: Tensor, smallest: Tensor, largest: Tensor) -> StageStatistics:
    """The same without a wide copy, for the usual case."""
    return StageStatistics(
        mean=values.sum(dtype=torch.float64) / values.numel(),
        rms=torch.linalg.vector_norm(values, dtype=torch.float64) / math.sqrt(values.numel()),
        min=smallest,
        max=largest,
        non_finite=torch.zeros((), dtype=torch.int64, device=values.device),
        fp16_overflow=torch.maximum(-smallest, largest) > torch.finfo(torch.float16).max,
    )
