"""Extreme singular values of norms' Jacobians against the dense ones, whatever the gain."""

import pytest
import torch
from glassblock.numerics.norm_jacobians import (
    norm_jacobian,
    norm_jacobian_along_row,
)
from glassblock.numerics.norm_singular_values import norm_singular_values
from glassblock.numerics.norms import Norm, norm_kind_named
from torch import Tensor

from numerics.makers import make_norm, random_tensor, unit_norm

D = 16


def rows() -> Tensor:
    x = random_tensor(5, D, seed=1)
    x[1] *= 1e-4  # eps, not the row, is what divides
    x[2] *= 1e5
    x[3, 4] = 1e3  # nearly along one channel
    x[4] += 30.0  # nearly constant
    return x


def check(x: Tensor, norm: Norm) -> None:
    values = torch.linalg.svdvals(norm_jacobian(x, norm))
    found = norm_singular_values(x, norm)
    torch.testing.assert_close(found.largest, values[:, 0], rtol=1e-13, atol=0.0)
    # The dense decomposition knows the smallest to its own rounding, some eps of the largest, and no better.
    assert ((found.smallest - values[:, -1]).abs() <= 1e-14 * values[:, 0]).all()


@pytest.mark.parametrize("kind", ["rms_llama", "rms_plus1", "rms_noweight", "layernorm", "layernorm_noparam"])
def test_against_the_dense_decomposition(kind: str) -> None:
    for seed in range(4):
        check(rows(), make_norm(kind, D, seed=seed))


def test_equal_and_zero_gains_and_no_epsilon() -> None:
    x = rows()
    for gain in (
        torch.ones(D).double(),
        torch.zeros(D).double(),
        torch.cat([torch.full((D - 1,), 2.0), torch.zeros(1)]),
    ):
        check(x, Norm(norm_kind_named("rms_llama"), gain.double(), None, 1e-3))
    check(x, unit_norm())
    assert (norm_singular_values(x, unit_norm()).smallest == 0).all()
    assert (norm_singular_values(x, make_norm("layernorm", D)).smallest == 0).all()


def test_a_unit_gain_has_the_closed_form_however_small_the_last_value() -> None:
    x, norm = 1e6 * random_tensor(3, D, seed=7), unit_norm(eps=1e-5)
    s = (x.square().mean(-1) + norm.eps).sqrt()
    found = norm_singular_values(x, norm)
    torch.testing.assert_close(found.largest, 1 / s, rtol=1e-14, atol=0.0)
    # 17 orders below the largest: the dense decomposition cannot see it.
    torch.testing.assert_close(found.smallest, norm.eps / s**3, rtol=1e-12, atol=0.0)


def test_a_row_of_zeros() -> None:
    check(torch.zeros(2, D, dtype=torch.float64), make_norm("rms_llama", D))


@pytest.mark.parametrize(("kind", "width"), [("rms_llama", 1), ("layernorm", 2)])
def test_where_nothing_but_the_row_itself_is_left(kind: str, width: int) -> None:
    """One value, in closed form; the dense Jacobian would find it as a difference of larger numbers."""
    x, norm = random_tensor(3, width), make_norm(kind, width)
    centred = x - x.mean(-1, keepdim=True) if norm.kind.centred else x
    along = torch.linalg.vector_norm(norm_jacobian_along_row(x, norm), dim=-1)
    left = along / torch.linalg.vector_norm(centred, dim=-1)
    found = norm_singular_values(x, norm)
    torch.testing.assert_close(found.largest, left, rtol=1e-14, atol=0.0)
    torch.testing.assert_close(found.smallest, left if width == 1 else torch.zeros_like(left), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("kind", ["rms_llama", "rms_noweight", "layernorm", "layernorm_noparam"])
def test_rows_without_a_direction_of_few_channels(kind: str, width: int) -> None:
    """Of zeros, and constant: as far as a norm of that width has anything to keep, it keeps it."""
    x = torch.stack([torch.zeros(width), torch.full((width,), 0.1)]).double()
    norm = make_norm(kind, width)
    found, dense = norm_singular_values(x, norm), norm_jacobian(x, norm)
    torch.testing.assert_close(found.largest, torch.linalg.svdvals(dense)[:, 0], rtol=1e-13, atol=1e-15)
