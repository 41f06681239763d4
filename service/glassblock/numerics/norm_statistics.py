"""What a norm sees in each row: moments, outputs, invariances, and the edges of the narrow dtypes.

Everything here is computed in float64, whatever the input: these are the numbers against which the arithmetic of a
model in a narrower dtype is judged. "Variance" means the biased variance about the mean; what a Llama implementation
calls so is the mean square.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.norms import check_eps, layer_norm, rms_norm

_SQUARES_OVERFLOW = 1e150
"""Beyond this the sum of a row's squares may leave float64."""


class NormStatistics(NamedTuple):
    """Per row, in float64: `[*batch]` the first four, `[*batch, d]` the outputs.

    Attributes:
        mean: The mean.
        square_mean: The mean of the squares.
        variance: The mean of the squared deviations from the mean.
        rms: The root of `square_mean`, without eps.
        rmsnorm: x / sqrt(square_mean + eps), times the gain.
        layernorm: (x - mean) / sqrt(variance + eps), times the gain.
    """

    mean: Tensor
    square_mean: Tensor
    variance: Tensor
    rms: Tensor
    rmsnorm: Tensor
    layernorm: Tensor


def norm_statistics(
    x: Float[Tensor, "*batch d"], eps: float, *, gain: Float[Tensor, " _"] | None = None, offset: float = 0.0
) -> NormStatistics:
    """Moments and both norms of each row.

    Raises:
        InvalidValue: `eps` is negative or not finite, or the gain has another width. A row on which a norm is
            not defined gives NaN or infinities: refuse it beforehand with `norms.check_norm_defined`.
    """
    check_eps(eps)
    _check_channels(x, gain=gain)
    wide = x.to(torch.float64)
    mean = wide.mean(-1)
    square_mean = wide.square().mean(-1)
    # Rows whose squares leave float64 are taken in units of their largest entry. Beside such squares no eps is visible.
    largest = wide.abs().amax(-1, keepdim=True)
    huge = largest > _SQUARES_OVERFLOW
    scaled = wide / torch.where(huge, largest, 1.0)
    scaled_rms = largest.squeeze(-1) * scaled.square().mean(-1).sqrt()
    return NormStatistics(
        mean=mean,
        square_mean=square_mean,
        variance=(wide - mean.unsqueeze(-1)).square().mean(-1),
        rms=torch.where(huge.squeeze(-1), scaled_rms, square_mean.sqrt()),
        rmsnorm=torch.where(huge, rms_norm(scaled, gain, 0.0, offset=offset), rms_norm(wide, gain, eps, offset=offset)),
        layernorm=torch.where(
            huge, layer_norm(scaled, gain, None, 0.0, offset=offset), layer_norm(wide, gain, None, eps, offset=offset)
        ),
    )


class Differences(NamedTuple):
    """Largest |difference| between two outputs of a norm, per row `[*batch]`, for both norms."""

    rms: Tensor
    layer: Tensor


class Invariances(NamedTuple):
    """How far each norm's output moves when its input is changed; zero is an invariance.

    Attributes:
        shift: x + shift against x. LayerNorm does not move.
        positive_scale: scale x against x. With eps = 0 neither moves.
        negative_scale: -scale x against x. Both move: the sign flips.
        negative_scale_flipped: -scale x against the flipped output. With eps = 0 nothing is left.
        channel_scale: x times one factor per channel against x. Both move.
    """

    shift: Differences
    positive_scale: Differences
    negative_scale: Differences
    negative_scale_flipped: Differences
    channel_scale: Differences


def norm_invariances(
    x: Float[Tensor, "*batch d"],
    eps: float,
    *,
    shift: float,
    scale: float,
    channel_scale: Float[Tensor, " _"],
    gain: Float[Tensor, " _"] | None = None,
    offset: float = 0.0,
) -> Invariances:
    """Compare the outputs of both norms under a shift, a scale, its negative, and a scale per channel.

    Raises:
        InvalidValue: `scale` is not a positive finite number, `shift` is not finite, `eps` cannot be one, or a
            tensor of one number per channel has another width.
    """
    check_eps(eps)
    _check_channels(x, gain=gain, channel_scale=channel_scale)
    if not (math.isfinite(scale) and scale > 0):
        raise InvalidValue(f"the scale is {scale}", hint="Give a positive finite number.", field="scale")
    if not math.isfinite(shift):
        raise InvalidValue(f"the shift is {shift}", hint="Give a finite number.", field="shift")
    wide = x.to(torch.float64)

    def norms(rows: Tensor) -> tuple[Tensor, Tensor]:
        return rms_norm(rows, gain, eps, offset=offset), layer_norm(rows, gain, None, eps, offset=offset)

    plain = norms(wide)

    def moved(rows: Tensor, *, sign: float = 1.0) -> Differences:
        changed = norms(rows)
        return Differences(*((new - sign * old).abs().amax(-1) for new, old in zip(changed, plain, strict=True)))

    return Invariances(
        shift=moved(wide + shift),
        positive_scale=moved(wide * scale),
        negative_scale=moved(wide * -scale),
        negative_scale_flipped=moved(wide * -scale, sign=-1.0),
        channel_scale=moved(wide * channel_scale.to(torch.float64)),
    )


class DtypeReport(NamedTuple):
    """What would not fit a dtype, per row `[*batch]` except the two about eps, which are 0-d; all bool.

    Attributes:
        value_overflow: A value is beyond the dtype's largest number.
        square_overflow: A square is.
        square_sum_overflow: The sum of the row's squares is.
        square_underflow: Every square of a row that is not all zero is below the dtype's smallest number.
        eps_zero: eps itself becomes zero.
        eps_subnormal: eps is kept, with fewer bits than the dtype has.
    """

    value_overflow: Bool[Tensor, "*batch"]
    square_overflow: Bool[Tensor, "*batch"]
    square_sum_overflow: Bool[Tensor, "*batch"]
    square_underflow: Bool[Tensor, "*batch"]
    eps_zero: Bool[Tensor, ""]
    eps_subnormal: Bool[Tensor, ""]


REPORTED_DTYPES: Mapping[str, torch.dtype] = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


def dtype_report(x: Float[Tensor, "*batch d"], eps: float) -> dict[str, DtypeReport]:
    """Would a norm that squares and sums in each of `REPORTED_DTYPES` overflow or lose its eps?

    NaN overflows nothing; an infinity overflows everything. A model that widens to float32 before it squares is
    described by the entry `float32` for its squares, and by that of its own dtype for its values.
    """
    check_eps(eps)
    wide = x.to(torch.float64)
    squares = wide.square()
    return {name: _fits(wide, squares, eps, dtype) for name, dtype in REPORTED_DTYPES.items()}


def _fits(wide: Tensor, squares: Tensor, eps: float, dtype: torch.dtype) -> DtypeReport:
    info = torch.finfo(dtype)
    stored = torch.tensor(eps, dtype=torch.float64, device=wide.device).to(dtype)
    return DtypeReport(
        value_overflow=(wide.abs() > info.max).any(-1),
        square_overflow=(squares > info.max).any(-1),
        square_sum_overflow=squares.sum(-1) > info.max,
        square_underflow=(squares.to(dtype) == 0).all(-1) & (wide != 0).any(-1),
        eps_zero=(stored == 0) & (eps > 0),
        eps_subnormal=(stored > 0) & (stored.to(torch.float64) < info.smallest_normal),
    )


def _check_channels(x: Tensor, **per_channel: Tensor | None) -> None:
    for name, tensor in per_channel.items():
        if tensor is not None and tensor.shape != x.shape[-1:]:
            raise InvalidValue(
                f"{name} has shape {list(tensor.shape)} and the rows have shape {list(x.shape)}",
                hint="Give one number per channel.",
                field=name,
            )
