"""Extremes of numbers, and how many are zero or subnormal, from their bits.

The bits of a floating-point number are a sign and a magnitude, and magnitudes are ordered as whole numbers. Read as
signed whole numbers, the greatest bits are the positive number farthest from zero and the least bits the negative one
nearest to it; read as unsigned ones, it is the other way round. So four extremes of the bits, which cost no more than
reading them, tell the extremes of the numbers, whether all are finite, and whether one is subnormal or zero.

Where one is, the bits are moved up by one place, which drops the sign. Those that are left are zero for a zero of
either sign; and one less, read as unsigned ones, they wrap around for zero, so that the least of them is the number
nearest to zero that is not zero. Only where that one is subnormal the subnormal ones are counted.
"""

import struct
import threading
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
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

_ROOM_BYTES = 1 << 19  # of numbers that stay in a core's cache while they are looked at three times
_kept = threading.local()

READ_BY_BITS = frozenset(_FORMS)
"""The dtypes whose numbers are looked at by their bits."""


def number_counts(numbers: Shaped[Tensor, " n"]) -> NumberCounts | None:
    """Extremes, zeros and subnormal numbers of at least one number; None where one is infinite or NaN.

    Args:
        numbers: In one of `READ_BY_BITS`, contiguous.
    """
    form = _FORMS[numbers.dtype]
    bits, sign = numbers.view(form.whole), -torch.iinfo(form.whole).min
    high, unsigned_high = (_extreme(bits, form, "max", unsigned=unsigned) for unsigned in (False, True))
    positive, negative = high >= 0, unsigned_high >= sign
    farthest = unsigned_high - sign  # magnitude of the least number, where one is negative
    if (positive and high >= form.infinity) or (negative and farthest >= form.infinity):
        return None
    low = _extreme(bits, form, "min", unsigned=True) if positive else form.infinity
    negative_low = form.infinity
    if negative and low >= form.normal:
        negative_low = _extreme(bits, form, "min", unsigned=False) + sign
    zero, subnormal = _near_zero(bits, form) if min(low, negative_low) < form.normal else (0, 0)
    least = -_number(farthest, form) if negative else _number(low, form)
    most = _number(high, form) if positive else -_number(negative_low, form)
    return NumberCounts(zero, subnormal, least + 0.0, most + 0.0)  # without a sign of zero


def _number(magnitude: int, form: _Form) -> float:
    """The positive number with these bits."""
    number: float = struct.unpack(form.codes[1], struct.pack(form.codes[0], magnitude << form.shift))[0]
    return number


def _extreme(bits: Tensor, form: _Form, which: Literal["min", "max"], *, unsigned: bool) -> int:
    """The least or the greatest bits, read as whole numbers with a sign or without one."""
    if bits.device.type == "cpu":
        # With numpy: it has unsigned numbers of every width, and returns a number without making a tensor of it.
        whole = bits.numpy().view(form.unsigned) if unsigned else bits.numpy()
        return int(whole.min() if which == "min" else whole.max())
    # With the sign bit turned over, signed numbers have the order of unsigned ones.
    sign = torch.iinfo(form.whole).min if unsigned else 0
    ordered = bits ^ sign if unsigned else bits
    return int(ordered.amin() if which == "min" else ordered.amax()) - sign


def _near_zero(bits: Tensor, form: _Form) -> tuple[int, int]:
    """How many numbers are zero, and how many subnormal."""
    if bits.device.type != "cpu":
        magnitudes = bits & torch.iinfo(form.whole).max
        zero = bits.numel() - int(torch.count_nonzero(magnitudes))
        return zero, int(torch.count_nonzero(magnitudes < form.normal)) - zero
    # With numpy, which counts four times as fast as torch.
    whole, zero, subnormal = bits.numpy().view(form.unsigned), 0, 0
    room = _room().view(form.unsigned)
    for start in range(0, len(whole), len(room)):
        block = whole[start : start + len(room)]
        doubled = np.add(block, block, out=room[: len(block)])
        zeros = len(block) - int(np.count_nonzero(doubled))
        nearest = int(np.subtract(doubled, 1, out=doubled).min()) + 1
        if nearest < 2 * form.normal and zeros < len(block):
            subnormal += int(np.count_nonzero(doubled < 2 * form.normal - 1))
        zero += zeros
    return zero, subnormal


def _room() -> npt.NDArray[np.uint8]:
    """A buffer that the thread keeps: to allocate one for every piece costs as much as to look at it."""
    if not hasattr(_kept, "room"):
        _kept.room = np.empty(_ROOM_BYTES, dtype=np.uint8)
    return _kept.room


def nonzero_count(numbers: Shaped[Tensor, " n"]) -> int:
    """How many whole numbers are not zero."""
    if numbers.device.type == "cpu":
        return int(np.count_nonzero(numbers.numpy()))
    return int(torch.count_nonzero(numbers))
