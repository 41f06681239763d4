"""What the numbers of a tensor are, told from pieces of it: not finite, zero, subnormal, how large, how many."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

from glassblock.numerics.number_bits import READ_BY_BITS, nonzero_count, number_counts

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WITH_SUBNORMALS = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})


@dataclass(frozen=True)
class TensorValues:
    """What one tensor holds.

    Attributes:
        elements: How many.
        non_finite: How many of them are NaN or infinite.
        nan: How many of those are NaN.
        first_non_finite: Index of the first of those, counted through the tensor row by row.
        zeros: How many are zero.
        subnormal: How many are smaller than the least normal number of their dtype, and not zero; 0 where the dtype has
            no such numbers.
        least, most: The extremes of those that are finite, where the dtype is one of real floating-point numbers; None
            where there is none.
        square_sum: Sum of their squares, from float32 sums over rows; not finite where a number is not. 0 for other
            dtypes.
    """

    elements: int = 0
    non_finite: int = 0
    first_non_finite: int | None = None
    zeros: int = 0
    subnormal: int = 0
    least: float | None = None
    most: float | None = None
    square_sum: float = 0.0
    nan: int = 0

    @property
    def any_nonzero(self) -> bool:
        """Whether one of the elements is not zero."""
        return self.zeros < self.elements

    @property
    def all_zero(self) -> bool:
        """Whether there are elements, and all are zero."""
        return self.elements > 0 and not self.any_nonzero

    @property
    def largest(self) -> float | None:
        """The greatest magnitude of those that are finite; None where there are no extremes."""
        return None if self.least is None or self.most is None else max(self.most, -self.least)

    def and_then(self, piece: Shaped[Tensor, " n"], square_sum: float | None = None) -> "TensorValues":
        """The same, with the next piece of the tensor looked at: flat, in order, in any dtype torch can hold.

        Args:
            piece: As stored.
            square_sum: Of its numbers, where the caller has it.
        """
        return self.joined(values_of(piece, square_sum)) if piece.numel() else self

    def joined(self, after: "TensorValues") -> "TensorValues":
        """Of this part of a tensor and of the part that comes after it."""
        if not self.elements:  # as nearly always: most tensors come in one piece
            return after
        first = self.first_non_finite
        if first is None and after.first_non_finite is not None:
            first = self.elements + after.first_non_finite
        return TensorValues(
            elements=self.elements + after.elements,
            non_finite=self.non_finite + after.non_finite,
            first_non_finite=first,
            zeros=self.zeros + after.zeros,
            subnormal=self.subnormal + after.subnormal,
            least=_least(self.least, after.least),
            most=_most(self.most, after.most),
            square_sum=self.square_sum + after.square_sum,
            nan=self.nan + after.nan,
        )


def values_of(piece: Shaped[Tensor, " n"], square_sum: float | None = None) -> TensorValues:
    """Of one piece alone, which is not empty; the arguments as those of `TensorValues.and_then`."""
    if piece.dtype not in READ_BY_BITS:
        return _of_another_dtype(piece)
    counts = number_counts(piece)
    if counts is None:
        wide = piece.to(torch.promote_types(piece.dtype, torch.float32))
        return _of_numbers(wide, torch.finfo(piece.dtype).smallest_normal, squares=True)
    if square_sum is None or not math.isfinite(square_sum):  # squares may be beyond float32
        square_sum = _square_sum(piece.double())
    return TensorValues(piece.numel(), 0, None, counts.zero, counts.subnormal, counts.least, counts.most, square_sum)


def coordinates(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The position along each axis of an index counted row by row."""
    places: list[int] = []
    for length in reversed(shape):
        index, place = divmod(index, length)
        places.append(place)
    return tuple(reversed(places))


def _of_another_dtype(piece: Tensor) -> TensorValues:
    count = piece.numel()
    if piece.dtype.is_complex:
        parts = torch.view_as_real(piece)
        bad = ~parts.isfinite().all(-1)
        nan = int(piece.isnan().sum())
        return TensorValues(count, int(bad.sum()), _first(bad), count - int(parts.any(-1).sum()), nan=nan)
    if not piece.dtype.is_floating_point:
        # A number of these dtypes is zero when all its bytes are.
        return TensorValues(count, zeros=count - nonzero_count(piece.view(_WHOLE[piece.dtype.itemsize])))
    normal = torch.finfo(piece.dtype).smallest_normal if piece.dtype in _WITH_SUBNORMALS else 0.0
    return _of_numbers(piece.to(torch.float32), normal, squares=False)


def _of_numbers(wide: Tensor, normal: float, *, squares: bool) -> TensorValues:
    """Numbers some of which may be infinite or NaN, one property after the other."""
    finite = wide.isfinite()
    some, bad = wide[finite], ~finite
    magnitudes = some.abs()
    zeros = int((magnitudes == 0).sum())
    extremes = (float(some.min()), float(some.max())) if some.numel() else (None, None)
    subnormal = int((magnitudes < normal).sum()) - zeros if normal else 0
    square_sum = _square_sum(wide) if squares else 0.0
    nan = int(wide.isnan().sum())
    return TensorValues(wide.numel(), int(bad.sum()), _first(bad), zeros, subnormal, *extremes, square_sum, nan)


def _square_sum(wide: Tensor) -> float:
    return float(torch.dot(wide, wide))


def _first(bad: Bool[Tensor, " n"]) -> int | None:
    places = bad.nonzero()
    return int(places[0]) if len(places) else None


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)


def _most(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
