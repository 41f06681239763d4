"""The lengths of a network's neurons in gate, up and down: how far they spread, and how they go together."""

import math
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.gate_or_up import EQUAL_LENGTHS, Spread, log_length_correlation, spread_of


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


def length_numbers(lengths: Float[Tensor, "3 m"]) -> LengthNumbers:
    """From the lengths of each neuron's rows of gate and up and of its column of down.

    Where all are finite and none is zero, as nearly always, the three are looked at together: an audit does this once
    for every network.
    """
    gate, up, down = lengths
    low, high = (float(extreme) for extreme in torch.aminmax(lengths))
    if not (low > 0 and high < math.inf) or lengths.shape[1] < 2:
        return LengthNumbers(
            (log_length_correlation(gate, down), log_length_correlation(up, down)),
            (spread_of(gate), spread_of(up), spread_of(down)),
            int((lengths == 0).all(0).sum()),
        )
    least, most = torch.aminmax(lengths, dim=1)
    ends = torch.stack([least, lengths.median(1).values, most], 1)
    spreads = [Spread(*numbers) for numbers in cast("list[list[float]]", ends.tolist())]
    logs = lengths.log()
    logs -= logs.mean(1, keepdim=True)
    products = logs @ logs.T
    deviations = products.diagonal().sqrt()
    flat = cast("list[bool]", (deviations / math.sqrt(lengths.shape[1] - 1) < EQUAL_LENGTHS).tolist())
    cosines = cast("list[float]", (products[2] / (deviations * deviations[2])).clamp(-1, 1).tolist())
    balances = [None if flat[2] or flat[place] else cosines[place] for place in (0, 1)]
    return LengthNumbers((balances[0], balances[1]), (spreads[0], spreads[1], spreads[2]), 0)
