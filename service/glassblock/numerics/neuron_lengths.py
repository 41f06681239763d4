"""The lengths of a network's neurons in gate, up and down: how far they spread, and how they go together."""

import math
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

EQUAL_LENGTHS = 1e-6
"""Row lengths that vary by less, relatively, vary by rounding."""


class Spread(NamedTuple):
    """Lengths of the rows of one weight that are finite and not zero."""

    least: float
    median: float
    most: float


class LengthNumbers(NamedTuple):
    """Of the neurons of one network.

    Attributes:
        balances: Correlation of the log lengths of gate and down, and of up and down (`log_length_correlation`).
        spreads: Of gate, up and down (`spread_of`).
        idle: Neurons that are zero in all three.
    """

    balances: tuple[float | None, float | None]
    spreads: tuple[Spread | None, Spread | None, Spread | None]
    idle: int


def length_numbers(lengths: Float[Tensor, "networks 3 m"]) -> list[LengthNumbers]:
    """From the lengths of each neuron's rows of gate and up and of its column of down, network by network.

    Where all are finite and none is zero, as nearly always, they are looked at together: an audit does this for every
    network.
    """
    low, high = (float(extreme) for extreme in torch.aminmax(lengths))
    if not (low > 0 and high < math.inf) or lengths.shape[2] < 2:
        return [_closely(*network) for network in lengths]
    least, most = torch.aminmax(lengths, dim=2)
    ends = torch.stack([least, lengths.median(2).values, most], 2)
    logs = lengths.log()
    logs -= logs.mean(2, keepdim=True)
    products = logs @ logs.mT
    deviations = products.diagonal(dim1=1, dim2=2).sqrt()
    flat = deviations / math.sqrt(lengths.shape[2] - 1) < EQUAL_LENGTHS
    cosines = (products[:, 2] / (deviations * deviations[:, 2:])).clamp(-1, 1)
    return [
        LengthNumbers(
            (None if of[2] or of[0] else gate, None if of[2] or of[1] else up),
            (Spread(*three[0]), Spread(*three[1]), Spread(*three[2])),
            0,
        )
        for of, (gate, up, _), three in zip(
            cast("list[list[bool]]", flat.tolist()),
            cast("list[list[float]]", cosines.tolist()),
            cast("list[list[list[float]]]", ends.tolist()),
            strict=True,
        )
    ]


def _closely(gate: Float[Tensor, " m"], up: Float[Tensor, " m"], down: Float[Tensor, " m"]) -> LengthNumbers:
    """Of one network, in which neurons may be zero or infinite."""
    return LengthNumbers(
        (log_length_correlation(gate, down), log_length_correlation(up, down)),
        (spread_of(gate), spread_of(up), spread_of(down)),
        int(((gate == 0) & (up == 0) & (down == 0)).sum()),
    )


def spread_of(lengths: Float[Tensor, " m"]) -> Spread | None:
    """The least, the middle and the greatest length; None where no row has one."""
    some = lengths[lengths.isfinite() & (lengths > 0)]
    if not len(some):
        return None
    # The lower median of an even number is a length that some row has.
    return Spread(float(some.min()), float(some.median()), float(some.max()))


def log_length_correlation(left: Float[Tensor, " m"], right: Float[Tensor, " m"]) -> float | None:
    """Correlation over neurons of the logarithms of two lengths, over those that have both."""
    lengths = torch.stack([left, right])
    logs = lengths[:, (lengths.isfinite() & (lengths > 0)).all(0)].log()
    if logs.shape[1] < 2 or float(logs.std(1).min()) < EQUAL_LENGTHS:
        return None
    return float(torch.corrcoef(logs)[0, 1])
