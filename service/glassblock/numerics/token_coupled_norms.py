"""Norms of the Jacobian of any function of token states, tokens coupled or not: attention, a whole layer, a chain.

J is known by its products alone (`coupled_jacobian`). Where rows (output positions) or columns (input positions) are
chosen, everything below is of that part of it.

**Frobenius norm**, estimated. For random z with E z z^T = I, E |J^T z|^2 = ||J||_F^2.

    hutchinson   the mean of |J^T z|^2 over the probes (Hutchinson 1990)
    hutch++      ||Q^T J||_F^2, exactly, for an orthonormal basis Q of J times random vectors, and Hutchinson's mean for
                 what is left, (I - Q Q^T) J (Meyer, Musco, Musco and Woodruff 2021, with the range finder of Halko,
                 Martinsson and Tropp 2011 on J in place of J J^T). It pays where a few directions hold most of the norm

Where as many products as J has rows are no matter, it is exact: `ROWS`.

A pilot decides which: the relative variance of |J^T z|^2 is about 2 over the effective rank tr(A)^2 / tr(A^2) of
A = J J^T, and hutch++ runs where that is below `LOW_RANK`. Pilot probes count in neither. The standard error is that of
the mean of the probes, and the 95 % interval Student's.

**Spectral norm**, bracketed by the same bidiagonalisation as everywhere (`singular_bracket`), from a uniform start. How
large the sums inside a function are cannot be seen from outside: bounds are moved by rounding relative to the norm
alone, and `adjoint_error` says how well the two products agree. In float64 that is beyond doubt for any real block.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from jaxtyping import Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.coupled_jacobian import CoupledJacobian, TokenFunction, coupled_jacobian
from glassblock.numerics.golub_kahan import uniform_starts
from glassblock.numerics.norm_factors import lengths
from glassblock.numerics.product_noise import ROUNDING
from glassblock.numerics.singular_bracket import bracket_largest
from glassblock.numerics.spectral_request import SpectralRequest
from glassblock.numerics.watching import UNWATCHED, Watch

ESTIMATORS = ("hutchinson", "hutch++")
ROWS = "rows"
"""No estimate: every row of J, one product each."""
PROBES = ("rademacher", "gaussian")
LOW_RANK = 20
_PILOT = 8
_NORMAL_975 = 1.959963984540054


class FrobeniusEstimate(NamedTuple):
    """An estimate of ||J||_F with its error.

    Attributes:
        frobenius: The root of the unbiased estimate of ||J||_F^2.
        standard_error: Of `frobenius`, to first order.
        lower, upper: Ends of the 95 % interval (Student's, of the square).
        probes: Random vectors that the mean is over.
        products: Products with J or its transpose that were made, pilot included.
        estimator: A name of `ESTIMATORS`, or `ROWS`: exact, up to rounding.
        distribution: A name of `PROBES`.
        seed: Of all random vectors.
        inputs, outputs: The positions that J was restricted to.
    """

    frobenius: float
    standard_error: float
    lower: float
    upper: float
    probes: int
    products: int
    estimator: str
    distribution: str
    seed: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class CoupledSpectral(NamedTuple):
    """sigma_1 of J, bracketed.

    Attributes:
        lower: Certain, up to rounding.
        upper: Wrong with probability at most `failure_probability`.
        converged: upper <= (1 + tolerance) lower.
        steps: Two products each.
        left, right: `[tokens, d]`, top Ritz vectors, zero outside the positions; None unless asked.
        adjoint_error: |u . J v - J^T u . v| over |J v| for random u and v of length one.
        failure_probability: Of the upper bound.
        seed: Of the start.
        inputs, outputs: The positions that J was restricted to.
    """

    lower: float
    upper: float
    converged: bool
    steps: int
    left: Tensor | None
    right: Tensor | None
    adjoint_error: float
    failure_probability: float
    seed: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def coupled_frobenius(
    function: TokenFunction,
    x: Float[Tensor, "tokens d"],
    *,
    probes: int = 64,
    seed: int = 0,
    distribution: str = "rademacher",
    estimator: str | None = None,
    inputs: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
    watch: Watch = UNWATCHED,
) -> FrobeniusEstimate:
    """Estimate the Frobenius norm of the Jacobian of `function` at `x`.

    Args:
        function: `[tokens, d]` to `[tokens, d]`, differentiable by torch.func.
        x: Where.
        probes: Vectors in the mean; hutch++ makes another probes / 2 for its basis, two products each.
        seed: Of all random vectors.
        distribution: A name of `PROBES`.
        estimator: A name of `ESTIMATORS`; None lets a pilot of 8 probes choose. `ROWS` takes every row of J and no
            probe.
        inputs: Positions of x that are differentiated by; all when None.
        outputs: Positions of the result that are differentiated.
        watch: Told and asked between products.

    Raises:
        InvalidValue: A name, a position or a number of probes cannot be used, or the function changes the shape.
        ComputationCancelled: `watch` asked for it.
    """
    _check_request(distribution, estimator, probes)
    jacobian = coupled_jacobian(function, x, inputs=inputs, outputs=outputs)
    n = len(jacobian.outputs) * x.shape[-1]
    # From the seed alone, whatever the device and the dtype of the computation.
    generator = torch.Generator("cpu").manual_seed(seed)
    done = 0

    def draw() -> Tensor:
        flat = torch.randn(n, generator=generator, dtype=torch.float64)
        return flat if distribution == "gaussian" else torch.where(flat < 0, -torch.ones_like(flat), 1.0)

    def square(z: Tensor, *, probe: int) -> float:
        nonlocal done
        watch.at(probe, probes, "probes")
        done += 1
        return float(lengths(jacobian.pulled(z)).double().square())

    if estimator == ROWS:
        return _row_by_row(jacobian, distribution=distribution, seed=seed, watch=watch)
    if estimator is None:
        pilot = torch.tensor([square(draw(), probe=0) for _ in range(_PILOT)], dtype=torch.float64)
        spread = float(pilot.var() / pilot.mean().square()) if float(pilot.mean()) > 0 else 0.0
        estimator = "hutch++" if spread > 2.0 / LOW_RANK else "hutchinson"
    captured, basis = 0.0, None
    if estimator == "hutch++":
        captured, basis, products = _captured(jacobian, generator, min(probes // 2, n), watch)
        done += products
    squares: list[float] = []
    for probe in range(probes):
        z = draw()
        if basis is not None:
            z = z - basis @ (basis.T @ z)
        squares.append(square(z, probe=probe))
    found = torch.tensor(squares, dtype=torch.float64)
    total = captured + float(found.mean())
    error = float(found.std()) / probes**0.5
    reach = _student_975(probes - 1) * error
    frobenius = math.sqrt(total)
    return FrobeniusEstimate(
        frobenius=frobenius,
        standard_error=0.0 if frobenius == 0 else error / (2.0 * frobenius),
        lower=math.nan if math.isnan(total - reach) else math.sqrt(max(captured, total - reach, 0.0)),
        upper=math.sqrt(total + reach),
        probes=probes,
        products=done,
        estimator=estimator,
        distribution=distribution,
        seed=seed,
        inputs=jacobian.inputs,
        outputs=jacobian.outputs,
    )


def coupled_spectral(
    function: TokenFunction,
    x: Float[Tensor, "tokens d"],
    *,
    request: SpectralRequest = SpectralRequest(),  # noqa: B008  a NamedTuple cannot be changed
    inputs: Sequence[int] | None = None,
    outputs: Sequence[int] | None = None,
    watch: Watch = UNWATCHED,
) -> CoupledSpectral:
    """Bracket the spectral norm of the Jacobian of `function` at `x`.

    Args:
        function: `[tokens, d]` to `[tokens, d]`, differentiable by torch.func in both directions.
        x: Where, in the dtype of the computation.
        request: Tolerance, failure probability, steps, seed, vectors; its certificate is not used.
        inputs: Positions of x that are differentiated by; all when None.
        outputs: Positions of the result that are differentiated.
        watch: Told and asked between steps.

    Raises:
        InvalidValue: A position or a number cannot be used, or the function changes the shape.
        ComputationCancelled: `watch` asked for it.
    """
    request.check(x.shape[-1])
    jacobian = coupled_jacobian(function, x, inputs=inputs, outputs=outputs)
    tokens, d = x.shape
    # Uniform on the sphere of the chosen inputs, and no step beyond their number.
    start = torch.zeros(tokens, d, dtype=torch.float64, device=x.device)
    reached = len(jacobian.inputs) * d
    start[list(jacobian.inputs)] = (
        uniform_starts(1, reached, seed=request.seed).view(len(jacobian.inputs), d).to(x.device)
    )
    found = bracket_largest(
        jacobian,
        start.to(x.dtype).view(1, -1),
        steps=min(request.steps, reached),
        tolerance=request.tolerance,
        failure_probability=request.failure_probability,
        eps=ROUNDING * torch.finfo(x.dtype).eps,
        watch=watch,
    )
    left = right = None
    if request.vectors:
        left, right = (vector.view(tokens, d) for vector in found.state.top_vectors())
    return CoupledSpectral(
        lower=float(found.lower),
        upper=float(found.upper),
        converged=bool(found.converged),
        steps=found.state.steps,
        left=left,
        right=right,
        adjoint_error=_adjoint_error(jacobian, request.seed),
        failure_probability=request.failure_probability,
        seed=request.seed,
        inputs=jacobian.inputs,
        outputs=jacobian.outputs,
    )


def _check_request(distribution: str, estimator: str | None, probes: int) -> None:
    for name, value, known in (
        ("distribution", distribution, PROBES),
        ("estimator", estimator, (None, *ESTIMATORS, ROWS)),
    ):
        if value not in known:
            told = tuple(str(entry) for entry in known if entry is not None)
            raise InvalidValue(f"unknown {name} {value!r}", hint="Use one of these.", field=name, known=told)
    if probes < 2:
        raise InvalidValue(f"{probes} probes tell no error", hint="Ask for two at least.", field="probes")


def _row_by_row(jacobian: CoupledJacobian, *, distribution: str, seed: int, watch: Watch) -> FrobeniusEstimate:
    rows = len(jacobian.outputs) * jacobian.x.shape[-1]
    square = 0.0
    for row in range(rows):
        watch.at(row, rows, "rows")
        unit = torch.zeros(rows, dtype=torch.float64)
        unit[row] = 1.0
        square += float(lengths(jacobian.pulled(unit)).double().square())
    frobenius = math.sqrt(square)
    return FrobeniusEstimate(
        frobenius=frobenius,
        standard_error=0.0,
        lower=frobenius,
        upper=frobenius,
        probes=rows,
        products=rows,
        estimator=ROWS,
        distribution=distribution,
        seed=seed,
        inputs=jacobian.inputs,
        outputs=jacobian.outputs,
    )


def _captured(
    jacobian: CoupledJacobian, generator: torch.Generator, rank: int, watch: Watch
) -> tuple[float, Tensor, int]:
    """||Q^T J||_F^2 for an orthonormal Q `[outputs d, rank]` of J times random vectors; Q, and the products made."""
    tokens, d = jacobian.x.shape
    columns: list[Tensor] = []
    for number in range(rank):
        watch.at(number, 2 * rank, "basis")
        v = torch.randn(tokens, d, generator=generator, dtype=torch.float64).to(jacobian.x).view(1, -1)
        columns.append(jacobian.times(v).view(tokens, d)[list(jacobian.outputs)].reshape(-1).double().cpu())
    basis = cast("tuple[Tensor, Tensor]", torch.linalg.qr(torch.stack(columns, dim=1)))[0]
    square = 0.0
    for number in range(rank):
        watch.at(rank + number, 2 * rank, "basis")
        square += float(lengths(jacobian.pulled(basis[:, number])).double().square())
    return square, basis, 2 * rank


def _adjoint_error(jacobian: CoupledJacobian, seed: int) -> float:
    u, v = uniform_starts(2, jacobian.x.numel(), seed=seed + 1).to(jacobian.x).unsqueeze(1)
    forward = jacobian.times(v)
    across = (u * forward).sum(dtype=torch.float64) - (jacobian.transposed_times(u) * v).sum(dtype=torch.float64)
    size = float(lengths(forward))
    return abs(float(across)) / size if size > 0 else abs(float(across))


def _student_975(freedom: int) -> float:
    """The 97.5 % point of Student's t: Cornish and Fisher's expansion, 2 % off for 2 degrees of freedom, then less.

    Abramowitz and Stegun 26.7.5.
    """
    z, n = _NORMAL_975, float(freedom)
    if freedom == 1:
        return math.tan(math.pi * 0.475)
    return z + (
        (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )
