"""Parts of a layer that couple tokens, or pass a router: the one place where a new one is plugged in.

A row of `LOADERS` gives, for one layer of a checkpoint, the part as a function of token states `[tokens, d]` to
`[tokens, d]` that torch.func can differentiate, weights and masks inside. All else follows from that.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue, TooLarge
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.finite_difference_check import check_states
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.spectral_request import SpectralRequest
from glassblock.numerics.token_coupled_norms import (
    ROWS,
    CoupledSpectral,
    FrobeniusEstimate,
    coupled_frobenius,
    coupled_spectral,
)
from glassblock.numerics.watching import Watch
from glassblock.operations.inputs import wired_eps
from glassblock.operations.layer_functions import LayerPart, attention_function, layer_function, mixture_function
from glassblock.operations.layer_jacobians import self_check
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import require_last_axis
from glassblock.wire import jacobians as wire
from glassblock.wire.values import Sourced

Loader = Callable[[CheckpointStore, str, Checkpoint, int, ReadMeter], LayerPart]

LOADERS: dict[str, Loader] = {
    "attention": attention_function,
    "mixture": mixture_function,
    "layer": layer_function,
}
"""By part: (store, checkpoint's name, checkpoint, layer, meter) -> the function."""

COUPLED_PARTS: frozenset[str] = frozenset(LOADERS)

MAX_TOKENS = 2_048
"""Their scores are written out, and kept for the way back."""


def coupled_layer(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    request: wire.JacobiansRequest,
    entered: Tensor,
    *,
    layer: int,
    meter: ReadMeter,
    watch: Watch,
) -> tuple[wire.LayerJacobians, dict[str, Tensor]]:
    """Norms of the Jacobian at what `entered` this layer, over all positions at once or over the chosen ones.

    And the singular vectors.

    Raises:
        InvalidValue: A position is not there, x is no sequence, or a norm is asked for that is not told of the part.
        TooLarge: More tokens than a sequence may have.
        ComputationCancelled: `watch` asked for it.
    """
    untold = [name for name in request.norms if name not in {"frobenius", "spectral"}]
    if untold and request.norms != wire.CHEAP_NORMS:
        raise InvalidValue(
            f"{', '.join(untold)}: not told of the part {request.part!r}", field="norms", hint="frobenius, spectral"
        )
    part = LOADERS[request.part](store, request.checkpoint, checkpoint, layer, meter)
    x = one_sequence(entered, part, name=request.checkpoint)
    flops = _forward_flops(part, x)  # runs it once: a mixture reads its experts here, outside of any derivative
    found = _frobenius(part, x, request, watch) if "frobenius" in request.norms else None
    bracket = _spectral(part, x, request, watch) if "spectral" in request.norms else None
    exact = bracket is None and found is not None and found.estimator == ROWS
    answer = wire.LayerJacobians(
        layer=layer,
        placement=part.wirings[-1].placement.value,
        eps=_eps(checkpoint, request.part, part),
        tokens=(),
        method="none",
        exactness="exact" if exact else "estimated",
        flops=flops * _passes(found, bracket),
        bytes=0,
        accumulation=name_of_dtype(x.dtype),
        cancellation=None,
        redone=(),
        self_check=self_check(check_states(part.run, x, seed=request.seed), len(x), request.seed),
        whole=wire.WholeJacobian(
            frobenius=None if found is None else wire.FrobeniusEstimate.model_validate(found._asdict()),
            spectral=None if bracket is None else _told(bracket),
        ),
    )
    vectors: dict[str, Tensor] = {}
    if bracket is not None and bracket.left is not None and bracket.right is not None:
        vectors = {"left": bracket.left, "right": bracket.right}
    return answer, vectors


def one_sequence(entered: Tensor, part: LayerPart, *, name: str) -> Tensor:
    """What enters a layer of checkpoint `name` as `[tokens, d]`, in the dtype of the computation.

    Raises:
        InvalidValue: It is no sequence of that width, or a norm divides by zero on a row of it.
        TooLarge: It is longer than a sequence may be.
    """
    require_last_axis("x", entered, part.width, f"d_model of {name}")
    if entered.ndim > 2 and entered[..., 0, 0].numel() > 1:
        raise InvalidValue(
            f"x has shape {list(entered.shape)}: one sequence is differentiated at a time",
            field="x",
            hint="send [tokens, d_model]",
        )
    x = entered.reshape(-1, part.width)
    if len(x) > MAX_TOKENS:
        raise TooLarge(f"{len(x):,} tokens; at most {MAX_TOKENS:,} at once", field="x", hint="send a shorter text")
    x = x.to(torch.promote_types(x.dtype, part.dtype))
    if part.wirings and part.wirings[0].input_norm is not None:
        check_norm_defined(x, part.wirings[0].input_norm, field="x")
    return x


def _frobenius(part: LayerPart, x: Tensor, request: wire.JacobiansRequest, watch: Watch) -> FrobeniusEstimate:
    outputs = len(x) if request.output_positions is None else len(set(request.output_positions))
    return coupled_frobenius(
        part.run,
        x,
        probes=request.probes,
        seed=request.seed,
        estimator=ROWS if request.probes >= outputs * x.shape[-1] else None,
        inputs=request.input_positions,
        outputs=request.output_positions,
        watch=watch,
    )


def _spectral(part: LayerPart, x: Tensor, request: wire.JacobiansRequest, watch: Watch) -> CoupledSpectral:
    wanted = SpectralRequest(
        tolerance=request.tolerance,
        failure_probability=request.failure_probability,
        vectors=request.vectors,
        seed=request.seed,
    )
    return coupled_spectral(
        part.run, x, request=wanted, inputs=request.input_positions, outputs=request.output_positions, watch=watch
    )


def _told(found: CoupledSpectral) -> wire.CoupledSpectral:
    return wire.CoupledSpectral.model_validate(
        {name: value for name, value in found._asdict().items() if name not in {"left", "right"}}
    )


def _forward_flops(part: LayerPart, x: Tensor) -> int:
    with FlopCounterMode(display=False) as counter:
        part.run(x)
    return counter.get_total_flops()


def _passes(found: FrobeniusEstimate | None, bracket: CoupledSpectral | None) -> int:
    """Passes forward, or as dear: a product with J^T is one pass back, one with J is carried beside one forward."""
    passes = 0
    if found is not None:
        pushes = found.probes // 2 if found.estimator == "hutch++" else 0
        passes += 1 + found.products + pushes
    if bracket is not None:
        passes += 1 + 3 * (bracket.steps + 1)
    return passes


def _eps(checkpoint: Checkpoint, part: str, loaded: LayerPart) -> dict[str, Sourced]:
    """Of each norm, that of attention under its own names where both branches are there."""
    *before, last = loaded.wirings
    found = wired_eps(checkpoint, last, overridden=False, branch="attention" if part == "attention" else "ffn")
    for wiring in before:
        attended = wired_eps(checkpoint, wiring, overridden=False, branch="attention")
        found |= {f"attention_{place}": eps for place, eps in attended.items()}
    return found
