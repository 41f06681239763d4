"""Parts of a layer that couple tokens: the one place where a new one is plugged in.

A row of `LOADERS` gives, for one layer of a checkpoint, the part as a function of token states `[tokens, d]` to
`[tokens, d]` that torch.func can differentiate, weights and masks inside. All else follows from that.
"""

from collections.abc import Callable
from typing import get_args

from torch import Tensor

from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.spectral_request import SpectralRequest
from glassblock.numerics.token_coupled_norms import TokenFunction, coupled_frobenius, coupled_spectral
from glassblock.numerics.watching import Watch
from glassblock.operations.layer_jacobians import LayerOutcome
from glassblock.operations.store import CheckpointStore
from glassblock.wire import jacobians as wire

COUPLED_PARTS: frozenset[str] = frozenset({"attention", "layer"})

Loader = Callable[[CheckpointStore, str, Checkpoint, int, ReadMeter], TokenFunction]

LOADERS: dict[str, Loader] = {}
"""By part: (store, checkpoint's name, checkpoint, layer, meter) -> the function. Empty until attention is read."""


def loader_of(part: str) -> Loader:
    """The row of a part.

    Raises:
        InvalidValue: There is none.
    """
    if part not in LOADERS:
        known = tuple(name for name in get_args(wire.JacobianPart) if name not in COUPLED_PARTS or name in LOADERS)
        raise InvalidValue(
            f"the part {part!r} needs the layer's attention, which is not read yet",
            field="part",
            known=known,
            hint="ask for one of these parts",
        )
    return LOADERS[part]


def coupled_layer(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    request: wire.JacobiansRequest,
    x: Tensor,
    *,
    layer: int,
    meter: ReadMeter,
    watch: Watch,
) -> LayerOutcome:
    """Norms of the Jacobian over all positions at once, or over the chosen ones.

    Raises:
        InvalidValue: The part has no row, a position is not there, or a norm is asked for that is not told of it.
        ComputationCancelled: `watch` asked for it.
    """
    untold = [name for name in request.norms if name not in {"frobenius", "spectral"}]
    if untold and request.norms != wire.CHEAP_NORMS:
        raise InvalidValue(
            f"{', '.join(untold)}: not told of a part that couples tokens", field="norms", hint="frobenius, spectral"
        )
    function = loader_of(request.part)(store, request.checkpoint, checkpoint, layer, meter)
    inputs, outputs = request.input_positions, request.output_positions
    estimate = spectral = None
    if "frobenius" in request.norms:
        found = coupled_frobenius(
            function, x, probes=request.probes, seed=request.seed, inputs=inputs, outputs=outputs, watch=watch
        )
        estimate = wire.FrobeniusEstimate.model_validate(found._asdict())
    vectors: dict[str, Tensor] = {}
    if "spectral" in request.norms:
        wanted = SpectralRequest(
            tolerance=request.tolerance,
            failure_probability=request.failure_probability,
            vectors=request.vectors,
            seed=request.seed,
        )
        bracket = coupled_spectral(function, x, request=wanted, inputs=inputs, outputs=outputs, watch=watch)
        spectral = wire.CoupledSpectral.model_validate(
            {name: value for name, value in bracket._asdict().items() if name not in {"left", "right"}}
        )
        if bracket.left is not None and bracket.right is not None:
            vectors = {"left": bracket.left, "right": bracket.right}
    return LayerOutcome(
        {
            "tokens": (),
            "method": "none",
            "exactness": "estimated",
            "flops": 0,
            "bytes": 0,
            "accumulation": str(x.dtype).removeprefix("torch."),
            "cancellation": None,
            "redone": (),
            "whole": wire.WholeJacobian(frobenius=estimate, spectral=spectral),
        },
        vectors,
    )
