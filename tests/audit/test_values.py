"""What a tensor holds, over every dtype and however it is cut into pieces."""

import pytest
import torch
from glassblock.audit.values import TensorValues, coordinates
from glassblock.checkpoint.reading import TORCH_DTYPES
from torch import Tensor

EVERY = list(TORCH_DTYPES.values())
FLOATS = [dtype for dtype in EVERY if dtype.is_floating_point and dtype is not torch.float8_e8m0fnu]


NUMBERS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def values_of(tensor: Tensor, *, chunk_elements: int) -> TensorValues:
    values, flat = TensorValues(), tensor.reshape(-1)
    for start in range(0, flat.numel(), chunk_elements):
        values = values.and_then(flat[start : start + chunk_elements])
    return values


def counts(values: TensorValues) -> tuple[int, int, int | None, bool]:
    """What is told of every dtype."""
    return values.elements, values.non_finite, values.first_non_finite, values.any_nonzero


def of_bits(dtype: torch.dtype, bits: int, elements: int = 10) -> Tensor:
    return torch.full((elements * dtype.itemsize,), bits, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [dtype for dtype in EVERY if dtype is not torch.float8_e8m0fnu], ids=str)
def test_zeros_are_zeros(dtype: torch.dtype) -> None:
    assert counts(values_of(of_bits(dtype, 0), chunk_elements=4)) == (10, 0, None, False)
    assert values_of(of_bits(dtype, 0), chunk_elements=4).all_zero


@pytest.mark.parametrize("dtype", EVERY, ids=str)
def test_one_number_is_not_zero(dtype: torch.dtype) -> None:
    # 0x01 in every byte is a small number in each of the dtypes, and true.
    tensor = of_bits(dtype, 0)
    tensor[9] = of_bits(dtype, 1, 1)[0]
    assert counts(values_of(tensor, chunk_elements=4)) == (10, 0, None, True)


def test_negative_zero_is_zero() -> None:
    for dtype in FLOATS:
        if dtype.itemsize > 1:
            assert values_of(torch.full((3,), -0.0, dtype=dtype), chunk_elements=2).all_zero
    assert values_of(of_bits(torch.float8_e4m3fn, 0x80), chunk_elements=4).all_zero


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("places", [[0], [6], [99], [13, 14, 80]], ids=str)
def test_not_finite_numbers_are_counted_and_the_first_is_placed(
    places: list[int], dtype: torch.dtype, chunk: int
) -> None:
    tensor = torch.ones(10, 10, dtype=dtype)
    for number, place in enumerate(places):
        tensor.view(-1)[place] = (float("nan"), float("inf"), float("-inf"))[number]
    values = values_of(tensor, chunk_elements=chunk)
    assert counts(values) == (100, len(places), places[0], True)
    assert (values.least, values.most) == (1.0, 1.0)


def test_a_complex_number_is_not_finite_when_a_part_is_not() -> None:
    tensor = torch.zeros(4, dtype=torch.complex64)
    tensor[2] = complex(0, float("nan"))
    assert counts(values_of(tensor, chunk_elements=3)) == (4, 1, 2, True)


def test_nan_of_eight_bits() -> None:
    tensor = torch.zeros(5).to(torch.float8_e4m3fn)
    tensor.view(torch.uint8)[3] = 0x7F
    assert counts(values_of(tensor, chunk_elements=2)) == (5, 1, 3, True)


@pytest.mark.parametrize("dtype", [*NUMBERS, torch.complex64], ids=str)
def test_nan_is_told_from_infinity(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, float("inf"), float("nan"), -float("inf"), float("nan")]).to(dtype)
    values = values_of(tensor, chunk_elements=2)
    assert (values.non_finite, values.nan) == (4, 2)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
def test_extremes_and_squares(shift: float, dtype: torch.dtype, chunk: int) -> None:
    tensor = (torch.randn(50, 20, generator=torch.Generator().manual_seed(0)) + shift).to(dtype)
    values = values_of(tensor, chunk_elements=chunk)
    wide = tensor.double()
    assert (values.least, values.most) == (float(wide.min()), float(wide.max()))
    # A sum of 1000 float32 numbers.
    assert values.square_sum == pytest.approx(float(wide.square().sum()), rel=1e-6)


def test_squares_beyond_float32_are_no_infinity() -> None:
    values = values_of(torch.full((8,), 1e30), chunk_elements=4)
    assert values.non_finite == 0
    assert values.square_sum == pytest.approx(8e60, rel=1e-6)  # 1e30 is rounded to float32


def test_numbers_whose_squares_vanish_are_not_zero() -> None:
    assert values_of(torch.full((8,), -1e-30), chunk_elements=4).any_nonzero


def test_nothing_is_neither_zero_nor_anything() -> None:
    assert values_of(torch.empty(0), chunk_elements=2) == TensorValues()
    assert not TensorValues().all_zero


@pytest.mark.parametrize(("index", "place"), [(0, (0, 0, 0)), (5, (0, 1, 1)), (23, (1, 2, 3))])
def test_coordinates(index: int, place: tuple[int, ...]) -> None:
    shape = (2, 3, 4)
    expected = tuple(int(axis) for axis in torch.unravel_index(torch.tensor(index), shape))
    assert coordinates(index, shape) == expected
    assert (index != 0) or place == expected


def test_a_scalar_has_no_coordinates() -> None:
    assert coordinates(0, ()) == ()


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_zeros_and_subnormal_numbers_are_counted(dtype: torch.dtype, chunk: int) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensor[::10], tensor[5::50] = 0.0, -0.0
    tensor[7::100] = torch.finfo(dtype).smallest_normal / 2
    tensor[9::100] = -torch.finfo(dtype).smallest_normal
    values = values_of(tensor, chunk_elements=chunk)
    assert (values.zeros, values.subnormal) == (120, 10)
    tensor[3] = float("nan")
    values = values_of(tensor, chunk_elements=chunk)
    assert (values.zeros, values.subnormal, values.non_finite) == (120, 10, 1)


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "numbers",
    [[1.0, 2.0], [-1.0, -2.0], [-1.0, 2.0], [0.0, -0.0], [-0.0, -3.0], [0.0, 3.0], [-2.0], [5.0], [-3.0, 0.0, 3.0]],
    ids=str,
)
def test_extremes_from_bits_are_those_of_the_numbers(numbers: list[float], dtype: torch.dtype) -> None:
    values = values_of(torch.tensor(numbers, dtype=dtype), chunk_elements=8)
    assert (values.least, values.most) == (min(numbers), max(numbers))
    assert values.zeros == numbers.count(0.0)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan"), -float("nan")], ids=str)
@pytest.mark.parametrize("other", [1.0, -1.0])
def test_nothing_that_is_not_finite_hides_in_its_bits(other: float, bad: float) -> None:
    for dtype in NUMBERS:
        tensor = torch.tensor([other, bad, other], dtype=dtype)
        if str(bad) == "nan" and other < 0:
            tensor[1] = torch.tensor([bad], dtype=dtype).neg()[0]  # the sign of NaN
        assert counts(values_of(tensor, chunk_elements=3)) == (3, 1, 1, True)
        assert counts(values_of(tensor[1:2], chunk_elements=3)) == (1, 1, 0, True)


def test_of_a_byte_the_subnormal_numbers_are_counted() -> None:
    tensor = torch.tensor([0.0, 2.0**-9, 2.0**-6, -(2.0**-8), 1.0]).to(torch.float8_e4m3fn)
    values = values_of(tensor, chunk_elements=2)
    assert (values.zeros, values.subnormal, values.least, values.most) == (1, 2, -(2.0**-8), 1.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.int16, torch.bool], ids=str)
def test_zeros_of_whole_numbers_are_counted(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 0, 3, 256]).to(torch.int64).to(dtype)
    assert values_of(tensor, chunk_elements=2).zeros == int((tensor == 0).sum())
