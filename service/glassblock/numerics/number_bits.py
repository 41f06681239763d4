"""Extremes of numbers, and how many are zero or subnormal, from their bits.

The bits of a floating-point number are a sign and a magnitude, and magnitudes are ordered as whole numbers. Read as
signed whole numbers, the greatest bits are the positive number farthest from zero and the least bits the negative one
nearest to it; read as unsigned ones, it is the other way round. So four extremes of the bits, which cost no more than
reading them, tell the extremes of the numbers, whether all are finite, and whether one is subnormal or zero.

Only where one is they are counted: those below the bits of the least normal number, and those that are not zero.
"""

import struct
from typing import Any, NamedTuple

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
    """The bits of a dtype: whole numbers as wide, the bits of infinity, those of the least normal number.

    Python's `struct` reads them by two codes, of whole numbers and of floats, once they are moved up by `shift`.
    """

    whole: torch.dtype
    unsigned: type[np.unsignedinteger[Any]]
    infinity: int
    normal: int
    codes: tuple[str, str]
    shift: int = 0


_FORMS = {
    torch.float16: _Form(torch.int16, np.uint16, 0x7C00, 0x0400, ("H", "e")),
    torch.bfloat16: _Form(torch.int16, np.uint16, 0x7F80, 0x0080, ("I", "f"), 16),
    torch.float32: _Form(torch.int32, np.uint32, 0x7F80_0000, 0x0080_0000, ("I", "f")),
    torch.float64: _Form(torch.int64, np.uint64, 0x7FF0_0000_0000_0000, 0x0010_0000_0000_0000, ("Q", "d")),
}

READ_BY_BITS = frozenset(_FORMS)
"""The dtypes whose numbers are looked at by their bits."""


def number_counts(numbers: Shaped[Tensor, " n"]) -> NumberCounts | None:
    """Extremes, zeros and subnormal numbers of at least one number; None where one is infinite or NaN.

    Args:
        numbers: In one of `READ_BY_BITS`, contiguous.
    """
    form = _FORMS[numbers.dtype]
    bits, sign = numbers.view(form.whole), -torch.iinfo(form.whole).min
    low, high = (int(extreme) for extreme in torch.aminmax(bits))
    unsigned_low, unsigned_high = _unsigned_extremes(bits, form)
    positive, negative = high >= 0, low < 0
    # Magnitudes of the negative numbers.
    nearest, farthest = low + sign, unsigned_high - sign
    if (positive and high >= form.infinity) or (negative and farthest >= form.infinity):
        return None
    zero = subnormal = 0
    if negative and nearest < form.normal:
        zero, subnormal = _near_zero(bits << 1, form, 2 * form.normal)  # without the sign
    elif positive and unsigned_low < form.normal:
        zero, subnormal = _near_zero(bits, form, form.normal)
    least = -_number(farthest, form) if negative else _number(unsigned_low, form)
    most = _number(high, form) if positive else -_number(nearest, form)
    return NumberCounts(zero, subnormal, least + 0.0, most + 0.0)  # without a sign of zero


def _number(magnitude: int, form: _Form) -> float:
    """The positive number with these bits."""
    number: float = struct.unpack(form.codes[1], struct.pack(form.codes[0], magnitude << form.shift))[0]
    return number


def _unsigned_extremes(bits: Tensor, form: _Form) -> tuple[int, int]:
    """The least and the greatest bits, read as whole numbers without a sign."""
    if bits.device.type == "cpu":
        # With numpy, which has unsigned numbers of every width.
        unsigned = bits.numpy().view(form.unsigned)
        return int(unsigned.min()), int(unsigned.max())
    # With the sign bit turned over, signed numbers have the order of unsigned ones.
    sign = torch.iinfo(form.whole).min
    low, high = torch.aminmax(bits ^ sign)
    return int(low) - sign, int(high) - sign


def _near_zero(bits: Tensor, form: _Form, normal: int) -> tuple[int, int]:
    """How many are zero, and how many others are below `normal`, read as whole numbers without a sign."""
    if bits.device.type != "cpu":
        sign = torch.iinfo(form.whole).min
        zero = bits.numel() - int(torch.count_nonzero(bits))
        return zero, int(torch.count_nonzero(bits ^ sign < normal + sign)) - zero
    # With numpy, which counts ten times as fast as torch.
    unsigned = bits.numpy().view(form.unsigned)
    zero = len(unsigned) - int(np.count_nonzero(unsigned))
    return zero, int(np.count_nonzero(unsigned < normal)) - zero


def nonzero_count(numbers: Shaped[Tensor, " n"]) -> int:
    """How many whole numbers are not zero."""
    if numbers.device.type == "cpu":
        return int(np.count_nonzero(numbers.numpy()))
    return int(torch.count_nonzero(numbers))
