"""Networks that are stored wider than the config says, and how many of their neurons are idle.

Zeros that fill the width up to a multiple change no output; a width that is wrong does.
"""

from collections.abc import Container, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from glassblock.audit.network_sketch import NetworkSketch
from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.settings import Sourced, size_of
from glassblock.numerics.fused_layouts import split_rows


class Width(NamedTuple):
    """The neurons that a layer stores, and those that the config declares."""

    stored: int
    declared: Sourced[int]


def wider_than_declared(checkpoint: Checkpoint, tensors: LayerTensors) -> Width | None:  # noqa: PLR0911
    """The width of a layer whose network is consistent and too wide; None where it is neither.

    Raises:
        DamagedCheckpoint: The config holds no usable size.
    """
    family, config, down = checkpoint.family, checkpoint.config, tensors.weights.get("down")
    if family is None or config is None or down is None or len(down.shape) != 2:
        return None
    network = tensors.network(None).row
    if network.width is None:
        return None
    first, last = (layout == "in_out" for layout in network.layouts)
    outer, inner = down.shape[::-1] if last else down.shape
    declared, hidden = size_of(config, family, network.width[0]), size_of(config, family, "hidden")
    if len(network.width) > 1 or declared is None or hidden is None:
        return None
    if inner <= declared.value or outer != hidden.value:
        return None
    rows = {"gate": inner, "up": inner, "fused": 2 * inner, "down": outer}
    for part, entry in tensors.weights.items():
        shape = (rows[part], inner if part == "down" else outer)
        if entry.shape != (shape[::-1] if (last if part == "down" else first) else shape):
            return None
    if any(entry.shape != (rows[part],) for part, entry in tensors.biases.items()):
        return None
    return Width(inner, declared)


def network_entries(tensors: LayerTensors) -> tuple[TensorEntry, ...]:
    """Weights and biases of a layer's network."""
    return (*tensors.weights.values(), *tensors.biases.values())


class WeighedNetworks:
    """Layers that are too wide, and whose neurons nobody else weighs: their lengths are taken as they go by."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        layers: Mapping[int, LayerTensors],
        *,
        planned: Container[int],
        unread: Container[str],
    ) -> None:
        """Choose them.

        Args:
            checkpoint: As opened.
            layers: What they are made of.
            planned: Layers whose networks are weighed when their gates are screened.
            unread: Tensors that cannot be read.
        """
        self._networks: dict[int, tuple[NetworkTensors, int, int]] = {}
        self._lengths: dict[int, tuple[Tensor, ...]] = {}
        for layer, tensors in layers.items():
            dense = tensors.dense
            entries = network_entries(tensors)
            readable = all(entry.dtype in FLOAT_CODES and entry.name not in unread for entry in entries)
            if dense is None or layer in planned or not readable:
                continue
            width = wider_than_declared(checkpoint, tensors)
            if width is not None:
                shape = dense.weights["down"].shape
                outer = shape[1] if dense.row.layouts[1] == "in_out" else shape[0]
                self._networks[layer] = (dense, width.stored, outer)

    @property
    def biases(self) -> frozenset[str]:
        """Names of the biases that belong to their neurons."""
        return frozenset(
            entry.name
            for network, _, _ in self._networks.values()
            for part, entry in network.biases.items()
            if part != "down"
        )

    def sketches(self, device: torch.device) -> Iterator[NetworkSketch]:
        """One for each of them, to be fed."""
        for layer, (network, neurons, width) in self._networks.items():
            closed = partial(self._closed, layer)
            yield NetworkSketch(network, neurons, width, summed=False, device=device, closed=closed)

    def idle(self, biases: Mapping[str, Tensor]) -> dict[int, int]:
        """How many neurons of each are zero in every projection and in every bias.

        Args:
            biases: Those of `biases` that could be read; a network that lacks one is left out.
        """
        found = {layer: self.idle_in(layer, biases) for layer in self._lengths}
        return {layer: idle for layer, idle in found.items() if idle is not None}

    def idle_in(self, layer: int, biases: Mapping[str, Tensor]) -> int | None:
        """The same of one layer; None where it is left out, or none of them."""
        lengths = self._lengths.get(layer)
        if lengths is None:
            return None
        network = self._networks[layer][0]
        own = [entry.name for part, entry in network.biases.items() if part != "down"]
        if any(name not in biases for name in own):
            return None
        active = torch.stack([squares > 0 for squares in lengths]).any(0)
        for part, entry in network.biases.items():
            if part == "fused" and network.fused_layout is not None:
                for half in split_rows(biases[entry.name], network.fused_layout):
                    active = active.logical_or(half.cpu() != 0)
            elif part != "down":
                active = active.logical_or(biases[entry.name].cpu() != 0)
        return int((~active).sum())

    def _closed(self, layer: int, sketch: NetworkSketch) -> None:
        self._lengths[layer] = tuple(sketch.squares.values())
