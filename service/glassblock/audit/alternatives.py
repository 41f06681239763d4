"""What a checkpoint's block might have been instead, as far as its other tensors and its configs tell."""

from collections.abc import Iterator

import torch

from glassblock.checkpoint.config import declared_eps
from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.layers import load_norm
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import CheckpointUnusable, InvalidValue
from glassblock.numerics.hypotheses import Alternatives
from glassblock.numerics.norms import Norm
from glassblock.numerics.rewiring import rewired
from glassblock.numerics.wiring import Placement, Wiring

OTHER_PLACES = (Placement.PRE, Placement.POST, Placement.SANDWICH, Placement.BRANCH_OUTPUT)


def alternatives_of(
    checkpoint: Checkpoint, layer: int, wiring: Wiring, device: torch.device | str, meter: ReadMeter
) -> Alternatives:
    """Other places of its norms, other epsilons that are stated, and other norms of the layer.

    Args:
        checkpoint: The checkpoint.
        layer: Its layer.
        wiring: Of its feed-forward block, as declared.
        device: Where tensors go.
        meter: Counts what is read.
    """
    return Alternatives(
        wirings=tuple(_other_places(wiring)),
        epsilons=tuple(_other_epsilons(checkpoint)),
        norms=dict(_other_norms(checkpoint, layer, wiring, device, meter)),
    )


def _other_places(wiring: Wiring) -> Iterator[Wiring]:
    """A parallel block is a pre-norm one beside another, and its stages are the same."""
    beside = {wiring.placement, *([Placement.PRE] if wiring.placement is Placement.PARALLEL else [])}
    for placement in OTHER_PLACES:
        if placement not in beside and any(norm is not None for norm in wiring.norms):
            yield rewired(wiring, placement)[0]


def _other_epsilons(checkpoint: Checkpoint) -> Iterator[float]:
    """Every one that config.json and params.json state, whichever norm it is meant for."""
    row = checkpoint.require_usable()
    for stated in declared_eps(checkpoint.config, row, checkpoint.params):
        yield stated.value


def _other_norms(
    checkpoint: Checkpoint, layer: int, wiring: Wiring, device: torch.device | str, meter: ReadMeter
) -> Iterator[tuple[str, Norm]]:
    """Norms of the same layer that could have been taken for the one in front of the network."""
    mine = wiring.input_norm
    if mine is None or mine.gain is None:
        return
    for role in layer_tensors(checkpoint, layer).norms:
        if role == "ffn_in":
            continue
        try:
            norm = load_norm(checkpoint, layer, role, device, meter)
        except (CheckpointUnusable, InvalidValue):
            continue  # a norm that cannot be read is no candidate; an audit tells what is wrong with it
        if norm.width == mine.width:
            yield role, norm
