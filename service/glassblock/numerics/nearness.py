"""How near a replay comes to a captured tensor: its residual against what rounding may do, and votes between two.

The floor of a token is the spread of the replays in the capture's dtype, each summed in another order, about the
replay in float64; at least one rounding of the result. A residual at the floor is what the same arithmetic leaves
behind. Below the floor two replays can still differ by whole bits: then they are told apart by a sign test over the
elements or tokens where they differ.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

AT_FLOOR = 4.0
"""Residual over floor up to which rounding explains it. Another engine sums in longer or shorter chains than the
replays do, which moves the root mean square of a sum's rounding by a small factor; a mistake that is seen at all is
seen ten to a million times above the floor."""

CONVICTS = 1e-4
"""Chance of votes this one-sided between two replays equally near, at or below which one displaces the declared."""

SUSPECTS = 1e-3
"""The same, for casting doubt on the declared one."""

EXCLUDES = 1e-2
"""The same, for leaving one of two out of what cannot be told apart."""

# A uniform error of half a unit in the last place has a root mean square of 1/sqrt(12) units; a number is on average
# 1.4 times the power of two that its unit is counted from.
_ROUNDING_RMS = 1 / math.sqrt(12) / 1.4
# What a token of float64 zeros rounds by has no square in float64; this has one.
_LEAST_FLOOR = 1e-150


class Nearness(NamedTuple):
    """One replayed stage against the captured one. Tensors by token.

    Attributes:
        residual: Root mean square over the tokens of |captured - float64 replay| / |float64 replay|, absolute where
            that is zero.
        floor: The same of the rounding floor.
        excess: Root mean square over the tokens of residual / floor; about 1 where the arithmetic is the same.
        distances: `[ways, tokens]`, mean squared distance to each replay in the capture's dtype.
        floors: `[tokens]`, root mean square of the rounding.
        scales: `[tokens]`, what residual and floor are relative to: root mean square of the float64 replay, 1 where it
            is zero.
    """

    residual: float
    floor: float
    excess: float
    distances: Float[Tensor, "ways tokens"]
    floors: Float[Tensor, " tokens"]
    scales: Float[Tensor, " tokens"]

    @property
    def at_floor(self) -> bool:
        """Whether rounding explains the residual."""
        return self.excess <= AT_FLOOR


class Votes(NamedTuple):
    """A sign test between two replays.

    Attributes:
        unit: `elements` or `tokens`.
        differing: How many of them tell the two apart.
        won: How many of these are nearer to the one.
        chance: Of at least so many, if both were as near.
        alone_exact: Whether the one gives every captured bit, and the other does not.
    """

    unit: str
    differing: int
    won: int
    chance: float
    alone_exact: bool = False


def nearness(
    captured: Float[Tensor, "tokens width"],
    exact: Float[Tensor, "tokens width"],
    rounded: tuple[Float[Tensor, "tokens width"], ...],
) -> Nearness:
    """Measure a replay.

    Args:
        captured: In the dtype that its values are of.
        exact: The replay in float64.
        rounded: The replays in the engine's dtype, one for each way of rounding and summing.
    """
    dtype = captured.dtype
    seen = captured.to(torch.float64)
    replays = [replay.to(dtype).to(torch.float64) for replay in rounded]
    # Below the smallest normal number the unit in the last place shrinks no further.
    grain = exact.abs().clamp(min=torch.finfo(dtype).smallest_normal) * torch.finfo(dtype).eps * _ROUNDING_RMS
    floors = torch.stack([_rms(grain), *(_rms(replay - exact) for replay in replays)]).amax(0).clamp(min=_LEAST_FLOOR)
    errors, scales = _rms(seen - exact), _rms(exact)
    scales = torch.where(scales == 0, torch.ones_like(scales), scales)
    finite = bool(floors.isfinite().all() & errors.isfinite().all())
    return Nearness(
        residual=_root_mean_square(errors / scales) if finite else math.inf,
        floor=_root_mean_square(floors / scales) if finite else math.inf,
        excess=_root_mean_square(errors / floors) if finite else math.inf,
        distances=torch.stack([(seen - replay).square().mean(-1) for replay in replays]),
        floors=floors,
        scales=scales,
    )


def element_votes(
    captured: Float[Tensor, "tokens width"],
    one: Float[Tensor, "tokens width"],
    other: Float[Tensor, "tokens width"],
    steady: Bool[Tensor, "tokens width"],
) -> tuple[int, int]:
    """Elements where two replays differ, and how many of these are nearer to the one.

    Args:
        captured: In the dtype that its values are of.
        one: A replay in that dtype.
        other: The other one.
        steady: Elements that may vote: those that both replays give whichever way they are summed.
    """
    telling = (one != other) & steady
    seen = captured[telling].to(torch.float64)
    to_one, to_other = ((seen - side[telling].to(torch.float64)).abs() for side in (one, other))
    return int((to_one != to_other).sum()), int((to_one < to_other).sum())


def sign_test(unit: str, differing: int, won: int) -> Votes:
    """Chance of at least `won` of `differing` votes under a fair coin: P(Binomial(n, 1/2) >= k).

    >>> sign_test("elements", 7, 7).chance
    0.0078125
    """
    if differing == 0:
        return Votes(unit, 0, 0, 1.0)
    logs = torch.arange(won, differing + 1, dtype=torch.float64)
    total = torch.tensor(float(differing), dtype=torch.float64)
    terms = torch.lgamma(total + 1) - torch.lgamma(logs + 1) - torch.lgamma(total - logs + 1)
    return Votes(unit, differing, won, min(1.0, float((terms - differing * math.log(2)).logsumexp(0).exp())))


def _rms(values: Tensor) -> Tensor:
    return values.to(torch.float64).square().mean(-1).sqrt()


def _root_mean_square(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
