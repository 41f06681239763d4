"""Stored codes times their scales: the affine forms, with one scale per block of a weight.

Whatever the format, weight = (code - zero) * scale, one scale (and zero) to each block of `[rows, columns]`: one block
for the whole weight (per tensor), one per row (per channel), one per group of columns, or a grid whose last row and
column of blocks may be cut off by the edge. All of it in float32, where the product of a code of up to 8 bits and a
16-bit scale is exact, so that rounding it to a model's dtype gives the bits that the format's own library gives.
"""

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float, Integer, Shaped, UInt8
from torch import Tensor

CHUNK_ELEMENTS = 1 << 22
"""Elements worked on at a time where a step needs a copy of the weight."""


def dequantise_blocks(
    codes: Shaped[Tensor, "*batch out in"],
    scale: Shaped[Tensor, "*batch block_rows block_columns"],
    block: tuple[int, int],
    *,
    zero: Shaped[Tensor, "*batch block_rows block_columns"] | int = 0,
) -> Float[Tensor, "*batch out in"]:
    """A weight out of codes and one scale per block.

    Args:
        codes: Integers, or floats of 8 bits.
        scale: What multiplies; also where a file calls it an inverse (`weight_scale_inv` of DeepSeek-V3 multiplies).
        block: Rows and columns of a block. `scale` has ceil(out / rows) by ceil(in / columns) entries.
        zero: The code that means 0, per block or for all.

    Returns:
        float32.

    Sources: deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; vllm-project/compressed-tensors, lifecycle/forward.py.
    """
    weight = codes.to(torch.float32, copy=True)
    if isinstance(zero, Tensor):
        apply_blocks(Tensor.sub_, weight, zero.to(torch.float32), block)
    elif zero:
        weight.sub_(zero)
    apply_blocks(Tensor.mul_, weight, scale.to(torch.float32), block)
    return weight


def dequantise_columns(
    codes: UInt8[Tensor, "out in"],
    scale: Shaped[Tensor, "out groups"],
    zero: Shaped[Tensor, "out groups"],
    column_groups: Integer[Tensor, " in"],
) -> Float[Tensor, "out in"]:
    """As `dequantise_blocks`, for columns whose group is told one by one (`g_idx`, from quantising in another order).

    The caller has made sure that every entry of `column_groups` is the index of a group.
    """
    index = column_groups.to(torch.int64)
    weight = codes.to(torch.float32)
    step = max(1, CHUNK_ELEMENTS // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], step):
        rows = slice(start, start + step)
        weight[rows].sub_(zero[rows].to(torch.float32)[:, index]).mul_(scale[rows].to(torch.float32)[:, index])
    return weight


def dequantise_rows_of_int8(codes: Shaped[Tensor, "out in"], absmax: Float[Tensor, " out"]) -> Float[Tensor, "out in"]:
    """A weight of LLM.int8() (Dettmers et al. 2022): code * absmax of its row / 127.

    Source: bitsandbytes, `int8_vectorwise_dequant`, whose constant for 1/127 is taken so that the bits agree.
    """
    return codes.to(torch.float32).mul_(absmax.to(torch.float32).unsqueeze(-1)).mul_(7.874015718698502e-3)


def powers_of_two(exponents: Shaped[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Scales in UE8M0 (OCP Microscaling 1.0, 5.4.1): byte e means 2^(e - 127), and 255 means NaN.

    Args:
        exponents: uint8, or float8_e8m0fnu, which is the same byte.
    """
    raw = exponents.contiguous().view(torch.float8_e8m0fnu)
    # A cast in torch reads the byte as the standard does, down to the subnormal 2^-127.
    return raw.to(torch.float32)


def apply_blocks(
    operation: Callable[[Tensor, Tensor], object],
    weight: Shaped[Tensor, "*batch out in"],
    entries: Shaped[Tensor, "*batch block_rows block_columns"],
    block: tuple[int, int],
) -> None:
    """Apply an operation that works in place, such as `Tensor.mul_`, to every block of `weight` and its entry."""
    *_, rows, columns = weight.shape
    tall, wide = min(block[0], max(rows, 1)), min(block[1], max(columns, 1))
    whole_rows, whole_columns = rows - rows % tall, columns - columns % wide
    # The whole blocks by a view; then what the edges cut off, each part one view as well.
    for top, bottom, height in ((0, whole_rows, tall), (whole_rows, rows, rows - whole_rows)):
        for left, right, width in ((0, whole_columns, wide), (whole_columns, columns, columns - whole_columns)):
            if top < bottom and left < right:
                part = cast("Tensor", weight[..., top:bottom, left:right].unflatten(-1, (-1, width)))
                blocks = cast("Tensor", part.unflatten(-3, (-1, height)))
                taken = entries[..., top // tall : -(-bottom // tall), left // wide : -(-right // wide)]
                operation(blocks, taken[..., :, None, :, None])


def dequantise_offset(
    codes: Shaped[Tensor, "*batch out in"],
    scale: Float[Tensor, "*batch out groups"],
    offset: Float[Tensor, "*batch out groups"],
    group_size: int,
) -> Float[Tensor, "*batch out in"]:
    """A weight of MLX's affine mode: code * scale + offset, where files call the offset `biases`.

    Source: mlx 0.32, `mlx.core.quantize` and `mlx.core.dequantize`.
    """
    weight = codes.to(torch.float32, copy=True)
    apply_blocks(Tensor.mul_, weight, scale.to(torch.float32), (1, group_size))
    apply_blocks(Tensor.add_, weight, offset.to(torch.float32), (1, group_size))
    return weight
