"""Attention, a mixture and a whole layer as functions of token states, for whoever differentiates them.

A function takes `[tokens, d]`, the stream that enters the layer at positions 0, 1, ..., and returns `[tokens, d]`, in
the arithmetic of the states it is given. Scores are written out: the kernels that do not have no forward derivative.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.block import branch_contribution
from glassblock.numerics.block import joined as joined_stream
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.layer import layer_dtype, layer_output
from glassblock.numerics.mixture import Mixture, mixture_dtype, run_mixture
from glassblock.numerics.wiring import Wiring
from glassblock.operations.layer_runs import attended
from glassblock.operations.store import CheckpointStore

StateFunction = Callable[[Tensor], Tensor]


class LayerPart(NamedTuple):
    """A part of a layer as a function.

    Attributes:
        run: The function.
        wirings: Norms and adds of the branches in it, the attention's before the network's.
        width: d.
        dtype: The widest of float32 and of its tensors' dtypes.
        elements: Numbers of its weights that lie on the device; of a mixture, of all its experts.
    """

    run: StateFunction
    wirings: tuple[Wiring, ...]
    width: int
    dtype: torch.dtype
    elements: int = 0


def attention_function(
    store: CheckpointStore, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter
) -> LayerPart:
    """What the attention branch of a layer adds to the stream, its norms included.

    Raises:
        InvalidValue: There is no such layer.
        CheckpointUnusable: It is not run here.
    """
    attention, wiring = store.attention(name, checkpoint, layer, meter)

    def attend(x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attended(x, attention, wiring.to(x.dtype), x.dtype)[2]

    dtype = widest_dtype((*attention.tensors, *wiring.tensors))
    return LayerPart(attend, (wiring,), attention.model_width, dtype)


def mixture_function(
    store: CheckpointStore, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter
) -> LayerPart:
    """The residual block around the mixture of a layer, its router included.

    Its derivative is that within the choice of experts made at the states, the weights of the chosen included.

    Raises:
        InvalidValue: There is no such layer, or it has no mixture.
        CheckpointUnusable: It is not run here.
    """
    row = layer_tensors(checkpoint, layer).row
    if row.mixture is None or row.feed_forward is not None:
        raise InvalidValue(
            f"layer {layer} has no mixture of experts alone", field="part", hint="ask for the part 'block'"
        )
    loaded, wiring = store.mixture(name, checkpoint, layer, meter)
    mixture = _keeping(loaded)

    def through(x: Tensor) -> Tensor:
        wired = wiring.to(x.dtype)
        read = x if wired.input_norm is None else wired.input_norm(x)
        down = run_mixture(read, mixture, dtype=x.dtype).down
        return joined_stream(x, branch_contribution(down, wired), wired)

    dtype = torch.promote_types(mixture_dtype(loaded.router, loaded), widest_dtype(wiring.tensors))
    return LayerPart(through, (wiring,), mixture.model_width, dtype)


def layer_function(
    store: CheckpointStore, name: str, checkpoint: Checkpoint, layer: int, meter: ReadMeter
) -> LayerPart:
    """The stream that leaves a layer, of the one that enters it; of a mixture as `mixture_function`.

    Raises:
        InvalidValue: There is no such layer.
        CheckpointUnusable: It is not run here.
    """
    loaded = store.layer(name, checkpoint, layer, meter)
    if isinstance(loaded.feed_forward, Mixture):
        loaded = replace(loaded, feed_forward=_keeping(loaded.feed_forward))

    def through(x: Tensor) -> Tensor:
        positions = torch.arange(len(x), device=x.device)
        with sdpa_kernel(SDPBackend.MATH):
            return layer_output(x, loaded, positions=positions, dtype=x.dtype)

    wirings = loaded.attention_wiring, loaded.feed_forward_wiring
    width = loaded.attention.model_width
    networks = layer_tensors(checkpoint, layer).networks
    elements = sum(prod(entry.shape) for network in networks for entry in network.weights.values())
    elements += sum(tensor.numel() for tensor in loaded.attention.tensors)
    return LayerPart(through, wirings, width, layer_dtype(torch.zeros(1, width), loaded), elements)


def _keeping(mixture: Mixture) -> Mixture:
    """The mixture, which keeps each expert that was asked for: the same few are wanted again and again."""
    kept: dict[int, FeedForward] = {}

    def expert(number: int) -> FeedForward:
        if number not in kept:
            kept[number] = mixture.expert(number)
        return kept[number]

    return replace(mixture, experts=expert)
