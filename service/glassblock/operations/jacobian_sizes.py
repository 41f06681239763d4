"""What Jacobian norms take: bytes at the peak, and FLOPs, from sizes alone."""

from collections.abc import Sequence
from typing import Protocol

import torch

from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.block_norms import norm_plan
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import Norm, norm_kind_named
from glassblock.numerics.spectral_request import DEFAULT_STEPS, DENSE_UP_TO
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations.layer_costs import LayerSizes, feed_forward_cost
from glassblock.operations.layer_jacobians import CONDITION, EXACT
from glassblock.operations.layer_sizes import AttentionSize, Cost, NetworkSize, attention_cost, heads_of
from glassblock.wire.jacobians import JacobiansRequest

SPECTRAL_BYTES = 2**31
"""Budget of one batch of tokens (`spectral_bracket`)."""
STEPS = 20
"""Of bidiagonalisation that a bracket usually takes; FLOPs are counted for so many."""

BLOCK_STEPS = 30
"""The same of a block's, with those that tokens take again in float64: 26 measured on SmolLM2, 35 on drawn weights."""

SCORE_COPIES = 14
"""Of the scores of attention, which are written out and kept for the way back: 12 to 13 measured."""

NORM_COPIES = 10
"""float64 copies of x at the peak of a norm's own Jacobian."""


def jacobian_cost(size: NetworkSize, rows: int, item: int, request: JacobiansRequest) -> Cost:
    """One layer's norms, its weights counted: the parts that treat every token by itself."""
    d, m, wanted = size.d, size.m, set(request.norms)
    if request.part == "norm":
        return Cost(size.held, NORM_COPIES * rows * d * 8, 0)
    wide = 8 * size.elements  # the self-check, and whatever is done again, in float64
    peaks, flops = [wide + 16 * (6 * m + 8 * d) * 8], 0
    if wanted & EXACT:
        network = _outline(size, torch.float64 if item == 8 else torch.float32)
        plan = norm_plan(rows, network, _PLAIN, dtype=network.up.dtype)
        peaks.append((item * size.elements if item != size.item else 0) + plan.bytes)
        flops += plan.flops
    if "spectral" in wanted:
        dense = request.certificate == "certain" and d <= DENSE_UP_TO
        token = (2 * m * d + 6 * d * d) * 8 if dense else (2 * min(DEFAULT_STEPS, d) * d + 12 * m) * item
        batch = max(1, min(rows, SPECTRAL_BYTES // token))
        certified = 4 * d * d * 8 if request.certificate == "certain" and not dense else 0
        peaks.append(wide + batch * token + certified)
        flops += rows * (2 * m * d * d + 20 * d**3 if dense else _bracket_flops(size))
    if wanted & CONDITION:
        peaks.append(wide + (2 * m * d + 6 * d * d) * 8)
        flops += rows * (2 * size.elements * d + 20 * d**3)
    return Cost(size.held, max(peaks), flops)


def _bracket_flops(size: NetworkSize) -> int:
    """Of one token: what its Jacobian stands on, two products a step, and vectors made orthogonal twice."""
    entered = 2 * (size.elements - size.m * size.d)
    return entered + 4 * BLOCK_STEPS * size.elements + 8 * BLOCK_STEPS**2 * size.d


def depth_cost(sizes: Sequence[NetworkSize], rows: int, item: int, request: JacobiansRequest) -> Cost:
    """The depth curves of a chain of blocks, all their weights counted."""
    item = max(4, item, *(size.item for size in sizes))
    held = sum(_with_cast(size, item) for size in sizes)
    widest = max(sizes, key=lambda size: size.elements)
    saved = len(sizes) * rows * (6 * widest.m + 8 * widest.d) * item
    # The bracket of every layer keeps its basis to the end.
    basis = len(sizes) * 2 * min(DEFAULT_STEPS, widest.d) * widest.d * rows * item + item * widest.elements
    products = len(sizes) * (4 * request.probes + 2 * STEPS)
    return Cost(held + saved, basis, 4 * rows * products * widest.elements)


def coupled_parts(sizes: LayerSizes, rows: int, item: int, request: JacobiansRequest) -> list[Cost]:
    """What is differentiated through, its weights counted: as stored, and as they are cast once for all products."""
    parts: list[Cost] = []
    if sizes.attention is not None and request.part != "mixture":
        cost, size = attention_cost(sizes.attention, 1, rows, item), sizes.attention
        scores = SCORE_COPIES * heads_of(size) * rows * rows * item
        parts.append(cost._replace(held=3 * cost.held + scores + _with_cast(size, item)))
    if request.part != "attention":
        networks = [*sizes.always, *([] if sizes.expert is None else sizes.routed * [sizes.expert])]
        cost = feed_forward_cost(sizes, rows, item, recombined=0)
        parts.append(cost._replace(held=2 * cost.held + sum(_with_cast(size, item) for size in networks)))
    return parts


def _with_cast(size: NetworkSize | AttentionSize, item: int) -> int:
    return size.held + (item * size.elements if item != size.item else 0)


def separate_cost(sizes: LayerSizes, rows: int, item: int, request: JacobiansRequest) -> Cost:
    """The parts that treat every token by itself: each network at the tokens that pass it."""
    peak = jacobian_cost(sizes.network, rows, item, request)
    if sizes.expert is None:
        return peak
    own = -(-rows * sizes.chosen // max(1, sizes.routed))
    flops = sizes.routed * jacobian_cost(sizes.expert, own, item, request).flops
    return peak._replace(flops=flops + sum(jacobian_cost(size, rows, item, request).flops for size in sizes.always))


class Entered(Protocol):
    """What enters: rows and their width."""

    @property
    def rows(self) -> int:
        """How many."""
        ...

    @property
    def width(self) -> int:
        """d_model."""
        ...


def coupled_cost(parts: Sequence[Cost], entered: Entered, item: int, request: JacobiansRequest) -> Cost:
    """The Jacobian over all positions at once, of attention, of a mixture or of the whole layer.

    Args:
        parts: that are differentiated through, each with its weights.
        entered: the positions.
        item: bytes of an element in the dtype of the computation.
        request: which norms.
    """
    held, transient = sum(part.held for part in parts), max((part.transient for part in parts), default=0)
    flops = sum(part.flops for part in parts)
    products = 0
    if "frobenius" in request.norms:
        products += request.probes
    if "spectral" in request.norms:
        products += 2 * STEPS
        transient += 2 * min(DEFAULT_STEPS, entered.rows * entered.width) * entered.rows * entered.width * item
    # A product with J or its transpose takes a forward pass and one back through it.
    return Cost(held, transient, (1 + 2 * products) * flops)


def _outline(size: NetworkSize, dtype: torch.dtype) -> FeedForward:
    """A network of this size on no device."""
    gate, up = (torch.empty(size.m, size.d, dtype=dtype, device="meta") for _ in range(2))
    down = torch.empty(size.d, size.m, dtype=dtype, device="meta")
    gate = gate if size.gated else None
    return FeedForward(gate, up, down, None, None, None, activation_named("silu"), gating_named("product"))


_PLAIN = Wiring(Placement.PRE, Norm(norm_kind_named("rms_noweight"), None, None, 1e-6))
"""How a norm stands does not change what the norms of a Jacobian take."""
