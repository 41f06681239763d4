"""Do the neurons of two weights belong to each other? Squared cosines of rows against all other pairings.

Training turns row i of gate, row i of up and column i of down towards each other or away, so the squares of their
cosines sum to more than those of a random pairing. The sum looks at lines, not directions: it is blind to signs.
"""

import math
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.squared_lengths import row_squares
from glassblock.numerics.unit_rows import CONSTANT_ROW, centred_unit_rows

_LEAST, _MOST = 1e-18, 1e18  # squares of lengths that float32 can multiply with each other


def pairing_z(left: Float[Tensor, "n d"], right: Float[Tensor, "n d"]) -> float | None:
    """How far the sum of cos^2 of row i and row i lies above that of a random pairing, in standard deviations.

    Mean and variance over all n! pairings are exact (Hoeffding 1951, equations 9 and 10). None where rows do not vary.
    """
    return pairing_zs(left[None], right[None])[0]


def pairing_zs(left: Float[Tensor, "pairs n d"], right: Float[Tensor, "pairs n d"]) -> list[float | None]:
    """The same of several pairs of weights at once."""
    pairs, n, _ = left.shape
    if n < 2:
        return [None] * pairs
    squares = _squared_cosines(torch.cat([left, right], 1).float(), n)
    total = squares.sum((1, 2))
    centred = squares - squares.mean(1, keepdim=True) - squares.mean(2, keepdim=True) + (total / n**2)[:, None, None]
    variances = centred.square_().sum((1, 2)) / (n - 1)
    excesses = squares.diagonal(dim1=1, dim2=2).sum(1) - total / n
    both = zip(cast("list[float]", excesses.tolist()), cast("list[float]", variances.tolist()), strict=True)
    return [excess / math.sqrt(variance) if variance > 0 else None for excess, variance in both]


def _squared_cosines(rows: Float[Tensor, "pairs rows d"], n: int) -> Float[Tensor, "pairs n n"]:
    """Of each of the first n rows and each of the others; zero beside a row without a direction."""
    mean = rows.mean(2, keepdim=True)
    centred = rows - mean
    lengths = row_squares(centred)
    before = lengths + rows.shape[2] * mean[..., 0].square()
    low, high = (float(extreme) for extreme in torch.aminmax(lengths))
    if low > _LEAST and high < _MOST and bool((lengths > CONSTANT_ROW**2 * before).all()):  # as nearly always
        products = (centred[:, :n] @ centred[:, n:].mT).square_()
        return products.div_(lengths[:, :n, None]).div_(lengths[:, None, n:])
    units = centred_unit_rows(rows.flatten(0, 1)).rows.view_as(rows)
    return (units[:, :n] @ units[:, n:].mT).square_()
