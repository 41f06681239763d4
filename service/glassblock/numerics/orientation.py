"""Does a square weight lie with its axes exchanged? A permutation test that is exact for every weight and every size.

The neurons of a network have no order: rows of gate and up and columns of down may be permuted together, and the law
of trained weights does not change, since neither initialisation nor training knows their numbers. So where the axes
are as they are read, whatever statistic is taken of the weights, its value is exchangeable with those under random
permutations of the neurons, and its rank among them is a p-value (Fisher; Lehmann and Romano 2005, section 15.2).

The statistic is what would be seen if the axes of one weight were exchanged: rows of its transpose, held against the
neurons of the other two. Training turns what belongs to one neuron towards each other or away, and balances the
lengths. The number of a channel has nothing to do with the number of a neuron, so where nothing is exchanged there is
nothing to see.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.unit_rows import centred_unit_rows

Turned = Literal["gate", "up", "down", "both"]
"""What may lie with its axes exchanged; `both` is gate and up together, as they do in one tensor."""

_BATCH_ENTRIES = 1 << 18


class Projections(NamedTuple):
    """The weights of a gated network, or of some neurons and as many channels of it.

    With c = k any of them may be turned; with c = 2 k only gate over up as one square.
    """

    gate: Float[Tensor, "k c"]
    up: Float[Tensor, "k c"]
    down: Float[Tensor, "c k"]


class TurnedTest(NamedTuple):
    """One null hypothesis: the axes are as they are read.

    Attributes:
        p: The rank of the statistic among its draws, a valid p-value.
        z: How far it lies above the draws, in their standard deviations.
        draws: How many there were; p is at least 1 / (draws + 1).
    """

    p: float
    z: float
    draws: int


def turned_test(networks: Sequence[Projections], turned: Turned, *, draws: int, seed: int) -> TurnedTest:
    """Test whether a weight lies as it is read, against the alternative that its axes are exchanged.

    Args:
        networks: The network; of experts in one tensor each of them, permuted apart and summed.
        turned: Which weight.
        draws: Random permutations.
        seed: Of the draws.

    Raises:
        ValueError: The weight is not square, or there are no draws.
    """
    if draws < 1 or not networks:
        raise ValueError("a permutation test takes a network and a draw at least")
    generator = torch.Generator().manual_seed(seed)
    each = [_standardised(_statistics(network, turned, draws, generator)) for network in networks]
    total = torch.stack(each).sum(0)
    observed, drawn = total[0], total[1:]
    spread = float(drawn.std()) if draws > 1 else 0.0
    z = float(observed - drawn.mean()) / spread if spread > 0 else 0.0
    # Equal permutations tie: 1e-9 is far above the rounding of float64, and far below what two others differ by.
    reached = int((drawn >= observed - 1e-9 * max(1.0, abs(float(observed)))).sum())
    return TurnedTest((1 + reached) / (draws + 1), z, draws)


def with_turned(network: Projections, turned: Turned) -> Projections:
    """The same weights, one of them read the other way round.

    Raises:
        ValueError: It is not square.
    """
    gate, up, down = network
    _require_square(network, turned)
    match turned:
        case "gate":
            return Projections(gate.T, up, down)
        case "up":
            return Projections(gate, up.T, down)
        case "down":
            return Projections(gate, up, down.T)
        case "both":
            if len(gate) == gate.shape[1]:
                return Projections(gate.T, up.T, down)
            one, other = torch.cat([gate, up]).T.tensor_split(2)
            return Projections(one, other, down)


def _require_square(network: Projections, turned: Turned) -> None:
    gate, up, down = network
    k, c = gate.shape
    if up.shape != (k, c) or down.shape != (c, k) or not (c == k or (c == 2 * k and turned == "both")):
        raise ValueError(f"{turned} is not square: {[list(weight.shape) for weight in network]}")


def _statistics(
    network: Projections, turned: Turned, draws: int, generator: torch.Generator
) -> Float[Tensor, "statistics draws1"]:
    """Of each pair, one of them turned: summed squared cosines, lengths in step. The first column is the real one."""
    other = with_turned(network, turned)
    mine = {"gate": network.gate, "up": network.up, "down": network.down.T}
    rows = {"gate": other.gate, "up": other.up, "down": other.down.T}
    moved = ("gate", "up") if turned == "both" else (turned,)
    pairs = [(mine[name], rows[part]) for part in moved for name in mine if name not in moved]
    k, c = network.gate.shape
    # Made where they are used: tens of thousands of permutations of some hundred numbers are many bytes.
    step = max(1, _BATCH_ENTRIES // (k * c))
    taken = torch.zeros(2 * len(pairs), 1 + draws, dtype=torch.float64)
    units = [(centred_unit_rows(still).rows, centred_unit_rows(turning).rows) for still, turning in pairs]
    ranks = [(_ranks(still), _ranks(turning)) for still, turning in pairs]
    for start in range(0, 1 + draws, step):
        count = min(step, 1 + draws - start)
        orders = torch.rand(count, k, generator=generator).argsort(1)
        if start == 0:
            orders[0] = torch.arange(k)
        columns = orders if c == k else torch.cat([orders, orders + k], 1)
        for place, ((still, turning), (length, its)) in enumerate(zip(units, ranks, strict=True)):
            moving = turning.T[columns]  # [count, c, k]: a column for each of its rows, their entries permuted
            cosines = (still[orders] * moving.transpose(1, 2)).sum(2)
            taken[2 * place, start : start + count] = cosines.double().square().sum(1)
            taken[2 * place + 1, start : start + count] = length[orders] @ its
    return taken


def _ranks(weight: Float[Tensor, "k c"]) -> Float[Tensor, " k"]:
    """The ranks of the lengths of its rows, centred: no outlier outweighs the others, and zeros need no logarithm."""
    lengths = cast("Tensor", torch.linalg.vector_norm(weight.double(), dim=1))
    order = torch.searchsorted(lengths.sort().values, lengths)  # equal lengths share a rank
    ranks = order.double()
    return ranks - ranks.mean()


def _standardised(values: Float[Tensor, "statistics draws1"]) -> Float[Tensor, " draws1"]:
    """One number out of several: each scaled by all its values, the real one among them, so that they stay alike."""
    spread = values.std(1, keepdim=True) if values.shape[1] > 1 else torch.zeros(len(values), 1)
    scaled = (values - values.mean(1, keepdim=True)) / torch.where(spread > 0, spread, math.inf)
    return scaled.sum(0)
