"""Tensors off the wire and onto it."""

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from torch import Tensor

from glassblock.checkpoint.reading import TORCH_DTYPES
from glassblock.errors import InvalidValue
from glassblock.wire.framing import ITEM_BYTES, WireTensor

DTYPES: Mapping[str, torch.dtype] = {code: TORCH_DTYPES[code] for code in ITEM_BYTES}
"""Of what travels."""
CODES: Mapping[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}
COMPUTE_DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def wire_tensor(tensor: Tensor) -> WireTensor:
    """`tensor` as it travels: its own memory where it is contiguous and on the host."""
    host = tensor.detach().cpu().contiguous()
    flat = host.reshape(-1).view(torch.uint8)
    return WireTensor(CODES[host.dtype], tuple(host.shape), memoryview(cast("bytes", flat.numpy())))


def posted_tensor(
    field: str, nested: object, tensors: Mapping[str, WireTensor], *, device: torch.device, nested_dtype: torch.dtype
) -> Tensor | None:
    """The tensor that a request gives as `field`, in its message or beside it; None when in neither.

    Args:
        nested_dtype: type that JSON numbers are read as. A tensor keeps its own.

    Raises:
        InvalidValue: given twice, ragged, not numbers, empty, or holding a value that is not finite.
    """
    posted = tensors.get(field)
    if posted is not None and nested is not None:
        raise InvalidValue(f"{field} is given twice, in the message and as a tensor", field=field, hint="give one")
    if posted is not None:
        tensor = _from_wire(field, posted)
    elif nested is not None:
        tensor = _from_nested(field, nested, nested_dtype)
    else:
        return None
    if tensor.numel() == 0:
        raise InvalidValue(f"{field} is empty: shape {list(tensor.shape)}", field=field, hint="send at least one row")
    tensor = tensor.to(device)
    _refuse_non_finite(field, tensor)
    return tensor


def captured_tensor(name: str, posted: WireTensor, *, device: torch.device) -> Tensor:
    """A posted tensor whatever its values are, in its own type; float8 becomes float32.

    Raises:
        InvalidValue: it is not of floating point.
    """
    return _from_wire(name, posted).to(device)


def _from_wire(field: str, posted: WireTensor) -> Tensor:
    dtype = DTYPES[posted.dtype]
    if not dtype.is_floating_point:
        raise InvalidValue(f"{field} is {posted.dtype}: floating point is needed", field=field, tensor=field)
    if not posted.data.nbytes:
        return torch.empty(posted.shape, dtype=dtype)
    aligned = posted.data if _address(posted.data) % dtype.itemsize == 0 else memoryview(bytearray(posted.data))
    tensor = torch.frombuffer(aligned, dtype=dtype).reshape(posted.shape)
    return tensor.to(torch.float32) if dtype.itemsize == 1 else tensor


def _address(data: memoryview) -> int:
    return np.frombuffer(cast("bytes", data), dtype=np.uint8).ctypes.data


def _from_nested(field: str, nested: object, dtype: torch.dtype) -> Tensor:
    try:
        array = np.asarray(nested)
    except ValueError as fault:
        raise InvalidValue(f"{field} is not rectangular: {fault}", field=field, hint="rows of equal length") from fault
    if (array.dtype.kind not in "fiu" and array.size) or _holds_truth_value(nested):
        raise InvalidValue(f"{field} holds something that is not a number", field=field, hint="numbers in lists")
    return torch.from_numpy(np.array(array, dtype=np.float64, ndmin=1)).to(dtype)


def _holds_truth_value(nested: object) -> bool:
    if not isinstance(nested, list):
        return isinstance(nested, bool)
    return any(
        item is True or item is False or (isinstance(item, list) and _holds_truth_value(cast("object", item)))
        for item in cast("list[object]", nested)
    )


def _refuse_non_finite(field: str, tensor: Tensor) -> None:
    if bool(torch.isfinite(tensor.sum())):
        return  # a finite sum has finite terms; an infinite one may be mere overflow, so look again
    culprits = (~torch.isfinite(tensor)).nonzero()
    if len(culprits):
        place = ", ".join(str(int(axis)) for axis in culprits[0])
        value = float(tensor[tuple(culprits[0])])
        raise InvalidValue(
            f"{field}[{place}] is {value}, and {len(culprits)} value(s) of {field} are not finite",
            field=field,
            hint="send finite values",
        )


def require_last_axis(field: str, tensor: Tensor, width: int, meaning: str) -> None:
    """Refuse a tensor whose last axis is not `width` long.

    Raises:
        InvalidValue: naming `field`, both lengths and what the length means.
    """
    found = tensor.shape[-1] if tensor.ndim else 0
    if found != width:
        raise InvalidValue(
            f"{field} is {found} wide, shape {list(tensor.shape)}; {meaning} is {width}",
            field=field,
            hint=f"the last axis of {field} must be {width}",
        )
