"""What the numbers of a tensor are, told from pieces of it: not finite, zero, how large, how many."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor

_NUMBERS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


@dataclass(frozen=True)
class TensorValues:
    """What one tensor holds.

    Attributes:
        elements: How many.
        non_finite: How many of them are NaN or infinite.
        first_non_finite: Index of the first of those, counted through the tensor row by row.
        any_nonzero: Whether one of them is not zero.
        least, most: The extremes of those that are finite, where the dtype is one of real floating-point numbers; None
            where there is none.
        total, square_sum: Sums of the numbers and of their squares, from float32 sums over pieces; not finite where a
            number is not. 0 for other dtypes.
    """

    elements: int = 0
    non_finite: int = 0
    first_non_finite: int | None = None
    any_nonzero: bool = False
    least: float | None = None
    most: float | None = None
    total: float = 0.0
    square_sum: float = 0.0

    @property
    def all_zero(self) -> bool:
        """Whether there are elements, and all are zero."""
        return self.elements > 0 and not self.any_nonzero

    def and_then(self, piece: Shaped[Tensor, " n"], wide: Shaped[Tensor, " n"] | None = None) -> "TensorValues":
        """The same, with the next piece of the tensor looked at: flat, in order, in any dtype torch can hold.

        Args:
            piece: As stored.
            wide: The same in float32, where the caller has it.
        """
        if piece.numel() == 0:
            return self
        total = square_sum = 0.0
        if piece.dtype in _NUMBERS:
            wide = piece.to(torch.promote_types(piece.dtype, torch.float32)) if wide is None else wide
            look = _looked_at_numbers(wide)
            total, square_sum = float(wide.sum()), float(torch.dot(wide, wide))
            if look.bad is None and not math.isfinite(square_sum):  # squares beyond float32
                wide = wide.double()
                total, square_sum = float(wide.sum()), float(torch.dot(wide, wide))
        else:
            look = _look(piece)
        first = self.first_non_finite
        if first is None and look.bad is not None:
            first = self.elements + int(look.bad.nonzero()[0])
        return TensorValues(
            elements=self.elements + piece.numel(),
            non_finite=self.non_finite + look.bad_count,
            first_non_finite=first,
            any_nonzero=self.any_nonzero or look.any_nonzero,
            least=_least(self.least, look.least),
            most=_most(self.most, look.most),
            total=self.total + total,
            square_sum=self.square_sum + square_sum,
        )


def coordinates(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The position along each axis of an index counted row by row."""
    places: list[int] = []
    for length in reversed(shape):
        index, place = divmod(index, length)
        places.append(place)
    return tuple(reversed(places))


class _Look(NamedTuple):
    """One piece: which elements are NaN or infinite (None where none is), and what the others are."""

    bad: Bool[Tensor, " n"] | None
    any_nonzero: bool
    least: float | None = None
    most: float | None = None

    @property
    def bad_count(self) -> int:
        return 0 if self.bad is None else int(self.bad.sum())


def _look(piece: Shaped[Tensor, " n"]) -> _Look:
    if piece.dtype.is_complex:
        parts = torch.view_as_real(piece)
        finite = parts.isfinite().all(-1)
        return _Look(None if finite.all() else ~finite, bool(parts.any()))
    if not piece.dtype.is_floating_point:
        # A number of these dtypes is zero when all its bytes are.
        return _Look(None, bool(piece.view(torch.uint8).any()))
    return _looked_at_numbers(piece.to(torch.float32))


def _looked_at_numbers(wide: Shaped[Tensor, " n"]) -> _Look:
    # Extremes hand NaN on and show infinity: one pass at the speed of memory, where asking each element takes ten.
    low, high = torch.aminmax(wide)
    least, most = float(low), float(high)
    if math.isfinite(least) and math.isfinite(most):
        return _Look(None, least < 0 or most > 0, least, most)
    finite = wide.isfinite()
    some = wide[finite]
    extremes = (float(some.min()), float(some.max())) if some.numel() else (None, None)
    return _Look(~finite, any_nonzero=True, least=extremes[0], most=extremes[1])


def _least(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else min(one, other)


def _most(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)
