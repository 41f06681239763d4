"""On which grid the numbers of a tensor lie: that of an 8-bit or 4-bit format, whole numbers, or bfloat16 in float32.

Weights that were stored in few bits and never multiplied by their scale keep that grid, whatever dtype holds them. A
trained weight leaves every grid within its first numbers, so looking costs next to nothing.
"""

import math
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Shaped
from torch import Tensor

_Wide = npt.NDArray[np.float32]
Grid = Literal["e4m3", "e4m3fnuz", "e5m2", "e2m1", "integer"]

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e4m3fnuz": torch.float8_e4m3fnuz, "e5m2": torch.float8_e5m2}
EVERY_GRID: frozenset[Grid] = frozenset({"e4m3", "e4m3fnuz", "e5m2", "e2m1", "integer"})
_WHOLE: frozenset[Grid] = frozenset({"integer"})
# Numbers looked at before all of a piece are: a few, which nearly always do, its first ones, and some evenly spread.
_FEW, _FIRST, _SPREAD = 4, 256, 4096
_LOW_BITS = 0xFFFF
_BEYOND_ONE_BIT, _BEYOND_THREE_BITS = 0x3FFFFF, 0xFFFFF  # after the leading bit of a float32


@dataclass(frozen=True)
class Grain:
    """What the numbers seen so far have in common.

    Attributes:
        grids: The grids that all of them lie on.
        narrow: Whether all are float32 and have no bit that bfloat16 would not have.
    """

    grids: frozenset[Grid] = EVERY_GRID
    narrow: bool = True

    @property
    def told(self) -> bool:
        """Whether nothing is left to look for."""
        return not self.grids and not self.narrow

    def and_then(self, piece: Shaped[Tensor, " n"]) -> "Grain":
        """With the next numbers of the tensor, which are of a plain floating-point dtype.

        A sample rules nearly every weight out; only where it does not are all numbers looked at.
        """
        if (
            not self.told
            and piece.dtype != torch.float32
            and _off_every_grid(cast("list[float]", piece[:_FEW].tolist()))
        ):
            return _NO_GRAIN
        grain, step = self, max(1, piece.numel() // _SPREAD)
        for part in (slice(_FIRST), slice(None, None, step), slice(None)):
            if grain.told or not piece.numel():
                return grain
            grain = grain._with(piece[part])
        return grain

    def joined(self, other: "Grain") -> "Grain":
        """Of both parts of a tensor together."""
        return Grain(self.grids & other.grids, self.narrow and other.narrow)

    def _with(self, numbers: Tensor) -> "Grain":
        narrow, grids = self.narrow and numbers.dtype == torch.float32, self.grids
        # With numpy, whose calls cost a fifth of torch's: of nearly every tensor these are a few hundred numbers.
        wide = cast("_Wide", numbers.to("cpu", torch.float32).contiguous().numpy())
        bits = wide.view(np.int32)
        if grids - _WHOLE and (bits & _BEYOND_THREE_BITS).any():
            grids &= _WHOLE  # none of the formats has more than three bits after the leading one
        narrow = narrow and not (bits & _LOW_BITS).any()
        with np.errstate(over="ignore", invalid="ignore"):  # invalid: a NaN of the kind that signals
            return Grain(frozenset(grid for grid in grids if _on(grid, wide, bits)), narrow)


def _off_every_grid(numbers: list[float]) -> bool:
    """Whether of a few numbers one has more than four bits and one is no whole number.

    Infinity lies on some grids: what is not finite is left to the closer look.
    """
    some = [number for number in numbers if math.isfinite(number)]
    return any(16 * math.frexp(number)[0] % 1 for number in some) and any(number % 1 for number in some)


_NO_GRAIN = Grain(frozenset(), narrow=False)


def _on(grid: Grid, wide: _Wide, bits: npt.NDArray[np.int32]) -> bool:
    if grid == "integer":
        return bool((wide == np.rint(wide)).all())
    if grid == "e2m1":
        # Halves up to six with one bit after the leading one: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
        halves = 2 * wide
        return not (bits & _BEYOND_ONE_BIT).any() and bool(((halves == np.rint(halves)) & (np.abs(wide) <= 6)).all())
    numbers = torch.from_numpy(wide)
    return bool((numbers.to(_FLOAT8[grid]).to(torch.float32) == numbers).all())
