"""Posted tensors held against what will meet them, before the work is queued: from numbers and headers alone."""

from collections.abc import Mapping
from typing import Any

import torch

from glassblock.checkpoint.layer_map import layer_tensors
from glassblock.checkpoint.layers import load_norm
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.reading import ReadMeter
from glassblock.errors import GlassblockError
from glassblock.numerics.captures import BlockSize, required_captures
from glassblock.operations.explanations import captured_stages
from glassblock.operations.inputs import layer_widths
from glassblock.operations.jacobian_networks import model_width
from glassblock.operations.norm_statistics import require_gain
from glassblock.operations.residuals import require_square
from glassblock.operations.tensors import posted_tensor, require_last_axis
from glassblock.wire.explain import ExplainRequest
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import Request


def check_posted(checkpoint: Checkpoint | None, request: Request, tensors: Mapping[str, WireTensor]) -> None:
    """Refuse what was posted where no work could take it, from its numbers and from headers: before it is queued.

    Raises:
        InvalidValue: as `posted_tensor`, and of captures as `captured_stages` and `required_captures`; or x, gain or
            matrix is not of the width that it meets.
    """
    if isinstance(request, ExplainRequest) and checkpoint is not None:
        _check_captures(checkpoint, request, tensors)
        return
    found = {
        field: posted_tensor(
            field, getattr(request, field), tensors, device=torch.device("cpu"), nested_dtype=torch.float64
        )
        for field in ("x", "gain", "matrix")
        if hasattr(request, field)
    }
    x, gain, matrix = (found.get(field) for field in ("x", "gain", "matrix"))
    if x is None:
        return
    if checkpoint is None and gain is not None:
        require_gain(gain, x.shape[-1])
    if checkpoint is None and matrix is not None:
        require_square(matrix, x.shape[-1])
    expected = None if checkpoint is None else _width(checkpoint, request)
    if expected is not None:
        require_last_axis("x", x, *expected)


def _width(checkpoint: Checkpoint, request: Any) -> tuple[int, str] | None:
    """How wide x must be, and what that is; None where the work itself tells why there is none."""
    layer = next(iter(getattr(request, "layers", ())), None) if not hasattr(request, "layer") else request.layer
    try:
        if getattr(request, "norm", None) is None:
            return None if layer is None else (model_width(checkpoint, layer), f"d_model of {request.checkpoint}")
        norm = load_norm(checkpoint, layer, request.norm, "cpu", ReadMeter())
    except GlassblockError:
        return None
    return None if norm.width is None else (norm.width, f"the width of {request.norm}")


def _check_captures(checkpoint: Checkpoint, request: ExplainRequest, tensors: Mapping[str, WireTensor]) -> None:
    captures = captured_stages(tensors, request.layer, device=torch.device("cpu"))
    try:
        network = layer_tensors(checkpoint, request.layer).network(None)
        size = BlockSize(*layer_widths(checkpoint, request.layer), gated=network.row.gated)
    except GlassblockError:  # the work itself tells why
        return
    required_captures(captures, size)
