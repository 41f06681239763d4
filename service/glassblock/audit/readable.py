"""Which tensors can be read, and which of them make up each layer: told from headers and config."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layers import LayerTensors, resolve_layer
from glassblock.checkpoint.opened import Checkpoint
from glassblock.errors import DamagedCheckpoint


def unreadable(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors whose bytes are cut off or claimed by another tensor too, each with the reason.

    So nothing is allocated for a length that a file only claims, and the bytes read never exceed the bytes there.
    """
    files: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in checkpoint.entries.values():
        files[entry.file].append(entry)
    reasons: dict[str, str] = {}
    for entries in files.values():
        reached = 0
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
            if entry.identity is not None and entry.stop > entry.identity.size:
                reasons[entry.name] = f"{entry.file.name} ends before {entry.name} does"
            elif entry.bytes and entry.start < reached:
                reasons[entry.name] = f"{entry.name} begins inside another tensor of {entry.file.name}"
            reached = max(reached, entry.stop)
    return reasons


def resolved_layers(checkpoint: Checkpoint) -> Mapping[int, LayerTensors]:
    """Which tensors each layer is made of; none where family, names or config do not tell."""
    if checkpoint.family is None or checkpoint.trunk is None:
        return MappingProxyType({})
    try:
        return MappingProxyType({layer: resolve_layer(checkpoint, layer)[0] for layer in checkpoint.layer_indices})
    except DamagedCheckpoint:
        return MappingProxyType({})  # the config's own fault says why
