"""Dequantising against loops over Python numbers, written from the formats' descriptions and not from the code."""

import itertools
import math

import pytest
import torch
from glassblock.numerics.dequantise import (
    dequantise_blocks,
    dequantise_columns,
    dequantise_offset,
    dequantise_rows_of_int8,
    powers_of_two,
)
from glassblock.numerics.dequantise_codebook import (
    BITSANDBYTES_TABLES,
    E2M1,
    dequantise_codebook4,
    dequantise_codebook8,
    dequantise_float4,
)
from glassblock.numerics.dequantise_packed import AWQ_ORDER, dequantise_awq, dequantise_gptq, unpack_bits
from torch import Tensor


def words(codes: list[list[int]], bits: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Each row's codes, one after the other from the lowest bit on, in words."""
    size = 8 * dtype.itemsize
    rows: list[Tensor] = []
    for row in codes:
        number = sum(code << (bits * place) for place, code in enumerate(row))
        raw = number.to_bytes(math.ceil(len(row) * bits / size) * dtype.itemsize, "little")
        rows.append(torch.frombuffer(bytearray(raw), dtype=dtype))
    return torch.stack(rows)


def drawn(generator: torch.Generator, bits: int, *shape: int) -> list[list[int]]:
    return torch.randint(0, 2**bits, shape, generator=generator).tolist()


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


# --- packing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 8, 31, 32, 33, 100])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_codes_come_out_as_they_went_in(generator: torch.Generator, bits: int, count: int, dtype: torch.dtype) -> None:
    codes = drawn(generator, bits, 3, count)
    packed = words(codes, bits, dtype)
    assert unpack_bits(packed, bits, count).tolist() == codes
    assert unpack_bits(packed.T.contiguous().T, bits, count).tolist() == codes


def test_nothing_packed_is_nothing() -> None:
    assert unpack_bits(torch.zeros(4, 0, dtype=torch.int32), 4, 0).shape == (4, 0)
    assert unpack_bits(torch.zeros(0, 4, dtype=torch.int32), 3, 10).shape == (0, 10)


def test_long_rows_are_unpacked_in_parts(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = drawn(generator, 3, 7, 50)
    monkeypatch.setattr("glassblock.numerics.dequantise_packed.CHUNK_ELEMENTS", 120)
    assert unpack_bits(words(codes, 3), 3, 50).tolist() == codes


# --- blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (8, 12), (13, 9), (3, 5, 7)])
@pytest.mark.parametrize("block", [(1, 1), (2, 3), (4, 4), (128, 128), (1, 4), (1, 1000), (1000, 1)])
def test_every_number_takes_the_scale_of_its_block(
    generator: torch.Generator, shape: tuple[int, ...], block: tuple[int, int]
) -> None:
    codes = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
    grid = (*shape[:-2], math.ceil(shape[-2] / block[0]), math.ceil(shape[-1] / block[1]))
    scale = torch.rand(grid, generator=generator)
    zero = torch.randint(-9, 9, grid, generator=generator, dtype=torch.int8)
    found = dequantise_blocks(codes, scale, block, zero=zero)
    assert found.dtype == torch.float32
    for *lead, row, column in itertools.product(*map(range, shape)):
        place = (*lead, row // block[0], column // block[1])
        code = int(codes[*lead, row, column]) - int(zero[place])
        # One product of float32 numbers, rounded once: what Python makes in float64 rounds to the same.
        assert float(found[*lead, row, column]) == float(torch.tensor(code * float(scale[place])))


def test_eight_bit_floats_and_one_zero_for_all() -> None:
    codes = torch.tensor([[1.5, -448.0], [0.0, 2.0**-9]]).to(torch.float8_e4m3fn)
    assert dequantise_blocks(codes, torch.tensor([[2.0]]), (2, 2)).tolist() == [[3.0, -896.0], [0.0, 2.0**-8]]
    whole = torch.tensor([[7, 9]], dtype=torch.uint8)
    assert dequantise_blocks(whole, torch.tensor([[0.5]]), (1, 2), zero=8).tolist() == [[-0.5, 0.5]]


def test_what_is_given_is_left_as_it_was() -> None:
    codes = torch.ones(2, 2)
    dequantise_blocks(codes, torch.full((1, 1), 3.0), (2, 2))
    dequantise_offset(codes, torch.full((2, 1), 3.0), torch.ones(2, 1), 2)
    assert codes.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_columns_in_another_order(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glassblock.numerics.dequantise.CHUNK_ELEMENTS", 20)
    codes = torch.randint(0, 16, (5, 9), generator=generator, dtype=torch.uint8)
    scale, zero = torch.rand(5, 3, generator=generator), torch.randint(0, 16, (5, 3), generator=generator)
    order = torch.randint(0, 3, (9,), generator=generator, dtype=torch.int32)
    found = dequantise_columns(codes, scale, zero, order)
    for row, column in itertools.product(range(5), range(9)):
        group = int(order[column])
        value = (int(codes[row, column]) - int(zero[row, group])) * float(scale[row, group])
        assert float(found[row, column]) == float(torch.tensor(value))


def test_an_offset_is_added_after_scaling(generator: torch.Generator) -> None:
    codes = torch.randint(0, 256, (2, 3, 8), generator=generator, dtype=torch.uint8)
    scale, offset = torch.rand(2, 3, 2, generator=generator), torch.randn(2, 3, 2, generator=generator)
    found = dequantise_offset(codes, scale, offset, 4)
    for expert, row, column in itertools.product(range(2), range(3), range(8)):
        place = (expert, row, column // 4)
        product = torch.tensor(float(int(codes[expert, row, column]) * float(scale[place])))
        assert found[expert, row, column] == product + offset[place]


def test_rows_of_int8_are_in_127ths() -> None:
    found = dequantise_rows_of_int8(torch.tensor([[127, -127], [1, 0]], dtype=torch.int8), torch.tensor([2.0, 127.0]))
    # The constant for 1/127 and two roundings.
    assert torch.allclose(found, torch.tensor([[2.0, -2.0], [1.0, 0.0]]), rtol=3 * 2**-24, atol=0)


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zero_offset", [0, 1])
@pytest.mark.parametrize("shuffled", [False, True])
def test_gptq(generator: torch.Generator, bits: int, zero_offset: int, shuffled: bool) -> None:
    rows, columns, size = 32, 50, 16
    groups = math.ceil(columns / size)
    codes = drawn(generator, bits, columns, rows)
    zeros = drawn(generator, bits, groups, rows)
    zeros[0][0] = 2**bits - 1  # one more does not come back to 0
    scales = torch.rand(groups, rows, generator=generator).half()
    order = torch.randint(0, groups, (columns,), generator=generator)
    found = dequantise_gptq(
        words([list(column) for column in zip(*codes, strict=True)], bits).T,
        words(zeros, bits),
        scales,
        bits=bits,
        width=columns,
        zero_offset=zero_offset,
        group_size=size,
        column_groups=order if shuffled else None,
    )
    assert found.shape == (rows, columns)
    for row, column in itertools.product(range(rows), range(columns)):
        group = int(order[column]) if shuffled else column // size
        value = (codes[column][row] - (zeros[group][row] + zero_offset)) * float(scales[group, row])
        assert float(found[row, column]) == value


def test_awq(generator: torch.Generator) -> None:
    rows, columns, size = 16, 10, 4
    groups = math.ceil(columns / size)
    codes, zeros = drawn(generator, 4, columns, rows), drawn(generator, 4, groups, rows)
    scales = torch.rand(groups, rows, generator=generator).half()

    def shuffled(lines: list[list[int]]) -> Tensor:
        return words([[line[8 * (k // 8) + AWQ_ORDER[k % 8]] for k in range(rows)] for line in lines], 4)

    found = dequantise_awq(shuffled(codes), shuffled(zeros), scales, group_size=size)
    for row, column in itertools.product(range(rows), range(columns)):
        group = column // size
        assert float(found[row, column]) == (codes[column][row] - zeros[group][row]) * float(scales[group, row])


# --- tables -----------------------------------------------------------------------------------------------------


def test_fp4_is_a_sign_two_bits_of_exponent_and_one_of_mantissa() -> None:
    for code, value in enumerate(E2M1):
        sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
        magnitude = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
        assert value == (-magnitude if sign else magnitude)
        assert math.copysign(1.0, value) == (-1.0 if sign else 1.0)


def test_scales_that_are_exponents() -> None:
    exponents = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8)
    assert powers_of_two(exponents).tolist() == [2.0 ** (int(exponent) - 127) for exponent in exponents]
    assert powers_of_two(exponents.view(torch.float8_e8m0fnu)).tolist() == powers_of_two(exponents).tolist()
    assert powers_of_two(torch.tensor([255], dtype=torch.uint8)).isnan().all()


def test_float4_takes_the_low_nibble_first(generator: torch.Generator) -> None:
    codes = drawn(generator, 4, 6, 10)
    scale = torch.rand(6, 3, generator=generator)
    found = dequantise_float4(words(codes, 4, torch.uint8), scale, 4)
    for row, column in itertools.product(range(6), range(10)):
        value = E2M1[codes[row][column]] * float(scale[row, column // 4])
        assert float(found[row, column]) == float(torch.tensor(value))


@pytest.mark.parametrize("quant_type", BITSANDBYTES_TABLES)
@pytest.mark.parametrize("shape", [(3, 48), (5, 7), (1, 1)])
def test_codebooks_run_across_rows(
    generator: torch.Generator, quant_type: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("glassblock.numerics.dequantise_codebook.CHUNK_ELEMENTS", 16)
    count, size, table = math.prod(shape), 32, BITSANDBYTES_TABLES[quant_type]
    (codes,) = drawn(generator, 4, 1, count + count % 2)
    packed = torch.tensor([high << 4 | low for high, low in zip(codes[::2], codes[1::2], strict=True)]).to(torch.uint8)
    absmax = torch.rand(math.ceil(count / size), generator=generator)
    found = dequantise_codebook4(packed, absmax, table=table, block_size=size, shape=shape)
    assert found.shape == shape
    for place, value in enumerate(found.flatten().tolist()):
        entry = float(torch.tensor(table[codes[place]]))
        assert value == float(torch.tensor(entry * float(absmax[place // size])))


def test_statistics_that_are_quantised_themselves(generator: torch.Generator) -> None:
    codes = torch.randint(0, 256, (10,), generator=generator, dtype=torch.uint8)
    table, absmax = torch.rand(256, generator=generator), torch.tensor([2.0, 3.0])
    found = dequantise_codebook8(codes, table, absmax, block_size=8, offset=0.5)
    for place, code in enumerate(codes.tolist()):
        product = torch.tensor(float(table[code]) * float(absmax[place // 8]))
        assert found[place] == product + 0.5
