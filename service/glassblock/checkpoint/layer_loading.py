"""Loading one whole layer: attention, feed-forward network or mixture, and the norms and adds around both."""

import torch

from glassblock.checkpoint.attention_loading import attention_of
from glassblock.checkpoint.layer_map import whole_layer_tensors
from glassblock.checkpoint.layer_parts import LayerTensors
from glassblock.checkpoint.layers import feed_forward_of, runnable, wiring_of
from glassblock.checkpoint.mixture_loading import mixture_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import FamilyMismatch
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.layer import Layer
from glassblock.numerics.mixture import Mixture
from glassblock.numerics.wiring import Wiring


def load_layer(
    checkpoint: Checkpoint,
    layer: int,
    device: torch.device | str,
    meter: ReadMeter,
    *,
    block: tuple[FeedForward, Wiring] | None = None,
) -> Layer:
    """One layer in the file's dtypes; the experts of a mixture are read when they are asked for.

    Args:
        checkpoint: The checkpoint.
        layer: Its number.
        device: Where the tensors go.
        meter: Counts what is read.
        block: Its feed-forward network with its wiring, where they were read before.

    Raises:
        InvalidValue: There is no such layer.
        FamilyMismatch: Its tensors do not fit, or its attention or its routing is not read here, or a number of the
            config cannot be one.
        DamagedCheckpoint, UnknownFamily: See `Checkpoint.require_usable`.
    """
    runnable(checkpoint, layer)
    tensors = whole_layer_tensors(checkpoint, layer)
    # The network before the attention: where it cannot be had, nothing large was read in vain.
    if block is None:
        second = second_branch(checkpoint, tensors, device, meter)
        block_wiring = wiring_of(checkpoint, tensors, device, meter)
    else:
        second, block_wiring = block
    return Layer(
        attention_of(checkpoint, tensors, device, meter),
        wiring_of(checkpoint, tensors, device, meter, branch="attention"),
        second,
        block_wiring,
    )


def second_branch(
    checkpoint: Checkpoint, tensors: LayerTensors, device: torch.device | str, meter: ReadMeter
) -> FeedForward | Mixture:
    """The feed-forward network of a layer, or its mixture.

    Raises:
        FamilyMismatch: It has neither, or both, or how it routes is not read here.
    """
    row = tensors.row
    if (row.feed_forward is None) == (row.mixture is None):
        how = "no feed-forward network" if row.mixture is None else "a network and a mixture side by side"
        raise FamilyMismatch(f"layer {tensors.layer} has {how}: the whole layer is not run here")
    if row.mixture is not None:
        return mixture_of(checkpoint, tensors, device, meter)
    return feed_forward_of(checkpoint, tensors, device, meter)
