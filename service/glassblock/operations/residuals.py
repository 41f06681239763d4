"""`residuals/compare`: one sublayer wired pre-, post- and sandwich-norm, side by side."""

from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue, TooLarge
from glassblock.numerics.block import apply_sublayer, residual_output, residual_stream
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import Norm, check_eps, check_norm_defined, norm_kind_named
from glassblock.numerics.residual_jacobians import residual_jacobian
from glassblock.numerics.rewiring import rewired
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations.inputs import block_input, given_eps, refuse_without_checkpoint, required, wired_eps
from glassblock.operations.overrides import overridden
from glassblock.operations.reply import Reply, nested_numbers
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import posted_tensor, require_last_axis
from glassblock.wire.blocks import Overrides
from glassblock.wire.framing import WireTensor
from glassblock.wire.norms import JacobianNorms, ResidualCompareAnswer, ResidualCompareRequest
from glassblock.wire.values import BytesRead, Sourced

MAX_ROWS = 256
"""Rows compared at once: each costs three dense Jacobians."""

JACOBIAN_ELEMENTS = 2**22
"""Numbers of the products that a dense Jacobian is made of, of the rows that are taken at once."""

PLACEMENTS = (Placement.PRE, Placement.POST, Placement.SANDWICH)


class _Sublayer(NamedTuple):
    """What is wired three ways: F, the wiring its norms come from, and where all that was read."""

    function: Tensor | FeedForward
    wiring: Wiring
    width: int
    x: Tensor
    eps: Sourced
    read: BytesRead | None = None


def compare(
    store: CheckpointStore,
    request: ResidualCompareRequest,
    tensors: Mapping[str, WireTensor],
    *,
    watch: Watch = UNWATCHED,
) -> Reply[ResidualCompareAnswer]:
    """Outputs and Jacobians of the three wirings of one sublayer.

    Args:
        watch: told and asked between rows.

    Raises:
        InvalidValue: x or the matrix is missing or does not fit, or a norm is not defined on a row.
        ComputationCancelled: `watch` asked for it.
    """
    if request.checkpoint is None:
        sublayer = _posted(store, request, tensors)
    else:
        sublayer = _of_checkpoint(store, request, tensors, request.checkpoint)
    rows = sublayer.x[..., 0].numel()
    if rows > MAX_ROWS:
        raise TooLarge(f"x has {rows} rows; at most {MAX_ROWS} are compared at once", field="x", hint="send fewer rows")
    dense = sublayer.width <= request.dense_up_to
    outputs: dict[str, Tensor] = {}
    norms: dict[str, JacobianNorms] = {}
    notes: list[str] = []
    for number, placement in enumerate(PLACEMENTS):
        watch.at(number * rows, len(PLACEMENTS) * rows, placement.value)
        wiring, assumed = rewired(sublayer.wiring, placement)
        notes += [note for note in assumed if note not in notes]
        _check_defined(sublayer, wiring)
        if wiring.output_norm is not None and _branch_vanishes(sublayer, wiring):
            notes.append(f"{placement.value}: F is zero on a row and eps is 0, so its norm is not defined there: NaN")
        outputs[placement.value] = residual_output(sublayer.x, sublayer.function, wiring)
        name = f"{placement.value}_jacobian"
        if dense:
            outputs[name] = _dense(sublayer, wiring, watch)
        else:
            norms[name] = _norms(sublayer, wiring, watch)
    answer = ResidualCompareAnswer(
        jacobians="dense" if dense else "norms",
        eps=sublayer.eps,
        notes=tuple(notes),
        read=sublayer.read,
        **norms,
    )
    return Reply(answer, outputs)


def _posted(store: CheckpointStore, request: ResidualCompareRequest, tensors: Mapping[str, WireTensor]) -> _Sublayer:
    refuse_without_checkpoint(request, "family", "family_row", "tower", "layer", "sample")
    x = required(posted_tensor("x", request.x, tensors, device=store.device, nested_dtype=torch.float64))
    matrix = posted_tensor("matrix", request.matrix, tensors, device=store.device, nested_dtype=torch.float64)
    if matrix is None:
        raise InvalidValue("matrix is missing", field="matrix", hint="post a square matrix, or name a checkpoint")
    width = x.shape[-1]
    require_square(matrix, width)
    eps = given_eps(request.eps)
    wiring = Wiring(Placement.PRE, input_norm=Norm(norm_kind_named("rms_noweight"), None, None, eps))
    common = torch.promote_types(torch.promote_types(x.dtype, matrix.dtype), torch.float32)
    return _Sublayer(matrix.to(common), wiring, width, x.to(common), Sourced(value=eps, source="request"))


def require_square(matrix: Tensor, width: int) -> None:
    """Refuse a matrix that does not take x to its own width.

    Raises:
        InvalidValue: naming both.
    """
    if matrix.shape != (width, width):
        raise InvalidValue(
            f"matrix has shape {list(matrix.shape)}, x is {width} wide", field="matrix", hint=f"send [{width}, {width}]"
        )


def _of_checkpoint(
    store: CheckpointStore, request: ResidualCompareRequest, tensors: Mapping[str, WireTensor], name: str
) -> _Sublayer:
    if request.matrix is not None or "matrix" in tensors:
        raise InvalidValue("matrix and checkpoint are both given", field="matrix", hint="give one of them")
    if request.layer is None:
        raise InvalidValue("layer is missing", field="layer", hint="give the layer whose FFN is meant")
    checkpoint = store.serving(name, family=request.family, family_row=request.family_row, tower=request.tower)
    checkpoint.require_usable()
    meter = ReadMeter()
    block = store.block(name, checkpoint, request.layer, meter)
    if request.eps is not None:
        check_eps(request.eps, field="eps")
    changed = overridden(block.feed_forward, block.wiring, Overrides(eps=request.eps))
    x = block_input(store, checkpoint, request.x, request.sample, tensors, meter=meter, nested_dtype=torch.float32)
    width = changed.feed_forward.model_width
    require_last_axis("x", x, width, f"d_model of {name}")
    eps = next(iter(wired_eps(checkpoint, changed.wiring, overridden=request.eps is not None).values()))
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    read = BytesRead(bytes=meter.bytes, tensors=meter.tensors)
    return _Sublayer(changed.feed_forward, changed.wiring, width, x, eps, read)


def _check_defined(sublayer: _Sublayer, wiring: Wiring) -> None:
    if wiring.input_norm is not None:
        check_norm_defined(sublayer.x, wiring.input_norm, field="x")
    if wiring.residual_norm is not None:
        check_norm_defined(residual_stream(sublayer.x, sublayer.function, wiring), wiring.residual_norm, field="x")


def _branch_vanishes(sublayer: _Sublayer, wiring: Wiring) -> bool:
    if wiring.output_norm is None or wiring.output_norm.eps > 0:
        return False
    normed = sublayer.x if wiring.input_norm is None else wiring.input_norm(sublayer.x)
    return not bool(apply_sublayer(normed, sublayer.function).any(-1).all())


def rows_at_once(width: int, hidden: int) -> int:
    """Rows whose dense Jacobians are computed together, of a sublayer `hidden` wide inside."""
    return max(1, JACOBIAN_ELEMENTS // max(1, width * max(width, hidden)))


def _dense(sublayer: _Sublayer, wiring: Wiring, watch: Watch) -> Tensor:
    hidden = sublayer.width if isinstance(sublayer.function, Tensor) else sublayer.function.width
    rows = sublayer.x.reshape(-1, sublayer.width)
    pieces = cast("tuple[Tensor, ...]", rows.split(rows_at_once(sublayer.width, hidden)))
    if len(pieces) == 1:
        return residual_jacobian(sublayer.x, sublayer.function, wiring)
    jacobians: Tensor | None = None
    done = 0
    for piece in pieces:
        watch.at(done, len(rows), f"{wiring.placement.value}: Jacobians")
        found = residual_jacobian(piece, sublayer.function, wiring)
        if jacobians is None:
            jacobians = found.new_empty(len(rows), *found.shape[1:])
        jacobians[done : done + len(piece)] = found
        done += len(piece)
    assert jacobians is not None  # noqa: S101  there are rows
    return jacobians.reshape(*sublayer.x.shape, sublayer.width)


def _norms(sublayer: _Sublayer, wiring: Wiring, watch: Watch) -> JacobianNorms:
    rows = sublayer.x.reshape(-1, sublayer.width)
    # One row at a time: a dense Jacobian is width x width.
    pairs: list[tuple[Tensor, Tensor]] = []
    for number, row in enumerate(rows):
        watch.at(number, len(rows), f"{wiring.placement.value}: Jacobians")
        jacobian = residual_jacobian(row, sublayer.function, wiring)
        norm = cast("Tensor", torch.linalg.matrix_norm(jacobian))
        pairs.append((norm, jacobian.diagonal().sum()))
    shape = sublayer.x.shape[:-1]
    frobenius, trace = (torch.stack(values).reshape(shape) for values in zip(*pairs, strict=True))
    return JacobianNorms(frobenius=nested_numbers(frobenius), trace=nested_numbers(trace))
