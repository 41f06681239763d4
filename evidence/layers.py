"""The feed-forward weights of SmolLM2-135M, layer by layer."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from record import ROOT
from safetensors import safe_open
from torch import Tensor

LAYERS = 30
NEURONS = 1536
SOURCE = "SmolLM2-135M-Instruct (bfloat16, dequantised from Q4_1; `tools/smollm2.py` fetches it)"


class Weights(NamedTuple):
    """gate and up `[m, d]`, down `[d, m]`."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def exchanged(self) -> "Weights":
        """Under the names that a swap would give them."""
        return Weights(self.up, self.gate, self.down)

    def neurons(self, chosen: Tensor) -> "Weights":
        """The same block with only these neurons."""
        return Weights(self.gate[chosen], self.up[chosen], self.down[:, chosen])


def smollm2_layers() -> Iterator[Weights]:
    """All layers in order."""
    sys.path.append(str(ROOT / "tools"))
    single: Path = importlib.import_module("smollm2").directories().single
    opened: Any = safe_open(single / "model.safetensors", "pt")
    with opened as file:
        for layer in range(LAYERS):
            yield Weights(
                *(file.get_tensor(f"model.layers.{layer}.mlp.{role}_proj.weight") for role in Weights._fields)
            )
