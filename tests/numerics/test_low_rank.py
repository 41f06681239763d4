"""The rank of a difference of two weights, under the rounding of their dtypes."""

import pytest
import torch
from glassblock.numerics.low_rank import MOST_RANK, low_rank, rounding_noise
from torch import Tensor

M, N = 192, 256


def base(dtype: torch.dtype) -> Tensor:
    return torch.randn(M, N, generator=torch.Generator().manual_seed(0)).mul(0.05).to(dtype)


def adapter(rank: int, size: float) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    delta = torch.randn(M, rank, generator=generator) @ torch.randn(rank, N, generator=generator)
    return delta * (size * base(torch.float32).norm() / delta.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 8, 32])
def test_a_merged_adapter_has_its_rank(rank: int, dtype: torch.dtype) -> None:
    before = base(dtype)
    merged = (before.float() + adapter(rank, 0.05)).to(dtype)
    assert low_rank(merged, before, seed=0) == rank
    assert low_rank(before, merged, seed=1) == rank


def test_an_adapter_that_was_merged_in_float32_and_saved_beside_a_rounded_base() -> None:
    whole = base(torch.float32)
    assert low_rank(whole + adapter(8, 0.05), whole.to(torch.bfloat16), seed=0) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_changes_have_no_low_rank(dtype: torch.dtype) -> None:
    before = base(dtype)
    noise = torch.randn(M, N, generator=torch.Generator().manual_seed(9)) * 0.0005
    assert low_rank((before.float() + noise).to(dtype), before, seed=0) is None
    assert low_rank((before.float() + adapter(8, 0.05) + noise).to(dtype), before, seed=0) is None
    assert low_rank((before.float() + adapter(MOST_RANK, 0.05)).to(dtype), before, seed=0) is None
    assert low_rank(before, before, seed=0) is None


def test_a_change_below_the_rounding_is_no_adapter() -> None:
    """Nothing is left of it but which numbers were rounded up."""
    before = base(torch.bfloat16)
    assert low_rank((before.float() + adapter(8, 0.0005)).to(torch.bfloat16), before, seed=0) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_expected_rounding_is_what_rounding_leaves(dtype: torch.dtype) -> None:
    whole = base(torch.float32)
    left = float((whole - whole.to(dtype).float()).square().sum())
    # ulp^2 / 12 holds on average over 49,152 numbers whose places between two neighbours are uniform.
    assert rounding_noise(whole.to(dtype)) == pytest.approx(left, rel=0.05)
