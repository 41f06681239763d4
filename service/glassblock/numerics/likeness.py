"""How like two tensors are, told from pieces of both, and fingerprints of rows and columns that find them again.

A piece of one tensor and the same piece of the other leave a few sums; those of all pieces add up. So two tensors of
any size are compared with two pieces in memory.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from glassblock.errors import InvalidValue

ROUNDINGS: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
"""Dtypes through which weights are commonly passed on their way."""

_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Likeness:
    """What pieces of two tensors add up to.

    Attributes:
        elements: How many.
        unequal: How many differ as numbers; NaN equals NaN here.
        first_squares, second_squares, product, difference_squares: Sums over all elements, of float32 numbers.
        second_is_first_cast: The chains of dtypes under which the second is the first, rounded: none where `unequal`
            was counted and no chain explains it. A chain is tried until one element contradicts it.
        first_is_second_cast: The other way round.
        shifts: Of -1 and 1, what first minus second is in every element, in the dtype of the narrower.
    """

    elements: int = 0
    unequal: int = 0
    first_squares: float = 0.0
    second_squares: float = 0.0
    product: float = 0.0
    difference_squares: float = 0.0
    second_is_first_cast: tuple[tuple[torch.dtype, ...], ...] | None = None
    first_is_second_cast: tuple[tuple[torch.dtype, ...], ...] | None = None
    shifts: tuple[float, ...] = (-1.0, 1.0)

    @property
    def equal(self) -> bool:
        """Whether all numbers are equal."""
        return self.unequal == 0

    @property
    def rounded(self) -> tuple[torch.dtype, ...] | None:
        """The dtypes through which one was made from the other; None where no such chain explains it."""
        for chains in (self.second_is_first_cast, self.first_is_second_cast):
            if chains:
                return chains[0]
        return None

    @property
    def cosine(self) -> float:
        """Of the angle between them; NaN where one is zero or not finite."""
        scale = math.sqrt(self.first_squares) * math.sqrt(self.second_squares)
        return self.product / scale if scale > 0 and math.isfinite(scale) else math.nan

    @property
    def relative_difference(self) -> float:
        """|first - second| / |second|; infinite where the second is zero and the first is not."""
        if self.difference_squares == 0:
            return 0.0
        return math.sqrt(self.difference_squares / self.second_squares) if self.second_squares > 0 else math.inf

    def and_then(self, first: Shaped[Tensor, "*shape"], second: Shaped[Tensor, "*shape"]) -> "Likeness":
        """With the next piece of both."""
        if first.shape != second.shape:
            raise InvalidValue(f"pieces of shapes {list(first.shape)} and {list(second.shape)} cannot be compared")
        one, other = _wide(first), _wide(second)
        same = (one == other) | (one.isnan() & other.isnan())
        if not (first.dtype.is_floating_point or second.dtype.is_floating_point):
            same = first == second  # float32 does not hold whole numbers of more than 24 bits
        unequal = int(same.numel() - same.sum())
        if self.second_is_first_cast is None or self.first_is_second_cast is None:
            forward, backward = _chains(first.dtype, second.dtype), _chains(second.dtype, first.dtype)
        else:
            forward, backward = self.second_is_first_cast, self.first_is_second_cast
        shifts = self.shifts
        if unequal:
            forward = tuple(chain for chain in forward if _is_cast(first, second, chain))
            backward = tuple(chain for chain in backward if _is_cast(second, first, chain))
        if shifts:
            shifts = tuple(shift for shift in shifts if _is_shifted(one, other, first.dtype, second.dtype, shift))
        difference = one - other
        return replace(
            self,
            elements=self.elements + same.numel(),
            unequal=self.unequal + unequal,
            first_squares=self.first_squares + float(one.square().sum(dtype=torch.float64)),
            second_squares=self.second_squares + float(other.square().sum(dtype=torch.float64)),
            product=self.product + float((one * other).sum(dtype=torch.float64)),
            difference_squares=self.difference_squares + float(difference.square().sum(dtype=torch.float64)),
            second_is_first_cast=forward,
            first_is_second_cast=backward,
            shifts=shifts,
        )


def row_fingerprints(rows: Shaped[Tensor, "n width"]) -> Int[Tensor, " n"]:
    """One number of 64 bits for each row: equal rows have equal ones, others different ones but by a rare accident.

    The bits of each element, as integers, times fixed random odd numbers, summed modulo 2^64: exact, so that neither
    the order of summation nor the place of a row in a tensor matters.
    """
    bits = _bits(rows)
    return (bits * _multipliers(bits.shape[1], bits.device)).sum(1)


def column_fingerprints(rows: Shaped[Tensor, "n width"], start: int, total: int) -> Int[Tensor, " width"]:
    """What rows from `start` on, of `total`, add to the fingerprints of the columns; sums over all rows are those.

    A column of `total` elements has the fingerprint that a row of the same numbers would have.
    """
    bits = _bits(rows)
    return (bits * _multipliers(total, bits.device)[start : start + len(bits), None]).sum(0)


def narrower_dtype(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The narrower of two dtypes: numbers that differ by rounding to it are equal in it."""
    if first.itemsize != second.itemsize:
        return first if first.itemsize < second.itemsize else second
    return first if first is second else torch.float32


def _bits(rows: Tensor) -> Tensor:
    # A negative zero is a zero.
    plain = torch.where(rows == 0, torch.zeros_like(rows), rows) if rows.dtype.is_floating_point else rows
    return plain.contiguous().view(_AS_INTEGERS[rows.dtype.itemsize]).to(torch.int64)


def _multipliers(count: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(20_060_102)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64)
    return (drawn * 2 + 1).to(device)


def _wide(piece: Tensor) -> Tensor:
    return piece if piece.dtype is torch.float64 else piece.to(torch.float32)


def _chains(start: torch.dtype, end: torch.dtype) -> tuple[tuple[torch.dtype, ...], ...]:
    """The ways from one dtype to another that are tried: at once, and through one or both of `ROUNDINGS`."""
    chains = dict[tuple[torch.dtype, ...], None]()
    for middle in ((), *((dtype,) for dtype in ROUNDINGS), ROUNDINGS, ROUNDINGS[::-1]):
        chain = [dtype for dtype in middle if dtype is not start]
        chain += [end] if (chain[-1] if chain else start) is not end else []
        if chain:
            chains[tuple(chain)] = None
    return tuple(chains)


def _is_cast(source: Tensor, made: Tensor, chain: tuple[torch.dtype, ...]) -> bool:
    for dtype in chain:
        source = source.to(dtype)
    return bool(((source == made) | (source.isnan() & made.isnan())).all())


def _is_shifted(one: Tensor, other: Tensor, first: torch.dtype, second: torch.dtype, shift: float) -> bool:
    """Whether one - other is `shift` in every element, as far as the dtypes that hold them can tell."""
    # Added in float32 and rounded once, or in the dtype of the source and rounded once more to that of the copy.
    for moved, made, own, source in ((other + shift, one, first, second), (one - shift, other, second, first)):
        if any(bool((made.to(own) == way.to(own)).all()) for way in (moved, moved.to(source))):
            return True
    return False
