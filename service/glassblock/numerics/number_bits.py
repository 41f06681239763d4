"""Extremes of numbers, and how many are zero or subnormal, from their bits.

The bits of a floating-point number are a sign and a magnitude, and magnitudes are ordered as whole numbers. Read as
signed whole numbers, the greatest bits are the positive number farthest from zero and the least bits the negative one
nearest to it; read as unsigned ones, it is the other way round. So four extremes of the bits, which cost no more than
reading them, tell the extremes of the numbers, whether all are finite, and whether one is subnormal or zero. Only then
these are counted.
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

_BLOCK = 1 << 16  # comparisons, of a byte each, that stay in a core's cache

READ_BY_BITS = frozenset(_FORMS)
"""The dtypes whose numbers are looked at by their bits."""


def number_counts(numbers: Shaped[Tensor, " n"]) -> NumberCounts | None:
    """Extremes, zeros and subnormal numbers of at least one number; None where one is infinite or NaN.

    Args:
        numbers: In one of `READ_BY_BITS`, contiguous.
    """
    form = _FORMS[numbers.dtype]
    bits, sign = numbers.view(form.whole), -torch.iinfo(form.whole).min
    low, high, unsigned_low, unsigned_high = _extremes(bits, form)
    positive, negative = high >= 0, low < 0
    farthest = unsigned_high - sign  # magnitude of the least number, where one is negative
    if (positive and high >= form.infinity) or (negative and farthest >= form.infinity):
        return None
    zero = below = 0
    if positive and unsigned_low < form.normal:
        zero, below = _count(bits, form, sign=0, any_zero=unsigned_low == 0)
    if negative and low + sign < form.normal:
        more_zero, more_below = _count(bits, form, sign=sign, any_zero=low == -sign)
        zero, below = zero + more_zero, below + more_below
    least = -_number(farthest, form) if negative else _number(low, form)
    most = _number(high, form) if positive else -_number(low + sign, form)
    return NumberCounts(zero, below - zero, least + 0.0, most + 0.0)  # without a sign of zero


def _number(magnitude: int, form: _Form) -> float:
    """The positive number with these bits."""
    number: float = struct.unpack(form.codes[1], struct.pack(form.codes[0], magnitude << form.shift))[0]
    return number


def _extremes(bits: Tensor, form: _Form) -> tuple[int, int, int, int]:
    """Least and greatest bits, read as signed whole numbers and then as unsigned ones."""
    if bits.device.type == "cpu":
        # With numpy: it has unsigned numbers of every width, and returns a number without making a tensor of it.
        signed = bits.numpy()
        unsigned = signed.view(form.unsigned)
        return int(signed.min()), int(signed.max()), int(unsigned.min()), int(unsigned.max())
    sign = torch.iinfo(form.whole).min
    low, high = torch.aminmax(bits)
    # With the sign bit turned over, signed numbers have the order of unsigned ones.
    unsigned_low, unsigned_high = torch.aminmax(bits ^ sign)
    return int(low), int(high), int(unsigned_low) - sign, int(unsigned_high) - sign


def _count(bits: Tensor, form: _Form, *, sign: int, any_zero: bool) -> tuple[int, int]:
    """How many numbers of one sign are zero, and how many are that or subnormal; `sign` is 0 or the bit of minus."""
    if bits.device.type != "cpu":
        near = bits < form.normal - sign
        if not sign:
            near &= bits >= 0
        return int((bits == -sign).sum()), int(near.sum())
    # With numpy, which counts four times as fast as torch, and in one buffer: what is allocated anew costs more.
    whole, zero, below = bits.numpy(), 0, 0
    if not sign:
        whole = whole.view(form.unsigned)
        zero = len(whole) - int(np.count_nonzero(whole)) if any_zero else 0
    buffer = np.empty(min(_BLOCK, len(whole)), dtype=np.bool_)
    for start in range(0, len(whole), _BLOCK):
        block = whole[start : start + _BLOCK]
        room = buffer[: len(block)]
        below += int(np.count_nonzero(np.less(block, form.normal - sign, out=room)))
        if sign and any_zero:
            zero += int(np.count_nonzero(np.equal(block, -sign, out=room)))
    return zero, below


def nonzero_count(numbers: Shaped[Tensor, " n"]) -> int:
    """How many whole numbers are not zero."""
    if numbers.device.type == "cpu":
        return int(np.count_nonzero(numbers.numpy()))
    return int(torch.count_nonzero(numbers))
