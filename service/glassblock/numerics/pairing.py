"""Do the neurons of two weights belong to each other? Squared cosines of rows against all other pairings.

Training turns row i of gate, row i of up and column i of down towards each other or away, so the squares of their
cosines sum to more than those of a random pairing. The sum looks at lines, not directions: it is blind to signs.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.unit_rows import centred_unit_rows


def pairing_z(left: Float[Tensor, "n d"], right: Float[Tensor, "n d"]) -> float | None:
    """How far the sum of cos^2 of row i and row i lies above that of a random pairing, in standard deviations.

    Mean and variance over all n! pairings are exact (Hoeffding 1951, equations 9 and 10). None where rows do not vary.
    """
    n = len(left)
    if n < 2:
        return None
    rows = centred_unit_rows(torch.cat([left, right])).rows  # at once, for this is done for every network
    squares = (rows[:n] @ rows[n:].T).square_()
    centred = squares - squares.mean(0) - squares.mean(1, keepdim=True) + squares.mean()
    variance = float(centred.square().sum()) / (n - 1)
    excess = float(squares.trace()) - float(squares.sum()) / n
    return excess / math.sqrt(variance) if variance > 0 else None
