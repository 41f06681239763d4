"""Tensor data from positioned reads, straight to the device.

No memory map: its pages would count as resident and hide what was really read, and a file cut while
mapped kills the process. Each read states an offset and a length, so reads may run in several threads.
"""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.changes import AlteredEntry, changed, row_bytes, sought, unmoved
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.files import FileIdentity, fill, identity_of, open_regular
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import DamagedCheckpoint, FamilyMismatch, GlassblockError, InvalidValue

STAGING_BYTES = 16 << 20
"""Length of each of the two pinned buffers through which data goes to a GPU."""

TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "C64": torch.complex64,
        "F64": torch.float64,
        "I64": torch.int64,
        "U64": torch.uint64,
    }
)
"""The torch dtype of each of the format's codes; those with elements below a byte have none."""


@dataclass(slots=True)
class ReadMeter:
    """What was read: `bytes` of tensor data, from `tensors` tensors (each counted once per read)."""

    bytes: int = 0
    tensors: int = 0


def read_tensor(entry: TensorEntry, device: torch.device | str, meter: ReadMeter) -> Tensor:
    """The whole tensor on `device`, in the file's dtype, contiguous.

    Raises:
        DamagedCheckpoint: The file became shorter or changed since its header was read.
        FamilyMismatch: torch has no dtype for its elements.
        UnknownCheckpoint, AccessRefused, ServiceUnavailable: See `files.open_regular`.
    """
    dtype = torch_dtype(entry)
    target = torch.device(device)
    entry = unmoved(entry)
    if isinstance(entry, AlteredEntry):
        return _shaped(_altered_bytes(entry, target, meter).view(dtype), entry)
    flat = torch.empty(entry.bytes, dtype=torch.uint8, device=target)
    with _opened(entry) as descriptor:
        if target.type == "cpu":
            _fill_from(descriptor, entry, 0, flat)
        else:
            _fill_staged(descriptor, entry, flat)
    meter.bytes += entry.bytes
    meter.tensors += 1
    return _shaped(flat.view(dtype), entry)


def read_rows(entry: TensorEntry, rows: Sequence[int], device: torch.device | str, meter: ReadMeter) -> Tensor:
    """The slices `rows` of the first axis, in that order; only their bytes are read.

    Raises:
        InvalidValue: A row is outside the tensor, or the tensor is a scalar.
        DamagedCheckpoint, FamilyMismatch: As `read_tensor`.
    """
    dtype = torch_dtype(entry)
    if not entry.shape:
        raise InvalidValue(f"tensor {shown(entry.name)} is a scalar and has no rows", tensor=entry.name)
    for row in rows:
        if not 0 <= row < entry.shape[0]:
            raise InvalidValue(
                f"row {row} is outside tensor {shown(entry.name)}, which has rows 0 to {entry.shape[0] - 1}",
                tensor=entry.name,
            )
    entry = unmoved(entry)
    if isinstance(entry, AlteredEntry):
        # Patched embeddings are seldom asked for rows: all of it is read.
        return read_tensor(entry, "cpu", meter)[list(rows)].to(device)
    row_length = entry.bytes // entry.shape[0] if entry.shape[0] else 0
    taken = torch.empty((len(rows), row_length), dtype=torch.uint8)
    with _opened(entry) as descriptor:
        # In the file's order, so that the disk moves one way.
        for position in sorted(range(len(rows)), key=rows.__getitem__):
            _fill_from(descriptor, entry, rows[position] * row_length, taken[position])
    meter.bytes += taken.numel()
    meter.tensors += 1
    return taken.view(-1).view(dtype).view(len(rows), *entry.shape[1:]).to(device)


def read_chunks(
    entry: TensorEntry,
    chunk_bytes: int,
    *,
    device: torch.device | str = "cpu",
    meter: ReadMeter | None = None,
    buffers: Iterator[Tensor] | None = None,
    seen: Callable[[memoryview], object] | None = None,
) -> Iterator[Tensor]:
    """The tensor in flat pieces of at most `chunk_bytes` bytes, in order, each byte read once.

    A piece holds whole rows (slices of the last axis) where a row fits into `chunk_bytes`, whole elements
    otherwise. It is valid until the next one is asked for: on the CPU all pieces share one buffer.

    Args:
        entry: The tensor.
        chunk_bytes: The most bytes of a piece.
        device: Where the pieces go.
        meter: Counts what is read.
        buffers: Where to read each piece to, in turn: uint8, `chunk_bytes` long at least. One of its own by default.
        seen: Given the bytes of each piece as they were read.

    Raises:
        InvalidValue: `chunk_bytes` is smaller than one element.
        DamagedCheckpoint, FamilyMismatch: As `read_tensor`.
    """
    dtype = torch_dtype(entry)
    step = piece_bytes(entry, chunk_bytes)
    target = torch.device(device)
    entry = unmoved(entry)
    if isinstance(entry, AlteredEntry):
        for piece in _altered_pieces(entry, step, target, meter or ReadMeter()):
            if seen is not None:
                seen(memoryview(cast("bytearray", piece.cpu().numpy())))
            yield piece.view(dtype)
        return
    if buffers is None:
        buffers = repeat(reading_buffer(min(step, entry.bytes), target))
    with _opened(entry) as descriptor:
        for offset in range(0, entry.bytes, step):
            piece = next(buffers)[: min(step, entry.bytes - offset)]
            _fill_from(descriptor, entry, offset, piece)
            if seen is not None:
                seen(memoryview(cast("bytearray", piece.numpy())))
            if meter is not None:
                meter.bytes += piece.numel()
            yield piece.view(dtype) if target.type == "cpu" else piece.to(target).view(dtype)
    if meter is not None:
        meter.tensors += 1


def piece_bytes(entry: TensorEntry, chunk_bytes: int) -> int:
    """Length of every piece of `read_chunks` but the last one.

    Raises:
        InvalidValue: `chunk_bytes` is smaller than one element.
        FamilyMismatch: torch has no dtype for its elements.
    """
    element = torch_dtype(entry).itemsize
    row = element * (entry.shape[-1] if entry.shape else 1)
    unit = row if 0 < row <= chunk_bytes else element
    step = chunk_bytes // unit * unit
    if step == 0:
        raise InvalidValue(f"chunk_bytes is {chunk_bytes}, less than one element of {element} bytes")
    return step


def read_run(entries: Sequence[TensorEntry], start: int, flat: Tensor) -> bool:
    """Fill the CPU bytes `flat` from byte `start` of a file on, where these tensors of it lie side by side.

    False where that file is not what it was, is too short or cannot be read: `read_span` of each tensor says why.
    """
    before, name = entries[0].identity, entries[0].file.name
    real = entries[0].file.resolve() if before is None else before.real
    try:
        with open_regular(real, name=name) as (descriptor, now):
            if before not in {None, now}:
                return False
            done = fill(descriptor, memoryview(cast("bytearray", flat.numpy())), start, name=name)
            return done == flat.numel() and before in {None, identity_of(descriptor, real)}
    except GlassblockError:
        return False


def read_span(entry: TensorEntry, start: int, flat: Tensor) -> None:
    """Fill the CPU bytes `flat` from byte `start` of the tensor on.

    Raises:
        DamagedCheckpoint, UnknownCheckpoint, AccessRefused, ServiceUnavailable: As `read_tensor`.
    """
    with _opened(entry) as descriptor:
        _fill_from(descriptor, entry, start, flat)


def reading_buffer(length: int, device: torch.device) -> Tensor:
    """Where to read pieces to that go to `device`: pinned where that is a GPU."""
    return torch.empty(length, dtype=torch.uint8, pin_memory=device.type == "cuda")


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """The torch dtype of the entry's elements.

    Raises:
        FamilyMismatch: torch has none that holds one element of this code.
    """
    dtype = TORCH_DTYPES.get(entry.dtype)
    if dtype is None:
        raise FamilyMismatch(
            f"tensor {shown(entry.name)} is stored as {entry.dtype}, whose elements are smaller than a byte: "
            "torch cannot hold them unpacked",
            tensor=entry.name,
            file=entry.file.name,
            known=tuple(TORCH_DTYPES),
        )
    return dtype


def _altered_bytes(entry: AlteredEntry, device: torch.device, meter: ReadMeter) -> Tensor:
    """The bytes of a patched tensor, or of a part of one, flat."""
    source, skip = sought(entry)
    tensor = read_tensor(source, device, meter)
    for change in entry.changes:
        tensor = changed(tensor, change, TORCH_DTYPES)
    return tensor.reshape(-1).view(torch.uint8)[skip : skip + entry.bytes]


def _altered_pieces(entry: AlteredEntry, step: int, device: torch.device, meter: ReadMeter) -> Iterator[Tensor]:
    """The same bytes in pieces of `step`; where the changes allow it, no more of the source is held than that."""
    row = row_bytes(entry)
    block = entry.bytes if not row or (entry.start - entry.base) % row else max(step // row, 1) * row
    held = torch.empty(0, dtype=torch.uint8, device=device)
    for start in range(entry.start, entry.stop, max(block, 1)):
        part = replace(entry, start=start, stop=min(start + block, entry.stop))
        held = torch.cat([held, _altered_bytes(part, device, meter)])
        while held.numel() >= step:
            yield held[:step]
            held = held[step:]
    if held.numel():
        yield held


@contextmanager
def _opened(entry: TensorEntry) -> Generator[int]:
    """The file that a tensor lies in; it is the same when it was read as when its header was."""
    real = entry.file.resolve() if entry.identity is None else entry.identity.real
    with open_regular(real, name=entry.file.name) as (descriptor, now):
        _require_same(entry, now)
        yield descriptor
        _require_same(entry, identity_of(descriptor, real))


def _require_same(entry: TensorEntry, now: FileIdentity) -> None:
    if entry.identity in {None, now}:
        return
    if now.size < entry.stop:
        raise _cut(entry, now.size)
    raise DamagedCheckpoint(
        f"{entry.file.name} was changed after its header was read",
        file=entry.file.name,
        tensor=entry.name,
        hint="Open the checkpoint again.",
    )


def _fill_from(descriptor: int, entry: TensorEntry, offset: int, flat: Tensor) -> None:
    """Fill the CPU bytes `flat` from `offset` on, counted from the tensor's first byte."""
    start = entry.start + offset
    done = fill(descriptor, memoryview(cast("bytearray", flat.numpy())), start, name=entry.file.name)
    if done < flat.numel():
        raise _cut(entry, start + done)


def _cut(entry: TensorEntry, end: int) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{entry.file.name} ends at byte {end:,}, inside tensor {shown(entry.name)}, "
        f"which reaches to byte {entry.stop:,}",
        file=entry.file.name,
        tensor=entry.name,
        byte=end,
        hint="Download or copy the file again.",
    )


def _fill_staged(descriptor: int, entry: TensorEntry, flat: Tensor) -> None:
    """Fill `flat` on a GPU through two pinned buffers: while one is read into, the other is copied."""
    stream = torch.cuda.current_stream(flat.device)
    length = min(STAGING_BYTES, flat.numel())
    buffers = [torch.empty(length, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event(), torch.cuda.Event()]
    for turn, offset in enumerate(range(0, flat.numel(), STAGING_BYTES)):
        # An event that was never recorded counts as passed.
        copied[turn % 2].synchronize()
        piece = buffers[turn % 2][: min(STAGING_BYTES, flat.numel() - offset)]
        _fill_from(descriptor, entry, offset, piece)
        flat[offset : offset + piece.numel()].copy_(piece, non_blocking=True)
        copied[turn % 2].record(stream)
    stream.synchronize()


def _shaped(flat: Tensor, entry: TensorEntry) -> Tensor:
    try:
        return flat.view(entry.shape)
    except (RuntimeError, TypeError, OverflowError, ValueError):
        # Only an empty tensor gets here: an axis beyond 2^63 beside an axis of 0.
        raise DamagedCheckpoint(
            f"tensor {shown(entry.name)} has the shape {list(entry.shape)}, which torch cannot hold",
            tensor=entry.name,
            file=entry.file.name,
        ) from None
