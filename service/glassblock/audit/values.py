"""What the numbers of a tensor are, told from pieces of it: not finite anywhere, zero everywhere."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Shaped
from torch import Tensor


@dataclass(frozen=True)
class TensorValues:
    """What one tensor holds.

    Attributes:
        elements: How many.
        non_finite: How many of them are NaN or infinite.
        first_non_finite: Index of the first of those, counted through the tensor row by row.
        any_nonzero: Whether one of them is not zero.
    """

    elements: int = 0
    non_finite: int = 0
    first_non_finite: int | None = None
    any_nonzero: bool = False

    @property
    def all_zero(self) -> bool:
        """Whether there are elements, and all are zero."""
        return self.elements > 0 and not self.any_nonzero

    def and_then(self, piece: Shaped[Tensor, " n"]) -> "TensorValues":
        """The same, with the next piece of the tensor looked at: flat, in order, in any dtype torch can hold."""
        if piece.numel() == 0:
            return self
        bad, any_nonzero = _looked_at(piece)
        first = self.first_non_finite
        if first is None and bad is not None:
            first = self.elements + int(bad.nonzero()[0])
        return TensorValues(
            elements=self.elements + piece.numel(),
            non_finite=self.non_finite + (0 if bad is None else int(bad.sum())),
            first_non_finite=first,
            any_nonzero=self.any_nonzero or any_nonzero,
        )


def values_of(tensor: Shaped[Tensor, "..."], *, chunk_elements: int) -> TensorValues:
    """What a whole tensor in memory holds, looked at in pieces that a cache can hold."""
    values, flat = TensorValues(), tensor.reshape(-1)
    for start in range(0, flat.numel(), chunk_elements):
        values = values.and_then(flat[start : start + chunk_elements])
    return values


def coordinates(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The position along each axis of an index counted row by row."""
    places: list[int] = []
    for length in reversed(shape):
        index, place = divmod(index, length)
        places.append(place)
    return tuple(reversed(places))


def _looked_at(piece: Shaped[Tensor, " n"]) -> tuple[Bool[Tensor, " n"] | None, bool]:
    """Which elements are NaN or infinite (None where none is), and whether any is not zero."""
    if piece.dtype.is_complex:
        parts = torch.view_as_real(piece)
        finite = parts.isfinite().all(-1)
        return (None if finite.all() else ~finite), bool(parts.any())
    if not piece.dtype.is_floating_point:
        # A number of these dtypes is zero when all its bytes are.
        return None, bool(piece.view(torch.uint8).any())
    wide = piece if piece.dtype.itemsize > 1 else piece.to(torch.float32)
    # A minimum hands NaN on and shows infinity: one pass at the speed of memory, where asking each element takes ten.
    low, high = torch.aminmax(wide)
    finite = bool(torch.isfinite(low) & torch.isfinite(high))
    return (None if finite else ~wide.isfinite()), not finite or bool((low != 0) | (high != 0))
