from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.norm_statistics import REPORTED_DTYPES, dtype_report, norm_invariances, norm_statistics
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numerics.makers import random_tensor

D = 8
CHANGES: dict[str, Any] = {"shift": 2.0, "scale": 3.0, "channel_scale": torch.linspace(0.5, 2.0, D)}


def test_moments_and_outputs_with_gain_and_offset() -> None:
    # [1, 3]: mean 2, mean square 5, variance 1; with eps = 4, s = 3 and sqrt(5); the gain is 1 + [1, 2].
    x = torch.tensor([[1.0, 3.0]])
    found = norm_statistics(x, 4.0, gain=torch.tensor([1.0, 2.0]), offset=1.0)
    assert [tensor.item() for tensor in found[:3]] == [2.0, 5.0, 1.0]
    expected = {"rms": [2.2360679775], "rmsnorm": [[2 / 3, 3.0]], "layernorm": [[-0.894427191, 1.3416407865]]}
    for name, value in expected.items():
        # Literals to ten decimals.
        torch.testing.assert_close(getattr(found, name), torch.tensor(value, dtype=torch.float64), rtol=0.0, atol=5e-11)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 4), d=st.integers(1, 16), seed=st.integers(0, 1000), mean=st.sampled_from([0.0, 5.0, 1e6]))
def test_the_mean_square_is_the_variance_and_the_squared_mean(rows: int, d: int, seed: int, mean: float) -> None:
    found = norm_statistics(random_tensor(rows, d, seed=seed) + mean, 1e-5)
    expected = found.variance + found.mean.square()
    # Some ulps of the mean square.
    torch.testing.assert_close(found.square_mean, expected, rtol=1e-14, atol=0.0)
    assert (found.variance >= 0).all()
    assert torch.equal(found.rms, found.square_mean.sqrt())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_rows_are_described_in_float64(dtype: torch.dtype) -> None:
    x = random_tensor(3, 5, D, dtype=dtype)
    found, wide = norm_statistics(x, 1e-5), norm_statistics(x.double(), 1e-5)
    for ours, theirs in zip(found, wide, strict=True):
        assert ours.dtype == torch.float64
        assert torch.equal(ours, theirs)
    assert [tuple(tensor.shape) for tensor in found] == [(3, 5)] * 4 + [(3, 5, D)] * 2


# Rounding of float64 outputs up to ten.
NOTHING = 1e-14


def test_what_each_norm_is_invariant_to_without_eps() -> None:
    found = norm_invariances(random_tensor(20, D) + 1.0, 0.0, **CHANGES)
    assert (found.shift.layer < NOTHING).all()
    assert (found.shift.rms > 1e-2).all()
    for differences in (found.positive_scale, found.negative_scale_flipped):
        assert (differences.rms < NOTHING).all()
        assert (differences.layer < NOTHING).all()
    for differences in (found.negative_scale, found.channel_scale):
        assert (differences.rms > 1e-2).all()
        assert (differences.layer > 1e-2).all()


def test_an_eps_breaks_the_invariance_under_scale_and_not_under_shift() -> None:
    found = norm_invariances(random_tensor(20, D), 0.5, **CHANGES)
    assert (found.shift.layer < NOTHING).all()
    for differences in (found.positive_scale, found.negative_scale_flipped):
        assert (differences.rms > 1e-2).all()
        assert (differences.layer > 1e-2).all()


def test_differences_by_hand() -> None:
    # rms_norm([1, 3]) is [0.447214, 1.341641]; shifted by 2, [3, 5] / sqrt(17); per channel, [3, 3] / 3.
    x = torch.tensor([1.0, 3.0])
    found = norm_invariances(x, 0.0, shift=2.0, scale=5.0, channel_scale=torch.tensor([3.0, 1.0]))
    for differences, value in (
        (found.shift, 0.280393),
        (found.negative_scale, 2 * 1.341641),
        (found.channel_scale, 0.552786),
    ):
        # Literals to six decimals, one of them doubled.
        assert differences.rms.item() == pytest.approx(value, abs=1.1e-6)
    assert found.negative_scale.layer.item() == 2.0


def test_the_gain_scales_the_differences() -> None:
    x, gain = random_tensor(4, D), torch.full((D,), 2.0, dtype=torch.float64)
    plain, doubled = norm_invariances(x, 0.1, **CHANGES), norm_invariances(x, 0.1, gain=gain, **CHANGES)
    for ours, theirs in zip(doubled, plain, strict=True):
        assert torch.equal(ours.rms, 2 * theirs.rms)
        assert torch.equal(ours.layer, 2 * theirs.layer)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"scale": 0.0}, "scale"),
        ({"scale": -1.0}, "scale"),
        ({"scale": torch.inf}, "scale"),
        ({"shift": torch.nan}, "shift"),
        ({"channel_scale": torch.ones(D + 1)}, "channel_scale"),
        ({"gain": torch.ones(1)}, "gain"),
    ],
)
def test_changes_without_meaning_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        norm_invariances(random_tensor(2, D), 0.1, **(CHANGES | changes))
    assert caught.value.field == field


@pytest.mark.parametrize("eps", [-1.0, torch.nan, torch.inf])
def test_an_impossible_eps_is_refused_everywhere(eps: float) -> None:
    x = random_tensor(2, D)
    with pytest.raises(InvalidValue):
        norm_statistics(x, eps)
    with pytest.raises(InvalidValue):
        norm_invariances(x, eps, **CHANGES)
    with pytest.raises(InvalidValue):
        dtype_report(x, eps)


def test_a_gain_of_another_width_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"\[3\]") as caught:
        norm_statistics(random_tensor(2, D), 0.1, gain=torch.ones(3))
    assert caught.value.field == "gain"


# The edges of the dtypes: float16 ends at 65504, its squares at 255.9; bfloat16 and float32 near 3.4e38, at 1.8e19.


@pytest.mark.parametrize(
    ("row", "dtype", "value", "square", "square_sum", "underflow"),
    [
        ([1.0, 2.0], "float16", False, False, False, False),
        ([255.0, 1.0], "float16", False, False, False, False),
        ([255.0, 255.0], "float16", False, False, True, False),
        ([-256.0, 0.0], "float16", False, True, True, False),
        ([65504.0, 0.0], "float16", False, True, True, False),
        ([0.0, -65505.0], "float16", True, True, True, False),
        ([65505.0, 0.0], "bfloat16", False, False, False, False),
        ([1e19, 1e19], "bfloat16", False, False, False, False),
        ([1.5e19, 1.5e19], "bfloat16", False, False, True, False),
        ([2e19, 0.0], "bfloat16", False, True, True, False),
        ([3.4e38, 0.0], "float32", False, True, True, False),
        ([3.5e38, 0.0], "float32", True, True, True, False),
        ([torch.inf, 0.0], "float32", True, True, True, False),
        ([torch.nan, 0.0], "float16", False, False, False, False),
        ([1e-4, 1e-4], "float16", False, False, False, True),
        ([1e-4, 1e-2], "float16", False, False, False, False),
        ([0.0, 0.0], "float16", False, False, False, False),
        ([1e-20, 1e-20], "bfloat16", False, False, False, False),
        ([1e-23, 1e-23], "float32", False, False, False, True),
    ],
)
def test_what_does_not_fit(
    row: list[float], dtype: str, value: bool, square: bool, square_sum: bool, underflow: bool
) -> None:
    found = dtype_report(torch.tensor([row, [1.0, 1.0]], dtype=torch.float64), 1e-5)[dtype]
    assert found.value_overflow.tolist() == [value, False]
    assert found.square_overflow.tolist() == [square, False]
    assert found.square_sum_overflow.tolist() == [square_sum, False]
    assert found.square_underflow.tolist() == [underflow, False]


@pytest.mark.parametrize(
    ("eps", "dtype", "zero", "subnormal"),
    [
        (0.0, "float16", False, False),
        (1e-8, "float16", True, False),
        (1e-6, "float16", False, True),
        (1e-5, "float16", False, True),
        (1e-4, "float16", False, False),
        (1e-12, "bfloat16", False, False),
        (1e-39, "bfloat16", False, True),
        (1e-45, "bfloat16", True, False),
        (1e-12, "float32", False, False),
        (1e-50, "float32", True, False),
    ],
)
def test_what_becomes_of_eps(eps: float, dtype: str, zero: bool, subnormal: bool) -> None:
    found = dtype_report(torch.ones(2, 3), eps)[dtype]
    assert (found.eps_zero.item(), found.eps_subnormal.item()) == (zero, subnormal)


def test_every_dtype_is_reported_with_the_shape_of_the_rows() -> None:
    x: Tensor = random_tensor(2, 3, D)
    report = dtype_report(x, 1e-5)
    assert list(report) == list(REPORTED_DTYPES)
    for entry in report.values():
        assert [tuple(tensor.shape) for tensor in entry] == [(2, 3)] * 4 + [()] * 2
        assert {tensor.dtype for tensor in entry} == {torch.bool}
