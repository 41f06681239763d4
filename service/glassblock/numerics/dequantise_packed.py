"""Codes of 2 to 8 bits packed into words, and the formats that pack along columns or rows: GPTQ and AWQ.

All of them fill a word from its lowest bit, and code i stands at bit i * bits of its row, also where that crosses from
one word into the next. AWQ alone shuffles the codes of a word.
"""

import torch
from jaxtyping import Float, Integer, Shaped, UInt8
from torch import Tensor

from glassblock.numerics.dequantise import CHUNK_ELEMENTS, dequantise_blocks, dequantise_columns

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble k of a word, counted from the lowest, holds this one of the word's eight columns."""

_CODES = 8  # eight codes of n bits take n bytes, whatever n is


def unpack_bits(packed: Integer[Tensor, "*rows words"], bits: int, count: int) -> UInt8[Tensor, "*rows codes"]:
    """The first `count` codes of each row.

    Args:
        packed: Words of 8, 16, 32 or 64 bits, in the byte order of the file (little-endian).
        bits: Bits of a code, 1 to 8.
        count: Codes to take; at most as many as a row holds.
    """
    rows = packed.shape[:-1]
    if count == 0 or packed.numel() == 0:
        return packed.new_empty((*rows, count), dtype=torch.uint8)
    # Flat first: an axis of one element may have any stride, and bytes can be seen only through a stride of one.
    octets = packed.reshape(-1).view(torch.uint8).view(-1, packed.shape[-1] * packed.itemsize)
    if bits in {1, 2, 4, 8}:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        spread = (octets.unsqueeze(-1) >> shifts).bitwise_and_(2**bits - 1)
        return spread.flatten(1)[:, :count].reshape(*rows, count)
    flat = octets.new_empty((octets.shape[0], count))
    step = max(1, CHUNK_ELEMENTS // count)
    for start in range(0, flat.shape[0], step):
        flat[start : start + step] = _unpack_odd(octets[start : start + step], bits)[:, :count]
    return flat.view(*rows, count)


def dequantise_gptq(
    qweight: Integer[Tensor, "words out"],
    qzeros: Integer[Tensor, "groups zero_words"],
    scales: Float[Tensor, "groups out"],
    *,
    bits: int,
    width: int,
    zero_offset: int,
    group_size: int,
    column_groups: Integer[Tensor, " in"] | None = None,
) -> Float[Tensor, "out in"]:
    """A weight of GPTQ (Frantar et al. 2023), packed along its input axis.

    Args:
        qweight: Codes, packed along the rows.
        qzeros: Zero points, packed along the columns.
        scales: What multiplies.
        bits: 2, 3, 4 or 8.
        width: Length of the input axis.
        zero_offset: What is added to a stored zero point: 1 in the first version of the format, 0 in `gptq_v2`. A
            first-version zero point of all ones becomes 2^bits, as in AutoGPTQ; GPTQModel lets it overflow instead.
        group_size: Columns that share a scale, where `column_groups` is None.
        column_groups: The group of each column (`g_idx`).

    Source: AutoGPTQ 0.7.1, nn_modules/qlinear/qlinear_cuda.py; GPTQModel 7.7, nn_modules/qlinear.
    """
    codes = unpack_bits(qweight.T, bits, width)
    # Wider than a byte: 255 and one more.
    zero = unpack_bits(qzeros, bits, scales.shape[1]).to(torch.int16).add_(zero_offset).T
    if column_groups is None:
        return dequantise_blocks(codes, scales.T, (1, group_size), zero=zero)
    return dequantise_columns(codes, scales.T, zero, column_groups)


def dequantise_awq(
    qweight: Integer[Tensor, "in words"],
    qzeros: Integer[Tensor, "groups words"],
    scales: Float[Tensor, "groups out"],
    *,
    group_size: int,
) -> Float[Tensor, "out in"]:
    """A weight of AWQ (Lin et al. 2024) in its `gemm` layout: 4 bits, packed along the output axis.

    Source: AutoAWQ 0.2.9, utils/packing_utils.py and modules/linear/gemm.py.
    """
    out = scales.shape[1]
    codes, zero = (_in_order(unpack_bits(packed, 4, out)) for packed in (qweight, qzeros))
    return dequantise_blocks(codes.T, scales.T, (1, group_size), zero=zero.T)


def _in_order(codes: Shaped[Tensor, "rows out"]) -> Shaped[Tensor, "rows out"]:
    places = torch.tensor(AWQ_ORDER, device=codes.device).argsort()
    return codes.reshape(codes.shape[0], -1, len(AWQ_ORDER))[..., places].flatten(-2)


def _unpack_odd(octets: UInt8[Tensor, "rows bytes"], bits: int) -> UInt8[Tensor, "rows codes"]:
    """Codes that cross bytes: the bytes of each eight codes are joined into one number first."""
    padding = -octets.shape[1] % bits
    if padding:
        octets = torch.nn.functional.pad(octets, (0, padding))
    joined = octets.reshape(octets.shape[0], -1, bits).to(torch.int64)
    places = torch.arange(bits, device=octets.device) * 8
    numbers = (joined << places).sum(-1, keepdim=True)
    shifts = torch.arange(_CODES, device=octets.device) * bits
    return ((numbers >> shifts) & (2**bits - 1)).to(torch.uint8).flatten(1)
