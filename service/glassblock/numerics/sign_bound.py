"""A certified upper bound on the tail of || sum_i s_i w_i ||^2 under fair signs s.

**The bound** (Chernoff's method; the step from signs to Gaussians is cosh x <= exp(x^2/2)). Let G = W W^T with
diagonal D = diag(|w_i|^2), and Q = s^T G s. Then Q - tr D = s^T A s with A = G - D, which has no diagonal and is
therefore affine in each sign. Given the others, E exp(t (a + b s_i)) = e^(ta) cosh(tb) <= E exp(t (a + b z_i)) for a
standard normal z_i, so the signs may be replaced one after another and, for 0 < t < 1/(2 mu_max(A)),

    P(Q >= q) <= exp(-t (q - tr D)) * det(I - 2 t A)^(-1/2).

**Unequal diagonals.** D need not be a multiple of I. With l = min_i D_ii, A <= G - l I in the order of quadratic forms,
hence eigenvalue by eigenvalue, and the determinant falls as eigenvalues rise, so G - l I may stand for A. For unit
rows l = 1 and nothing is lost. With b = 1 + 2 t l and C = W^T W (Sylvester),

    det(I - 2 t (G - l I)) = b^(m - d) det(b I_d - 2 t C).

**What is certified.** Any t gives a valid bound, so eigenvalues (float32, not trusted) only choose t. The determinant
at that t comes from a Cholesky factor in float64: its success proves b I - 2 t C positive definite, hence t admissible,
up to rounding, and rounding is paid for by subtracting from the diagonal more than its proven size (Higham 2002,
Theorem 10.3, and the bound of (3.13) for inner products). No estimate of the largest eigenvalue enters. The rows are
taken as the float32 numbers that they are: they need fair signs, not exact unit length.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

_ROUNDOFF = 2.0**-53
# Four times the textbook constants, which are stated to first order.
_MARGIN = 4.0
_BISECTIONS = 60
_RETREATS = 40


class RowMoments(NamedTuple):
    """What the bound needs to know of m rows, in float64.

    Attributes:
        total: `[d]`, the sum of the rows.
        gram: `[d, d]` = W^T W, or `[m, m]` = W W^T.
        rows: m, the number of rows that are not zero.
        least: The smallest squared length of a row.
        trace: The sum of the squared lengths.
    """

    total: Float[Tensor, " d"]
    gram: Float[Tensor, "n n"]
    rows: int
    least: float
    trace: float


def row_moments(blocks: Iterable[Float[Tensor, "_ d"]], *, at_most: int) -> RowMoments:
    """Accumulate the moments over blocks of rows; rows that are zero carry no sign and do not count.

    Args:
        blocks: The rows, in any number of blocks.
        at_most: No more rows than this; where it is below d, W W^T is formed in place of W^T W.

    Holds 8 min(at_most, d)^2 bytes, and where W W^T is formed the rows too, in float64.
    """
    total, gram = torch.zeros(0), torch.zeros(0, 0)
    lengths: list[Tensor] = []
    narrow: list[Tensor] = []
    for block in blocks:
        wide = block.to(torch.float64)
        squares = wide.square().sum(1)
        lengths.append(squares[squares > 0])
        total = total + wide.sum(0) if len(total) else wide.sum(0)
        if at_most < wide.shape[1]:
            narrow.append(wide[squares > 0])
        elif len(gram):
            gram.addmm_(wide.T, wide)
        else:
            gram = wide.T @ wide
    if narrow:
        stacked = torch.cat(narrow)
        gram = stacked @ stacked.T
    squares = torch.cat(lengths)
    least = float(squares.min()) if len(squares) else 0.0
    return RowMoments(total, gram, rows=len(squares), least=least, trace=float(squares.sum()))


def log10_tail_bound(moments: RowMoments) -> float:
    """log10 of an upper bound on P(Q >= |total|^2), Q = |sum_i s_i w_i|^2 under fair independent signs; at most 0.

    Computed in logarithms throughout, so it neither underflows nor saturates. It only ever rejects: near 0 it says
    nothing. It is an over-estimate, by about a factor of ten on real weights.
    """
    excess = _excess(moments)
    if excess <= 0:  # no row at all among these
        return 0.0
    t, pole = _best_exponent(moments, excess)
    for _ in range(_RETREATS):
        if t <= 0:
            break
        bound = _log_bound(moments, excess, t)
        if bound is not None:
            return min(0.0, bound / math.log(10))
        t = pole - 2 * (pole - t)
    return 0.0


def _excess(moments: RowMoments) -> float:
    """q - tr D, rounded down: the computed sum may exceed the true one by what adding m rows rounds."""
    rows, width = moments.rows, len(moments.total)
    longest = math.sqrt(rows * moments.trace)  # >= the sum of the rows' lengths (Cauchy and Schwarz)
    length = math.sqrt(float(moments.total.square().sum())) * (1 - _MARGIN * width * _ROUNDOFF)
    length = max(0.0, length - _MARGIN * rows * _ROUNDOFF * longest)
    return length**2 - moments.trace * (1 + _MARGIN * (rows + width) * _ROUNDOFF)


def _best_exponent(moments: RowMoments, excess: float) -> tuple[float, float]:
    """Near the t that minimises the bound, and the pole 1/(2 mu_max): the zero of a convex function's derivative."""
    spectrum = cast("Tensor", torch.linalg.eigvalsh(moments.gram.to(torch.float32)))
    eigenvalues = spectrum.to("cpu", torch.float64) - moments.least
    rest = moments.rows - len(eigenvalues)
    largest = float(eigenvalues.max())
    if largest <= 0:
        return 0.0, 0.0
    pole = 0.5 / largest
    low, high = 0.0, pole
    for _ in range(_BISECTIONS):
        t = (low + high) / 2
        slope = float((eigenvalues / (1 - 2 * t * eigenvalues)).sum()) - excess
        slope -= rest * moments.least / (1 + 2 * t * moments.least)
        low, high = (t, high) if slope < 0 else (low, t)
    return low, pole


def _log_bound(moments: RowMoments, excess: float, t: float) -> float | None:
    """Natural logarithm of the bound at t, rounded up; None where the matrix is not safely positive definite."""
    gram, n = moments.gram, len(moments.gram)
    width = len(moments.total)
    least = moments.least * (1 - _MARGIN * width * _ROUNDOFF)
    shift = 1 + 2 * t * least
    # The factor's backward error is below (n + 1) u tr(b I - 2 t C) <= (n + 1) u n b, the Gram matrix's below
    # (m or d) u tr C; forming the matrix rounds each entry once or twice.
    length = max(moments.rows, width)
    slack = _MARGIN * _ROUNDOFF * ((n + 3) * n * shift + 2 * t * (length + 3) * moments.trace)
    matrix = gram * (-2 * t)
    matrix.diagonal().add_(shift - slack)
    factor, failed = cast("tuple[Tensor, Tensor]", torch.linalg.cholesky_ex(matrix))
    if int(failed):
        return None
    logs = factor.diagonal().log()  # half the log-determinant, once summed
    rest = 0.5 * (moments.rows - n) * math.log(shift)
    rounding = _MARGIN * (n + 8) * _ROUNDOFF * (t * excess + float(logs.abs().sum()) + abs(rest))
    return -t * excess - float(logs.sum()) - rest + rounding
