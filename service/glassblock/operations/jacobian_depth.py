"""The depth curves of a chain of a checkpoint's feed-forward blocks, or of its whole layers, as an answer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from glassblock.errors import InvalidValue, TooLarge
from glassblock.numerics.block import common_dtype, residual_output
from glassblock.numerics.block_jacobians import network_in, refuse_unlike
from glassblock.numerics.coupled_jacobian import TokenFunction
from glassblock.numerics.depth_curves import Curve, DepthCurves, depth_curves
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.rewiring import rewired
from glassblock.numerics.watching import Watch
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations.reply import nested_numbers
from glassblock.operations.store import LoadedBlock
from glassblock.wire.jacobians import Depth, DepthCurve, JacobiansRequest

MAX_TOKENS = 512
"""In a chain: each keeps its hidden units of every layer."""

MAX_CHAIN_BYTES = 2**33
"""Weights of a chain in the dtype of the computation, all layers at once."""


def refuse_chain(request: JacobiansRequest) -> None:
    """Refuse what is no chain of blocks or of layers.

    Raises:
        InvalidValue: Naming the field.
    """
    if request.part not in {"block", "layer"}:
        raise InvalidValue(
            f"a chain is one of blocks or of layers, and the part is {request.part!r}",
            field="part",
            known=("block", "layer"),
            hint="ask for one of these parts",
        )
    if request.expert is not None:
        raise InvalidValue("a chain has no single expert", field="expert", hint="leave it out")
    if list(request.layers) != sorted(request.layers):
        raise InvalidValue("the layers of a chain must ascend", field="layers", hint="name them in the model's order")
    first, last = request.layers[0], request.layers[-1]
    if request.part == "layer" and last - first + 1 != len(request.layers):
        raise InvalidValue(
            "the layers of a chain follow one another, and some are left out",
            field="layers",
            hint=f"name all from {first} to {last}",
        )


def depth_of(
    blocks: Sequence[LoadedBlock],
    x: Tensor,
    request: JacobiansRequest,
    placement: Placement | None,
    *,
    watch: Watch,
) -> Depth:
    """The chain of these blocks at `x`, without the attention between them.

    Raises:
        TooLarge: More tokens, or more weights, than a chain may have.
        InvalidValue: A norm is not defined on a state that the chain reaches.
        ComputationCancelled: `watch` asked for it.
    """
    x = x.reshape(-1, x.shape[-1])
    _refuse_long(x)
    dtype = x.dtype
    for block in blocks:
        dtype = common_dtype(x.to(dtype), block.feed_forward, block.wiring)
    _refuse_heavy(sum(block.feed_forward.parameters for block in blocks) * dtype.itemsize)
    wirings = [block.wiring if placement is None else rewired(block.wiring, placement)[0] for block in blocks]
    links: list[TokenFunction] = []
    state = x.to(dtype)
    for block, wiring, layer in zip(blocks, wirings, request.layers, strict=True):
        if wiring.input_norm is not None:
            check_norm_defined(state, wiring.input_norm, field=f"x at layer {layer}")
        link = _link(block, wiring.to(dtype), dtype)
        state = link(state)
        links.append(link)
    found = _curves(links, x.to(dtype), request, coupled=False, watch=watch)
    return _told(found, request, wirings[0].placement, dtype)


def depth_of_layers(
    layers: Sequence[TokenFunction],
    x: Tensor,
    request: JacobiansRequest,
    placement: Placement,
    *,
    held_bytes: int,
    watch: Watch,
) -> Depth:
    """The chain of these whole layers at `x`, `[tokens, d]`, attention between them: one group, the whole sequence.

    Raises:
        TooLarge: More tokens, or more weights, than a chain may have.
        ComputationCancelled: `watch` asked for it.
    """
    _refuse_long(x)
    _refuse_heavy(held_bytes)
    found = _curves(layers, x, request, coupled=True, watch=watch)
    return _told(found, request, placement, x.dtype)


def _refuse_long(x: Tensor) -> None:
    if len(x) > MAX_TOKENS:
        raise TooLarge(f"x has {len(x)} rows; a chain takes at most {MAX_TOKENS}", field="x", hint="send fewer rows")


def _refuse_heavy(weights: int) -> None:
    if weights > MAX_CHAIN_BYTES:
        raise TooLarge(
            f"the chain's weights take {weights:,} bytes; at most {MAX_CHAIN_BYTES:,}",
            field="layers",
            hint="ask for the depth of fewer layers",
        )


def _curves(
    links: Sequence[TokenFunction], x: Tensor, request: JacobiansRequest, *, coupled: bool, watch: Watch
) -> DepthCurves:
    return depth_curves(
        links,
        x,
        coupled=coupled,
        probes=request.probes,
        failure_probability=request.failure_probability,
        tolerance=request.tolerance,
        seed=request.seed,
        watch=watch,
    )


def _told(found: DepthCurves, request: JacobiansRequest, placement: Placement, dtype: torch.dtype) -> Depth:
    return Depth(
        layers=request.layers,
        placement=placement.value,
        part=request.part,
        coupled=found.coupled,
        residual_rms=nested_numbers(found.rms),
        added=nested_numbers(found.added),
        layer_spectral=[nested_numbers(found.layer_lower), nested_numbers(found.layer_upper)],
        to_end=_curve(found.to_end),
        from_start=_curve(found.from_start),
        exactness="estimated",
        probes=found.probes,
        steps=found.steps,
        seed=found.seed,
        failure_probability=found.failure_probability,
        accumulation=name_of_dtype(dtype),
        layer_products=found.products,
    )


def _link(block: LoadedBlock, wiring: Wiring, dtype: torch.dtype) -> TokenFunction:
    # Cast once: the chain is run hundreds of times.
    refuse_unlike(block.feed_forward, wiring)
    network = network_in(block.feed_forward, dtype)

    def run(state: Tensor) -> Tensor:
        return residual_output(state, network, wiring)

    return run


def _curve(curve: Curve) -> DepthCurve:
    return DepthCurve(**{name: nested_numbers(value) for name, value in curve._asdict().items()})
