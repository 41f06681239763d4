"""Positioned reads: the right bytes, no others, and a clear word when the file is not what its header said."""

import os
import struct
from pathlib import Path

import pytest
import torch
from glassblock.checkpoint.container import read_container
from glassblock.checkpoint.entries import DTYPE_BITS, TensorEntry
from glassblock.checkpoint.reading import (
    TORCH_DTYPES,
    ReadMeter,
    read_chunks,
    read_rows,
    read_tensor,
)
from glassblock.errors import AccessRefused, DamagedCheckpoint, FamilyMismatch, InvalidValue
from makers import write_container
from safetensors.torch import load_file, save_file
from torch import Tensor


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def random_of(dtype: torch.dtype, *shape: int) -> Tensor:
    count = dtype.itemsize * torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("code", sorted(TORCH_DTYPES))
def test_every_dtype_is_read_bit_for_bit(tmp_path: Path, code: str) -> None:
    dtype = TORCH_DTYPES[code]
    path = tmp_path / "x.safetensors"
    tensors = {"t": random_of(dtype, 5, 7), "scalar": random_of(dtype), "empty": random_of(dtype, 0, 3)}
    save_file(tensors, path)
    reference = load_file(path)
    meter = ReadMeter()
    for name, entry in read_container(path).entries.items():
        assert entry.dtype == code
        read = read_tensor(entry, "cpu", meter)
        assert (read.dtype, read.shape) == (dtype, reference[name].shape)
        assert read.is_contiguous()
        assert torch.equal(bits(read), bits(reference[name])) or entry.elements == 0
    assert meter == ReadMeter(bytes=36 * dtype.itemsize, tensors=3)


@pytest.mark.parametrize("code", sorted(set(DTYPE_BITS) - set(TORCH_DTYPES)))
def test_elements_below_a_byte_are_refused_by_name(tmp_path: Path, code: str) -> None:
    size = DTYPE_BITS[code] // 2
    path = write_container(tmp_path / "x", {"t": {"dtype": code, "shape": [4], "data_offsets": [0, size]}}, bytes(size))
    entry = read_container(path).entries["t"]
    with pytest.raises(FamilyMismatch, match=f'tensor "t" is stored as {code}'):
        read_tensor(entry, "cpu", ReadMeter())
    with pytest.raises(FamilyMismatch):
        next(read_chunks(entry, 64))


def test_data_that_starts_at_an_odd_byte(tmp_path: Path) -> None:
    values = torch.arange(5, dtype=torch.float64)
    header = b'{"t":{"dtype":"F64","shape":[5],"data_offsets":[0,40]}}'
    for padding in range(8):
        path = write_container(tmp_path / "x", header + b" " * padding, values.numpy().tobytes())
        entry = read_container(path).entries["t"]
        assert torch.equal(read_tensor(entry, "cpu", ReadMeter()), values)
        assert torch.equal(torch.cat([chunk.clone() for chunk in read_chunks(entry, 16)]), values)
        assert torch.equal(read_rows(entry, [4, 0], "cpu", ReadMeter()), values[[4, 0]])


@pytest.mark.parametrize("chunk_bytes", [2, 3, 27, 28, 29, 100, 279, 280, 10_000])
def test_chunks_are_whole_rows_where_a_row_fits(tmp_path: Path, chunk_bytes: int) -> None:
    tensor = torch.randn(2, 5, 14).to(torch.bfloat16)  # ten rows of 28 bytes
    path = tmp_path / "x"
    save_file({"t": tensor}, path)
    meter = ReadMeter()
    chunks = [chunk.clone() for chunk in read_chunks(read_container(path).entries["t"], chunk_bytes, meter=meter)]
    assert torch.equal(torch.cat(chunks), tensor.flatten())
    assert all(chunk.numel() * 2 <= chunk_bytes for chunk in chunks)
    assert chunk_bytes < 28 or all(chunk.numel() % 14 == 0 for chunk in chunks)
    assert meter == ReadMeter(bytes=280, tensors=1)


def test_chunks_reuse_one_buffer(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"t": torch.randn(1000)}, path)
    pointers = {chunk.data_ptr() for chunk in read_chunks(read_container(path).entries["t"], 400)}
    assert len(pointers) == 1


def test_a_chunk_must_hold_an_element(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"t": torch.randn(4)}, path)
    with pytest.raises(InvalidValue, match="one element of 4 bytes"):
        next(read_chunks(read_container(path).entries["t"], 3))


def test_rows_are_read_alone_and_in_the_order_asked(tmp_path: Path) -> None:
    tensor = torch.randn(50, 6)
    path = tmp_path / "x"
    save_file({"t": tensor, "s": torch.tensor(1.0)}, path)
    entries, meter = read_container(path).entries, ReadMeter()
    assert torch.equal(read_rows(entries["t"], [49, 0, 7, 7], "cpu", meter), tensor[[49, 0, 7, 7]])
    assert meter.bytes == 4 * 24
    assert read_rows(entries["t"], [], "cpu", meter).shape == (0, 6)
    for rows, words in (([50], 'row 50 is outside tensor "t"'), ([-1], 'row -1 is outside tensor "t"')):
        with pytest.raises(InvalidValue, match=words):
            read_rows(entries["t"], rows, "cpu", meter)
    with pytest.raises(InvalidValue, match="is a scalar"):
        read_rows(entries["s"], [0], "cpu", meter)


@pytest.fixture
def entry(tmp_path: Path) -> TensorEntry:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(10), "b": torch.randn(10)}, path)
    return read_container(path).entries["b"]


def read_in_three_ways(entry: TensorEntry) -> list[DamagedCheckpoint]:
    errors: list[DamagedCheckpoint] = []
    for read in (
        lambda: read_tensor(entry, "cpu", ReadMeter()),
        lambda: list(read_chunks(entry, 8)),
        lambda: read_rows(entry, [9], "cpu", ReadMeter()),
    ):
        with pytest.raises(DamagedCheckpoint) as error:
            read()
        errors.append(error.value)
    return errors


def test_a_file_that_shrank(entry: TensorEntry) -> None:
    os.truncate(entry.file, entry.stop - 3)
    for error in read_in_three_ways(entry):
        assert (error.file, error.tensor, error.byte) == ("model.safetensors", "b", entry.stop - 3)
        assert "ends at byte" in error.message


def test_a_file_that_was_replaced(entry: TensorEntry) -> None:
    other = entry.file.with_name("other")
    other.write_bytes(entry.file.read_bytes())
    other.replace(entry.file)
    for error in read_in_three_ways(entry):
        assert (error.file, error.tensor) == ("model.safetensors", "b")
        assert "was changed after its header was read" in error.message


def test_a_shorter_file_in_its_place_is_told_of_rows_that_both_have(entry: TensorEntry) -> None:
    other = entry.file.with_name("other")
    save_file({"a": torch.zeros(10), "b": torch.zeros(5)}, other)
    other.replace(entry.file)
    for read in (lambda: read_rows(entry, [0], "cpu", ReadMeter()), lambda: next(read_chunks(entry, 8))):
        with pytest.raises(DamagedCheckpoint, match="ends at byte"):
            read()


def test_a_file_that_changes_while_it_is_read(entry: TensorEntry) -> None:
    chunks = read_chunks(entry, 8)
    next(chunks)
    with entry.file.open("r+b") as file:
        file.seek(entry.stop - 4)
        file.write(b"1234")
    os.utime(entry.file, ns=(0, 1))
    with pytest.raises(DamagedCheckpoint, match="was changed after its header was read"):
        list(chunks)


def test_a_file_that_was_rewritten_in_place(entry: TensorEntry) -> None:
    with entry.file.open("r+b") as file:
        file.seek(entry.start)
        file.write(b"1234")
    os.utime(entry.file, ns=(0, 1))
    assert "was changed" in read_in_three_ways(entry)[0].message


def test_a_file_that_became_a_link(entry: TensorEntry, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    entry.file.rename(moved)
    entry.file.symlink_to(moved)
    with pytest.raises(AccessRefused, match="became a symbolic link"):
        read_tensor(entry, "cpu", ReadMeter())


def test_only_the_tensors_own_bytes_are_touched(tmp_path: Path) -> None:
    # A file of 64 GB of holes around 4 KB of data: reading anything else would take minutes and show up as zeros.
    values = torch.randn(1024)
    before = 64 << 30
    header = (
        f'{{"big":{{"dtype":"U8","shape":[{before}],"data_offsets":[0,{before}]}},'
        f'"t":{{"dtype":"F32","shape":[1024],"data_offsets":[{before},{before + 4096}]}}}}'
    ).encode()
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(8 + len(header) + before)
        file.write(values.numpy().tobytes())
    container, meter = read_container(path), ReadMeter()
    assert container.faults == ()
    assert torch.equal(read_tensor(container.entries["t"], "cpu", meter), values)
    assert meter.bytes == 4096
    assert path.stat().st_blocks * 512 < 1 << 20


def test_a_shape_that_torch_cannot_hold(tmp_path: Path) -> None:
    header = {"t": {"dtype": "U8", "shape": [0, 2**64 - 1], "data_offsets": [0, 0]}}
    entry = read_container(write_container(tmp_path / "x", header)).entries["t"]
    with pytest.raises(DamagedCheckpoint, match="which torch cannot hold"):
        read_tensor(entry, "cpu", ReadMeter())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_receives_the_same_bits(tmp_path: Path) -> None:
    tensor = torch.randn(5_000_001).to(torch.bfloat16)
    path = tmp_path / "x"
    save_file({"t": tensor.repeat(4)}, path)
    entry, meter = read_container(path).entries["t"], ReadMeter()
    assert torch.equal(read_tensor(entry, "cuda", meter).cpu(), tensor.repeat(4))
    assert torch.equal(torch.cat(list(read_chunks(entry, 1 << 20, device="cuda"))).cpu(), tensor.repeat(4))
    assert torch.equal(read_rows(entry, [3, 1], "cuda", meter).cpu(), tensor[[3, 1]])
