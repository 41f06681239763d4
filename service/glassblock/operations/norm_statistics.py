"""`norms/statistics`: what a norm sees in each row, and what it does to it."""

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.family import Role
from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.layers import load_norm
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.checkpoint.settings import eps_of
from glassblock.errors import InvalidValue
from glassblock.numerics import norm_statistics as numerics
from glassblock.numerics.norm_jacobians import norm_jacobian, norm_jacobian_frobenius
from glassblock.numerics.norms import Norm, check_eps, check_norm_defined, norm_kind_named
from glassblock.numerics.watching import UNWATCHED, Watch
from glassblock.operations.inputs import (
    block_input,
    given_eps,
    refuse_beside_text,
    refuse_without_checkpoint,
    required,
)
from glassblock.operations.reply import Reply, nested_numbers
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import posted_tensor, require_last_axis
from glassblock.operations.texts import norm_reads, token_ids_of
from glassblock.wire import norms as wire
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import BytesRead, Sourced

DENSE_UP_TO = 128
SHIFT, SCALE = 1.0, 2.0
ELEMENTS_AT_ONCE = 2**20
"""Numbers of the rows that are looked at together: little memory, and soon stopped."""


def statistics(
    store: CheckpointStore,
    request: wire.NormStatisticsRequest,
    tensors: Mapping[str, WireTensor],
    *,
    watch: Watch = UNWATCHED,
) -> Reply[wire.NormStatisticsAnswer]:
    """Moments, outputs, Jacobians, invariances and dtype edges of posted rows, or of a checkpoint's own norm.

    Args:
        watch: told and asked between groups of rows.

    Raises:
        ComputationCancelled: `watch` asked for it.
        InvalidValue: no x, a width that does not fit, an eps that cannot be one, or a norm that is
            not defined on a row (all zero, or constant under LayerNorm, with eps 0).
    """
    if request.checkpoint is None:
        return _of_posted(store, request, tensors, watch)
    return _of_checkpoint(store, request, tensors, request.checkpoint, watch)


def _of_posted(
    store: CheckpointStore, request: wire.NormStatisticsRequest, tensors: Mapping[str, WireTensor], watch: Watch
) -> Reply[wire.NormStatisticsAnswer]:
    refuse_without_checkpoint(request, "family", "family_row", "tower", "layer", "norm", "sample", "token_ids", "text")
    x = required(posted_tensor("x", request.x, tensors, device=store.device, nested_dtype=torch.float64))
    gain = posted_tensor("gain", request.gain, tensors, device=store.device, nested_dtype=torch.float64)
    eps = given_eps(request.eps)
    if gain is not None:
        require_gain(gain, x.shape[-1])
    elif request.offset:
        raise InvalidValue("offset is added to a gain, and none is given", field="offset", hint="post the stored gain")
    source = Sourced(value=eps, source="request")
    return _answered(x, gain, request.offset, source, dense=request.jacobian, watch=watch)


def require_gain(gain: Tensor, width: int) -> None:
    """Refuse a gain that is not one number for each channel of x.

    Raises:
        InvalidValue: naming its shape.
    """
    if gain.ndim != 1:
        raise InvalidValue(f"gain has shape {list(gain.shape)}", field="gain", hint="one number per channel")
    require_last_axis("gain", gain, width, "the width of x")


def _of_checkpoint(
    store: CheckpointStore,
    request: wire.NormStatisticsRequest,
    tensors: Mapping[str, WireTensor],
    name: str,
    watch: Watch,
) -> Reply[wire.NormStatisticsAnswer]:
    role = request.norm
    if role is None:
        raise InvalidValue("norm is missing: which norm of the checkpoint", field="norm", hint="for example ffn_in")
    if request.layer is None and role != "final":
        raise InvalidValue("layer is missing", field="layer", hint="give `layer`, whose norm is meant")
    if request.layer is not None and role == "final":
        raise InvalidValue("the final norm belongs to no layer", field="layer", hint="leave out `layer`")
    if request.gain is not None or "gain" in tensors or request.offset:
        raise InvalidValue("gain and offset come from the checkpoint", field="gain", hint="leave out gain and offset")
    checkpoint = store.open(name, family=request.family, family_row=request.family_row, tower=request.tower)
    checkpoint.require_usable()
    meter = ReadMeter()
    norm = load_norm(checkpoint, request.layer, role, store.device, meter)
    source = Sourced(value=norm.eps, source=_eps_source(checkpoint, request.layer, role))
    if request.eps is not None:
        check_eps(request.eps, field="eps")
        norm = Norm(norm.kind, norm.gain, norm.bias, request.eps)
        source = Sourced(value=request.eps, source="override")
    ids = token_ids_of(store, checkpoint, request.token_ids, request.text)
    if ids is None:
        x = block_input(store, checkpoint, request.x, request.sample, tensors, meter=meter, nested_dtype=torch.float32)
    else:
        refuse_beside_text(request, tensors)
        x = norm_reads(store, name, checkpoint, ids, layer=request.layer, role=role, meter=meter)
    if norm.width is not None:
        require_last_axis("x", x, norm.width, f"the width of {role}")
    check_norm_defined(x, norm, field="x")
    gain = None if norm.gain is None else norm.gain.to(torch.float64)
    reply = _answered(x, gain, norm.kind.offset, source, dense=request.jacobian, watch=watch)
    answer = reply.answer.model_copy(
        update={"norm_kind": norm.kind.name, "read": BytesRead(bytes=meter.bytes, tensors=meter.tensors)}
    )
    return Reply(answer, {**reply.tensors, "output": norm(x)})


def _eps_source(checkpoint: Checkpoint, layer: int | None, role: Role) -> str:
    """Who states the epsilon of a norm that is there; in some layers of a hybrid stand others than in the rest."""
    family = checkpoint.require_usable()
    row = family if layer is None else layer_tensors(checkpoint, layer).row
    return next(eps_of(checkpoint.config, row, norm.eps).source for norm in row.norms if norm.role == role)


def _answered(
    x: Tensor, gain: Tensor | None, offset: float, eps: Sourced, *, dense: bool, watch: Watch
) -> Reply[wire.NormStatisticsAnswer]:
    d = x.shape[-1]
    epsilon = cast("float", eps.value)
    # The plain arithmetics get gain + offset already added, so that both Jacobians see the gain in use.
    ones = torch.ones(d, dtype=torch.float64, device=x.device)
    in_use = ones if gain is None else gain.to(torch.float64) + offset
    rms = Norm(norm_kind_named("rms_llama"), in_use, None, epsilon)
    layer = Norm(norm_kind_named("layernorm_nobias"), in_use, None, epsilon)
    if epsilon == 0 or x.numel() == 0:
        wide = x.to(torch.float64)
        check_norm_defined(wide, rms, field="x")
        # A constant row has no direction once centred: with eps 0 its LayerNorm is 0/0, and is refused.
        check_norm_defined(wide, layer, field="x")
        del wide
    if dense and d > DENSE_UP_TO:
        raise InvalidValue(
            f"x is {d} wide; dense Jacobians are written out up to {DENSE_UP_TO}", field="jacobian", hint="leave it out"
        )
    found = _looked_at(x, rms, layer, watch)
    answer = wire.NormStatisticsAnswer(
        mean=nested_numbers(found["mean"]),
        square_mean=nested_numbers(found["square_mean"]),
        variance=nested_numbers(found["variance"]),
        rms=nested_numbers(found["rms"]),
        jacobian=_dense(x.to(torch.float64), rms, layer) if dense else None,
        jacobian_frobenius={name: nested_numbers(found[f"frobenius.{name}"]) for name in ("rmsnorm", "layernorm")},
        invariances=wire.Invariances(
            **{
                change: wire.Differences(
                    rmsnorm=nested_numbers(found[f"{change}.rms"]), layernorm=nested_numbers(found[f"{change}.layer"])
                )
                for change in numerics.Invariances._fields
            }
        ),
        dtype_report={
            dtype: wire.DtypeFit.model_validate(
                {fit: nested_numbers(found[f"{dtype}.{fit}"]) for fit in numerics.DtypeReport._fields}
            )
            for dtype in numerics.REPORTED_DTYPES
        },
        eps=eps,
    )
    return Reply(answer, {"rmsnorm": found["rmsnorm"], "layernorm": found["layernorm"]})


def _looked_at(x: Tensor, rms: Norm, layer: Norm, watch: Watch) -> dict[str, Tensor]:
    """All that is seen in each row, a group of rows after the other."""
    d = x.shape[-1]
    rows = x.reshape(-1, d)
    found: dict[str, Tensor] = {}
    done = 0
    for group in cast("tuple[Tensor, ...]", rows.split(max(1, ELEMENTS_AT_ONCE // d))):
        watch.at(done, len(rows), "rows")
        for name, values in _of_rows(group, rms, layer).items():
            if values.ndim == 0:  # about eps, and no row
                found[name] = values
                continue
            if name not in found:
                found[name] = values.new_empty(len(rows), *values.shape[1:])
            found[name][done : done + len(group)] = values
        done += len(group)
    shape = x.shape[:-1]
    return {name: value.reshape((*shape, *value.shape[1:])) if value.ndim else value for name, value in found.items()}


def _of_rows(x: Tensor, rms: Norm, layer: Norm) -> dict[str, Tensor]:
    eps, gain = rms.eps, rms.gain
    moved = numerics.norm_invariances(
        x,
        eps,
        shift=SHIFT,
        scale=SCALE,
        channel_scale=torch.linspace(1, 2, x.shape[-1], dtype=torch.float64, device=x.device),
        gain=gain,
    )
    fits = numerics.dtype_report(x, eps)
    wide = x.to(torch.float64)
    return {
        **numerics.norm_statistics(x, eps, gain=gain)._asdict(),
        "frobenius.rmsnorm": norm_jacobian_frobenius(wide, rms),
        "frobenius.layernorm": norm_jacobian_frobenius(wide, layer),
        **{f"{change}.{norm}": by for change, pair in moved._asdict().items() for norm, by in pair._asdict().items()},
        **{f"{dtype}.{fit}": value for dtype, report in fits.items() for fit, value in report._asdict().items()},
    }


def _dense(x: Tensor, rms: Norm, layer: Norm) -> wire.NormJacobians:
    return wire.NormJacobians(
        rmsnorm=nested_numbers(norm_jacobian(x, rms)), layernorm=nested_numbers(norm_jacobian(x, layer))
    )
