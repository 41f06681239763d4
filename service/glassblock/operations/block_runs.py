"""`blocks/run`: a part of one layer, as it stands or with one thing changed."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.layer_parts import LayerTensors, NetworkTensors
from glassblock.checkpoint.layers import activation_of
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.stored_entries import storage_notes
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import LEARNED_ACTIVATIONS, activation_named
from glassblock.numerics.block import Stages, run_block
from glassblock.numerics.dtypes import name_of_dtype
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import check_norm_defined
from glassblock.numerics.recombination import recombination_error
from glassblock.numerics.stage_statistics import stage_statistics
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.numerics.wiring import Wiring
from glassblock.operations.inputs import block_input, refuse_beside_text, wired_eps
from glassblock.operations.layer_runs import Entering, Ran, run_attention_part, run_mixture_part, run_whole_layer
from glassblock.operations.overrides import overridden
from glassblock.operations.reply import Reply, nested_numbers
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import COMPUTE_DTYPES, require_last_axis
from glassblock.operations.texts import states_of, token_ids_of
from glassblock.wire.blocks import ALL_STAGES, BlockRunAnswer, BlockRunRequest, StageStatistics
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import BytesRead, RunStage, Sourced, Stage

RECOMBINED_ROWS = 32
"""Rows that are recomputed in float64 to say how far the parts make the whole."""

WITHOUT_WEIGHTS = ("x", "normed")


def run(
    store: CheckpointStore,
    request: BlockRunRequest,
    tensors: Mapping[str, WireTensor],
    *,
    watch: Watch = UNWATCHED,
) -> Reply[BlockRunAnswer]:
    """Run a part of one layer and answer for the stages asked for.

    Nothing beyond the norm is computed when nothing beyond it is asked for.

    Args:
        store: Where checkpoints are.
        request: What is asked.
        tensors: `x`, where it was posted as a tensor.
        watch: Told and asked between the layers below that a text passes.

    Raises:
        InvalidValue: layer, expert, x, a text or an override cannot be used.
        CheckpointUnusable: the checkpoint is damaged, or does not fit its family, or this part of it is not run here.
        ComputationCancelled: `watch` asked for it.
    """
    checkpoint = store.serving(
        request.checkpoint, family=request.family, family_row=request.family_row, tower=request.tower
    )
    family = checkpoint.require_usable()
    if request.expert is not None and request.part != "ffn":
        raise InvalidValue(
            f"an expert is a feed-forward network, and the part is {request.part!r}",
            field="expert",
            hint="leave it out",
        )
    meter = ReadMeter()
    layer = layer_tensors(checkpoint, request.layer)
    entering = _entering(store, checkpoint, request, tensors, meter=meter, watch=watch)
    if request.part == "attention":
        ran = run_attention_part(store, checkpoint, request, entering, meter)
    elif request.part == "layer":
        ran = run_whole_layer(store, checkpoint, request, entering, meter)
    elif request.expert is None and layer.row.mixture is not None and layer.row.feed_forward is None:
        ran = run_mixture_part(store.mixture(request.checkpoint, checkpoint, request.layer, meter), request, entering)
    else:
        ran = _network(store, checkpoint, request, entering, meter)
    captured: dict[RunStage, Tensor] = {
        name: tensor for name, tensor in ran.stages.items() if request.capture is None or name in request.capture
    }
    answer = BlockRunAnswer(
        checkpoint=request.checkpoint,
        layer=request.layer,
        part=request.part,
        family=family.name,
        verified=family.verified,
        device=str(store.device),
        compute_dtype=name_of_dtype(ran.stages["x"].dtype),
        placement=ran.wiring.placement.value,
        activation=None if request.part == "attention" else _activation(request, checkpoint, layer),
        eps=wired_eps(
            checkpoint,
            ran.wiring,
            overridden=request.overrides.eps is not None,
            branch="attention" if request.part == "attention" else "ffn",
        ),
        overrides=request.overrides.model_dump(exclude_defaults=True),
        stages={name: _statistics(tensor) for name, tensor in captured.items()},
        recombination_error=ran.recombined.get("output"),
        recombination=dict(ran.recombined),
        parameters=ran.parameters,
        hidden_elements=ran.hidden_elements,
        token_ids=None if entering.token_ids is None else nested_numbers(entering.token_ids),
        read=BytesRead(bytes=meter.bytes, tensors=meter.tensors),
        notes=(*ran.notes, *_storage(request, layer), *_notes(request, captured), *_overflows(ran.stages, ran.wiring)),
    )
    if not request.return_tensors:
        return Reply(answer)
    native = request.dtype == "native"
    returned = {
        str(name): tensor if native or not tensor.is_floating_point() else tensor.to(torch.float32)
        for name, tensor in captured.items()
    }
    return Reply(answer, returned, nest_under="tensors")


def _entering(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    request: BlockRunRequest,
    tensors: Mapping[str, WireTensor],
    *,
    meter: ReadMeter,
    watch: Watch,
) -> Entering:
    """What the part is run on: posted or sampled rows, or the states of a text."""
    dtype = COMPUTE_DTYPES[request.overrides.dtype] if request.overrides.dtype else None
    ids = token_ids_of(store, checkpoint, request.token_ids, request.text)
    if ids is not None:
        refuse_beside_text(request, tensors)
        states = states_of(
            store, request.checkpoint, checkpoint, ids, layer=request.layer, meter=meter, dtype=dtype, watch=watch
        )
        if request.part != "ffn":
            return Entering(states, ids)
        # The block reads what attention left; in a parallel layer it reads what attention read.
        if request.expert is not None:
            layer_tensors(checkpoint, request.layer).network(request.expert)
        layer = store.layer(request.checkpoint, checkpoint, request.layer, meter)
        return Entering.after_attention(states, layer, ids, dtype=dtype)
    if request.part != "ffn" and request.sample is not None:
        raise InvalidValue(
            "sampled rows are no text, and attention reads texts",
            field="sample",
            hint="give `token_ids`, `text` or `x`",
        )
    x = block_input(
        store,
        checkpoint,
        request.x,
        request.sample,
        tensors,
        meter=meter,
        nested_dtype=torch.float64 if dtype is torch.float64 else torch.float32,
    )
    return Entering(x)


def _network(
    store: CheckpointStore, checkpoint: Checkpoint, request: BlockRunRequest, entering: Entering, meter: ReadMeter
) -> Ran:
    """A dense block, or one expert alone in the place of its mixture."""
    alone = request.expert is not None
    if alone:
        feed_forward, wiring = store.expert(request.checkpoint, checkpoint, request.layer, request.expert, meter)
    else:
        block = store.block(request.checkpoint, checkpoint, request.layer, meter)
        feed_forward, wiring = block.feed_forward, block.wiring
    changed = overridden(feed_forward, wiring, request.overrides)
    x, dtype = entering.x, COMPUTE_DTYPES[request.overrides.dtype] if request.overrides.dtype else None
    require_last_axis("x", x, changed.feed_forward.model_width, f"d_model of {request.checkpoint}")
    if changed.wiring.input_norm is not None:
        check_norm_defined(x, changed.wiring.input_norm, field="x")
    wanted: set[str] = {"output"} if request.capture is None else set(request.capture)
    until = next((stage for stage in WITHOUT_WEIGHTS if wanted <= {"x", stage}), "down" if alone else "output")
    other = None if alone else entering.other
    stages = run_block(x, changed.feed_forward, changed.wiring, until=until, dtype=dtype, other=other)
    _check_norms_defined(stages, changed.wiring)
    return Ran(
        cast("dict[RunStage, Tensor]", _present(stages)),
        changed.wiring,
        parameters=changed.feed_forward.parameters,
        hidden_elements=x[..., 0].numel() * changed.feed_forward.width,
        recombined=_recombined(stages, changed.feed_forward, changed.wiring, other),
        notes=changed.notes,
    )


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
    counted = tensor if tensor.is_floating_point() else tensor.to(torch.float64)
    values = {name: nested_numbers(value) for name, value in stage_statistics(counted)._asdict().items()}
    return StageStatistics.model_validate(
        {"shape": tuple(tensor.shape), "dtype": name_of_dtype(tensor.dtype), **values}
    )


def _recombined(stages: Stages, feed_forward: FeedForward, wiring: Wiring, other: Tensor | None) -> dict[Stage, float]:
    if stages.down is None:
        return {}
    few = Stages(*(None if tensor is None else _first_rows(tensor) for tensor in stages))
    # Without `normed` the two large products into the hidden width are not made again: what is asked is
    # whether gate, up and x make the output.
    few = few._replace(normed=None)
    errors = recombination_error(few, feed_forward, wiring, other=None if other is None else _first_rows(other))
    return {cast("Stage", name): float(error) for name, error in errors.items()}


def _first_rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])[:RECOMBINED_ROWS]


def _activation(request: BlockRunRequest, checkpoint: Checkpoint, layer: LayerTensors) -> Sourced | None:
    """The name that is run, and who says so; of a mixture that of its experts."""
    if request.overrides.activation is not None:
        return Sourced(value=request.overrides.activation, source="override")
    networks: tuple[NetworkTensors, ...] = (
        layer.networks if request.expert is None else (layer.network(request.expert),)
    )
    named = activation_of(checkpoint, networks[0].row) if networks else None
    return (
        None
        if named is None
        else Sourced(
            value=activation_named(named.value).name if named.value not in LEARNED_ACTIVATIONS else named.value,
            source=named.source,
        )
    )


def _storage(request: BlockRunRequest, layer: LayerTensors) -> tuple[str, ...]:
    attention = () if layer.attention is None or request.part == "ffn" else layer.attention.entries
    return storage_notes((*layer.entries, *attention))


def _overflows(stages: Mapping[RunStage, Tensor], wiring: Wiring) -> list[str]:
    """Rows whose mean square leaves the type that the norm sums in: as in the model, they come out as zeros."""
    if wiring.input_norm is None:
        return []
    read = stages.get("middle", stages["x"])
    sums_in = torch.promote_types(read.dtype, torch.float32)
    rows = int(read.to(sums_in).square().mean(-1).isinf().sum())
    told = name_of_dtype(sums_in)
    return [f"normed: the mean square of {rows} row(s) overflows {told}, as it would in the model"] if rows else []


def _notes(request: BlockRunRequest, captured: Mapping[RunStage, Tensor]) -> list[str]:
    asked = request.capture if request.capture is not None else ALL_STAGES if request.part == "ffn" else ()
    alone = request.expert is not None
    notes = [
        f"{name}: this block has no such stage"
        for name in asked
        if name not in captured and not (alone and request.capture is None)
    ]
    rows = next((tensor[..., 0].numel() for tensor in captured.values()), 0)
    if rows > RECOMBINED_ROWS and request.part == "ffn":
        notes.append(f"recombination: measured on the first {RECOMBINED_ROWS} of {rows} rows")
    return notes
