"""Stored forms whose codes are packed into words: GPTQ, AWQ, compressed-tensors, MLX."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from glassblock.checkpoint.quantisation import as_object
from glassblock.checkpoint.reading import ReadMeter, read_tensor
from glassblock.checkpoint.storage import Layout, Sought, Storage
from glassblock.errors import DamagedCheckpoint
from glassblock.numerics.dequantise import dequantise_blocks, dequantise_columns, dequantise_offset
from glassblock.numerics.dequantise_packed import dequantise_awq, dequantise_gptq, unpack_bits

SCALES = ("F32", "BF16", "F16")
INDICES = ("I32", "I64")

GPTQ_BITS = (2, 3, 4, 8)
PACKED_BITS = (2, 4, 8)
MLX_BITS = (2, 3, 4, 5, 6, 8)

ZERO_OFFSETS = MappingProxyType({"gptq": 1, "gptq_v2": 0})
"""What is added to a stored zero point, by the `checkpoint_format` of GPTQ."""


def _plan_gptq(sought: Sought) -> Layout:
    words, rows = sought.axes("codes", 2)
    groups, width = sought.axes("scale", 2)
    sought.dtype_of("scale", *SCALES)
    sought.dtype_of("zero", "I32")
    undeclared = sought.declared is None or sought.declared.method is None
    if undeclared and rows != width and rows * 8 == width:
        return _plan_awq(sought)  # the same names, packed along the other axis
    sought.expect("scale", (groups, rows), why="one column for each row of the weight")
    zeros = sought.axes("zero", 2)
    if zeros[0] != groups:
        beside = f"{sought.names['zero']} has the shape {list(zeros)}"
        raise sought.misfit("scale", f"has the shape {[groups, width]}, but {beside}: both have a row for each group")
    order = sought.parts.get("order")
    columns = None if order is None else sought.axes("order", 1)[0]
    if order is not None:
        sought.dtype_of("order", *INDICES)
    fitting = [
        bits
        for bits in GPTQ_BITS
        if zeros == (groups, _words(rows, bits))
        and words == _words(columns if columns is not None else words * 32 // bits, bits)
    ]
    declared = None if sought.declared is None else sought.declared.whole("bits")
    # GPTQModel may give each module bits of its own (`dynamic`): then the tensors say which.
    if declared is not None and declared not in fitting and not _dynamic(sought):
        shapes = f"{sought.main.shape} codes, {zeros} zero points and {(groups, width)} scales"
        raise sought.misfit("codes", f"does not hold {declared} bits a weight, as the config declares: {shapes}")
    if declared in fitting:
        fitting = [bits for bits in fitting if bits == declared]
    if len(fitting) != 1:
        told = f"{sought.main.shape} codes and {zeros} zero points for {(groups, width)} scales"
        raise sought.unclear(f"shows no number of bits: {told}")
    (bits,) = fitting
    columns = words * 32 // bits if columns is None else columns
    size = _group_size(sought, columns, groups) if order is None else max(1, -(-columns // groups))
    version = None if sought.declared is None else sought.declared.text("checkpoint_format", "format")
    if version is not None and version not in ZERO_OFFSETS:
        raise sought.unknown_setting("checkpoint_format", version, tuple(ZERO_OFFSETS))
    told = f"zero points of {version}" if version is not None else "zero points of gptq (no config says otherwise)"
    return Layout(
        (rows, columns),
        MappingProxyType(dict(sought.parts)),
        f"GPTQ, {bits} bits in groups of {size}, {told}",
        bits=bits,
        block=(1, size),
        zero_offset=ZERO_OFFSETS[version or "gptq"],
    )


def _plan_awq(sought: Sought) -> Layout:
    columns, words = sought.axes("codes", 2)
    groups, rows = sought.axes("scale", 2)
    sought.dtype_of("scale", *SCALES)
    sought.dtype_of("zero", "I32")
    if sought.declared is not None:
        version = sought.declared.text("version", "format")
        if version not in {None, "gemm"}:
            raise sought.unknown_setting("version", version, ("gemm",))
        bits = sought.declared.whole("bits", "w_bit")
        if bits not in {None, 4}:
            raise sought.unknown_setting("bits", bits, ("4",))
    if rows != 8 * words:
        raise sought.misfit(
            "codes", f"has {words} words a row where {rows / 8:g} hold the {rows} rows that the scales have"
        )
    sought.expect("zero", (groups, words), why="packed as the codes are, one row for each group")
    size = _group_size(sought, columns, groups)
    return Layout(
        (rows, columns),
        MappingProxyType({role: sought.parts[role] for role in ("codes", "zero", "scale")}),
        f"AWQ, 4 bits in groups of {size}",
        bits=4,
        block=(1, size),
        quant_type="awq",
    )


def _plan_compressed(sought: Sought) -> Layout:
    rows, words = sought.axes("codes", 2)
    sought.dtype_of("scale", *SCALES)
    shape = _told_shape(sought)
    if shape[0] != rows:
        raise sought.misfit("shape", f"tells {list(shape)}, but {sought.main.name} has {rows} rows")
    columns = shape[1]
    schemes = () if sought.declared is None else sought.declared.weight_schemes()
    declared = [bits for scheme in schemes if type(bits := scheme.get("num_bits")) is int]
    known = [bits for bits in declared or PACKED_BITS if bits in PACKED_BITS]
    if not known:
        raise sought.unknown_setting("config_groups", declared, tuple(f"num_bits {bits}" for bits in PACKED_BITS))
    fitting = sorted({bits for bits in known if words == _words(columns, bits)})
    if len(fitting) != 1:
        told = f"holds {words} words a row; {columns} columns of {' or '.join(map(str, sorted(set(known))))} bits take"
        raise sought.misfit("codes", f"{told} {' or '.join(str(_words(columns, bits)) for bits in sorted(set(known)))}")
    (bits,) = fitting
    scale = sought.parts["scale"]
    if scale.elements == 1:
        grid, block, told = (1, 1), (rows, columns), "one scale"
    elif scale.shape in {(rows,), (rows, 1)}:
        grid, block, told = (rows, 1), (1, columns), "one scale for each row"
    else:
        groups = sought.axes("scale", 2)[1]
        sought.expect("scale", (rows, groups), why="one row for each row of the weight")
        size = _group_size(sought, columns, groups, schemes)
        grid, block, told = (rows, groups), (1, size), f"in groups of {size}"
    parts = {"codes": sought.main, "scale": replace(scale, shape=grid), "shape": sought.parts["shape"]}
    row_blocks = {"codes": 1, "scale": block[0]}
    zero = sought.parts.get("zero")
    if zero is None and schemes and all(scheme.get("symmetric") is False for scheme in schemes):
        raise sought.lack("zero", "the config declares weights with a zero point (symmetric is false)")
    if zero is not None:
        packed = sought.dtype_of("zero", "I32", "I8") == "I32"
        expected = (_words(grid[0], bits), grid[1]) if packed else grid
        sought.expect("zero", expected, why="one zero point for each scale", ones=False)
        parts["zero"] = replace(zero, shape=expected)
        row_blocks["zero"] = 32 // bits * block[0] if packed else block[0]
    if "order" in sought.parts:
        sought.dtype_of("order", *INDICES)
        sought.expect("order", (columns,), why="one group for each column")
        parts["order"] = sought.parts["order"]
    return Layout(
        shape,
        MappingProxyType(parts),
        f"compressed-tensors, {bits} bits, {told}",
        row_blocks=MappingProxyType(row_blocks),
        bits=bits,
        block=block,
    )


def _plan_mlx(sought: Sought) -> Layout:
    *lead, rows, words = sought.axes("codes", 2, 3)
    *_, groups = grid = sought.axes("scale", len(lead) + 2)
    sought.dtype_of("scale", *SCALES)
    sought.dtype_of("offset", *SCALES)
    sought.expect("scale", (*lead, rows, groups), why="one row for each row of the weight")
    sought.expect("offset", grid, why="one for each scale")
    declared: Mapping[str, object] = {} if sought.declared is None else sought.declared.values
    module = sought.name.removesuffix(".weight")
    own = as_object(declared.get(module)) or declared
    mode = own.get("mode", "affine")
    if mode != "affine":
        raise sought.unknown_setting("mode", mode, ("affine",))
    bits, size = own.get("bits"), own.get("group_size")
    if type(bits) is not int or type(size) is not int or bits not in MLX_BITS or size < 1:
        known = (f"bits {', '.join(map(str, MLX_BITS))} with a group_size",)
        raise sought.unknown_setting("bits", bits, known)
    if words * 32 != bits * size * groups:
        told = f"{words} words a row and {groups} groups of {size}, which do not hold {bits} bits a weight"
        raise sought.misfit("codes", f"has {told}")
    return Layout(
        (*lead, rows, size * groups),
        MappingProxyType(dict(sought.parts)),
        f"MLX affine, {bits} bits in groups of {size}",
        row_blocks=MappingProxyType({"codes": 1, "scale": 1, "offset": 1}),
        bits=bits,
        block=(1, size),
    )


def _words(count: int, bits: int) -> int:
    return -(-count * bits // 32)


def _dynamic(sought: Sought) -> bool:
    return sought.declared is not None and bool(sought.declared.values.get("dynamic"))


def _group_size(sought: Sought, columns: int, groups: int, schemes: tuple[Mapping[str, object], ...] = ()) -> int:
    """Columns that share a scale: as declared, or as they divide evenly where nothing is declared."""
    declared = [value for scheme in schemes if type(value := scheme.get("group_size")) is int]
    if sought.declared is not None and (size := sought.declared.whole("group_size", "q_group_size")) is not None:
        declared.append(size)
    sizes = [columns if size == -1 else size for size in declared if size == -1 or size > 0]
    for size in sizes:
        if groups == -(-columns // size):
            return size
    if groups and columns % groups == 0 and (not sizes or _dynamic(sought)):
        return columns // groups
    told = f"groups of {' or '.join(map(str, sizes))}, as the config declares" if sizes else "equal groups"
    raise sought.misfit("scale", f"has {groups} groups for {columns} columns, which are no {told}")


def _told_shape(sought: Sought) -> tuple[int, int]:
    """The shape that the tensor `weight_shape` holds; it is read, being two numbers."""
    sought.dtype_of("shape", *INDICES)
    if sought.parts["shape"].shape != (2,):
        sought.expect("shape", (2,), why="the weight's rows and columns")
    rows, columns = (int(number) for number in read_tensor(sought.parts["shape"], "cpu", ReadMeter()))
    if rows < 1 or columns < 1:
        raise sought.misfit("shape", f"tells {[rows, columns]}, which is no shape")
    return rows, columns


def _read_gptq(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    if layout.quant_type == "awq":
        return dequantise_awq(parts["codes"], parts["zero"], parts["scale"], group_size=layout.block[1])
    order = _order(parts, layout, groups=parts["scale"].shape[0])
    return dequantise_gptq(
        parts["codes"],
        parts["zero"],
        parts["scale"],
        bits=layout.bits,
        width=layout.shape[1],
        zero_offset=layout.zero_offset,
        group_size=layout.block[1],
        column_groups=order,
    )


def _read_compressed(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    rows, columns = layout.shape
    middle = 1 << (layout.bits - 1)
    codes, scale = unpack_bits(parts["codes"], layout.bits, columns), parts["scale"]
    zero = parts.get("zero")
    if zero is None:
        zero = torch.full_like(scale, middle, dtype=torch.float32)
    elif zero.dtype == torch.int32:
        zero = unpack_bits(zero.T, layout.bits, scale.shape[0]).T
    else:
        zero = zero.to(torch.int16) + middle
    order = _order(parts, layout, groups=scale.shape[1], unset=-1)
    if order is None:
        return dequantise_blocks(codes, scale, layout.block, zero=zero)
    spread = (rows, scale.shape[1])
    return dequantise_columns(codes, scale.expand(spread), zero.expand(spread), order)


def _read_mlx(parts: Mapping[str, Tensor], layout: Layout) -> Tensor:
    codes = unpack_bits(parts["codes"].view(torch.int32), layout.bits, layout.shape[-1])
    return dequantise_offset(codes, parts["scale"], parts["offset"], layout.block[1])


def _order(parts: Mapping[str, Tensor], layout: Layout, *, groups: int, unset: int | None = None) -> Tensor | None:
    """The group of each column; None where the columns lie in the order of their groups, or all are `unset`."""
    order = parts.get("order")
    if order is None:
        return None
    low, high = int(order.min()), int(order.max())
    in_sequence = torch.arange(order.numel(), device=order.device) // layout.block[1]
    if low == high == unset or torch.equal(order.to(torch.int64), in_sequence):
        return None
    if low < 0 or high >= groups:
        entry = layout.parts["order"]
        raise DamagedCheckpoint(
            f"{entry.name} names the groups {low} to {high}, but there are {groups}, counted from 0",
            tensor=entry.name,
            file=entry.file.name,
            hint="Quantise the model again.",
        )
    return order


_PACKED_PARTS = MappingProxyType({"zero": ("{stem}.qzeros",), "scale": ("{stem}.scales",)})

PACKED_STORAGES = (
    Storage(
        name="GPTQ",
        codes=("{stem}.qweight",),
        dtypes=frozenset({"I32"}),
        needs=_PACKED_PARTS,
        methods=frozenset({"gptq"}),
        axes="out_in",
        plan=_plan_gptq,
        dequantise=_read_gptq,
        may=MappingProxyType({"order": ("{stem}.g_idx",)}),
    ),
    Storage(
        name="AWQ",
        codes=("{stem}.qweight",),
        dtypes=frozenset({"I32"}),
        needs=_PACKED_PARTS,
        methods=frozenset({"awq"}),
        axes="out_in",
        plan=_plan_awq,
        dequantise=_read_gptq,
    ),
    Storage(
        name="compressed-tensors",
        codes=("{name}_packed",),
        dtypes=frozenset({"I32"}),
        needs=MappingProxyType({"scale": ("{name}_scale",), "shape": ("{name}_shape",)}),
        methods=frozenset({"compressed-tensors"}),
        axes="out_in",
        plan=_plan_compressed,
        dequantise=_read_compressed,
        may=MappingProxyType({"zero": ("{name}_zero_point",), "order": ("{name}_g_idx",)}),
    ),
    Storage(
        name="MLX",
        codes=("{name}",),
        dtypes=frozenset({"U32"}),
        needs=MappingProxyType({"scale": ("{stem}.scales",), "offset": ("{stem}.biases",)}),
        methods=frozenset({"mlx"}),
        axes="out_in",
        plan=_plan_mlx,
        dequantise=_read_mlx,
    ),
)
