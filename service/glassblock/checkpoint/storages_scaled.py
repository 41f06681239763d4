"""Stored forms whose codes are numbers of 8 or 4 bits that only want scaling: FP8, int8, MXFP4, NVFP4."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.quantisation import as_pair
from glassblock.checkpoint.storage import Layout, Sought, Storage
from glassblock.numerics.dequantise import dequantise_blocks, powers_of_two
from glassblock.numerics.dequantise_codebook import dequantise_float4

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
EXPONENTS = ("F8_E8M0", "U8")
SCALES = ("F32", "BF16", "F16")

MODELOPT = frozenset({"modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"})
"""What NVIDIA's Model Optimizer and its loaders call its files; the form of a weight is told by its parts."""

_INPUT_FACTORS = ("{stem}.pre_quant_scale",)

BLOCK_SIZE = (128, 128)
"""Rows and columns that share a scale where no config says so: the default of the format's own configuration."""

_MXFP8_BLOCK = (1, 32)


def _plan_fp8_blocks(sought: Sought) -> Layout:
    *_, rows, columns = shape = sought.axes("codes", 2, 3)
    dtype = sought.dtype_of("scale", *SCALES, *EXPONENTS)
    if sought.parts["scale"].elements == 1 and len(shape) == 2:
        return _scaled(sought, shape, sought.parts["scale"], (rows, columns), "one scale")
    grid = sought.axes("scale", len(shape))[-2:]
    declared = sought.declared.pair("weight_block_size") if sought.declared is not None else None
    block, source = (BLOCK_SIZE, "no config says otherwise") if declared is None else (declared, "weight_block_size")
    if dtype in EXPONENTS and grid == _grid(shape, _MXFP8_BLOCK):
        # Experts in MX blocks may lie beside dense layers in the blocks that the config declares.
        block = _MXFP8_BLOCK
    expected = (*shape[:-2], *_grid(shape, block))
    sought.expect("scale", expected, why=f"one for each block of {list(block)}; {source}")
    return _scaled(sought, shape, sought.parts["scale"], block, f"one scale for each block of {list(block)}")


def _plan_scaled(sought: Sought) -> Layout:
    *lead, rows, columns = shape = sought.axes("codes", 2, 3)
    _refuse_input_factors(sought)
    scale = sought.parts["scale"]
    if scale.dtype in EXPONENTS and scale.shape == (*lead, *_grid(shape, _MXFP8_BLOCK)):
        return _scaled(sought, shape, scale, _MXFP8_BLOCK, f"one scale for each block of {list(_MXFP8_BLOCK)}")
    sought.dtype_of("scale", *SCALES)
    default = None
    if len(scale.shape) == 4 and not lead and scale.shape[1::2] == (1, 1):
        # As the Model Optimizer writes blocks, of the one size that its loaders know.
        default, scale = BLOCK_SIZE, replace(scale, shape=scale.shape[::2])
        sought = replace(sought, parts=MappingProxyType({**sought.parts, "scale": scale}))
    if scale.elements == 1 and not lead:
        grid, block, detail = (1, 1), (rows, columns), "one scale"
    elif scale.shape in {tuple(lead), (*lead, 1, 1)}:
        grid, block, detail = (*lead, 1, 1), (rows, columns), "one scale for each expert"
    elif scale.shape in {(*lead, rows), (*lead, rows, 1)}:
        grid, block, detail = (*lead, rows, 1), (1, columns), "one scale for each row"
    else:
        block = _declared_block(sought, shape, default)
        grid, detail = (*lead, *_grid(shape, block)), f"one scale for each block of {list(block)}"
        sought.expect("scale", grid, why=detail)
    layout = _scaled(sought, shape, replace(scale, shape=grid), block, detail)
    zero = sought.parts.get("zero")
    if zero is None:
        if _all_asymmetric(sought):
            raise sought.lack("zero", "the config declares weights with a zero point (symmetric is false)")
        return layout
    sought.dtype_of("zero", "I8", *sorted(FLOAT8))
    sought.expect("zero", scale.shape, why="one for each scale", ones=False)
    return replace(
        layout,
        parts=MappingProxyType({**layout.parts, "zero": replace(zero, shape=grid)}),
        row_blocks=MappingProxyType({**layout.row_blocks, "zero": block[0]}),
    )


def _plan_mxfp4(sought: Sought) -> Layout:
    *lead, rows, groups, half = sought.axes("codes", 3, 4)
    sought.dtype_of("scale", *EXPONENTS)
    if half != 16:
        raise sought.misfit("codes", f"has blocks of {half} bytes where 16 are expected (32 numbers of 4 bits)")
    sought.expect("scale", (*lead, rows, groups), why="one for each block of 32")
    return Layout(
        (*lead, rows, 32 * groups),
        MappingProxyType(dict(sought.parts)),
        "FP4, one scale for each 32 columns",
        row_blocks=MappingProxyType({"codes": 1, "scale": 1}),
        bits=4,
        block=(1, 32),
    )


def _plan_packed_fp4(sought: Sought) -> Layout:
    return _plan_fp4(sought, "global_scale")


def _plan_modelopt_fp4(sought: Sought) -> Layout:
    algorithm = None if sought.declared is None else sought.declared.text("quant_algo")
    named = algorithm is not None and "fp4" in algorithm
    if algorithm is not None and not named and algorithm != "mixed_precision":
        raise sought.unknown_setting("quant_algo", algorithm, ("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"))
    _refuse_input_factors(sought)
    scale, rows = sought.parts["scale"], sought.axes("codes", 2)[0]
    # In the same names lie codes of whole numbers, two rows to a byte.
    if not named and (scale.dtype not in {"F8_E4M3", *EXPONENTS} or scale.shape[:1] != (rows,)):
        raise sought.unclear(f"has no scales of FP4 beside it, but {sought.names['scale']}")
    return _plan_fp4(sought, "global_factor")


def _plan_fp4(sought: Sought, over_all: str) -> Layout:
    rows, half = sought.axes("codes", 2)
    dtype = sought.dtype_of("scale", "F8_E4M3", *EXPONENTS)
    size = 16 if dtype == "F8_E4M3" else 32
    sought.expect("scale", (rows, -(-2 * half // size)), why=f"one for each {size} columns")
    parts = {role: sought.parts[role] for role in ("codes", "scale")}
    if size == 16:
        whole = sought.parts.get(over_all)
        if whole is None:
            raise sought.lack(over_all, "scales in FP8 are read relative to it (nvfp4)")
        sought.dtype_of(over_all, *SCALES)
        if whole.elements != 1:
            raise sought.misfit(over_all, f"has the shape {list(whole.shape)} where one number is expected")
        parts[over_all] = replace(whole, shape=(1,))
    return Layout(
        (rows, 2 * half),
        MappingProxyType(parts),
        f"FP4, one scale for each {size} columns",
        row_blocks=MappingProxyType({"codes": 1, "scale": 1}),
        bits=4,
        block=(1, size),
    )


def _refuse_input_factors(sought: Sought) -> None:
    """A weight whose inputs are multiplied channel by channel is more than its codes and scales."""
    if "input_factors" in sought.parts:
        raise sought.unclear(f"is applied to inputs times {sought.names['input_factors']}, which is not read")


def _scaled(sought: Sought, shape: tuple[int, ...], scale: TensorEntry, block: tuple[int, int], detail: str) -> Layout:
    grid = (*shape[:-2], *_grid(shape, block))
    return Layout(
        shape,
        MappingProxyType({"codes": sought.main, "scale": replace(scale, shape=grid)}),
        f"{sought.main.dtype}, {detail}",
        row_blocks=MappingProxyType({"codes": 1, "scale": block[0]}),
        block=block,
    )


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def _declared_block(sought: Sought, shape: tuple[int, ...], default: tuple[int, int] | None) -> tuple[int, int]:
    """The block that the config declares and whose grid the scale has, or groups that divide the columns."""
    found = sought.axes("scale", len(shape))
    schemes = () if sought.declared is None else sought.declared.weight_schemes()
    blocks = [block for scheme in schemes if (block := _block_structure(scheme.get("block_structure"))) is not None]
    sizes = [size for scheme in schemes if type(size := scheme.get("group_size")) is int and size > 0]
    blocks.extend((1, size) for size in sizes)
    if sought.declared is not None and (block := sought.declared.pair("weight_block_size")) is not None:
        blocks.append(block)
    if not blocks and default is not None:
        blocks.append(default)
    for block in blocks:
        if found == (*shape[:-2], *_grid(shape, block)):
            return block
    rows, groups = found[-2:]
    if not blocks and rows == shape[-2] and groups and shape[-1] % groups == 0:
        return (1, shape[-1] // groups)
    told = (
        f"the config declares blocks of {' or '.join(str(list(block)) for block in blocks)}"
        if blocks
        else ("no config says how many rows and columns share a scale")
    )
    raise sought.misfit("scale", f"has the shape {list(found)}, which fits no weight of {list(shape)}: {told}")


def _block_structure(value: object) -> tuple[int, int] | None:
    """`[128, 128]`, or `128x128` in older files."""
    if isinstance(value, str):
        rows, _, columns = value.partition("x")
        if rows.isdecimal() and columns.isdecimal() and len(value) < 40:
            return as_pair([int(rows), int(columns)])
    return as_pair(value)


def _all_asymmetric(sought: Sought) -> bool:
    schemes = () if sought.declared is None else sought.declared.weight_schemes()
    return bool(schemes) and all(scheme.get("symmetric") is False for scheme in schemes)


def _read_scaled(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    scale = parts["scale"]
    numbers = powers_of_two(scale) if scale.dtype in {torch.uint8, torch.float8_e8m0fnu} else scale
    return dequantise_blocks(parts["codes"], numbers, layout.block, zero=parts.get("zero", 0))


def _read_mxfp4(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    return dequantise_float4(parts["codes"].flatten(-2), powers_of_two(parts["scale"]), layout.block[1])


def _read_packed_fp4(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    scale = parts["scale"]
    numbers = powers_of_two(scale) if layout.block[1] == 32 else scale.to(torch.float32)
    if "global_factor" in parts:
        numbers = numbers * parts["global_factor"].to(torch.float32)
    if "global_scale" in parts:
        numbers = numbers / parts["global_scale"].to(torch.float32)
    return dequantise_float4(parts["codes"], numbers, layout.block[1])


SCALED_STORAGES = (
    Storage(
        name="block-scaled FP8",
        codes=("{name}",),
        dtypes=FLOAT8,
        needs=MappingProxyType({"scale": ("{name}_scale_inv",)}),
        methods=frozenset({"fp8", "mxfp8"}),
        axes="plain",
        plan=_plan_fp8_blocks,
        dequantise=_read_scaled,
        tells=("scale",),
    ),
    Storage(
        name="scaled",
        codes=("{name}",),
        dtypes=FLOAT8 | {"I8"},
        needs=MappingProxyType({"scale": ("{name}_scale",)}),
        methods=frozenset({"compressed-tensors", "fbgemm_fp8", "fp8"}) | MODELOPT,
        axes="plain",
        plan=_plan_scaled,
        dequantise=_read_scaled,
        may=MappingProxyType({"zero": ("{name}_zero_point",), "input_factors": _INPUT_FACTORS}),
        tells=("scale",),
    ),
    Storage(
        name="MXFP4",
        codes=("{stem}_blocks", "{name}.blocks"),
        dtypes=frozenset({"U8"}),
        needs=MappingProxyType({"scale": ("{stem}_scales", "{name}.scales")}),
        methods=frozenset({"mxfp4"}),
        axes="out_in",
        plan=_plan_mxfp4,
        dequantise=_read_mxfp4,
    ),
    Storage(
        name="packed FP4",
        codes=("{name}_packed",),
        dtypes=frozenset({"U8"}),
        needs=MappingProxyType({"scale": ("{name}_scale",)}),
        methods=frozenset({"compressed-tensors"}),
        axes="out_in",
        plan=_plan_packed_fp4,
        dequantise=_read_packed_fp4,
        may=MappingProxyType({"global_scale": ("{name}_global_scale",)}),
    ),
    Storage(
        name="FP4 of the Model Optimizer",
        codes=("{name}",),
        dtypes=frozenset({"U8"}),
        needs=MappingProxyType({"scale": ("{name}_scale",)}),
        methods=MODELOPT,
        axes="out_in",
        plan=_plan_modelopt_fp4,
        dequantise=_read_packed_fp4,
        may=MappingProxyType({"global_factor": ("{name}_scale_2",), "input_factors": _INPUT_FACTORS}),
        tells=("global_factor",),
    ),
)
"""Which of them a weight lies in is told by the names of its scales."""
