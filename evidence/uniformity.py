"""Whether p-values of sign draws are spread as they must be where signs are fair."""

import math
from collections.abc import Sequence

import torch


def uniformity_p(values: Sequence[float], *, draws: int) -> float:
    """Kolmogorov's and Smirnov's p-value against the uniform law, with Stephens' (1970) correction for size.

    The values lie on the grid 1/(draws + 1), ..., 1, and only there is the distance taken: it is at most that of a
    continuous uniform variable, so the p-value errs upwards.
    """
    grid = torch.arange(1, draws + 2) / (draws + 1)
    counts = torch.bincount((torch.tensor(values) * (draws + 1)).round().long(), minlength=draws + 2)[1:]
    distance = float((counts.cumsum(0) / len(values) - grid).abs().max())
    root = math.sqrt(len(values))
    scaled = (root + 0.12 + 0.11 / root) * distance
    return min(1.0, 2 * sum((-1) ** (j - 1) * math.exp(-2 * (j * scaled) ** 2) for j in range(1, 101)))
