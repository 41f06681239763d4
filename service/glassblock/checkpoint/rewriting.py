"""The header of a weight file whose tensors differ, or whose end is gone: the file as its header would then be read.

Where nothing but names differ and the new header fits into the old one's place, the data stay where they are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from glassblock.checkpoint.changes import altered
from glassblock.checkpoint.container import MAX_HEADER_BYTES, layout_faults
from glassblock.checkpoint.entries import Container, TensorEntry
from glassblock.errors import InvalidValue

REWRITABLE = frozenset({"hole", "trailing-bytes"})
"""Faults of a container that are gone when it is written anew; with any other its tensors cannot be told."""

_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class Rewritten:
    """A weight file that differs.

    Attributes:
        container: As its header would be read.
        header: The header, with the eight bytes of its length.
        was: The file that is there.
        header_only: Whether its data stay where they are, so that the header can be exchanged in place.
    """

    container: Container
    header: bytes
    was: Container
    header_only: bool


def rewritten(was: Container, tensors: Mapping[str, TensorEntry]) -> Rewritten:
    """The file with these tensors, in this order, one behind the other.

    Raises:
        InvalidValue: Its header would be longer than the format allows.
    """
    offsets: dict[str, int] = {}
    reached = 0
    for name, entry in tensors.items():
        offsets[name] = reached
        reached += entry.bytes
    header = _header(was, tensors, offsets)
    data_start = _LENGTH_BYTES + was.header_bytes
    places = sorted((entry.start, entry.stop) for entry in was.entries.values())
    kept = (
        not any(fault.kind in REWRITABLE for fault in was.faults)
        and len(header) <= was.header_bytes
        and list(was.entries.values()) == list(tensors.values())
        and [(data_start + offsets[name], entry.stop) for name, entry in tensors.items()] == places
    )
    length = was.header_bytes if kept else -(-len(header) // _ALIGNMENT) * _ALIGNMENT
    if length > MAX_HEADER_BYTES:
        raise InvalidValue(f"the header of {was.file.name} would be longer than the format allows", field="patch")
    header = length.to_bytes(_LENGTH_BYTES, "little") + header.ljust(length)
    size = len(header) + reached
    identity = None if was.identity is None else replace(was.identity, size=size)
    entries = tuple(
        replace(altered(entry, start=len(header) + offsets[name], name=name), identity=identity, file=was.file)
        for name, entry in tensors.items()
    )
    container = replace(
        was,
        size=size,
        header_bytes=length,
        entries=MappingProxyType({entry.name: entry for entry in entries}),
        faults=tuple(layout_faults(entries, was.file, len(header), size)),
    )
    return Rewritten(container, header, was, header_only=kept)


def _header(was: Container, tensors: Mapping[str, TensorEntry], offsets: Mapping[str, int]) -> bytes:
    fields: dict[str, object] = {"__metadata__": dict(was.metadata)} if was.metadata else {}
    for name, entry in tensors.items():
        span = [offsets[name], offsets[name] + entry.bytes]
        fields[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": span}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def shortened(container: Container, count: int) -> Container:
    """The file without so many of its last bytes."""
    size = max(container.size - count, 0)
    entries = {
        name: replace(entry, identity=None if entry.identity is None else replace(entry.identity, size=size))
        for name, entry in container.entries.items()
    }
    faults = layout_faults(tuple(entries.values()), container.file, _LENGTH_BYTES + container.header_bytes, size)
    return replace(container, size=size, entries=MappingProxyType(entries), faults=tuple(faults))
