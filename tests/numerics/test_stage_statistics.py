import math

import pytest
import torch
from glassblock.numerics.stage_statistics import StageStatistics, stage_statistics
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.makers import random_tensor

NAN, INF = torch.nan, torch.inf


def numbers(found: StageStatistics) -> list[float]:
    return [tensor.item() for tensor in found]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0, -4.0], [-0.5, math.sqrt(12.5), -4.0, 3.0, 0, False]),
        ([3.0, -4.0, NAN, INF, -INF], [-0.5, math.sqrt(12.5), -4.0, 3.0, 3, True]),
        ([3.0, -4.0, NAN], [-0.5, math.sqrt(12.5), -4.0, 3.0, 1, False]),
        ([65504.0], [65504.0, 65504.0, 65504.0, 65504.0, 0, False]),
        ([-65505.0], [-65505.0, 65505.0, -65505.0, -65505.0, 0, True]),
        ([0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0, False]),
        ([NAN, INF], [NAN, NAN, NAN, NAN, 2, True]),
        ([NAN], [NAN, NAN, NAN, NAN, 1, False]),
        ([], [NAN, NAN, NAN, NAN, 0, False]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_by_hand(values: list[float], expected: list[float], dtype: torch.dtype) -> None:
    found = numbers(stage_statistics(torch.tensor(values, dtype=dtype)))
    # One rounding of float64 in the root and one in the product with the unit.
    assert found == pytest.approx(expected, rel=1e-15, nan_ok=True)
    assert found[2:] == pytest.approx(expected[2:], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_narrow_values_are_summed_in_float64(dtype: torch.dtype) -> None:
    # A running sum in float16 stops at 2048, and in bfloat16 at 256.
    values = torch.full((100, 1000), 1.0, dtype=dtype)
    values[0, 0] = 3.0
    found = stage_statistics(values)
    assert found.mean.item() == pytest.approx(1.00002, rel=1e-15)
    assert found.rms.item() == pytest.approx(math.sqrt(1.00008), rel=1e-15)
    assert [tensor.dtype for tensor in found] == [torch.float64] * 4 + [torch.int64, torch.bool]
    assert all(tensor.shape == () for tensor in found)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float64, 1e300), (torch.float64, 1e-300), (torch.float32, 1e38), (torch.bfloat16, 1e38)],
)
def test_squares_that_do_not_fit_do_no_harm(dtype: torch.dtype, size: float) -> None:
    values = torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64).mul(size).to(dtype)
    stored = values[0].item()
    found = stage_statistics(values)
    assert found.rms.item() == pytest.approx(stored, rel=1e-15)
    assert found.mean.item() == pytest.approx(stored / 2, rel=1e-15)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=20))
def test_against_python(values: list[float]) -> None:
    finite = [value for value in values if math.isfinite(value)]
    found = stage_statistics(torch.tensor(values, dtype=torch.float32))
    assert found.non_finite.item() == len(values) - len(finite)
    assert found.fp16_overflow.item() == any(abs(value) > 65504 for value in values)
    if finite:
        largest = max(map(abs, finite))
        # Cancelling sums of up to twenty numbers: relative to the largest.
        assert found.mean.item() == pytest.approx(math.fsum(finite) / len(finite), rel=0, abs=1e-14 * largest)
        rms = math.sqrt(math.fsum(value * value for value in finite) / len(finite))
        assert found.rms.item() == pytest.approx(rms, rel=1e-14)
        assert (found.min.item(), found.max.item()) == (min(finite), max(finite))


def test_any_shape() -> None:
    values = random_tensor(2, 3, 4)
    assert numbers(stage_statistics(values)) == pytest.approx(numbers(stage_statistics(values.flatten())), rel=1e-14)
    assert stage_statistics(torch.tensor(2.0)).mean.item() == 2.0
