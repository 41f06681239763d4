"""`budgets`: sizes, or a checkpoint's sizes, turned into counts."""

from typing import Literal, cast

from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.errors import InvalidValue
from glassblock.numerics.budgets import (
    ELEMENT_COUNTS_ARE_NOT_PEAK_MEMORY,
    equal_parameter_width,
    feed_forward_budget,
    round_up_to_multiple,
)
from glassblock.operations.inputs import layer_widths, refuse_without_checkpoint
from glassblock.operations.store import CheckpointStore
from glassblock.wire.budgets import ActivationBudget, Budget, BudgetAnswer, BudgetRequest, EqualParameterWidth

SWEPT = ("d_model", "d_ff", "batch", "tokens")
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8": 1}
STORED_AS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8": "F8_E4M3"}
DEFAULT_DTYPE = "bfloat16"


def count(store: CheckpointStore, request: BudgetRequest) -> BudgetAnswer:
    """The budget, and one per point when one size is a list.

    Raises:
        InvalidValue: sizes are missing, given twice, or more than one is a list.
    """
    request = _with_sizes(store, request)
    lists = [name for name in SWEPT if isinstance(getattr(request, name), list)]
    if len(lists) > 1:
        raise InvalidValue(f"{' and '.join(lists)} are both lists", field=lists[1], hint="sweep one size at a time")
    if not lists:
        return BudgetAnswer(**_budget(request).model_dump(), note=ELEMENT_COUNTS_ARE_NOT_PEAK_MEMORY)
    points = [_budget(request.model_copy(update={lists[0]: value})) for value in getattr(request, lists[0])]
    return BudgetAnswer(
        **points[0].model_dump(), swept=lists[0], sweep=tuple(points), note=ELEMENT_COUNTS_ARE_NOT_PEAK_MEMORY
    )


def _with_sizes(store: CheckpointStore, request: BudgetRequest) -> BudgetRequest:
    sizes = ("d_model", "d_ff", "kind")
    if request.checkpoint is None:
        refuse_without_checkpoint(request, "family", "family_row", "tower")
        for name in sizes:
            if getattr(request, name) is None:
                raise InvalidValue(
                    f"{name} is missing", field=name, hint="give `d_model`, `d_ff` and `kind`, or a checkpoint"
                )
        return request
    given = [name for name in (*sizes, "layers") if name in request.model_fields_set]
    if given:
        raise InvalidValue(f"{given[0]} comes from the checkpoint", field=given[0], hint="leave it out")
    checkpoint = store.open(
        request.checkpoint, family=request.family, family_row=request.family_row, tower=request.tower
    )
    family = checkpoint.require_usable()
    widths = {layer_widths(checkpoint, layer) for layer in checkpoint.layer_indices}
    if len(widths) != 1:
        told = ", ".join(f"{d_model} x {d_ff}" for d_model, d_ff in sorted(widths))
        raise InvalidValue(
            f"the layers of {request.checkpoint} have different sizes: {told}",
            field="checkpoint",
            hint="ask for each size by `d_model` and `d_ff`",
        )
    ((d_model, d_ff),) = widths
    update = {
        "d_model": d_model,
        "d_ff": d_ff,
        "kind": "gated" if family.network.gated else "plain",
        "layers": checkpoint.layers,
        "dtype": request.dtype or _stored_dtype(checkpoint),
    }
    return request.model_copy(update=update)


def _stored_dtype(checkpoint: Checkpoint) -> str:
    stored = layer_tensors(checkpoint, checkpoint.layer_indices[0]).weights["down"].dtype
    return next((name for name, code in STORED_AS.items() if code == stored), DEFAULT_DTYPE)


def _budget(request: BudgetRequest) -> Budget:
    d_model, d_ff, batch, tokens = (cast("int", getattr(request, name)) for name in SWEPT)
    kind = cast("Literal['plain', 'gated']", request.kind)
    dtype = request.dtype or DEFAULT_DTYPE
    counted = feed_forward_budget(
        d_model=d_model,
        d_ff=d_ff,
        gated=kind == "gated",
        batch=batch,
        tokens=tokens,
        layers=request.layers,
        element_bytes=ITEM_BYTES[dtype],
    )
    exact = equal_parameter_width(d_ff)
    return Budget(
        d_model=d_model,
        d_ff=d_ff,
        kind=kind,
        batch=batch,
        tokens=tokens,
        layers=request.layers,
        dtype=dtype,
        parameters=counted.total_parameters,
        parameters_per_layer=counted.parameters,
        parameter_bytes=counted.total_parameters * ITEM_BYTES[dtype],
        hidden_elements=counted.hidden_elements,
        activations={
            name: ActivationBudget(elements=stage.elements, bytes=stage.bytes) for name, stage in counted.stages.items()
        },
        macs_per_token=counted.macs_per_token,
        flops_per_token=counted.flops_per_token,
        flops=counted.total_flops,
        equal_parameter_width=EqualParameterWidth(
            exact=str(exact),
            value=float(exact),
            rounded=round_up_to_multiple(exact, request.multiple_of),
            multiple_of=request.multiple_of,
        ),
    )
