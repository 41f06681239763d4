"""The rows of a weight that is stored quantised, dequantised in pieces where its form keeps rows apart."""

from collections.abc import Iterator

import torch
from torch import Tensor

from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.stored_entries import READ_AS, StoredEntry, read_weight
from glassblock.checkpoint.stored_weights import read_stored

PIECE_ENTRIES = 1 << 21
"""Numbers dequantised at once, where the form keeps rows apart; else a weight, or an expert of a stack, is whole."""


def stored_pieces(entry: StoredEntry, device: torch.device, meter: ReadMeter) -> Iterator[Tensor]:
    """The numbers that the codes stand for, in the family's layout, flat, in whole rows.

    GPTQ, AWQ and the 4 bits of bitsandbytes do not keep rows apart: of these one whole weight is held in float32.

    Raises:
        InvalidValue, DamagedCheckpoint, FamilyMismatch, UnknownCheckpoint, AccessRefused, ServiceUnavailable: See
            `read_weight`.
    """
    stored = entry.stored
    by_rows = stored is not None and bool(stored.layout.row_blocks) and len(stored.shape) == 2
    if stored is None or not by_rows or entry.transposed or entry.slices:
        yield read_weight(entry, device, meter).reshape(-1)
        return
    rows, width = entry.shape
    step = max(1, PIECE_ENTRIES // width)
    for start in range(0, rows, step):
        some = (start, min(start + step, rows))
        yield read_stored(stored, device, meter, dtype=READ_AS, rows=some).reshape(-1)
