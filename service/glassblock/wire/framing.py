"""One safetensors body in either direction, without torch.

The JSON message travels in the file's `__metadata__` under `request` or `response`, the
tensors as themselves: 8 bytes of little-endian header length, the JSON header, padded with
spaces to a multiple of 8, then the tensors' bytes back to back, C-ordered and little-endian
(the safetensors format). A frame is written as a header and the tensors' own memory, so that
nothing is copied; it is read as views into one buffer.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from glassblock.errors import InvalidValue

MEDIA_TYPE = "application/x-safetensors"
MAX_HEADER_BYTES = 16 * 1024 * 1024
MAX_TENSORS = 1024
MAX_AXES = 32
MAX_SIZE = 2**48  # elements and bytes: also of a shape whose other axis is 0
ALIGNMENT = 8

ITEM_BYTES: Mapping[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

MessageKey = Literal["request", "response"]


@dataclass(frozen=True)
class WireTensor:
    """A tensor as it travels.

    Attributes:
        dtype: safetensors type code, a key of `ITEM_BYTES`.
        shape: axes, outermost first; empty for a scalar.
        data: contiguous bytes, `ITEM_BYTES[dtype] * prod(shape)` of them.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def frame(key: MessageKey, message: str, tensors: Mapping[str, WireTensor]) -> Iterator[bytes | memoryview]:
    """Yield the body: its header, then every tensor's memory as it lies."""
    header: dict[str, object] = {"__metadata__": {key: message}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.data.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    yield len(text).to_bytes(8, "little") + text
    yield from (tensor.data.cast("B") for tensor in tensors.values() if tensor.data.nbytes)


def unframe(key: MessageKey, body: memoryview) -> tuple[str, dict[str, WireTensor]]:
    """The message and the tensors of a body, as views into it.

    Raises:
        InvalidValue: as `read_tensors`, or the body carries no message under `key`.
    """
    metadata, tensors = read_tensors(body)
    message = metadata.get(key)
    if not isinstance(message, str):
        raise _refused(f"the header has no text under __metadata__.{key}", hint="put the JSON message there")
    if not _is_unicode(message):
        raise _refused(f"the text under __metadata__.{key} is not Unicode")
    return message, tensors


def read_tensors(body: memoryview) -> tuple[dict[str, object], dict[str, WireTensor]]:
    """The `__metadata__` and the tensors of any safetensors file, as views into it.

    Raises:
        InvalidValue: the body is no safetensors file, or lies about its sizes or offsets.
            The error names the tensor.
    """
    header, data = _split(body)
    metadata = header.pop("__metadata__", None)
    if len(header) > MAX_TENSORS:
        raise _refused(f"the body holds {len(header)} tensors, over the limit of {MAX_TENSORS}")
    placed = {name: _tensor(name, entry, data) for name, entry in header.items()}
    covered = 0
    for name, (start, tensor) in sorted(placed.items(), key=_by_place):
        if start != covered:
            raise _refused(
                f"a hole or an overlap: the tensor starts at {start}, the one before ends at {covered}",
                tensor=name,
                hint="offsets must tile the data",
            )
        covered = start + tensor.data.nbytes
    if covered != data.nbytes:
        raise _refused(f"the tensors claim {covered} bytes, the body holds {data.nbytes}", hint="offsets must tile it")
    tensors = {name: tensor for name, (_, tensor) in placed.items()}
    return cast("dict[str, object]", metadata) if isinstance(metadata, dict) else {}, tensors


def _by_place(item: tuple[str, tuple[int, WireTensor]]) -> tuple[int, int]:
    start, tensor = item[1]
    return start, tensor.data.nbytes


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise _refused("a name stands twice in one object of the header")
    return fields


def _split(body: memoryview) -> tuple[dict[str, object], memoryview]:
    if body.nbytes < 8:
        raise _refused(f"the body has {body.nbytes} bytes, too few for a safetensors header")
    length = int.from_bytes(body[:8], "little")
    if length > min(MAX_HEADER_BYTES, body.nbytes - 8):
        raise _refused(f"the header claims {length} bytes, the body has {body.nbytes - 8}")
    try:
        header: object = json.loads(bytes(body[8 : 8 + length]), object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as fault:
        raise _refused("the header is not JSON") from fault
    if not isinstance(header, dict):
        raise _refused("the header is not a JSON object")
    return cast("dict[str, object]", header), body[8 + length :]


def _tensor(name: str, entry: object, data: memoryview) -> tuple[int, WireTensor]:
    if not _is_unicode(name):
        raise _refused("a tensor's name is not Unicode")
    fields = cast("dict[str, object]", entry) if isinstance(entry, dict) else {}
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise _refused(f"dtype {repr(dtype)[:40]} is not read here", tensor=name, known=tuple(ITEM_BYTES))
    axes = _whole_numbers(name, "shape", fields.get("shape"))
    if len(axes) > MAX_AXES or math.prod(max(axis, 1) for axis in axes) > MAX_SIZE:
        raise _refused("the shape is larger than any tensor can be", tensor=name)
    offsets = _whole_numbers(name, "data_offsets", fields.get("data_offsets"))
    if len(offsets) != 2:
        raise _refused("data_offsets must be two numbers", tensor=name)
    start, stop = offsets
    needed = ITEM_BYTES[dtype] * math.prod(axes)
    if not 0 <= start <= stop <= data.nbytes or stop - start != needed:
        raise _refused(f"offsets [{start}, {stop}] do not hold the {needed} bytes of shape {list(axes)}", tensor=name)
    return start, WireTensor(dtype, axes, data[start:stop])


def _whole_numbers(name: str, key: str, value: object) -> tuple[int, ...]:
    items = cast("list[object]", value) if isinstance(value, list) else [None]
    if not all(type(item) is int and 0 <= item <= MAX_SIZE for item in items):
        raise _refused(f"{key} must be a list of whole numbers, not negative and not above {MAX_SIZE}", tensor=name)
    return tuple(cast("list[int]", items))


def _is_unicode(text: str) -> bool:
    r"""Whether JSON's `\ud800` escapes left no half character that nobody can write again."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused(
    message: str, *, tensor: str | None = None, hint: str | None = None, known: tuple[str, ...] = ()
) -> InvalidValue:
    return InvalidValue(f"safetensors body: {message}", field="body", tensor=tensor, hint=hint, known=known)
