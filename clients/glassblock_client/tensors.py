"""numpy arrays as tensors on the wire and back, without torch.

numpy has no bfloat16 and no float8. They arrive as float32, which holds every one of their
values exactly: bfloat16 is the upper half of a float32's bits; a float8 has 256 values, and
two tables list them. Everything else comes as it was stored, as a view into the bytes received.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from glassblock.errors import InvalidValue
from glassblock.wire.framing import WireTensor
from numpy.typing import NDArray

Array = NDArray[Any]

DTYPES: Mapping[str, str] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
"""Type codes that numpy can hold, with their layout on the wire."""

CODES: Mapping[str, str] = {np.dtype(layout).name: code for code, layout in DTYPES.items()}
"""By the name of numpy's type, which does not tell the byte order."""


def wire_from_array(array: Array, *, field: str = "x") -> WireTensor:
    """`array` as it travels: its own memory where that is contiguous and little-endian, else a copy.

    Raises:
        InvalidValue: the element type has no place on the wire (complex, object, text, longdouble).
    """
    code = CODES.get(array.dtype.name)
    if code is None:
        raise InvalidValue(
            f"{field} has the element type {array.dtype}, which does not travel",
            field=field,
            known=tuple(CODES),
            hint="convert it with .astype(numpy.float32)",
        )
    ordered = np.ascontiguousarray(array, dtype=DTYPES[code])
    return WireTensor(code, array.shape, ordered.reshape(-1).view(np.uint8).data)


def array_from_wire(tensor: WireTensor) -> Array:
    """The tensor as numpy: a view where numpy has the type, float32 for bfloat16 and float8."""
    if tensor.dtype == "BF16":
        halves = np.frombuffer(tensor.data, "<u2")
        return (halves.astype("<u4") << np.uint32(16)).view("<f4").reshape(tensor.shape)
    if tensor.dtype in FLOAT8_VALUES:
        return FLOAT8_VALUES[tensor.dtype][np.frombuffer(tensor.data, np.uint8)].reshape(tensor.shape)
    if tensor.dtype == "BOOL":
        return (np.frombuffer(tensor.data, np.uint8) != 0).reshape(tensor.shape)
    return np.frombuffer(tensor.data, DTYPES[tensor.dtype]).reshape(tensor.shape)


def _float8_values(exponent_bits: int, mantissa_bits: int, *, infinities: bool) -> NDArray[np.float32]:
    """The value of each of the 256 bytes: sign, exponent, mantissa, from the top.

    Source: Micikevicius et al. 2022, "FP8 formats for deep learning", table 1. E5M2 keeps
    IEEE's infinities and NaNs in its top exponent; E4M3 has no infinity, one NaN per sign, and
    uses the rest of its top exponent for numbers.
    """
    bits = np.arange(256)
    exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (bits & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    bias = (1 << (exponent_bits - 1)) - 1
    magnitude = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    if infinities:
        top = exponent == (1 << exponent_bits) - 1
        magnitude = np.where(top, np.where(mantissa == 0, np.inf, np.nan), magnitude)
    else:
        magnitude = np.where(bits & 0x7F == 0x7F, np.nan, magnitude)
    return np.where(bits >= 128, -magnitude, magnitude).astype(np.float32)


FLOAT8_VALUES: Mapping[str, NDArray[np.float32]] = {
    "F8_E4M3": _float8_values(4, 3, infinities=False),
    "F8_E5M2": _float8_values(5, 2, infinities=True),
}


Numbers = Array | Sequence[Any] | float
"""What stands for a tensor in a call: an array, which travels as its bytes, or numbers nested in lists, as JSON."""


def divide(**inputs: Numbers | WireTensor | None) -> tuple[dict[str, Any], dict[str, WireTensor]]:
    """What goes into the message (nested lists, None) and what travels beside it (arrays), by field.

    Raises:
        InvalidValue: neither an array nor numbers in lists.
    """
    nested: dict[str, Any] = {}
    tensors: dict[str, WireTensor] = {}
    for field, value in inputs.items():
        nested[field] = None
        if isinstance(value, WireTensor):
            tensors[field] = value
        elif isinstance(value, np.ndarray):
            tensors[field] = wire_from_array(value, field=field)
        elif value is None or isinstance(value, (list, tuple, float, int)):
            nested[field] = value
        else:
            raise InvalidValue(
                f"{field} is a {type(value).__name__}, not a numpy array nor numbers in lists",
                field=field,
                hint="a torch tensor becomes an array with .numpy()",
            )
    return nested, tensors
