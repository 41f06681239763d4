"""On which grid numbers lie: told of codes in any dtype, and of nothing that was trained."""

import pytest
import torch
from glassblock.audit.grain import Grain
from torch import Tensor

CODES = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 60


def grids(numbers: Tensor) -> set[str]:
    return set(Grain().and_then(numbers).grids)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_codes_keep_their_grid_in_every_dtype(dtype: torch.dtype) -> None:
    assert "e4m3" in grids(CODES.clamp(-448, 448).to(torch.float8_e4m3fn).to(dtype))
    assert "integer" in grids(CODES.clamp(-127, 127).round().to(dtype))
    assert "e2m1" in grids(torch.tensor([0.5, -1.5, 6.0, 3.0, 0.0]).repeat(100).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_that_are_no_codes_are_on_none(dtype: torch.dtype) -> None:
    assert grids((CODES / 3).to(dtype)) == set()


def test_one_number_off_the_grid_is_seen_in_any_piece() -> None:
    codes = CODES.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    off = codes.clone()
    off[-1] = 0.3
    assert "e4m3" in grids(codes)
    assert grids(off) == set()
    assert Grain().and_then(codes).and_then(off).grids == frozenset()


def test_float32_that_bfloat16_would_hold() -> None:
    assert Grain().and_then(CODES.to(torch.bfloat16).float()).narrow
    assert not Grain().and_then(CODES).narrow
    assert not Grain().and_then(CODES.to(torch.bfloat16)).narrow


def test_every_number_of_four_bits_and_no_other() -> None:
    codes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert "e2m1" in grids(torch.cat([codes, -codes]))
    for other in (0.25, 2.5, 3.5, 5.0, 8.0, 12.0, 1e-40, float("inf"), float("nan")):
        assert "e2m1" not in grids(torch.cat([codes, torch.tensor([other])])), other


@pytest.mark.parametrize("place", [0, 1, 5000, 99_998, 99_999])
def test_whichever_number_is_off_the_grid_it_is_seen(place: int) -> None:
    numbers = torch.randint(-7, 8, (100_000,), generator=torch.Generator().manual_seed(0)).float()
    assert grids(numbers) >= {"integer", "e4m3"}
    numbers[place] = 1.06
    assert grids(numbers) == set()


def test_parts_together_lie_where_each_does() -> None:
    codes, off = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 9.0])
    assert Grain().and_then(codes).joined(Grain().and_then(off)) == Grain().and_then(torch.cat([codes, off]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 3, 4, 999])
def test_infinity_lies_among_whole_numbers_wherever_it_stands(place: int, dtype: torch.dtype) -> None:
    numbers = torch.randint(-127, 128, (1000,), generator=torch.Generator().manual_seed(0)).to(dtype)
    numbers[place] = -torch.inf
    assert "integer" in grids(numbers)


def test_a_signalling_nan_lies_on_no_grid_and_warns_nobody() -> None:
    numbers = torch.ones(8, dtype=torch.bfloat16)
    numbers.view(torch.int16)[5] = 0x7F81
    assert grids(numbers) == set()
