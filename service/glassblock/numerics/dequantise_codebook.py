"""Codes that index a table of values: FP4 in its two readings, NF4, and the 8-bit table of nested statistics."""

from math import prod
from types import MappingProxyType

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from glassblock.numerics.dequantise import CHUNK_ELEMENTS, apply_blocks

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""FP4 of OCP Microscaling 1.0 (5.3.3), by its four bits."""

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, over [-1, 1] (Dettmers et al. 2023, QLoRA, appendix E)."""

_FP4_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
BITSANDBYTES_TABLES = MappingProxyType(
    {
        "nf4": NF4,
        "fp4": (*(value / 12.0 for value in _FP4_TWELFTHS), *(-value / 12.0 for value in _FP4_TWELFTHS)),
    }
)
"""The tables of bitsandbytes by `quant_type` (functional.py, `get_4bit_type`). Its FP4 is none of OCP's."""


def dequantise_float4(
    packed: UInt8[Tensor, "*batch out half"], scale: Float[Tensor, "*batch out groups"], group_size: int
) -> Float[Tensor, "*batch out in"]:
    """A weight in FP4 (E2M1) with one scale per group of columns: MXFP4 (32 columns) and NVFP4 (16).

    The low nibble of a byte is the even column.

    Sources: transformers, integrations/mxfp4.py; compressed-tensors, compressors/nvfp4.
    """
    weight = _looked_up(packed, E2M1, low_first=True)
    apply_blocks(Tensor.mul_, weight, scale, (1, group_size))
    return weight


def dequantise_codebook4(
    packed: UInt8[Tensor, " bytes"],
    absmax: Float[Tensor, " blocks"],
    *,
    table: tuple[float, ...],
    block_size: int,
    shape: tuple[int, ...],
) -> Float[Tensor, "*shape"]:
    """A weight of bitsandbytes in 4 bits: table entry times the largest magnitude of its block.

    Blocks run through the flattened weight, across its rows; the last may be short. The high nibble of a byte comes
    first. Where the number of elements is odd, the last low nibble means nothing.

    Source: bitsandbytes 0.50, backends/default/ops.py, `dequantize_4bit`.
    """
    flat = _looked_up(packed, table, low_first=False)[: prod(shape)]
    apply_blocks(Tensor.mul_, flat.unsqueeze(0), absmax.unsqueeze(0), (1, block_size))
    return flat.reshape(shape)


def dequantise_codebook8(
    codes: UInt8[Tensor, " count"],
    table: Float[Tensor, " 256"],
    absmax: Float[Tensor, " blocks"],
    *,
    block_size: int,
    offset: float,
) -> Float[Tensor, " count"]:
    """Block statistics that were quantised themselves (double quantisation): table * absmax of the block + offset.

    Source: bitsandbytes 0.50, functional.py, `dequantize_4bit` and `dequantize_blockwise`.
    """
    values = table.to(torch.float32)[codes.to(torch.int64)]
    apply_blocks(Tensor.mul_, values.unsqueeze(0), absmax.unsqueeze(0), (1, block_size))
    return values.add_(offset)


def _looked_up(
    packed: UInt8[Tensor, "*batch half"], table: tuple[float, ...], *, low_first: bool
) -> Float[Tensor, "*batch in"]:
    """Two values for every byte, looked up at once in a table of byte -> two values."""
    values = torch.tensor(table, dtype=torch.float32, device=packed.device)
    octets = torch.arange(256, device=packed.device)
    low, high = values[octets & 15], values[octets >> 4]
    pairs = torch.stack((low, high) if low_first else (high, low), dim=-1)
    flat = packed.reshape(-1)
    found = torch.empty((flat.numel(), 2), dtype=torch.float32, device=packed.device)
    # A lookup wants indices four times as wide as a byte: never for the whole weight at once.
    for start in range(0, flat.numel(), CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        torch.index_select(pairs, 0, flat[part].to(torch.int32), out=found[part])
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])
