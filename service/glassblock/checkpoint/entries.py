"""What a safetensors header says, as values: tensors, whole files, and what is wrong with them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from glassblock.checkpoint.files import FileIdentity

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "BOOL": 8,
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)
"""Bits of one element, for every dtype the format knows."""

FLOAT_CODES = frozenset({"F64", "F32", "F16", "BF16"})
"""Dtypes whose numbers are the weights themselves, without a scale."""

ContainerFaultKind = Literal["truncated", "trailing-bytes", "overlap", "hole", "header", "not-safetensors"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its header describes it.

    Attributes:
        name: Its full name in the file.
        dtype: The format's code, such as `BF16`.
        shape: Lengths of its axes, row-major; empty for a scalar.
        file: The file it lies in, as the checkpoint names it.
        start: First byte of its data, from the start of the file.
        stop: Byte after its last.
        identity: What the file was when its header was read; None leaves later changes unnoticed.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    stop: int
    identity: FileIdentity | None = None

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar, 0 where an axis is empty."""
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        """Length of its data."""
        return self.stop - self.start

    def part(self, index: int, count: int) -> "TensorEntry":
        """The entry of one of `count` equal parts along the first axis; without that axis where each has length 1.

        How one expert of a stack is had without reading the others. `count` divides the first axis.
        """
        rows, step = self.shape[0] // count, self.bytes // count
        shape = self.shape[1:] if self.shape[0] == count else (rows, *self.shape[1:])
        start = self.start + index * step
        return replace(self, shape=shape, start=start, stop=start + step)


@dataclass(frozen=True, slots=True)
class ContainerFault:
    """One thing wrong with a container.

    Attributes:
        kind: Which, after the rules `container/*`.
        file: The file, as the checkpoint names it.
        tensor: The tensor it shows at, if it shows at one.
        byte: Where it shows, from the start of the file.
        message: What is wrong, with the numbers.
        hint: What to do.
    """

    kind: ContainerFaultKind
    file: Path
    tensor: str | None
    byte: int | None
    message: str
    hint: str

    @property
    def rule(self) -> str:
        """The name of the audit rule it falls under."""
        return f"container/{self.kind}"


@dataclass(frozen=True)
class Container:
    """What a safetensors file says it holds.

    Attributes:
        file: The file, as the checkpoint names it.
        size: Its length in bytes.
        header_bytes: Length of the header, without the eight bytes that tell it; 0 where none could be read.
        entries: The tensors whose description can be believed, in the order of their data.
        metadata: The free text under `__metadata__`.
        faults: Everything wrong with it.
        refused: Names in the header whose description cannot be believed; each has its fault.
        identity: What the file was when its header was read.
    """

    file: Path
    size: int
    header_bytes: int
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    faults: tuple[ContainerFault, ...]
    refused: frozenset[str] = frozenset()
    identity: FileIdentity | None = None

    @property
    def listed(self) -> bool:
        """Whether the header could be read, so that a name absent from it is absent from the file."""
        return self.header_bytes > 0
