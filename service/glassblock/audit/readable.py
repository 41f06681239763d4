"""Which tensors can be read: told from headers."""

from collections import defaultdict
from pathlib import Path

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.stored_entries import codes_like_numbers


def unreadable(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors whose bytes are cut off or claimed by another tensor too, or are no numbers, each with the reason.

    So nothing is allocated for a length that a file only claims, and the bytes read never exceed the bytes there.
    """
    files: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in checkpoint.entries.values():
        files[entry.file].append(entry)
    reasons = codes_like_numbers(checkpoint.entries)
    for entries in files.values():
        reached = 0
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
            if entry.identity is not None and entry.stop > entry.identity.size:
                reasons[entry.name] = f"{entry.file.name} ends before {entry.name} does"
            elif entry.bytes and entry.start < reached:
                reasons[entry.name] = f"{entry.name} begins inside another tensor of {entry.file.name}"
            reached = max(reached, entry.stop)
    return reasons
