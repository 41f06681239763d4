"""What running a layer reads, holds and computes, told from headers."""

from math import prod
from typing import NamedTuple

from glassblock.checkpoint.fitting import Sizes
from glassblock.checkpoint.layer_map import layer_tensors, whole_layer_tensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.errors import InvalidValue
from glassblock.operations.layer_sizes import (
    AttentionSize,
    Cost,
    NetworkSize,
    attention_cost,
    attention_size,
    network_cost,
    network_size,
    read_bytes,
)
from glassblock.operations.plan_inputs import PlanInput, compute_item


class LayerSizes(NamedTuple):
    """One layer: its attention where it is read, and its network.

    Attributes:
        network: the dense one; of a mixture the one that takes most, an expert or the shared one.
        always: what every row passes: the dense network, or the shared one of a mixture.
        expert: the largest of the routed ones; None in a dense layer.
        chosen: experts that a row goes to.
        routed: experts that are read: no more than the rows can choose.
        read: bytes.
        router: numbers of the router's matrix.
    """

    attention: AttentionSize | None
    network: NetworkSize
    always: tuple[NetworkSize, ...]
    expert: NetworkSize | None
    chosen: int
    routed: int
    read: int
    router: int

    @property
    def held(self) -> int:
        """Bytes of attention and of one network, as they lie."""
        return self.network.held + (0 if self.attention is None else self.attention.held)

    @property
    def item(self) -> int:
        """Bytes of the widest element stored."""
        return max(self.network.item, 0 if self.attention is None else self.attention.item)

    def products(self, rows: int) -> int:
        """FLOPs of the networks that `rows` rows pass."""
        expert = 0 if self.expert is None else self.chosen * self.expert.elements
        return 2 * rows * (sum(size.elements for size in self.always) + expert + self.router)


def sizes_of_layer(checkpoint: Checkpoint, layer: int, *, whole: bool, rows: int) -> LayerSizes:
    """One layer from its headers; `whole` with attention.

    Args:
        rows: that pass it: no more experts are read than they can choose.

    Raises:
        InvalidValue: it has no feed-forward network.
    """
    tensors = whole_layer_tensors(checkpoint, layer) if whole else layer_tensors(checkpoint, layer)
    networks = [network_size(network) for network in tensors.networks]
    if not networks:
        raise InvalidValue(f"layer {layer} has no feed-forward network", field="layer")
    numbered = [isinstance(network.expert, int) for network in tensors.networks]
    experts = [size for size, one in zip(networks, numbered, strict=True) if one]
    always = tuple(size for size, one in zip(networks, numbered, strict=True) if not one)
    told = Sizes(checkpoint).of("experts_per_token") if experts else None
    chosen = min(len(experts), len(experts) if told is None else told.value)
    routed = min(len(experts), rows * chosen)
    widest = max(networks, key=lambda size: size.held)
    attention = None
    if whole and tensors.attention is not None:
        attention = attention_size(tensors.attention, widest.d)
    read = sum(size.read for size in always) + routed * max((size.read for size in experts), default=0)
    read += read_bytes(tensors.router.values()) + (0 if attention is None else attention.read)
    router = tensors.router.get("weight")
    return LayerSizes(
        attention,
        widest,
        always,
        max(experts, key=lambda size: size.held, default=None),
        chosen,
        routed,
        read,
        0 if router is None else prod(router.shape),
    )


def one_network(sizes: LayerSizes, network: NetworkSize) -> LayerSizes:
    """One network of the layer, whatever others there are."""
    read = network.read + (0 if sizes.attention is None else sizes.attention.read)
    return sizes._replace(network=network, always=(network,), expert=None, chosen=0, routed=0, read=read, router=0)


def _mixture_cost(sizes: LayerSizes, rows: int, item: int) -> Cost:
    """Running a mixture, its weights not counted: an expert after the other, at worst each on all rows."""
    d, m = sizes.network.d, sizes.network.m
    copies = 3 if sizes.network.gated else 2
    held = rows * item * (4 * d + 2 * sum(size.d for size in sizes.always)) + rows * sizes.routed * item
    cast = m * d * item if item != sizes.network.item else 0
    return Cost(held, rows * item * (copies * m + 2 * d) + cast, sizes.products(rows))


def feed_forward_cost(sizes: LayerSizes, rows: int, item: int, *, recombined: int) -> Cost:
    """The dense network or the mixture of a layer, its weights not counted.

    Args:
        rows: that pass it.
        item: bytes of an element of the computation.
        recombined: rows on which its stages are put together again.
    """
    if sizes.expert is None:
        return network_cost(sizes.network, rows, item, recombined=recombined)
    return _mixture_cost(sizes, rows, item)


def layer_cost(sizes: LayerSizes, entered: PlanInput, item: int) -> Cost:
    """One whole layer on rows in sequences."""
    rows = entered.rows
    batch, tokens = entered.texts or (1, rows)
    costs = [feed_forward_cost(sizes, rows, item, recombined=0)]
    if sizes.attention is not None:
        costs.append(attention_cost(sizes.attention, batch, tokens, item))
    return Cost(
        sizes.held + sum(cost.held for cost in costs),
        max(cost.transient for cost in costs),
        sum(cost.flops for cost in costs),
    )


def cost_below(checkpoint: Checkpoint, layers: int, entered: PlanInput, named: str | None) -> tuple[Cost, int]:
    """The layers that a text passes first, one after the other, and the bytes read for them."""
    read, flops, peak = 0, 0, 0
    for layer in range(layers):
        sizes = sizes_of_layer(checkpoint, layer, whole=True, rows=entered.rows)
        cost = layer_cost(sizes, entered, compute_item(named, entered.item, sizes.item))
        read, flops, peak = read + sizes.read, flops + cost.flops, max(peak, cost.bytes)
    return Cost(peak, 0, flops), read
