"""Likeness of two tensors from pieces, where their numbers are codes: whole numbers that float32 does not hold."""

import pytest
import torch
from glassblock.numerics.likeness import Likeness


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.int64])
def test_codes_that_float32_rounds_to_one_number_are_not_equal(dtype: torch.dtype) -> None:
    words = torch.tensor([2**24 + 4, 7], dtype=dtype)
    changed = torch.tensor([2**24 + 3, 7], dtype=dtype)
    assert float(words[0].float()) == float(changed[0].float())
    found = Likeness().and_then(words, changed)
    assert (found.elements, found.unequal) == (2, 1)
    assert found.rounded is None
    assert Likeness().and_then(words, words.clone()).equal


def test_nan_equals_nan_and_pieces_add_up() -> None:
    one = torch.tensor([1.0, torch.nan, 2.0])
    other = torch.tensor([1.0, torch.nan, 3.0])
    found = Likeness().and_then(one[:2], other[:2])
    assert found.equal
    found = found.and_then(one[2:], other[2:])
    assert (found.elements, found.unequal) == (3, 1)
