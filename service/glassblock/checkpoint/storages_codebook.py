"""Stored forms of bitsandbytes: 4 bits by a table of values, and 8 bits by row."""

from collections.abc import Mapping
from math import isfinite, prod
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from glassblock.checkpoint.quantisation import as_object, as_pair
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.storage import Layout, Sought, Storage
from glassblock.checkpoint.strict_json import JsonFault, parse_json
from glassblock.errors import DamagedCheckpoint
from glassblock.numerics.dequantise import dequantise_rows_of_int8
from glassblock.numerics.dequantise_codebook import BITSANDBYTES_TABLES, dequantise_codebook4, dequantise_codebook8

MAX_STATE_BYTES = 4096
"""Longest quantisation state read; real ones have some 150 bytes."""

STATE_MARK = ".quant_state.bitsandbytes__"
"""Between the name of a weight of 4 bits and its type, in the name of its quantisation state."""

# Older versions computed the table anew, whose last digits differ.
_TABLE_TOLERANCE = 1e-6


def _plan_four_bits(sought: Sought) -> Layout:
    quant_type = sought.names["state"].rpartition(STATE_MARK)[2]
    state = _state(sought)
    shape = as_pair(state.get("shape"))
    if shape is None:
        raise sought.misfit(
            "state", f"tells the shape {state.get('shape')!r:.60}, where two positive whole numbers stand"
        )
    if state.get("quant_type") != quant_type:
        raise sought.misfit("state", f"tells the type {state.get('quant_type')!r:.60}, its name {quant_type}")
    count = prod(shape)
    if sought.main.bytes != -(-count // 2):
        told = f"{list(shape)} takes {-(-count // 2)}, as {sought.names['state']} tells"
        raise sought.misfit("codes", f"has {sought.main.bytes} bytes where {told}")
    size = _size(sought, state, "blocksize")
    blocks = -(-count // size)
    sought.expect("absmax", (blocks,), why=f"one for each {size} of {count} numbers")
    roles = ["codes", "absmax", "table", "state"]
    nested_block, offset = 0, 0.0
    sought.expect("table", (16,), why="the values of 4 bits")
    if sought.dtype_of("absmax", "F32", "U8") == "U8":
        for role in ("nested_absmax", "nested_table"):
            if role not in sought.parts:
                raise sought.lack(role, "the absmax is quantised itself")
        sought.dtype_of("nested_absmax", "F32")
        sought.dtype_of("nested_table", "F32")
        nested_block, offset = _size(sought, state, "nested_blocksize"), _offset(sought, state)
        sought.expect("nested_table", (256,), why="the values of 8 bits")
        sought.expect("nested_absmax", (-(-blocks // nested_block),), why=f"one for each {nested_block} blocks")
        roles += ["nested_absmax", "nested_table"]
    return Layout(
        shape,
        MappingProxyType({role: sought.parts[role] for role in roles}),
        f"bitsandbytes {quant_type}, blocks of {size}{', nested' if nested_block else ''}",
        bits=4,
        block=(1, size),
        quant_type=quant_type,
        nested_block=nested_block,
        nested_offset=offset,
    )


def _plan_eight_bits(sought: Sought) -> Layout:
    rows, columns = sought.axes("codes", 2)
    sought.dtype_of("scale", "F32")
    sought.expect("scale", (rows,), why="one for each row")
    if "format" in sought.parts:
        sought.dtype_of("format", "U8", "I32", "I64")
        if sought.parts["format"].elements != 1:
            raise sought.misfit("format", "is no single number")
    return Layout(
        (rows, columns),
        MappingProxyType(dict(sought.parts)),
        "bitsandbytes, 8 bits, one scale for each row",
        row_blocks=MappingProxyType({"codes": 1, "scale": 1}),
    )


def _state(sought: Sought) -> Mapping[str, object]:
    """The JSON that the quantisation state holds; it is read, being short."""
    entry = sought.parts["state"]
    if entry.bytes > MAX_STATE_BYTES:
        raise sought.misfit("state", f"has {entry.bytes:,} bytes; at most {MAX_STATE_BYTES} are read")
    raw = read_tensor(entry, "cpu", ReadMeter()).flatten().view(torch.uint8)
    try:
        state = as_object(parse_json(bytes(cast("list[int]", raw.tolist())), constants=True))
    except JsonFault as error:
        raise sought.misfit("state", f"cannot be read: {error.message}") from None
    if not state:
        raise sought.misfit("state", "is no JSON object")
    return state


def _size(sought: Sought, state: Mapping[str, object], key: str) -> int:
    value = state.get(key)
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise sought.misfit("state", f"tells the {key} {value!r:.60}, where a whole number from 1 to 1,048,576 stands")
    return value


def _offset(sought: Sought, state: Mapping[str, object]) -> float:
    value = state.get("nested_offset")
    if not isinstance(value, int | float) or isinstance(value, bool) or abs(value) > 3e38 or not isfinite(value):
        raise sought.misfit("state", f"tells the nested_offset {value!r:.60}, where a number stands")
    return float(value)


def _read_four_bits(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    table = BITSANDBYTES_TABLES[layout.quant_type]
    expected = torch.tensor(table, device=parts["table"].device)
    if not torch.allclose(parts["table"].to(torch.float32), expected, rtol=0, atol=_TABLE_TOLERANCE):
        name = layout.parts["table"].name
        raise DamagedCheckpoint(
            f"{name} does not hold the values of {layout.quant_type}",
            tensor=name,
            file=layout.parts["table"].file.name,
            hint="Quantise the model again.",
        )
    absmax = parts["absmax"]
    if layout.nested_block:
        absmax = dequantise_codebook8(
            absmax,
            parts["nested_table"],
            parts["nested_absmax"],
            block_size=layout.nested_block,
            offset=layout.nested_offset,
        )
    codes = parts["codes"].reshape(-1).view(torch.uint8)
    return dequantise_codebook4(codes, absmax, table=table, block_size=layout.block[1], shape=layout.shape)


def _read_eight_bits(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    if "format" in parts and int(parts["format"]) != 0:
        entry = layout.parts["format"]
        raise DamagedCheckpoint(
            f"{entry.name} is {int(parts['format'])}: only 0, codes in rows, is read",
            tensor=entry.name,
            file=entry.file.name,
            hint="Save the model again with a current bitsandbytes.",
        )
    return dequantise_rows_of_int8(parts["codes"], parts["scale"])


CODEBOOK_STORAGES = (
    Storage(
        name="bitsandbytes 8-bit",
        codes=("{name}",),
        dtypes=frozenset({"I8"}),
        needs=MappingProxyType({"scale": ("{stem}.SCB",)}),
        methods=frozenset({"bitsandbytes"}),
        axes="out_in",
        plan=_plan_eight_bits,
        dequantise=_read_eight_bits,
        may=MappingProxyType({"format": ("{stem}.weight_format",)}),
        tells=("scale",),
    ),
    Storage(
        name="bitsandbytes 4-bit",
        codes=("{name}",),
        # Whatever it is called, it is bytes (`bnb_4bit_quant_storage`).
        dtypes=frozenset({"U8", "I8", "F16", "BF16", "F32"}),
        needs=MappingProxyType(
            {
                "state": tuple("{name}" + STATE_MARK + quant_type for quant_type in BITSANDBYTES_TABLES),
                "absmax": ("{name}.absmax",),
                "table": ("{name}.quant_map",),
            }
        ),
        methods=frozenset({"bitsandbytes"}),
        axes="out_in",
        plan=_plan_four_bits,
        dequantise=_read_four_bits,
        may=MappingProxyType(
            {"nested_absmax": ("{name}.nested_absmax",), "nested_table": ("{name}.nested_quant_map",)}
        ),
        tells=("state", "absmax", "table"),
    ),
)
"""Both are of bitsandbytes: which one is told by what lies beside the codes; where nothing does, by their dtype."""
