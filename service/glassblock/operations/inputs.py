"""What an operation works on: posted rows, or rows of a checkpoint's own embedding."""

from collections.abc import Mapping

import torch
from torch import Tensor

from glassblock.checkpoint.embedding_rows import sample_embedding_rows
from glassblock.checkpoint.family import ROLES_OF, Branch
from glassblock.checkpoint.layer_map import eps_sources, layer_tensors
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import InvalidValue
from glassblock.numerics.norms import check_eps
from glassblock.numerics.wiring import Wiring
from glassblock.operations.store import CheckpointStore
from glassblock.operations.tensors import posted_tensor
from glassblock.wire.blocks import BlockRunRequest
from glassblock.wire.framing import WireTensor
from glassblock.wire.jacobians import JacobiansRequest
from glassblock.wire.norms import NormStatisticsRequest
from glassblock.wire.values import Request, Sample, Sourced


def block_input(
    store: CheckpointStore,
    checkpoint: Checkpoint,
    nested: object,
    sample: Sample | None,
    tensors: Mapping[str, WireTensor],
    *,
    meter: ReadMeter,
    nested_dtype: torch.dtype,
) -> Tensor:
    """Posted `x`, or the sampled embedding rows as they enter the first layer.

    Raises:
        InvalidValue: neither or both are given, or x cannot be used.
    """
    posted = posted_tensor("x", nested, tensors, device=store.device, nested_dtype=nested_dtype)
    if sample is None:
        return required(posted)
    if posted is not None:
        raise InvalidValue("x and sample are both given", field="sample", hint="give one of them")
    return sample_embedding_rows(checkpoint, sample.rows, sample.seed, store.device, meter).x


def required(x: Tensor | None) -> Tensor:
    """`x`, which must be there.

    Raises:
        InvalidValue: it is not.
    """
    if x is None:
        hint = "Post it, or name a checkpoint, and give a sample, token_ids or a text."
        raise InvalidValue("x is missing", field="x", hint=hint)
    return x


def refuse_without_checkpoint(request: Request, *fields: str) -> None:
    """Refuse what only a checkpoint gives a meaning.

    Raises:
        InvalidValue: one of `fields` is given.
    """
    for field in fields:
        if getattr(request, field) is not None:
            raise InvalidValue(f"{field} belongs to a checkpoint, and none is named", field=field, hint="name one")


def refuse_beside_text(
    request: BlockRunRequest | NormStatisticsRequest | JacobiansRequest, tensors: Mapping[str, WireTensor]
) -> None:
    """Refuse rows beside a text: each says what enters.

    Raises:
        InvalidValue: x or a sample is given.
    """
    given = "x" if request.x is not None or "x" in tensors else "sample" if request.sample is not None else None
    if given is not None:
        raise InvalidValue(f"a text and {given} are both given", field=given, hint="give one of them")


def given_eps(eps: float | None) -> float:
    """The epsilon of a request that names no checkpoint to take one from.

    Raises:
        InvalidValue: it is missing, negative or not finite.
    """
    if eps is None:
        raise InvalidValue("eps is missing", field="eps", hint="nothing is assumed: give the norm's epsilon")
    check_eps(eps, field="eps")
    return eps


def wired_eps(
    checkpoint: Checkpoint, wiring: Wiring, *, overridden: bool, branch: Branch = "ffn"
) -> dict[str, Sourced]:
    """Epsilon of each norm of a branch as wired, with the place that states it."""
    declared = eps_sources(checkpoint)
    told = [declared[role] for role in ROLES_OF[branch] if role in declared]
    sources: dict[str, Sourced] = {}
    for place, norm in zip(("input", "output", "residual"), wiring.norms, strict=True):
        if norm is not None:
            stated = "override" if overridden else next(eps.source for eps in told if eps.value == norm.eps)
            sources[place] = Sourced(value=norm.eps, source=stated)
    return sources


def layer_widths(checkpoint: Checkpoint, layer: int) -> tuple[int, int]:
    """d_model and d_ff of a layer, from its headers.

    Raises:
        InvalidValue, CheckpointUnusable: as `layer_tensors`.
    """
    network = layer_tensors(checkpoint, layer).network(None)
    shape = network.weights["down"].shape
    d_model, d_ff = shape if network.row.layouts[1] == "out_in" else reversed(shape)
    return d_model, d_ff
