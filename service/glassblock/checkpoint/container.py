"""The header of a safetensors file, read without believing it.

Layout of the format (version 0.8 of the reference implementation): eight bytes with the header's length,
little-endian; the header, a JSON object of name -> {dtype, shape, data_offsets}; then the data, whose
offsets count from the header's end, leave no hole, overlap nowhere and stop at the end of the file.

Damage is a value here, not an exception: an audit reports it, a run refuses it.
"""

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, cast

from glassblock.checkpoint.entries import DTYPE_BITS, Container, ContainerFault, ContainerFaultKind, TensorEntry
from glassblock.checkpoint.files import FileIdentity, fill, open_regular
from glassblock.checkpoint.foreign import HEAD_BYTES, foreign_content
from glassblock.checkpoint.strict_json import JsonFault, parse_json, shown
from glassblock.errors import DamagedCheckpoint

MAX_HEADER_BYTES = 100_000_000
"""Longest header read, as in the reference implementation."""

MAX_FAULTS = 100
"""Faults told per file; one more counts the rest."""

NOWHERE_HINT = "Download it again: an interrupted download into a cache leaves such links."

_LENGTH_BYTES = 8
_LARGEST = 2**64 - 1
_METADATA = "__metadata__"
_JSON_STARTS = (b" ", b"\t", b"\r", b"\n", b"{")
_FETCH_AGAIN = "Download or copy the file again."
_WRITE_AGAIN = "Write the file again with the safetensors library."


def read_container(path: Path, *, real: Path | None = None) -> Container:
    """The header of the file at `path`; never its tensors.

    Args:
        path: How the file is called.
        real: What is opened, with all links resolved; `path` resolved by default.

    Returns:
        What it holds and what is wrong with it. Damaged content is never raised.

    Raises:
        UnknownCheckpoint: There is no such file.
        AccessRefused: It may not be read.
        ServiceUnavailable: Too many files are open.
    """
    identity: FileIdentity | None = None
    try:
        with open_regular(path.resolve() if real is None else real, name=path.name) as (descriptor, identity):
            header = _read_header(descriptor, identity.size, name=path.name)
    except (DamagedCheckpoint, _NoHeader) as error:
        kind = error.kind if isinstance(error, _NoHeader) else "not-safetensors"
        fault = ContainerFault(kind, path, None, error.byte, error.message, error.hint or "")
        return Container(path, 0 if identity is None else identity.size, 0, {}, {}, (fault,), identity=identity)
    return _believed(header, path, identity)


def nowhere_container(path: Path) -> Container:
    """What a link to nowhere holds: nothing, which is its fault."""
    message = f"{path.name} is a link that leads nowhere"
    fault = ContainerFault("not-safetensors", path, None, None, message, NOWHERE_HINT)
    return Container(path, 0, 0, {}, {}, (fault,))


class _NoHeader(Exception):
    def __init__(self, kind: ContainerFaultKind, byte: int, message: str, hint: str = _FETCH_AGAIN) -> None:
        super().__init__(message)
        self.kind: ContainerFaultKind = kind
        self.byte = byte
        self.message = message
        self.hint = hint


class _Unbelievable(Exception):
    """What is wrong with the description of one tensor, in words that follow its name."""


class _Header(NamedTuple):
    raw: bytes
    fields: Mapping[str, object]

    @property
    def data_start(self) -> int:
        return _LENGTH_BYTES + len(self.raw)

    def where(self, name: str) -> int:
        """Byte of the file at which the description of `name` stands; the header's first where it is escaped."""
        return _LENGTH_BYTES + max(0, self.raw.find(shown(name, limit=len(name) + 1).encode()))


def _read_header(descriptor: int, size: int, *, name: str) -> _Header:
    head = bytearray(min(size, HEAD_BYTES))
    head = bytes(head[: fill(descriptor, memoryview(head), 0, name=name)])
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    _check_start(head, length, size, name=name)
    raw = bytearray(length)
    raw = bytes(raw[: fill(descriptor, memoryview(raw), _LENGTH_BYTES, name=name)])
    if len(raw) < length:
        raise _NoHeader("truncated", _LENGTH_BYTES + len(raw), f"{name} became shorter while it was read")
    try:
        fields = parse_json(raw, constants=False)
    except JsonFault as error:
        byte = _LENGTH_BYTES + (error.byte or 0)
        message = f"{name} has a header that cannot be read: {error.message}"
        raise _NoHeader("header", byte, message, _WRITE_AGAIN) from None
    if not isinstance(fields, dict):
        raise _NoHeader("header", _LENGTH_BYTES, f"{name} has a header that is no JSON object", _WRITE_AGAIN)
    return _Header(raw, cast("dict[str, object]", fields))


def _check_start(head: bytes, length: int, size: int, *, name: str) -> None:
    """Refuse a file whose first bytes, or whose header's length, no safetensors file has."""
    if not head:
        raise _NoHeader("not-safetensors", 0, f"{name} is empty")
    begins_as_json = head[_LENGTH_BYTES : _LENGTH_BYTES + 1] in _JSON_STARTS
    # Not on the first bytes alone: the length of a header of 640 bytes looks like the start of a pickle.
    if (not begins_as_json or length > MAX_HEADER_BYTES) and (foreign := foreign_content(head)):
        message = f"{name} is not a safetensors file but {foreign.words}"
        raise _NoHeader("not-safetensors", 0, message, foreign.hint)
    if size < _LENGTH_BYTES:
        raise _NoHeader("not-safetensors", 0, f"{name} has {size} bytes, too few for a header's length")
    if length > MAX_HEADER_BYTES and not begins_as_json:
        raise _NoHeader("not-safetensors", 0, f"{name} does not begin as a safetensors file does")
    if length > MAX_HEADER_BYTES:
        message = f"{name} claims a header of {length:,} bytes; the format allows {MAX_HEADER_BYTES:,}"
        raise _NoHeader("header", 0, message, _WRITE_AGAIN)
    if _LENGTH_BYTES + length > size:
        message = (
            f"{name} claims a header of {length:,} bytes, but {size - _LENGTH_BYTES:,} follow its length: "
            "the file was cut inside its header, or the length is wrong"
        )
        raise _NoHeader("truncated", size, message)


def _believed(header: _Header, path: Path, identity: FileIdentity) -> Container:
    entries: list[TensorEntry] = []
    faults: list[ContainerFault] = []
    refused: list[str] = []
    metadata = _metadata(header.fields.get(_METADATA))
    if metadata is None:
        message = f"{path.name}: __metadata__ is no object of texts"
        faults.append(ContainerFault("header", path, None, header.where(_METADATA), message, _WRITE_AGAIN))
    data_start = header.data_start
    for name, fields in header.fields.items():
        if name == _METADATA:
            continue
        try:
            entries.append(_entry(name, fields, path, data_start, identity))
        except _Unbelievable as error:
            refused.append(name)
            if len(refused) <= MAX_FAULTS:
                message = f"{path.name}: tensor {shown(name)} {error}"
                faults.append(ContainerFault("header", path, name, header.where(name), message, _WRITE_AGAIN))
    if len(refused) > MAX_FAULTS:
        message = f"{path.name}: {len(refused) - MAX_FAULTS:,} more tensors are described wrongly"
        faults.append(ContainerFault("header", path, refused[-1], _LENGTH_BYTES, message, _WRITE_AGAIN))
    entries.sort(key=lambda entry: (entry.start, entry.stop))
    gaps = list(layout_faults(entries, path, data_start, identity.size))
    if refused or any(gap.kind == "overlap" for gap in gaps):
        # Where a misplaced or refused tensor should have lain there is a hole now, which is no second fault.
        gaps = [gap for gap in gaps if gap.kind in {"overlap", "truncated"}]
    return Container(
        path,
        identity.size,
        len(header.raw),
        MappingProxyType({entry.name: entry for entry in entries}),
        MappingProxyType(metadata or {}),
        (*faults, *_at_most(gaps)),
        frozenset(refused),
        identity,
    )


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return {}
    if not isinstance(value, dict):
        return None
    texts = cast("dict[str, object]", value)
    if not all(isinstance(text, str) for text in texts.values()):
        return None
    return cast("dict[str, str]", texts)


def _entry(name: str, fields: object, path: Path, data_start: int, identity: FileIdentity) -> TensorEntry:
    if not isinstance(fields, dict):
        raise _Unbelievable("is not described by an object")
    described = cast("dict[str, object]", fields)
    try:
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
    except KeyError:
        missing = (field for field in ("dtype", "shape", "data_offsets") if field not in described)
        raise _Unbelievable(f"lacks {' and '.join(missing)}") from None
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise _Unbelievable(f"has the dtype {reprlib.repr(dtype)}, which is not one of {', '.join(DTYPE_BITS)}")
    axes = _naturals(shape)
    if axes is None:
        raise _Unbelievable(f"has the shape {reprlib.repr(shape)}, which is no list of numbers from 0 to 2^64 - 1")
    span = _naturals(offsets)
    if span is None or len(span) != 2 or span[0] > span[1]:
        raise _Unbelievable(f"has the data_offsets {reprlib.repr(offsets)}, which are no ascending pair of numbers")
    bits = _checked_product((*axes, DTYPE_BITS[dtype]))
    if bits is None:
        raise _Unbelievable(f"has the shape {reprlib.repr(shape)}, whose size passes 2^64")
    if bits % 8:
        raise _Unbelievable(
            f"of the shape {reprlib.repr(shape)} takes {bits} bits in {dtype}, no whole number of bytes"
        )
    if bits // 8 != span[1] - span[0]:
        raise _Unbelievable(
            f"of the shape {reprlib.repr(shape)} takes {bits // 8:,} bytes in {dtype}, "
            f"but its data_offsets {reprlib.repr(offsets)} span {span[1] - span[0]:,}"
        )
    return TensorEntry(name, dtype, axes, path, data_start + span[0], data_start + span[1], identity)


def _naturals(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list):
        return None
    numbers: list[int] = []
    for number in cast("list[object]", value):
        # The exact type: a bool is an int to isinstance.
        if type(number) is not int or not 0 <= number <= _LARGEST:
            return None
        numbers.append(number)
    return tuple(numbers)


def _checked_product(factors: Iterable[int]) -> int | None:
    """The product from left to right, or None where it passes 2^64 on the way, as unsigned arithmetic would."""
    product = 1
    for factor in factors:
        product *= factor
        if product > _LARGEST:
            return None
    return product


def layout_faults(entries: Sequence[TensorEntry], path: Path, data_start: int, size: int) -> Iterator[ContainerFault]:
    """What is wrong with how the data of `entries` (in their order) cover the file after its header."""
    reached, holder = data_start, None
    for entry in entries:
        if entry.start > reached:
            yield ContainerFault(
                "hole",
                path,
                entry.name,
                reached,
                f"{path.name}: bytes {reached:,} to {entry.start:,}, before tensor {shown(entry.name)}, "
                "belong to no tensor",
                _WRITE_AGAIN,
            )
        elif entry.start < reached and holder is not None:
            yield ContainerFault(
                "overlap",
                path,
                entry.name,
                entry.start,
                f"{path.name}: tensor {shown(entry.name)} starts at byte {entry.start:,}, inside tensor "
                f"{shown(holder.name)}, which ends at byte {holder.stop:,}",
                _WRITE_AGAIN,
            )
        if entry.stop >= reached:
            reached, holder = entry.stop, entry
    if reached > size:
        cut = [entry for entry in entries if entry.stop > size]
        yield ContainerFault(
            "truncated",
            path,
            cut[0].name,
            size,
            f"{path.name} has {size:,} bytes, {reached - size:,} fewer than its header describes: "
            f"{len(cut)} of {len(entries)} tensors are cut or gone, the first is {shown(cut[0].name)}",
            _FETCH_AGAIN,
        )
    elif reached < size:
        yield ContainerFault(
            "trailing-bytes",
            path,
            None,
            reached,
            f"{path.name} has {size - reached:,} bytes after its last tensor, from byte {reached:,} on",
            "Cut them off, or write the file again with the safetensors library.",
        )


def _at_most(faults: list[ContainerFault]) -> Iterator[ContainerFault]:
    yield from faults[:MAX_FAULTS]
    rest = faults[MAX_FAULTS:]
    if rest:
        last = rest[-1]
        message = f"{last.file.name}: {len(rest):,} more faults of its layout, the last at byte {last.byte:,}"
        yield replace(last, message=message)
