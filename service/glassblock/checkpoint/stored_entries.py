"""Weights of a layer, plain or stored quantised, under one type: an entry with the weight's own shape.

So whoever maps tensors to their places sees `[out, in]`, transposed where the family stores that, and slices of stacks,
whatever lies in the file; and whoever wants the numbers asks `read_weight`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from glassblock.checkpoint.config import ConfigFile
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.storage import StorageFault
from glassblock.checkpoint.storages_codebook import STATE_MARK
from glassblock.checkpoint.stored_weights import StoredWeight, read_stored, stored_weight
from glassblock.numerics.dtypes import name_of_dtype

READ_AS = torch.float32
"""What stored weights are dequantised to: wide enough that no form loses by it."""


@dataclass(frozen=True, slots=True)
class StoredEntry(TensorEntry):
    """The codes of a stored weight, with the shape that the plain weight would have in this family.

    `dtype` is that of the codes, and never one of a plain weight; `start` and `stop` are those of the codes.

    Attributes:
        stored: The weight.
        transposed: Whether the family keeps its plain weight `[in, out]` where this one comes out `[out, in]`.
        slices: What `part` took, in this order: number and count.
    """

    stored: StoredWeight | None = None
    transposed: bool = False
    slices: tuple[tuple[int, int], ...] = ()

    def part(self, index: int, count: int) -> "StoredEntry":
        """As `TensorEntry.part`; of the codes only a share, of what lies beside them nothing is said here."""
        shape = self.shape[1:] if self.shape[0] == count else (self.shape[0] // count, *self.shape[1:])
        step = self.bytes // count
        start = self.start + index * step
        slices = (*self.slices, (index, count))
        return replace(self, shape=shape, start=start, stop=start + step, slices=slices)


def weight_entry(
    entries: Mapping[str, TensorEntry], config: ConfigFile | None, name: str, layout: Literal["out_in", "in_out"]
) -> TensorEntry | StorageFault | None:
    """The entry of a weight: as the file has it where it is plain, of its stored form where it is quantised.

    Args:
        entries: The checkpoint's tensors.
        config: Its config.
        name: The name of the plain weight.
        layout: How the family keeps that.
    """
    stored = stored_weight(entries, config, name)
    if not isinstance(stored, StoredWeight):
        return entries.get(name) if stored is None else stored
    main = stored.main
    transposed = layout == "in_out" and stored.storage.axes == "out_in"
    *lead, rows, columns = stored.shape
    return StoredEntry(
        name=main.name,
        dtype="U8" if main.dtype in FLOAT_CODES else main.dtype,
        shape=(*lead, columns, rows) if transposed else stored.shape,
        file=main.file,
        start=main.start,
        stop=main.stop,
        identity=main.identity,
        stored=stored,
        transposed=transposed,
    )


def read_weight(entry: TensorEntry, device: torch.device | str, meter: ReadMeter) -> Tensor:
    """A weight in the family's own layout: as stored where it is plain, in `READ_AS` where it is quantised.

    Raises:
        InvalidValue, DamagedCheckpoint, FamilyMismatch, UnknownCheckpoint, AccessRefused, ServiceUnavailable: See
            `read_stored` and `read_tensor`.
    """
    if not isinstance(entry, StoredEntry) or entry.stored is None:
        return read_tensor(entry, device, meter)
    stored, slices = entry.stored, list(entry.slices)
    # One of as many parts as a stack has experts is one expert.
    alone = len(stored.shape) == 3 and slices and slices[0][1] == stored.shape[0]
    expert = slices.pop(0)[0] if alone else None
    rows = None
    if len(slices) == 1 and not entry.transposed and (expert is not None or len(stored.shape) == 2):
        index, count = slices.pop()
        height = stored.shape[-2] // count
        rows = (index * height, (index + 1) * height)
    weight = read_stored(stored, device, meter, dtype=READ_AS, expert=expert, rows=rows)
    weight = weight.transpose(-1, -2) if entry.transposed else weight
    for index, count in slices:
        height = weight.shape[0] // count
        weight = weight[index * height : (index + 1) * height]
    return weight.reshape(entry.shape)


def codes_like_numbers(entries: Mapping[str, TensorEntry]) -> dict[str, str]:
    """Tensors that hold codes though their dtype is one of plain weights, each with words for why it is no number."""
    names = (name.partition(STATE_MARK)[0] for name in entries if STATE_MARK in name)
    return {
        name: f"{name} is stored as codes of 4 bits, called {entries[name].dtype}, and is no number by itself"
        for name in names
        if name in entries and entries[name].dtype in FLOAT_CODES
    }


def storage_notes(weights: Iterable[TensorEntry]) -> tuple[str, ...]:
    """In words, how those of the weights that are quantised are stored and what they were made to."""
    details = (entry.stored.layout.detail for entry in weights if isinstance(entry, StoredEntry) and entry.stored)
    made = name_of_dtype(READ_AS)
    return tuple(f"weights: stored as {detail}; dequantised to {made}" for detail in dict.fromkeys(details))
