"""Closed forms against central differences, against autograd, and against one another."""

from dataclasses import replace

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.norm_jacobians import (
    norm_jacobian,
    norm_jacobian_along_row,
    norm_jacobian_frobenius,
    norm_jacobian_trace,
)
from glassblock.numerics.norms import NORM_KINDS, GainOrder
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.makers import central_differences, make_norm, random_tensor, unit_norm

D = 9
EVERY_KIND = sorted(NORM_KINDS)
EPS = [0.0, 1e-5, 0.7]

# With a step of 1e-5 the truncation, h^2/6 f''', and the rounding, 1e-16/h, are both near 1e-11; the third derivative
# of a norm whose s is of the order of one is of the order of ten.
DIFFERENCES = 5e-10
# Sums of nine float64 products that are a few ones large.
ROUNDING = 2e-14


def rows() -> Tensor:
    x = random_tensor(2, 3, D, seed=11)
    x[0, 1] += 2.0
    x[1, 2, 4] = 8.0
    return x


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("name", EVERY_KIND)
def test_dense_against_central_differences(name: str, eps: float) -> None:
    norm = make_norm(name, D, eps=eps)
    for row in rows().flatten(0, 1):
        expected = central_differences(norm, row)
        torch.testing.assert_close(norm_jacobian(row, norm), expected, rtol=0.0, atol=DIFFERENCES)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("name", EVERY_KIND)
def test_dense_against_autograd(name: str, eps: float) -> None:
    norm = make_norm(name, D, eps=eps)
    x = rows()
    jacobian = norm_jacobian(x, norm)
    assert jacobian.shape == (2, 3, D, D)
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        expected = torch.func.jacrev(norm)(x[tuple(index)])
        torch.testing.assert_close(jacobian[tuple(index)], expected, rtol=0.0, atol=ROUNDING)


@pytest.mark.parametrize("eps", EPS)
@pytest.mark.parametrize("name", EVERY_KIND)
def test_the_product_with_the_row_norm_and_trace_against_the_dense_matrix(name: str, eps: float) -> None:
    norm, x = make_norm(name, D, eps=eps), rows()
    dense = norm_jacobian(x, norm)
    close = {"rtol": 0.0, "atol": ROUNDING}
    torch.testing.assert_close(norm_jacobian_along_row(x, norm), torch.einsum("...ij,...j->...i", dense, x), **close)
    torch.testing.assert_close(norm_jacobian_frobenius(x, norm), torch.linalg.matrix_norm(dense), **close)
    torch.testing.assert_close(norm_jacobian_trace(x, norm), dense.diagonal(dim1=-2, dim2=-1).sum(-1), **close)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_the_textbook_form(name: str) -> None:
    norm, x = make_norm(name, D, eps=0.3), rows()
    gamma = torch.ones(D, dtype=torch.float64) if norm.gain is None else norm.gain + norm.kind.offset
    centred = x - x.mean(-1, keepdim=True) if norm.kind.centred else x
    s = (centred.square().mean(-1) + 0.3).sqrt()[..., None, None]
    projection = torch.eye(D, dtype=torch.float64) - (1 / D if norm.kind.centred else 0.0)
    outer = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    expected = gamma[:, None] * (projection / s - outer / (D * s**3))
    torch.testing.assert_close(norm_jacobian(x, norm), expected, rtol=0.0, atol=ROUNDING)


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(EVERY_KIND),
    exponent=st.integers(-280, 280),
    seed=st.integers(0, 1000),
)
def test_rows_of_any_size_scale_as_they_must(name: str, exponent: int, seed: int) -> None:
    # J(c x) = J(x) / c with eps = 0. Squares of 1e280 do not exist in float64.
    norm, x = make_norm(name, D, seed=seed, eps=0.0), random_tensor(3, D, seed=seed)
    scale = 10.0**exponent
    found = norm_jacobian(x * scale, norm) * scale
    torch.testing.assert_close(found, norm_jacobian(x, norm), rtol=1e-12, atol=1e-12)
    size = norm_jacobian_frobenius(x * scale, norm) * scale
    torch.testing.assert_close(size, norm_jacobian_frobenius(x, norm), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_float32_rows_whose_squares_overflow_keep_a_derivative(name: str) -> None:
    norm, x = make_norm(name, D, eps=1e-5), rows()
    huge = (x * 1e30).float()
    narrow = norm.to(torch.float32)
    found = norm_jacobian(huge, narrow)
    assert found.dtype == torch.float32
    expected = norm_jacobian(huge.double(), norm)
    # Tens of float32 roundings, relative to the largest entry of each matrix.
    assert ((found - expected).abs().amax((-2, -1)) < 1e-5 * expected.abs().amax((-2, -1))).all()


@pytest.mark.parametrize("name", EVERY_KIND)
def test_zero_rows_have_a_derivative_while_eps_is_there(name: str) -> None:
    norm, x = make_norm(name, D, eps=0.04), torch.zeros(D, dtype=torch.float64)
    gamma = torch.ones(D, dtype=torch.float64) if norm.gain is None else norm.gain + norm.kind.offset
    projection = torch.eye(D, dtype=torch.float64) - (1 / D if norm.kind.centred else 0.0)
    torch.testing.assert_close(norm_jacobian(x, norm), gamma[:, None] * projection / 0.2, rtol=1e-14, atol=1e-14)
    assert torch.equal(norm_jacobian_along_row(x, norm), x)


def test_without_eps_nothing_is_left_along_the_row_exactly() -> None:
    for name in EVERY_KIND:
        assert (norm_jacobian_along_row(rows(), make_norm(name, D, eps=0.0)) == 0).all(), name


def test_a_tiny_eps_is_seen_along_the_row_without_cancellation() -> None:
    x = torch.full((4,), 3.0, dtype=torch.float64)
    found = norm_jacobian_along_row(x, unit_norm(eps=1e-20))
    # eps x / s^3 = 1e-20 * 3 / 27; a product with the dense matrix would give rounding, near 1e-16.
    torch.testing.assert_close(found, torch.full((4,), 1e-20 / 9, dtype=torch.float64), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize(("name", "d"), [("rms_noweight", 1), ("layernorm_noparam", 2)])
def test_a_frobenius_norm_of_zero_is_no_root_of_a_negative_number(name: str, d: int) -> None:
    # One direction holds the whole row and eps is nothing: J is zero, and its square is rounding of either sign.
    x = random_tensor(1000, d)
    found = norm_jacobian_frobenius(x, unit_norm(name, eps=0.0)) * (x - x.mean(-1, keepdim=True) * (d - 1)).abs()[:, 0]
    # The root of a few ulps of one.
    assert (found < 5e-8).all()


def test_a_bias_has_no_part_in_it() -> None:
    norm, x = make_norm("layernorm", D), rows()
    assert torch.equal(norm_jacobian(x, norm), norm_jacobian(x, replace(norm, bias=None)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_rows_are_widened(dtype: torch.dtype) -> None:
    x = rows().to(dtype)
    norm = make_norm("rms_llama", D).to(dtype)
    assert norm_jacobian(x, norm).dtype == torch.float32
    wide = norm_jacobian(x.double(), norm.to(torch.float64))
    # Some float32 roundings on entries that are a few ones large.
    torch.testing.assert_close(norm_jacobian(x, norm).double(), wide, rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("name", sorted(name for name, kind in NORM_KINDS.items() if kind.gain is not GainOrder.NONE))
def test_rows_of_another_width_are_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="9 channels"):
        norm_jacobian(torch.ones(2, D + 1), make_norm(name, D))


@pytest.mark.parametrize("name", ["layernorm", "layernorm_noparam"])
def test_a_constant_row_near_overflow_beside_a_small_epsilon(name: str) -> None:
    """The row over s leaves float32, and nothing of the row is left."""
    norm = make_norm(name, D, dtype=torch.float32, eps=1e-12)
    x = torch.full((1, D), 1e33)
    gamma = torch.ones(D) if norm.gain is None else norm.gain
    expected = gamma.unsqueeze(-1) * (torch.eye(D) - 1 / D) / 1e-6
    torch.testing.assert_close(norm_jacobian(x, norm)[0], expected, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(norm_jacobian_frobenius(x, norm)[0], expected.norm(), rtol=1e-6, atol=0.0)
    torch.testing.assert_close(norm_jacobian_trace(x, norm)[0], expected.trace(), rtol=1e-5, atol=0.0)
    assert (norm_jacobian_along_row(x, norm) == 0).all()
