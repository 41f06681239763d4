"""What one pass keeps of any tensor, whatever it is for: a few numbers that add up over its parts."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from glassblock.audit.grain import EVERY_GRID, Grain, Grid
from glassblock.audit.values import TensorValues, values_of
from glassblock.numerics.number_bits import READ_BY_BITS


@dataclass(frozen=True)
class TensorSketch:
    """The values and the grain of a tensor, or of a part of one.

    Attributes:
        values: Counts, extremes and the sum of squares.
        grain: On which grids the numbers lie; of dtypes other than F64, F32, F16 and BF16 nothing is said.
    """

    values: TensorValues = field(default_factory=TensorValues)
    grain: Grain = field(default_factory=Grain)

    def and_then(self, piece: Shaped[Tensor, " n"], square_sum: float | None = None) -> "TensorSketch":
        """With the next piece.

        Args:
            piece: As stored.
            square_sum: Of its numbers, where the caller has it.
        """
        if not piece.numel():
            return self
        if piece.dtype not in READ_BY_BITS:
            return TensorSketch(self.values.joined(values_of(piece)), self.grain)
        found = values_of(piece, square_sum)
        # Zero lies on every grid, so of a piece that is all zeros one number is enough.
        return TensorSketch(self.values.joined(found), self.grain.and_then(piece[:1] if found.all_zero else piece))

    def joined(self, after: "TensorSketch") -> "TensorSketch":
        """Of this part of a tensor and of the part that comes after it."""
        return TensorSketch(self.values.joined(after.values), self.grain.joined(after.grain))


SKETCH_VERSION = 4
"""Raised whenever the same bytes would give other numbers."""


def dumped(sketch: TensorSketch) -> str:
    """The sketch as JSON, with the version; NaN and infinities as strings."""
    values = {name: _plain(value) for name, value in vars(sketch.values).items()}
    grain = {"grids": sorted(sketch.grain.grids), "narrow": sketch.grain.narrow}
    return json.dumps({"version": SKETCH_VERSION, "values": values, "grain": grain}, allow_nan=False)


def loaded(text: str) -> TensorSketch | None:
    """The sketch that was dumped; None where that was by another version, or the text is none of a sketch."""
    try:
        told: Any = json.loads(text)
        if told["version"] != SKETCH_VERSION:
            return None
        values = TensorValues(**{name: _number(value) for name, value in told["values"].items()})
        grids: frozenset[Grid] = EVERY_GRID & frozenset(told["grain"]["grids"])
        return TensorSketch(values, Grain(grids, narrow=bool(told["grain"]["narrow"])))
    except (ValueError, TypeError, KeyError):
        return None


def _plain(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def _number(value: float | str | None) -> Any:
    return float(value) if isinstance(value, str) else value
