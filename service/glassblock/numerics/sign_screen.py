"""The sign symmetry in one look at a weight: T and a few drawn T from sums over pieces of it, nothing held whole.

With w_i the centred rows of W and s_i fair signs, T = | sum_i c_i w_i |^2 / sum_i c_i^2 |w_i|^2 has expectation 1 for
any scale c_i that is blind to signs. Fifteen draws of it and T itself are one small matrix times the weight, and that
product adds up over pieces. So a weight of any size costs one pass, 16 sums of d numbers and three numbers per neuron.

**What it is for.** z = (T - 1) / sqrt(mean (T_k - 1)^2): the drawn T_k scatter about 1, which is exact, so no draw is
spent on a mean. It screens: a weight with a small z is not worth the certified test. It convicts nobody.

**Why a small z rules the certificate out.** With mu_j >= -1 the eigenvalues of G - I and v = sum mu_j^2, the variance
of m T is 2 v, so an excess e = m (T - 1) is e = z sqrt(2 v). Since -log(1 - x) >= x + x^2 / (2 (1 + |x|)) for x < 1
and sum mu_j = 0, the bound of `sign_bound` is at least

    log p >= min over t > 0 of  -t e + t^2 v / (1 + 2 t),

which is -z^2 / 2 as v grows. At z = 3 that is -4.5: a p-value of 0.011 at best, where a conviction needs one below
1e-3 over all tensors tested. `least_log10_p` computes it for every v; below v = 8 z^2 it says nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.squared_lengths import column_squares, row_squares

DRAWS = 15  # with T itself sixteen rows, a whole number of vectors in every product of matrices
_BLOCK_ENTRIES = 2**20  # a block in float32 that stays in a core's cache
_LEAST_ROWS = 32  # from so many entries of each column its scale is taken
_CONSTANT = 1e-4  # of a row's square: deviations from the mean that float32 may not tell from rounding


class SignScreen(NamedTuple):
    """What a look at one weight shows.

    Attributes:
        statistic: T; NaN where an entry is not finite.
        z: T's excess over 1 in root mean squares of the drawn excesses; NaN where there is none.
        above: Whether T exceeds every draw.
        rows: Neurons with a direction.
        dropped: Neurons without: zero, or constant.
        variance: v of `least_log10_p`, from the scatter of the drawn T; NaN where it cannot be told.
    """

    statistic: float
    z: float
    above: bool
    rows: int
    dropped: int
    variance: float = math.nan

    def stands_out(self, z: float) -> bool:
        """Whether T lies beyond z and beyond every draw."""
        return self.above and self.z > z

    def quiet(self, z: float) -> bool:
        """Whether T is finite and lies below z."""
        return self.z < z


class SignSums(NamedTuple):
    """The sums of one weight, under T's own signs and under the drawn ones.

    Attributes:
        sums: `[1 + draws, d]` float64: of the scaled centred rows, the first with all signs positive.
        energy: Sum of the squared lengths of these rows, which the drawn squared lengths have as expectation.
        rows, dropped: Neurons with and without a direction.
    """

    sums: Float[Tensor, "signs d"]
    energy: float
    rows: int
    dropped: int


def screen_signs(neurons: int, *, seed: int) -> Float[Tensor, "signs m"]:
    """One row of ones and `DRAWS` rows of seeded fair signs, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    coins = torch.randint(0, 2, (1 + DRAWS, neurons), generator=generator, dtype=torch.int8)
    coins[0] = 1
    return coins.mul_(2).sub_(1).index_fill_(0, torch.tensor([0]), 1).float()


def screened(sums: SignSums) -> SignScreen:
    """T and its z from the sums of one weight."""
    return _screened(sums.sums, sums.energy, sums.rows, sums.dropped)


def screened_together(parts: Sequence[SignSums]) -> SignScreen:
    """T of the sum of several weights, neuron by neuron, with one sign for each neuron index.

    Experts that were copied from one network share the signs of their neurons; others do not. Flipping a neuron in all
    of them at once is a symmetry in either case. The energy of the summed rows is not known from sums; the drawn
    squared lengths scatter about it, so it is taken as their mean.
    """
    total = torch.stack([part.sums for part in parts]).sum(0)
    energy = float(total[1:].square().sum(1).mean())
    rows = max(part.rows for part in parts)
    return _screened(total, energy, rows, min(part.dropped for part in parts))


def least_log10_p(z: float, variance: float) -> float:
    """No certified p-value of a weight with this z has a log10 below this.

    Args:
        z: T's excess over its standard deviation.
        variance: v, the sum of the squared eigenvalues of G - I: half the variance of m T.
    """
    excess = z * math.sqrt(2 * variance)
    if excess <= 0:
        return 0.0
    if variance / 2 <= excess:
        return -math.inf  # so few neurons in so many dimensions that the argument says nothing
    # The derivative of -t e + t^2 v / (1 + 2 t) vanishes where (1 + 2 t)^2 = 1 / (1 - 2 e / v).
    root = math.sqrt(1 / (1 - 2 * excess / variance))
    t = (root - 1) / 2
    return (-t * excess + t * t * variance / (1 + 2 * t)) / math.log(10)


@dataclass
class RowSums:
    """Sums over the rows of a weight `[m, d]`, each row scaled to unit length once its mean is taken off.

    Attributes:
        signs: `[1 + draws, m]`, from `screen_signs`.
        width: d.
        device: Where the rows are.
        squares: `[m]`, squared lengths of the rows as they are, mean and all.
    """

    signs: Float[Tensor, "signs m"]
    width: int
    device: torch.device
    squares: Float[Tensor, " m"] = field(init=False)

    def __post_init__(self) -> None:
        neurons = self.signs.shape[1]
        self.signs = self.signs.to(self.device)
        self.squares = torch.zeros(neurons, device=self.device)
        self._sums = torch.zeros(len(self.signs), self.width, device=self.device)
        self._shift = torch.zeros(len(self.signs), device=self.device)
        self._kept = torch.zeros(neurons, dtype=torch.bool, device=self.device)

    def add(self, rows: Float[Tensor, "r d"], start: int, squares: Float[Tensor, " r"] | None = None) -> None:
        """The rows from neuron `start` on, and their squared lengths where the caller has them."""
        step = max(1, _BLOCK_ENTRIES // self.width)
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            span = slice(start + first, start + first + len(block))
            wide = block.to(torch.float32)
            mean = wide.mean(1)
            length = (row_squares(wide) if squares is None else squares[first : first + step]).to(torch.float32)
            centred = length - self.width * mean.square()
            kept = centred > _CONSTANT * length
            scaled = self.signs[:, span] * centred.rsqrt().where(kept, 0.0)
            self._sums.addmm_(scaled, wide)
            self._shift.addmv_(scaled, mean)
            self.squares[span], self._kept[span] = length, kept

    def finish(self) -> SignSums:
        """What they come to."""
        kept = int(self._kept.sum())
        sums = (self._sums - self._shift[:, None]).to("cpu", torch.float64)
        return SignSums(sums, float(kept), kept, len(self._kept) - kept)


@dataclass
class ColumnSums:
    """The same over the columns of a weight stored `[d, m]`, where a neuron's length is not known before the end.

    The columns are scaled by their length in the first piece, which is as blind to signs as the whole length is.
    Attributes as those of `RowSums`.
    """

    signs: Float[Tensor, "signs m"]
    width: int
    device: torch.device
    squares: Float[Tensor, " m"] = field(init=False)

    def __post_init__(self) -> None:
        neurons = self.signs.shape[1]
        self.signs = self.signs.to(self.device)
        self.squares = torch.zeros(neurons, device=self.device)
        self._totals = torch.zeros(neurons, device=self.device)
        self._sums = torch.zeros(len(self.signs), self.width, device=self.device)
        self._scale: Tensor | None = None

    def add(self, rows: Float[Tensor, "r m"], start: int) -> None:
        """The entries `start` and on of every neuron."""
        step = max(_LEAST_ROWS, _BLOCK_ENTRIES // rows.shape[1])
        for first in range(0, len(rows), step):
            wide = rows[first : first + step].to(torch.float32)
            squares = column_squares(wide)
            if self._scale is None:
                length = squares.sqrt()
                floor = 0.1 * length.median()
                self._scale = 1 / (length.clamp_min(float(floor)) if float(floor) > 0 else torch.ones_like(length))
                self.signs = self.signs * self._scale
            self._sums[:, start + first : start + first + len(wide)] = self.signs @ wide.T
            self._totals += wide.sum(0)
            self.squares += squares

    def finish(self) -> SignSums:
        """What they come to."""
        scale = torch.ones_like(self._totals) if self._scale is None else self._scale
        mean = self._totals / self.width
        centred = self.squares - self.width * mean.square()
        kept = centred > _CONSTANT * self.squares
        energy = float((centred * scale.square()).where(kept, 0.0).sum(dtype=torch.float64))
        sums = (self._sums - (self.signs @ mean)[:, None]).to("cpu", torch.float64)
        rows = int(kept.sum())
        return SignSums(sums, energy, rows, len(kept) - rows)


def _screened(sums: Tensor, energy: float, rows: int, dropped: int) -> SignScreen:
    if not energy > 0:
        return SignScreen(math.nan, math.nan, above=False, rows=rows, dropped=dropped)
    statistic, *drawn = cast("list[float]", (row_squares(sums) / energy).tolist())
    spread = math.sqrt(sum((value - 1) ** 2 for value in drawn) / len(drawn))
    z = (statistic - 1) / spread if spread > 0 else math.nan
    return SignScreen(statistic, z, statistic > max(drawn), rows, dropped, variance=(rows * spread) ** 2 / 2)
