"""Exact Frobenius norm and trace of block Jacobians in closed form, from Gram matrices or from dense cores.

Write J = shift I + L T with T = inner I + scale M R (`block_jacobians`), L = diag(gamma) Pi / s and R = diag(gamma_r)
Pi_r / s_r (`norm_factors`), N = M diag(gamma_r), and v, rho for the directions of a norm. All sums below are over the
directions; with G = gamma^2,

    ||N Pi_r||^2           = ||N||^2 - sum (1 - rho^2) |N v|^2                              likewise with gamma N
    tr(gamma N Pi_r)       = tr(gamma N) - sum (1 - rho) v . (gamma N v)                    likewise with G
    ||gamma T||^2          = inner^2 sum G + 2 inner scale tr(G N) + scale^2 ||gamma N Pi_r||^2
    ||gamma Pi T||^2       = ||gamma T||^2 - 2 sum (1 - rho_k) T^T G v_k . T^T v_k
                             + sum (1 - rho_k) (1 - rho_l) (v_k . G v_l) (T^T v_k . T^T v_l)
    tr(gamma Pi T)         = tr(gamma T) - sum (1 - rho_k) T^T v_k . gamma v_k
    ||J||^2                = shift^2 d + 2 shift tr(L T) + ||L T||^2

The scales s and s_r are divided out at the very end, in float64, so that rows near overflow or near zero leave numbers
of the order of one. Each sum over channels or neurons is in the dtype of the Jacobian, each sum of terms in float64.

**Cancellation.** Beside each result goes the sum of the absolute values of its terms over the result: the factor by
which rounding is magnified in ||J||^2. A negative result, which only rounding gives, shows as a negative factor.
Slopes are taken in units of the largest: deep in the tails of an activation their squares do not fit float32.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from glassblock.numerics.block_jacobians import BlockJacobian
from glassblock.numerics.formed_jacobians import branch_divisor, branch_formed, core_formed, formed
from glassblock.numerics.layer_grams import LayerGrams
from glassblock.numerics.norm_factors import NormFactors
from glassblock.numerics.watching import UNWATCHED, Watch


class ExactNorms(NamedTuple):
    """Of each token's Jacobian, float64 `[tokens]`.

    Attributes:
        frobenius: ||J||_F. NaN where rounding left the square negative.
        trace: tr J; its error is relative to ||J||_F.
        cancellation: By how much rounding is magnified. NaN where everything is zero, or underflows.
        core_along: `[tokens, d]`, M diag(gamma_r) v_1 for the row's direction v_1, where it was needed on the way.
    """

    frobenius: Tensor
    trace: Tensor
    cancellation: Tensor
    core_along: Tensor | None = None


def norms_from_grams(jacobian: BlockJacobian, grams: LayerGrams, *, watch: Watch = UNWATCHED) -> ExactNorms:
    """By the closed forms. `grams` must be those of the same part in the same dtype; `other` is not covered.

    Raises:
        ComputationCancelled: Between Gram blocks that are formed anew.
    """
    jacobian, unit = _in_units(jacobian)
    slopes = jacobian.slopes
    square = grams.quadratic_form(slopes, watch=watch)
    core = _Sums(
        square=square,
        sizes=torch.maximum(square, grams.neuron_sizes(slopes)),
        trace=torch.einsum("ktm,mk->t", slopes, grams.trace).double(),
        trace_squared=torch.einsum("ktm,mk->t", slopes, grams.trace_squared).double(),
    )
    along = None
    if jacobian.right is not None:
        pushed = [jacobian.core_times(jacobian.right.gamma * v) for v in jacobian.right.directions]
        core = _projected_on_the_right(jacobian, jacobian.right, core, pushed)
        along = pushed[0].double() * unit.unsqueeze(-1)
    scale = jacobian.scale
    core = _Sums(scale**2 * core.square, scale**2 * core.sizes, scale * core.trace, scale * core.trace_squared)
    if jacobian.left is not None:
        core = _projected_on_the_left(jacobian, jacobian.left, core)
    return _divided_and_shifted(jacobian, core, unit)._replace(core_along=along)


def norms_from_cores(jacobian: BlockJacobian) -> ExactNorms:
    """By pushing the identity through: M is formed for each token, and what follows is applied to it whole."""
    if jacobian.other is not None:
        return _norms_with_other(jacobian, jacobian.other)
    jacobian, unit = _in_units(jacobian)
    core, left = core_formed(jacobian), jacobian.left
    pieces = core if jacobian.right is None else core * jacobian.right.gamma
    pieces = pieces if left is None else left.gamma.unsqueeze(-1) * pieces
    sizes = jacobian.scale**2 * _square(pieces)
    if left is not None:
        sizes = sizes + jacobian.inner**2 * _dot(left.gamma, left.gamma)
    dense = branch_formed(jacobian, core)
    trace = _trace(dense)
    return _divided_and_shifted(jacobian, _Sums(_square(dense), sizes, trace, trace), unit)


def _in_units(jacobian: BlockJacobian) -> tuple[BlockJacobian, Tensor]:
    """The same with slopes divided by the largest of each token, and that, float64: all may be deep in a tail.

    In a POST block, where the identity is added to M, such slopes do not matter and stay as they are.
    """
    if jacobian.inner != 0.0:
        return jacobian, jacobian.amplification.new_ones(())
    unit = jacobian.slopes.abs().amax((0, -1))
    unit = torch.where(unit > 0.0, unit, torch.ones_like(unit))
    return dataclasses.replace(jacobian, slopes=jacobian.slopes / unit.unsqueeze(-1)), unit.double()


class _Sums(NamedTuple):
    """A squared norm, the absolute values of what it was summed from, tr(gamma T) and tr(gamma^2 T); float64.

    Before the norms' scales are divided out.
    """

    square: Tensor
    sizes: Tensor
    trace: Tensor
    trace_squared: Tensor


def _projected_on_the_right(
    jacobian: BlockJacobian, right: NormFactors, core: _Sums, pushed: Sequence[Tensor]
) -> _Sums:
    """`pushed` holds M diag(gamma_r) v for each direction v."""
    square, sizes, trace, trace_squared = core
    for v, rho, core_v in zip(right.directions, right.kept, pushed, strict=True):
        moved = core_v
        if jacobian.left is not None:
            moved = jacobian.left.gamma * core_v
            trace_squared = trace_squared - (1.0 - rho) * _dot(v, jacobian.left.gamma * moved)
        removed = (1.0 - rho.square()) * _dot(moved, moved)
        square, sizes = square - removed, sizes + removed
        trace = trace - (1.0 - rho) * _dot(v, moved)
    return _Sums(square, sizes, trace, trace_squared)


def _projected_on_the_left(jacobian: BlockJacobian, left: NormFactors, core: _Sums) -> _Sums:
    inner, gain_square = jacobian.inner, _dot(left.gamma, left.gamma)
    square = inner**2 * gain_square + 2.0 * inner * core.trace_squared + core.square
    sizes = inner**2 * gain_square + 2.0 * (inner * core.trace_squared).abs() + core.sizes
    trace = inner * left.gamma.sum(dtype=torch.float64) + core.trace
    weighted = left.gamma.square() * left.directions
    pulled = [_transposed_inner(jacobian, v) for v in left.directions]
    pulled_weighted = [_transposed_inner(jacobian, v) for v in weighted]
    removed = 1.0 - left.kept
    for k, v in enumerate(left.directions):
        crossed = 2.0 * removed[k] * _dot(pulled_weighted[k], pulled[k])
        square, sizes = square - crossed, sizes + crossed.abs()
        trace = trace - removed[k] * _dot(pulled[k], left.gamma * v)
        for j in range(len(pulled)):
            both = removed[k] * removed[j] * _dot(v, weighted[j]) * _dot(pulled[k], pulled[j])
            square, sizes = square + both, sizes + both.abs()
    return _Sums(square, sizes, trace, core.trace_squared)


def _transposed_inner(jacobian: BlockJacobian, v: Tensor) -> Tensor:
    """T^T v, times the s of the norm on the right."""
    found = jacobian.core_transposed_times(v)
    if jacobian.right is not None:
        found = jacobian.right.project(jacobian.right.gamma * found)
    return jacobian.scale * found + jacobian.inner * v


def _divided_and_shifted(jacobian: BlockJacobian, sums: _Sums, unit: Tensor) -> ExactNorms:
    divisor, shift, d = branch_divisor(jacobian) / unit, jacobian.shift, jacobian.width
    size, trace = sums.square.sqrt() / divisor, sums.trace / divisor
    if shift == 0.0:
        return ExactNorms(size, trace, sums.sizes / sums.square)
    # In terms of the larger of the two, so that no square overflows.
    larger = size.clamp(min=abs(shift))
    shifted, branch = shift / larger, size / larger
    terms = shifted.square() * d, 2.0 * shifted * (trace / larger), branch.square()
    total = terms[0] + terms[1] + terms[2]
    sizes = terms[0] + terms[1].abs() + sums.sizes * (1.0 / divisor / larger).square()
    return ExactNorms(larger * total.sqrt(), trace + shift * d, sizes / total)


def _norms_with_other(jacobian: BlockJacobian, other: Tensor) -> ExactNorms:
    alone, other = formed(dataclasses.replace(jacobian, other=None)).double(), other.double()
    dense = alone + other
    square = _square(dense)
    return ExactNorms(square.sqrt(), _trace(dense), (_square(alone) + _square(other)) / square)


def _square(dense: Tensor) -> Tensor:
    return dense.square().sum((-2, -1), dtype=torch.float64)


def _trace(dense: Tensor) -> Tensor:
    return dense.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=torch.float64)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, dtype=torch.float64)
