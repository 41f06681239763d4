"""`blocks/run`: one feed-forward block, as it stands or with one thing changed."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.layers import activation_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.numerics.block import Stages, run_block
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.recombination import recombination_error
from glassblock.numerics.stage_statistics import stage_statistics
from glassblock.numerics.wiring import Wiring
from glassblock.operations.inputs import block_input, wired_eps
from glassblock.operations.overrides import ChangedBlock, overridden
from glassblock.operations.reply import Reply, nested_numbers
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import COMPUTE_DTYPES, require_last_axis
from glassblock.wire.blocks import BlockRunAnswer, BlockRunRequest, StageStatistics
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import BytesRead, Sourced, Stage

RECOMBINED_ROWS = 32
"""Rows that are recomputed in float64 to say how far the parts make the whole."""

WITHOUT_WEIGHTS = ("x", "normed")


def run(store: CheckpointStore, request: BlockRunRequest, tensors: Mapping[str, WireTensor]) -> Reply[BlockRunAnswer]:
    """Run one block and answer for the stages asked for.

    Nothing beyond the norm is computed when nothing beyond it is asked for.

    Raises:
        InvalidValue: layer, x or an override cannot be used.
        CheckpointUnusable: the checkpoint is damaged, or does not fit its family.
    """
    checkpoint = store.open(request.checkpoint)
    family = checkpoint.require_usable()
    meter = ReadMeter()
    block = store.block(request.checkpoint, checkpoint, request.layer, meter)
    changed = overridden(block.feed_forward, block.wiring, request.overrides)
    dtype = COMPUTE_DTYPES[request.overrides.dtype] if request.overrides.dtype else None
    x = block_input(
        store,
        checkpoint,
        request.x,
        request.sample,
        tensors,
        meter=meter,
        nested_dtype=torch.float64 if dtype is torch.float64 else torch.float32,
    )
    require_last_axis("x", x, changed.feed_forward.model_width, f"d_model of {request.checkpoint}")
    if changed.wiring.input_norm is not None:
        check_norm_defined(x, changed.wiring.input_norm, field="x")
    until = next((stage for stage in WITHOUT_WEIGHTS if set(request.capture) <= {"x", stage}), "output")
    stages = run_block(x, changed.feed_forward, changed.wiring, until=until, dtype=dtype)
    _check_norms_defined(stages, changed.wiring)
    captured: dict[Stage, Tensor] = {
        name: tensor for name, tensor in _present(stages).items() if name in request.capture
    }
    recombined = _recombined(stages, changed.feed_forward, changed.wiring)
    answer = BlockRunAnswer(
        checkpoint=request.checkpoint,
        layer=request.layer,
        part=request.part,
        family=family.name,
        verified=family.verified,
        device=str(store.device),
        compute_dtype=str(cast("Tensor", stages.x).dtype).removeprefix("torch."),
        placement=changed.wiring.placement.value,
        activation=_activation(request, changed, checkpoint),
        eps=wired_eps(checkpoint, changed.wiring, overridden=request.overrides.eps is not None),
        stages={name: _statistics(tensor) for name, tensor in captured.items()},
        recombination_error=recombined.get("output"),
        recombination=recombined,
        parameters=changed.feed_forward.parameters,
        hidden_elements=x[..., 0].numel() * changed.feed_forward.width,
        read=BytesRead(bytes=meter.bytes, tensors=meter.tensors),
        notes=(*changed.notes, *_notes(request, captured), *_overflows(stages, changed.wiring)),
    )
    if not request.return_tensors:
        return Reply(answer)
    native = request.dtype == "native"
    returned = {str(name): tensor if native else tensor.to(torch.float32) for name, tensor in captured.items()}
    return Reply(answer, returned, nest_under="tensors")


def _check_norms_defined(stages: Stages, wiring: Wiring) -> None:
    """With eps 0, no norm after the input's may meet a row on which it divides by zero."""
    if stages.output is None:
        return
    for norm, read in ((wiring.output_norm, stages.down), (wiring.residual_norm, _stream(stages, wiring))):
        if norm is not None and norm.eps == 0 and read is not None:
            check_norm_defined(read, norm, field="overrides.eps")


def _stream(stages: Stages, wiring: Wiring) -> Tensor | None:
    if stages.x is None or stages.contribution is None:
        return None
    return wiring.residual_scale * stages.x + stages.contribution


def _present(stages: Stages) -> dict[Stage, Tensor]:
    return {cast("Stage", name): tensor for name, tensor in stages._asdict().items() if tensor is not None}


def _statistics(tensor: Tensor) -> StageStatistics:
    values = {name: nested_numbers(value) for name, value in stage_statistics(tensor)._asdict().items()}
    return StageStatistics.model_validate(
        {"shape": tuple(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), **values}
    )


def _recombined(stages: Stages, feed_forward: FeedForward, wiring: Wiring) -> dict[Stage, float]:
    if stages.output is None:
        return {}
    few = Stages(*(None if tensor is None else _first_rows(tensor) for tensor in stages))
    # Without `normed` the two large products into the hidden width are not made again: what is asked is
    # whether gate, up and x make the output.
    few = few._replace(normed=None)
    errors = recombination_error(few, feed_forward, wiring)
    return {cast("Stage", name): float(error) for name, error in errors.items()}


def _first_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])[:RECOMBINED_ROWS]


def _activation(request: BlockRunRequest, changed: ChangedBlock, checkpoint: Checkpoint) -> Sourced:
    source = "override" if request.overrides.activation is not None else activation_of(checkpoint).source
    return Sourced(value=changed.feed_forward.activation.name, source=source)


def _overflows(stages: Stages, wiring: Wiring) -> list[str]:
    """Rows whose mean square leaves the type that the norm sums in: as in the model, they come out as zeros."""
    if stages.x is None or wiring.input_norm is None:
        return []
    sums_in = torch.promote_types(stages.x.dtype, torch.float32)
    rows = int(stages.x.to(sums_in).square().mean(-1).isinf().sum())
    told = str(sums_in).removeprefix("torch.")
    return [f"normed: the mean square of {rows} row(s) overflows {told}, as it would in the model"] if rows else []


def _notes(request: BlockRunRequest, captured: dict[Stage, Tensor]) -> list[str]:
    notes = [f"{name}: this block has no such stage" for name in request.capture if name not in captured]
    rows = next((tensor[..., 0].numel() for tensor in captured.values()), 0)
    if rows > RECOMBINED_ROWS:
        notes.append(f"recombination: measured on the first {RECOMBINED_ROWS} of {rows} rows")
    return notes
