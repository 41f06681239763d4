"""Networks that are stored wider than the config says, and how many of their neurons are idle.

Zeros that fill the width up to a multiple change no output; a width that is wrong does.
"""

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.fitting import FLOAT_CODES
from glassblock.checkpoint.layers import LayerTensors, split_fused
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import Sourced, size_of


class Width(NamedTuple):
    """The neurons that a layer stores, and those that the config declares."""

    stored: int
    declared: Sourced[int]


def wider_than_declared(checkpoint: Checkpoint, tensors: LayerTensors) -> Width | None:
    """The width of a layer whose network is consistent and too wide; None where it is neither.

    Raises:
        DamagedCheckpoint: The config holds no usable size.
    """
    family, config, down = checkpoint.family, checkpoint.config, tensors.weights.get("down")
    if family is None or config is None or down is None or len(down.shape) != 2:
        return None
    in_out = family.feed_forward.layout == "in_out"
    outer, inner = down.shape[::-1] if in_out else down.shape
    declared = size_of(config, family, "intermediate")
    if inner <= declared.value or outer != size_of(config, family, "hidden").value:
        return None
    rows = {"gate": inner, "up": inner, "fused": 2 * inner, "down": outer}
    for part, entry in tensors.weights.items():
        shape = (rows[part], inner if part == "down" else outer)
        if entry.shape != (shape[::-1] if in_out else shape):
            return None
    if any(entry.shape != (rows[part],) for part, entry in tensors.biases.items()):
        return None
    return Width(inner, declared)


def networks_to_weigh(
    checkpoint: Checkpoint, layers: Mapping[int, LayerTensors], *, planned: Container[int], unread: Container[str]
) -> Iterator[tuple[int, LayerTensors]]:
    """Layers that are too wide, and whose weights nobody else looks at as a whole."""
    for layer, tensors in layers.items():
        entries = network_entries(tensors)
        readable = all(entry.dtype in FLOAT_CODES and entry.name not in unread for entry in entries)
        if layer not in planned and readable and wider_than_declared(checkpoint, tensors) is not None:
            yield layer, tensors


def network_entries(tensors: LayerTensors) -> tuple[TensorEntry, ...]:
    """Weights and biases of a layer's network."""
    return (*tensors.weights.values(), *tensors.biases.values())


def idle_neurons(checkpoint: Checkpoint, weights: Mapping[str, Tensor], biases: Mapping[str, Tensor]) -> int:
    """How many neurons are zero in every projection.

    Args:
        checkpoint: A checkpoint with a family, which says how weights are stored and what is fused.
        weights: Weights of a network by part, as stored.
        biases: Biases by part; that of `down` belongs to no neuron.
    """
    if checkpoint.family is None:
        raise ValueError("the checkpoint has no family: no network of it is known")
    network = checkpoint.family.feed_forward
    oriented = {part: weight.T if network.layout == "in_out" else weight for part, weight in weights.items()}
    active = oriented["down"].any(0)
    for part, rows in (*oriented.items(), *((part, bias[:, None]) for part, bias in biases.items())):
        if part == "fused" and network.fused is not None:
            for half in split_fused(rows, network.fused):
                active = torch.logical_or(active, half.any(1))
        elif part != "down":
            active = torch.logical_or(active, rows.any(1))
    return int((~active).sum())
