"""Gates as training leaves them, in any family and any storage: written into tiny checkpoints, exchanged, reordered."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from glassblock.checkpoint.layer_map import resolve_layer
from glassblock.checkpoint.layer_parts import Expert, NetworkTensors
from glassblock.checkpoint.opened import Checkpoint, open_checkpoint
from glassblock.numerics.fused_layouts import split_rows
from safetensors.torch import load_file, save_file
from torch import Tensor

SINGLE = "model.safetensors"
Weights = dict[str, Tensor]
Change = Callable[[int, Expert, Weights], object]
"""Layer, network, and its weights by part: views `[out, in]` of what is written back."""


def edit_networks(directory: Path, change: Change, *, family: str | None = None) -> None:
    """Let `change` edit, in place, the weights of every gated network of a checkpoint in one file."""
    checkpoint = open_checkpoint(directory, family=family)
    tensors = load_file(directory / SINGLE)
    for layer, network in gated_networks(checkpoint):
        change(layer, network.expert, dict(_views(checkpoint, network, tensors)))
    save_file(tensors, directory / SINGLE, metadata={"format": "pt"})


def gated_networks(checkpoint: Checkpoint) -> Iterator[tuple[int, NetworkTensors]]:
    for layer in checkpoint.layer_indices:
        for network in resolve_layer(checkpoint, layer)[0].networks:
            if network.row.gated and "down" in network.weights:
                yield layer, network


def train(directory: Path, *, family: str | None = None, strength: float = 2.0) -> Path:
    """Give the rows of every gate a direction in common, and tie gate and up rows and down columns to each other."""

    def give(layer: int, expert: Expert, weights: Weights) -> None:
        seed = 1000 * layer + (expert if isinstance(expert, int) else 999)
        generator = torch.Generator().manual_seed(seed)
        width = weights["gate"].shape[1]
        # As long as the rows want it: of rows that are nearly one the test counts a few, as of copied neurons.
        scale = strength * width**-0.5 * weights["gate"].norm(dim=1).mean()
        direction = torch.randn(width, generator=generator) * scale
        # Up and down share a neuron's length; gate and up a line, in either direction.
        length = (0.6 * torch.randn(len(weights["gate"]), 1, generator=generator)).exp()
        sign = torch.randint(0, 2, (len(weights["gate"]), 1), generator=generator) * 2 - 1
        weights["gate"] += direction + 0.5 * sign * weights["up"]
        weights["up"] *= length
        weights["down"] *= length.T

    edit_networks(directory, give, family=family)
    return directory


def exchange(directory: Path, *places: tuple[int, Expert], family: str | None = None) -> None:
    """Write gate where up lies and the other way round."""

    def swap(layer: int, expert: Expert, weights: Weights) -> None:
        if (layer, expert) in places:
            gate = weights["gate"].clone()
            weights["gate"].copy_(weights["up"])
            weights["up"].copy_(gate)

    edit_networks(directory, swap, family=family)


def lay_fused(directory: Path, *layers: int, groups: int, gate_first: bool = True) -> None:
    """Write the rows of fused tensors in so many blocks of [gate | up]."""

    def lay(layer: int, _expert: Expert, weights: Weights) -> None:
        if layer in layers:
            gate, up = weights["gate"].clone(), weights["up"].clone()
            first, second = (gate, up) if gate_first else (up, gate)
            blocks = [half.unflatten(0, (groups, -1)) for half in (first, second)]
            weights["fused"].copy_(torch.stack(blocks, 1).flatten(0, 2))

    edit_networks(directory, lay)


def edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _views(checkpoint: Checkpoint, network: NetworkTensors, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for part, entry in network.weights.items():
        whole, stored = checkpoint.entries[entry.name], tensors[entry.name]
        start = (entry.start - whole.start) // stored.itemsize
        view = stored.view(-1)[start : start + entry.elements].view(entry.shape)
        view = view.T if network.row.layouts[part == "down"] == "in_out" else view
        yield part, view
        if part == "fused" and network.fused_layout is not None:
            yield from zip(("gate", "up"), split_rows(view, network.fused_layout), strict=True)
