"""A network brought back whole, or as many of its channels as fit, for the certified test."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from glassblock.audit.gate_plans import GatePlan
from glassblock.checkpoint.entries import TensorEntry
from glassblock.numerics.fused_layouts import RowLayout, split_rows

MOST_ENTRIES = 1 << 23
"""Entries of one projection that are held for the certified test; of a larger one so many of its channels."""

FEWEST_CHANNELS = 64

Pieces = Callable[[TensorEntry], Iterator[Tensor]]


class LoadedNetwork(NamedTuple):
    """The projections of one network, over some of its channels.

    Attributes:
        first, second: Gate and up under their names; of a fused tensor all rows as they lie, and None.
        down: `[channels, m]`.
        channels: How many of the d channels these are.
    """

    first: Float[Tensor, "rows channels"]
    second: Float[Tensor, "m channels"] | None
    down: Float[Tensor, "channels m"]
    channels: int

    def split(self, layout: RowLayout | None) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down, a fused tensor cut as the layout says; None for separate tensors."""
        if layout is None or self.second is not None:
            return self.first, cast("Tensor", self.second), self.down
        return (*split_rows(self.first, layout), self.down)


def load_network(plan: GatePlan, pieces: Pieces, *, most_entries: int = MOST_ENTRIES) -> LoadedNetwork:
    """Read a network again.

    A sign that is flipped is flipped in every channel, so the test holds over any of them, and costs power only: the
    certificate's Gram matrix is channels by channels. They are drawn by the layer's number, not by what they hold.

    Args:
        plan: The network.
        pieces: Reads a tensor in whole rows.
        most_entries: Of one projection.

    Raises:
        CheckpointUnusable, UnknownCheckpoint: As `read_chunks`.
    """
    count = min(plan.width, max(FEWEST_CHANNELS, most_entries // plan.neurons))
    generator = torch.Generator().manual_seed(plan.layer)
    channels = torch.randperm(plan.width, generator=generator)[:count].sort().values if count < plan.width else None
    first, last = plan.network.row.layouts
    loaded = {
        part: _channels(entry, channels, pieces, rows_are_channels=first == "in_out")
        for part, entry in plan.network.weights.items()
        if part != "down"
    }
    # Of down the channels are what it returns, so they are its rows where those of gate are columns.
    down = _channels(plan.network.weights["down"], channels, pieces, rows_are_channels=last == "out_in")
    return LoadedNetwork(loaded["fused"] if "fused" in loaded else loaded["gate"], loaded.get("up"), down.T, count)


def _channels(
    entry: TensorEntry, channels: Int[Tensor, " c"] | None, pieces: Pieces, *, rows_are_channels: bool
) -> Float[Tensor, "neurons c"]:
    """Neurons by channels, whichever way they are stored."""
    width, height = entry.shape[-1], entry.elements // entry.shape[-1]
    kept: list[Tensor] = []
    start = 0
    for piece in pieces(entry):
        rows = piece.view(-1, width)
        if channels is None:
            kept.append(rows.clone())
        elif rows_are_channels:
            inside = channels[(channels >= start) & (channels < start + len(rows))] - start
            kept.append(rows[inside.to(rows.device)].clone())
        else:
            kept.append(rows[:, channels.to(rows.device)])
        start += len(rows)
    if start != height:
        raise ValueError(f"{entry.name} came in {start} rows, not {height}")
    whole = torch.cat(kept)
    return whole.T if rows_are_channels else whole
