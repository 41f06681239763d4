"""Rotary positions: the frequencies in every form that released models use, and the rotation itself.

Channel pairs of a query or key are rotated by the angle `position * frequency`, one frequency for each pair (Su et
al., "RoFormer", 2021). A form changes the frequencies so that a model reads longer sequences than it was trained on.

Frequencies, cosines and sines are computed in float32 whatever the dtype of the model, as models do, and only then
cast: bfloat16 has no room for a position beyond 256. The order of operations is that of transformers'
`modeling_rope_utils`, bit for bit.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.errors import InvalidValue
from glassblock.numerics.rotary_forms import (
    DynamicForm,
    LongRopeForm,
    RotaryForm,
    YarnForm,
    form_frequencies,
    form_scaling,
)


class Arrangement(StrEnum):
    """Which channels make a pair."""

    HALVES = "halves"  # channel i with i + dim/2: Llama, GPT-NeoX and most
    PAIRS = "pairs"  # channel 2i with 2i + 1: GPT-J, Cohere, GLM, Ernie 4.5, DeepSeek-V2
    PAIRS_TO_HALVES = "pairs-to-halves"  # reads pairs and returns halves, queries and keys alike: DeepSeek-V3


class RotaryPrecision(StrEnum):
    """Where the cast from float32 is."""

    ROUNDED = "rounded"  # cosine and sine are cast, and every product is in the dtype: Llama and nearly all
    ROUNDED_TABLE = "rounded-table"  # cosine and sine are cast, the products are in float32: Cohere
    WIDE = "wide"  # nothing is cast before the end: OLMo, Ernie 4.5
    COMPLEX = "complex"  # as WIDE, with the rounding of `torch.polar`: DeepSeek-V2, Llama 4


@dataclass(frozen=True)
class Rotary:
    """How positions turn the queries and keys of a layer.

    Attributes:
        dim: How many channels of a head are turned, counted from the first; the rest pass. Even.
        theta: The base of the frequencies.
        form: How they are changed for long sequences.
        arrangement: Which channels make a pair.
        precision: Where the cast from float32 is.
        over: What takes the place of `dim` in the frequencies; None for `dim` itself. One less where a config asks for
            an odd number of channels and the model turns one more (GPT-NeoX in transformers).

    Raises:
        InvalidValue: `dim` is odd or not positive, or 2 in the dynamic form, or theta is not above one; or LongRoPE's
            factors are not dim/2, or its original context is no longer than a token; or `over` is another number, or
            given in the YaRN form, which has none for it.
    """

    dim: int
    theta: float
    form: RotaryForm
    arrangement: Arrangement = Arrangement.HALVES
    precision: RotaryPrecision = RotaryPrecision.ROUNDED
    over: int | None = None

    def __post_init__(self) -> None:
        if self.dim < 2 or self.dim % 2:
            raise InvalidValue(
                f"{self.dim} channels cannot be turned in pairs", hint="Give an even number.", field="dim"
            )
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise InvalidValue(f"rope theta is {self.theta}", hint="Give a number above one.", field="theta")
        if isinstance(self.form, LongRopeForm):
            if self.form.original_max_position_embeddings <= 1:
                raise InvalidValue(
                    f"LongRoPE of an original context of {self.form.original_max_position_embeddings} tokens",
                    hint="Give the context that the model was first trained on.",
                    field="original_max_position_embeddings",
                )
            for name in ("short_factor", "long_factor"):
                count = len(self.form.short_factor if name == "short_factor" else self.form.long_factor)
                if count != self.dim // 2:
                    raise InvalidValue(
                        f"{name} has {count} numbers and {self.dim} turned channels ask for {self.dim // 2}",
                        hint="Give one factor for each pair of channels.",
                        field=name,
                    )
        if isinstance(self.form, DynamicForm) and self._over == 2:
            raise InvalidValue(
                "the dynamic form of rotary positions turns more than one pair: its base grows by dim / (dim - 2)",
                hint="Use another form.",
                field="dim",
            )
        whole = self.over in {None, self.dim}
        if not whole and (self.over != self.dim - 1 or isinstance(self.form, YarnForm)):
            raise InvalidValue(
                f"frequencies of {self.dim} channels over {self.over} in the form {type(self.form).__name__}",
                hint="Give the number of channels, or one less in another form than YaRN's.",
                field="over",
            )
        # Once, and before anything is differentiated: within a transform of torch.func it would belong to that alone.
        _ = self.frequencies

    @cached_property
    def frequencies(self) -> Tensor:
        """`[dim / 2]` float32, the angle per position of each pair, in a sequence that outgrows nothing."""
        with torch.inference_mode(mode=False):
            return form_frequencies(self.form, self._over, self.theta, tokens=None)

    @property
    def _over(self) -> int:
        """What the frequencies are over."""
        return self.dim if self.over is None else self.over


class RotaryTable(NamedTuple):
    """Cosine and sine of every angle, times the attention scaling: `[*positions, dim / 2]`."""

    cosine: Tensor
    sine: Tensor


def inverse_frequencies(rotary: Rotary, *, tokens: int | None = None) -> Float[Tensor, " half"]:
    """The angle per position of each pair of channels, in float32.

    Args:
        rotary: The base and the form.
        tokens: The highest position plus one. It matters to the dynamic form and to LongRoPE, which change when a
            sequence outgrows what they were made for; None is a sequence that does not.
    """
    if tokens is None:
        return rotary.frequencies
    return form_frequencies(
        rotary.form, rotary.dim if rotary.over is None else rotary.over, rotary.theta, tokens=tokens
    )


def attention_scaling(rotary: Rotary) -> float:
    """What cosine and sine are multiplied by: 1 but for YaRN and LongRoPE."""
    return form_scaling(rotary.form)


def rotary_table(rotary: Rotary, positions: Int[Tensor, "*batch tokens"], *, dtype: torch.dtype) -> RotaryTable:
    """Cosine and sine for these positions, in the dtype that the products are computed in.

    Args:
        rotary: The frequencies.
        positions: `[*batch, tokens]`, counted from zero.
        dtype: That of the queries and keys.
    """
    tokens = None
    if isinstance(rotary.form, DynamicForm | LongRopeForm) and positions.numel():
        tokens = int(positions.max()) + 1
    frequencies = inverse_frequencies(rotary, tokens=tokens).to(positions.device)
    angles = positions[..., None].float() * frequencies
    if rotary.precision is RotaryPrecision.COMPLEX:
        turns = torch.polar(torch.ones_like(angles), angles)
        cosine, sine = turns.real, turns.imag
    else:
        cosine, sine = angles.cos(), angles.sin()
    scaling = attention_scaling(rotary)
    if scaling != 1.0:
        cosine, sine = cosine * scaling, sine * scaling
    if rotary.precision in {RotaryPrecision.ROUNDED, RotaryPrecision.ROUNDED_TABLE}:
        cosine, sine = cosine.to(dtype), sine.to(dtype)
    if rotary.precision is not RotaryPrecision.ROUNDED:
        wide = torch.promote_types(dtype, torch.float32)
        cosine, sine = cosine.to(wide), sine.to(wide)
    return RotaryTable(cosine, sine)


def rotate(
    values: Float[Tensor, "*batch heads tokens head_dim"], table: RotaryTable, rotary: Rotary
) -> Float[Tensor, "*batch heads tokens head_dim"]:
    """Turn the first `rotary.dim` channels of every head by its token's angles.

    Args:
        values: Queries or keys.
        table: Of the positions of these tokens, in the dtype of `values` or, where the precision says so, wider.
        rotary: The arrangement.
    """
    turned, passed = values[..., : rotary.dim], values[..., rotary.dim :]
    cosine, sine = table.cosine.unsqueeze(-3), table.sine.unsqueeze(-3)
    wide = turned.to(cosine.dtype)
    if rotary.arrangement is Arrangement.HALVES:
        first, second = wide.chunk(2, dim=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
    # Models multiply x by the cosine and (-second, first) by the sine: the same roundings.
    pair = first * cosine - second * sine, second * cosine + first * sine
    paired = rotary.arrangement is Arrangement.PAIRS
    result = (torch.stack(pair, dim=-1).flatten(-2) if paired else _beside(*pair)).to(values.dtype)
    return result if passed.shape[-1] == 0 else _beside(result, passed)


def _beside(first: Tensor, second: Tensor) -> Tensor:
    """Both along the channels, the heads of a token beside each other in memory: attention's output then lies so too,
    and its heads merge without a copy."""
    return torch.cat((first.transpose(-3, -2), second.transpose(-3, -2)), dim=-1).transpose(-3, -2)
