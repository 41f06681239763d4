"""Rows of a weight as directions: mean-subtracted, of unit length, one per neuron.

The sign-symmetry statistics look at directions only. Every step here is odd, bit for bit (a row and its negative
give a result and its negative), so rounding cannot disturb the symmetry that the statistics test.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# A row whose deviations from its mean are this small beside the row itself holds rounding, no direction.
CONSTANT_ROW = 1e-5
# Products and sums of unit rows shorter than this have lost their entries to underflow or to cancellation.
CANCELLED_ROW = 1e-12


class UnitRows(NamedTuple):
    """One direction per neuron, in place, so that the neurons of several weights stay aligned.

    Attributes:
        rows: `[m, d]` float32, of unit length; zero where the row was dropped.
        kept: `[m]` bool; False for a row that is zero, constant or not finite and so has no direction.
    """

    rows: Float[Tensor, "m d"]
    kept: Bool[Tensor, " m"]


def centred_unit_rows(weight: Float[Tensor, "m d"]) -> UnitRows:
    """Each row less its mean, scaled to unit length.

    Subtracting the mean removes the common offset that rounding towards minus infinity leaves in every entry.
    Rows that are zero (padding), constant or not finite are dropped: they carry no sign.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    peak = wide.abs().amax(-1, keepdim=True)
    finite = peak.isfinite()
    # Divided by its largest entry first, no row overflows or underflows when it is squared.
    rows = (wide / torch.where(peak > 0, peak, 1.0)).to(torch.float32)
    if not bool(finite.all()):
        rows.masked_fill_(~finite, 0.0)
    mean = rows.mean(-1, keepdim=True)
    rows.sub_(mean)
    # Once more: the first mean is rounded, and what it leaves behind is common to all entries.
    rows.sub_(rows.mean(-1, keepdim=True))
    length = _length(rows)
    before = (length.square() + weight.shape[-1] * mean.square()).sqrt()
    return _scaled(rows, length, kept=length > CONSTANT_ROW * before)


def product_rows(left: UnitRows, right: UnitRows) -> UnitRows:
    """The elementwise product of two sets of unit rows, neuron by neuron, scaled to unit length."""
    return rescaled_rows(left.rows * right.rows)


def rescaled_rows(rows: Float[Tensor, "m d"]) -> UnitRows:
    """Unit length without centring, in place; a row that cancelled to nothing is dropped."""
    length = _length(rows)
    return _scaled(rows, length, kept=length > CANCELLED_ROW)


def _length(rows: Float[Tensor, "m d"]) -> Float[Tensor, "m 1"]:
    return rows.square().sum(-1, keepdim=True).sqrt()


def _scaled(rows: Float[Tensor, "m d"], length: Float[Tensor, "m 1"], *, kept: Bool[Tensor, "m 1"]) -> UnitRows:
    return UnitRows(rows.mul_(torch.where(kept, 1 / length, 0.0)), kept.squeeze(-1))
