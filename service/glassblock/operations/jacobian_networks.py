"""Which networks of a layer are differentiated, and at which rows: the dense one at all, experts at their own."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor

from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.layer_parts import Expert
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.dtypes import widest_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.mixture import Mixture, mixture_dtype
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.routing import route
from glassblock.numerics.wiring import Wiring
from glassblock.operations.store import CheckpointStore
from glassblock.wire.jacobians import JacobiansRequest

ROUTER_LEFT_OUT = (
    "experts: each stands alone in the place of its mixture, unweighed, at the tokens that go to it; the derivatives of"
    " the router and of the weights are left out, which the part `mixture` has"
)


class NetworkAt(NamedTuple):
    """A network and where it is differentiated.

    Attributes:
        feed_forward: The network.
        x: `[tokens, d]`, the stream that enters the block.
        expert: Which one of a mixture; None for a dense one.
        rows: Which of the rows that were given; None for all.
        weights: By which the mixture multiplies it at each of them.
    """

    feed_forward: FeedForward
    x: Tensor
    expert: Expert = None
    rows: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None


class LayerNetworks(NamedTuple):
    """The networks of one layer.

    Attributes:
        wiring: Norms and add around them.
        width: d.
        at: Those that are differentiated at `[tokens, d]`, under a wiring.
        note: What must be said of them.
    """

    wiring: Wiring
    width: int
    at: Callable[[Tensor, Wiring], Iterator[NetworkAt]]
    note: str | None = None


def layer_networks(
    store: CheckpointStore, checkpoint: Checkpoint, request: JacobiansRequest, layer: int, meter: ReadMeter
) -> LayerNetworks:
    """The dense network, the expert asked for, or every expert that a token goes to.

    Raises:
        InvalidValue: There is no such layer or expert, or the weights multiply what experts read.
        CheckpointUnusable: It is not run here.
    """
    name, row = request.checkpoint, layer_tensors(checkpoint, layer).row
    if request.expert is not None:
        network, wiring = store.expert(name, checkpoint, layer, request.expert, meter)
        return _one(network, wiring, request.expert)
    if row.mixture is None or row.feed_forward is not None:
        block = store.block(name, checkpoint, layer, meter)
        return _one(block.feed_forward, block.wiring, None)
    mixture, wiring = store.mixture(name, checkpoint, layer, meter)
    if mixture.routing.weigh_input:
        raise InvalidValue(
            f"layer {layer}: the weight of an expert multiplies what it reads, so that none has a Jacobian without it",
            field="expert",
            hint="name an expert, which is then run unweighed; or ask for the part 'mixture'",
        )

    def at(x: Tensor, wired: Wiring) -> Iterator[NetworkAt]:
        return _on_their_tokens(x, mixture, wired)

    return LayerNetworks(wiring, mixture.model_width, at, ROUTER_LEFT_OUT)


def _one(network: FeedForward, wiring: Wiring, expert: Expert) -> LayerNetworks:
    def at(x: Tensor, _: Wiring) -> Iterator[NetworkAt]:
        yield NetworkAt(network, x, expert)

    return LayerNetworks(wiring, network.model_width, at)


def model_width(checkpoint: Checkpoint, layer: int) -> int:
    """d of a layer, from the header of one of its networks.

    Raises:
        InvalidValue: There is no such layer, or it has no network.
    """
    tensors = layer_tensors(checkpoint, layer)
    network = tensors.networks[0] if tensors.networks else tensors.network(None)
    shape = network.weights["down"].shape
    return shape[0] if network.row.layouts[1] == "out_in" else shape[1]


def _on_their_tokens(x: Tensor, mixture: Mixture, wiring: Wiring) -> Iterator[NetworkAt]:
    dtype = torch.promote_types(mixture_dtype(x, mixture), widest_dtype(wiring.tensors))
    wired, read = wiring.to(dtype), x.to(dtype)
    if wired.input_norm is not None:
        check_norm_defined(read, wired.input_norm, field="x")
        read = wired.input_norm(read)
    routed = route(read, mixture.router, mixture.routing, bias=mixture.router_bias, correction=mixture.correction)
    for number in range(mixture.count):
        rows, choices = (routed.chosen == number).nonzero(as_tuple=True)
        if len(rows):
            weights = cast("list[float]", routed.weights[rows, choices].double().tolist())
            at = cast("list[int]", rows.tolist())
            yield NetworkAt(mixture.expert(number), x[rows], number, tuple(at), tuple(weights))
    if mixture.shared is not None:
        gates: tuple[float, ...] | None = None
        if mixture.shared_gate is not None:
            gate = torch.sigmoid(read @ mixture.shared_gate.to(dtype).T)
            gates = tuple(cast("list[float]", gate.flatten().double().tolist()))
        yield NetworkAt(mixture.shared, x, "shared", tuple(range(len(x))), gates)
