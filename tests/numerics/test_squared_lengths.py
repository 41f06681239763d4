"""Squared lengths of rows and columns, against torch's norms in float64; overflow is infinite and silent."""

from functools import partial

import pytest
import torch
from glassblock.numerics.squared_lengths import column_squares, row_squares
from torch import Tensor


def matrix(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 7), (64, 576), (576, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_norms_in_float64(shape: tuple[int, int], dtype: torch.dtype) -> None:
    numbers = matrix(*shape).to(dtype)
    exact = numbers.double().square()
    # A sum of n squares, each rounded: n eps at most, relative.
    bound = max(shape) * torch.finfo(dtype).eps
    for found, expected in ((row_squares(numbers), exact.sum(1)), (column_squares(numbers), exact.sum(0))):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=bound, atol=0.0)


def test_of_a_part_that_is_not_contiguous() -> None:
    whole = matrix(10, 6)
    # Two orders of a sum of ten numbers at most.
    close = partial(torch.testing.assert_close, rtol=10 * torch.finfo(torch.float32).eps, atol=0.0)
    close(row_squares(whole[::2, 1:4]), whole[::2, 1:4].square().sum(1))
    close(column_squares(whole.T), whole.T.square().sum(0))


def test_what_overflows_is_infinite_and_what_is_no_number_stays_none() -> None:
    numbers = torch.tensor([[1e30, 1.0], [1.0, 2.0], [float("nan"), 0.0]])
    assert row_squares(numbers)[:2].tolist() == [float("inf"), 5.0]
    assert row_squares(numbers)[2].isnan()
    assert column_squares(numbers)[0].isnan()
    assert column_squares(numbers)[1] == 5.0


@pytest.mark.parametrize("rows", [31, 32, 33, 576, 65_537])
def test_columns_of_equal_numbers_are_as_exact_however_many_there_are(rows: int) -> None:
    numbers = torch.full((rows, 3), 0.1)
    exact = numbers.double().square().sum(0)
    # A sum of 32 rounded squares, and one rounding of all such sums: 33 eps at most, relative.
    torch.testing.assert_close(column_squares(numbers).double(), exact, rtol=33 * 2.0**-24, atol=0.0)
