"""Extremes of numbers, and how many are zero or subnormal, from their bits.

The bits of a floating-point number are a sign and a magnitude, and magnitudes are ordered as whole numbers. So one
look at the extremes of the bits, read as whole numbers, tells the extremes of the numbers and whether all are finite,
at the speed of memory; whether one is subnormal or zero, the least magnitude tells, and they are counted only then.
"""

from typing import Any, NamedTuple, cast

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor


class NumberCounts(NamedTuple):
    """What some numbers are, all of them finite.

    Attributes:
        zero: How many are zero, of either sign.
        subnormal: How many are smaller than the least normal number of their dtype, and not zero.
        least, most: The extremes.
    """

    zero: int
    subnormal: int
    least: float
    most: float


class _Form(NamedTuple):
    """The bits of a dtype: whole numbers as wide, the bits of infinity, those of the least normal number."""

    whole: torch.dtype
    unsigned: type[np.unsignedinteger[Any]]
    infinity: int
    normal: int


_FORMS = {
    torch.float16: _Form(torch.int16, np.uint16, 0x7C00, 0x0400),
    torch.bfloat16: _Form(torch.int16, np.uint16, 0x7F80, 0x0080),
    torch.float32: _Form(torch.int32, np.uint32, 0x7F80_0000, 0x0080_0000),
    torch.float64: _Form(torch.int64, np.uint64, 0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000),
}

_BLOCK = 1 << 18  # numbers whose magnitudes stay in a core's cache

READ_BY_BITS = frozenset(_FORMS)
"""The dtypes whose numbers are looked at by their bits."""


def number_counts(numbers: Shaped[Tensor, " n"]) -> NumberCounts | None:
    """Extremes, zeros and subnormal numbers of at least one number; None where one is infinite or NaN.

    Args:
        numbers: In one of `READ_BY_BITS`, contiguous.
    """
    form = _FORMS[numbers.dtype]
    bits = numbers.view(form.whole)
    low, high = (int(extreme) for extreme in torch.aminmax(bits))
    greatest = torch.iinfo(form.whole).max
    # Of negative numbers the one farthest from zero has the greatest bits.
    negative = _most_negative(bits, form) if low < 0 <= high else high
    if high >= form.infinity or (negative & greatest) >= form.infinity:
        return None
    zero, below = _small(bits, form)
    ends = torch.tensor([low if low >= 0 else negative, high if high >= 0 else low], dtype=form.whole)
    least, most = cast("list[float]", ends.view(numbers.dtype).tolist())
    return NumberCounts(zero, below - zero, least + 0.0, most + 0.0)  # without a sign of zero


def _most_negative(bits: Tensor, form: _Form) -> int:
    """The bits of the least number, where there are numbers of both signs, as a signed whole number."""
    if bits.device.type == "cpu":
        greatest = int(bits.numpy().view(form.unsigned).max())
        return greatest - 2 * (torch.iinfo(form.whole).max + 1)
    return int(torch.where(bits < 0, bits, torch.iinfo(form.whole).min).max())


def _small(bits: Tensor, form: _Form) -> tuple[int, int]:
    """How many numbers are zero, and how many are that or subnormal."""
    greatest = torch.iinfo(form.whole).max
    if bits.device.type != "cpu":
        magnitudes = bits & greatest
        return int((magnitudes == 0).sum()), int((magnitudes < form.normal).sum())
    # With numpy, which counts four times as fast as torch, and in one buffer: what is allocated anew costs more.
    whole, zero, below = bits.numpy(), 0, 0
    buffer = np.empty(min(_BLOCK, len(whole)), dtype=whole.dtype)
    for start in range(0, len(whole), _BLOCK):
        block = whole[start : start + _BLOCK]
        magnitude = np.bitwise_and(block, greatest, out=buffer[: len(block)])
        if int(magnitude.min()) < form.normal:
            zero += len(block) - int(np.count_nonzero(magnitude))
            below += int(np.count_nonzero(magnitude < form.normal))
    return zero, below


def nonzero_count(numbers: Shaped[Tensor, " n"]) -> int:
    """How many whole numbers are not zero."""
    if numbers.device.type == "cpu":
        return int(np.count_nonzero(numbers.numpy()))
    return int(torch.count_nonzero(numbers))
