"""The sign symmetry in one look at a weight: T beside fifteen others from sums over pieces, nothing held whole.

With w_i the centred rows of W and s_i fair signs, T = | sum_i s_i c_i w_i |^2 / sum_i c_i^2 |w_i|^2 has expectation 1
for any scale c_i that is blind to signs. T itself, with all signs positive, stands beside fifteen others, under
fifteen patterns of signs that repeat every fifteen neurons. All sixteen follow from fifteen sums: neuron i is added to
sum i mod 15, and a small matrix turns these into the signed ones. Sums add up over pieces. So a weight of any size
costs one pass over its numbers, 15 sums of d numbers and two numbers per neuron.

**Why these signs.** They are the simplex code: the rows of a Hadamard matrix of order sixteen without its first
column. So they are closed under multiplication, and that is what a randomisation test asks of its transformations
(Lehmann and Romano, Testing Statistical Hypotheses, 3rd edition, theorem 15.2.1): where each neuron's sign is a fair
coin, T is any of the sixteen with the same chance. Any two patterns, and each with T's own, have a correlation of
-1/15, so the others scatter as independent ones do, and of what all neurons share a 225th part is left in them. The
length is odd, for rows lie in turns of two, four or eight where gate and up are interleaved, and signs in step with
those would show them.

**What it is for.** z = (T - 1) / sqrt(mean (T_k - 1)^2): the T_k scatter about 1, which is exact, so none is spent on a
mean. It screens: a weight with a small z is not worth the certified test. It convicts nobody.

**Why a small z rules the certificate out.** With mu_j >= -1 the eigenvalues of G - I and v = sum mu_j^2, the variance
of m T is 2 v, so an excess e = m (T - 1) is e = z sqrt(2 v). Since -log(1 - x) >= x + x^2 / 2 for x from 0 to 1, and
>= x + x^2 / (2 (1 + |x|)) below 0, where |2 t mu_j| <= 2 t, and sum mu_j = 0, the bound of `sign_bound` is at least

    log p >= min over t > 0 of  -t e + t^2 v / (1 + 2 t),

which is -z^2 / 2 as v grows. At z = 3 that is -4.5: a p-value of 0.011 at best, where a conviction needs one below
1e-3 over all tensors tested. `least_log10_p` computes it for every v; below v = 8 z^2 it says nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.numerics.squared_lengths import column_squares, row_squares

PATTERNS = 16
"""Patterns of signs, T's own among them."""

TURN = PATTERNS - 1
"""Neurons after which they repeat."""

_BLOCK_ENTRIES = 2**20  # a block in float32 that stays in a core's cache
_LEAST_ROWS = 32  # from so many entries of each column its scale is taken
_CONSTANT = 1e-4  # of a row's square: deviations from the mean that float32 may not tell from rounding


class SignScreen(NamedTuple):
    """What a look at one weight shows.

    Attributes:
        statistic: T; NaN where an entry is not finite.
        z: T's excess over 1 in root mean squares of the others' excesses; NaN where there is none.
        above: Whether T exceeds every other.
        rows: Neurons with a direction.
        dropped: Neurons without: zero, or constant.
        variance: v of `least_log10_p`, from the scatter of the others; NaN where it cannot be told.
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
    """The sums of one weight.

    Attributes:
        sums: `[turn, d]` float32: of the scaled rows, neuron i in sum i mod 15. The means of the rows are in them, and
            are the means of the sums.
        energy: Sum of the squared lengths of the scaled rows without their means.
        rows, dropped: Neurons with and without a direction.
    """

    sums: Float[Tensor, "turn d"]
    energy: float
    rows: int
    dropped: int


@cache
def sign_patterns(device: torch.device) -> Float[Tensor, "patterns turn"]:
    """Sylvester's Hadamard matrix (1867) less its first column, float64: the first row is ones."""
    matrix = torch.ones(1, 1, dtype=torch.float64, device=device)
    while len(matrix) < PATTERNS:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix[:, 1:].contiguous()


def screened(sums: SignSums) -> SignScreen:
    """T and its z from the sums of one weight."""
    return screens([sums])[0]


def screens(weights: Sequence[SignSums]) -> list[SignScreen]:
    """The same of several weights of one width."""
    squares = _signed_squares(torch.stack([weight.sums for weight in weights]))
    both = zip(squares, weights, strict=True)
    return [_screened(signed, weight.energy, weight.rows, weight.dropped) for signed, weight in both]


def screened_together(parts: Sequence[SignSums]) -> SignScreen:
    """T of the sum of several weights, neuron by neuron, with one sign for each neuron index.

    Experts that were copied from one network share the signs of their neurons; others do not. Flipping a neuron in all
    of them at once is a symmetry in either case. The energy of the summed rows is not known from sums; the signed
    squared lengths scatter about it, so it is taken as their mean.
    """
    (squares,) = _signed_squares(torch.stack([part.sums for part in parts]).sum(0, keepdim=True, dtype=torch.float64))
    rows = max(part.rows for part in parts)
    return _screened(squares, sum(squares[1:]) / (PATTERNS - 1), rows, min(part.dropped for part in parts))


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
        neurons, width: m and d.
        device: Where the rows are.
        squares: `[m]`, squared lengths of the rows as they are, mean and all.
    """

    neurons: int
    width: int
    device: torch.device
    squares: Float[Tensor, " m"] = field(init=False)

    def __post_init__(self) -> None:
        self.squares = torch.zeros(self.neurons, device=self.device)
        self._sums = torch.zeros(TURN, 1, self.width, device=self.device)
        self._kept = torch.zeros(self.neurons, dtype=torch.bool, device=self.device)

    def add(self, rows: Float[Tensor, "r d"], start: int, squares: Float[Tensor, " r"] | None = None) -> None:
        """The rows from neuron `start` on, and their squared lengths where the caller has them."""
        step = max(1, _BLOCK_ENTRIES // self.width)
        for first in range(0, len(rows), step):
            block = rows[first : first + step]
            span = slice(start + first, start + first + len(block))
            wide = block.to(torch.float32)
            length = (row_squares(wide) if squares is None else squares[first : first + step]).to(torch.float32)
            centred = length - self.width * wide.mean(1).square_()
            kept = centred > _CONSTANT * length
            self._add(wide, centred.rsqrt_().where(kept, 0.0), span.start)
            self.squares[span], self._kept[span] = length, kept

    def _add(self, rows: Tensor, scale: Tensor, start: int) -> None:
        """Neuron i to sum i mod 15: whole turns at once, and what lies before and after them."""
        head = min(-start % TURN, len(rows))
        turns, tail = divmod(len(rows) - head, TURN)
        body = slice(head, len(rows) - tail)
        for part, place, length in ((slice(head), start % TURN, head), (slice(body.stop, len(rows)), 0, tail)):
            if length:
                self._sums[place : place + length, 0] += scale[part, None] * rows[part]
        if turns:
            weights = scale[body].view(turns, TURN).T[:, None]
            self._sums.baddbmm_(weights, rows[body].reshape(turns, TURN, -1).transpose(0, 1))

    def finish(self) -> SignSums:
        """What they come to."""
        kept = int(torch.count_nonzero(self._kept))
        return SignSums(self._sums[:, 0].cpu(), float(kept), kept, self.neurons - kept)


@dataclass
class ColumnSums:
    """The same over the columns of a weight stored `[d, m]`, where a neuron's length is not known before the end.

    The columns are scaled by their length in the first piece, which is as blind to signs as the whole length is.
    Attributes as those of `RowSums`.
    """

    neurons: int
    width: int
    device: torch.device
    squares: Float[Tensor, " m"] = field(init=False)

    def __post_init__(self) -> None:
        # Row k has a one for each neuron of sum k.
        self._turns = torch.eye(TURN, device=self.device).repeat(1, -(-self.neurons // TURN))[:, : self.neurons]
        self.squares = torch.zeros(self.neurons, device=self.device)
        self._totals = torch.zeros(self.neurons, device=self.device)
        self._sums = torch.zeros(TURN, self.width, device=self.device)
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
                self._turns = self._turns * self._scale
            self._sums[:, start + first : start + first + len(wide)] = self._turns @ wide.T
            self._totals += wide.sum(0)
            self.squares += squares

    def finish(self) -> SignSums:
        """What they come to."""
        scale = torch.ones_like(self._totals) if self._scale is None else self._scale
        mean = self._totals / self.width
        centred = self.squares - self.width * mean.square()
        kept = centred > _CONSTANT * self.squares
        energy = float((centred * scale.square()).where(kept, 0.0).sum(dtype=torch.float64))
        rows = int(torch.count_nonzero(kept))
        return SignSums(self._sums.cpu(), energy, rows, self.neurons - rows)


def _signed_squares(sums: Float[Tensor, "weights turn d"]) -> list[list[float]]:
    """The squared length of the sum under each pattern, T's own first."""
    sums = sums.double()
    patterns = sign_patterns(sums.device)
    return cast("list[list[float]]", row_squares(patterns @ (sums - sums.mean(2, keepdim=True))).tolist())


def _screened(squares: Sequence[float], energy: float, rows: int, dropped: int) -> SignScreen:
    """From the squared length of the sum under each pattern, T's own first."""
    if not energy > 0:
        return SignScreen(math.nan, math.nan, above=False, rows=rows, dropped=dropped)
    statistic, *others = (square / energy for square in squares)
    spread = math.sqrt(sum((value - 1) ** 2 for value in others) / len(others))
    z = (statistic - 1) / spread if spread > 0 else math.nan
    return SignScreen(statistic, z, statistic > max(others), rows, dropped, variance=(rows * spread) ** 2 / 2)
