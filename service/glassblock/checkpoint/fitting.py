"""Whether a tensor has the shape that the config and the family give it, and, where not, in which way."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

from glassblock.checkpoint.entries import FLOAT_CODES, TensorEntry
from glassblock.checkpoint.family import Architecture, Size
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.row_fields import field_naming, is_given
from glassblock.checkpoint.settings import Sourced, size_of
from glassblock.checkpoint.storage import StorageFault
from glassblock.checkpoint.stored_entries import StoredEntry, weight_entry

LayerFaultKind = Literal[
    "shape",
    "missing-tensor",
    "missing-bias",
    "missing-norm",
    "final-missing",
    "empty",
    "experts-missing",
    "scale-missing",
    "quantised",
]

_RULES: Mapping[LayerFaultKind, str | None] = MappingProxyType(
    {
        "shape": "config/shape",
        "missing-tensor": "ffn/missing-tensor",
        "missing-bias": "ffn/missing-bias",
        "missing-norm": "norm/role",
        "final-missing": "norm/final-missing",
        "empty": "tensor/empty",
        "experts-missing": "moe/experts-missing",
        "scale-missing": "quant/scale-missing",
        "quantised": None,
    }
)
_TELLING_RATIOS = (
    (2, 1, "twice what"),
    (3, 1, "three times what"),
    (1, 2, "half of what"),
    (1, 3, "a third of what"),
    (3, 2, "1.5 times what"),
    (2, 3, "two thirds of what"),
)


@dataclass(frozen=True, slots=True)
class LayerFault:
    """One tensor that does not fit, or is not there.

    Attributes:
        kind: Which.
        layer: Its layer; None for what belongs to none.
        tensor: Its full name.
        file: The file it lies in, or, when it is missing, the checkpoint's path.
        message: What is wrong, with shapes and config keys.
        hint: What to do.
    """

    kind: LayerFaultKind
    layer: int | None
    tensor: str
    file: Path
    message: str
    hint: str

    @property
    def rule(self) -> str | None:
        """The name of the audit rule it falls under; None where it is nothing wrong but something not read yet."""
        return _RULES[self.kind]


class Axis(NamedTuple):
    """The length of an axis: the product of sizes, times a number, and the lengths of what follows on it.

    Sizes None: any length.
    """

    sizes: tuple[Size, ...] | None
    times: int = 1
    then: tuple["Axis", ...] = ()

    @property
    def every_size(self) -> tuple[Size, ...]:
        """The sizes in it."""
        return (*(self.sizes or ()), *(size for axis in self.then for size in axis.every_size))


class Wanted(NamedTuple):
    """A tensor that a family has, or (not `declared`) must not have.

    Attributes:
        place: The part of the network, or the role of the norm.
        kind: What it is there.
        name: Its full name.
        axes: Its shape; None for any.
        declared: Whether family and config say that it is there.
        optional: Whether it may be absent all the same.
        layout: How the family keeps a weight.
        denied_by: Where it is not declared: who says that it is not there.
    """

    place: str
    kind: Literal[
        "weight",
        "bias",
        "gain",
        "norm-bias",
        "correction",
        "shared_gate",
        "output_bias",
        "branch-gain",
        "activation",
        "sinks",
        "positions",
    ]
    name: str
    axes: tuple[Axis, ...] | None
    declared: bool = True
    optional: bool = False
    layout: Literal["out_in", "in_out"] = "out_in"
    denied_by: str = ""


class Sizes:
    """Sizes as the config and the family say, or, without a config, as the first tensor shows them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._seen: dict[Size, Sourced[int]] = {}

    def of(self, size: Size) -> Sourced[int] | None:
        """The size, if anybody has told it yet."""
        config = self._checkpoint.config
        if size not in self._seen and config is not None:
            told = size_of(config, row_of(self._checkpoint), size)
            if told is not None:
                self._seen[size] = told
        return self._seen.get(size)

    def learn(self, axes: tuple[Axis, ...], entry: TensorEntry) -> None:
        """Where neither config nor family tells a size, take the one that `entry` shows first."""
        for axis, length in zip(axes, entry.shape, strict=False):
            if (
                axis.sizes is not None
                and not axis.then
                and len(axis.sizes) == 1
                and length % axis.times == 0
                and self.of(axis.sizes[0]) is None
            ):
                self._seen.setdefault(axis.sizes[0], Sourced(length // axis.times, f"tensor {entry.name}"))


def row_of(checkpoint: Checkpoint) -> Architecture:
    """The family of a checkpoint that is known to have one."""
    if checkpoint.family is None:
        raise ValueError("the checkpoint has no family: look at family_fault first")
    return checkpoint.family


def trunk_prefix(checkpoint: Checkpoint) -> str:
    """The prefix of a checkpoint's names, which is known."""
    if checkpoint.trunk is None:
        raise ValueError("the checkpoint has no trunk: look at family_fault first")
    return checkpoint.trunk.prefix


def layer_prefix(checkpoint: Checkpoint, layer: int) -> str:
    """What the names of a layer's tensors begin with."""
    return trunk_prefix(checkpoint) + row_of(checkpoint).layer.format(i=layer)


def look_up(
    checkpoint: Checkpoint, wanted: tuple[Wanted, ...], sizes: Sizes, layer: int | None
) -> tuple[dict[tuple[str, str], TensorEntry], tuple[LayerFault, ...]]:
    """The entries found by place and kind, and what is wrong with them. A bias follows its weight in `wanted`."""
    found: dict[tuple[str, str], TensorEntry] = {}
    faults: list[LayerFault] = []
    absent: set[str] = set()
    for item in wanted:
        entry = entry_for(checkpoint, item)
        fault = fault_of(checkpoint, item, entry, sizes, layer)
        # Where a weight is missing, its bias going with it is no second fault.
        if fault is not None and not (entry is None and item.place in absent):
            faults.append(fault)
        if entry is None:
            absent.add(item.place)
        elif item.declared:
            found[item.place, item.kind] = entry.entry if isinstance(entry, StorageFault) else entry
    return found, tuple(faults)


def entry_for(checkpoint: Checkpoint, item: Wanted) -> TensorEntry | StorageFault | None:
    """The tensor that is `item`, a weight in whatever form it is stored; or why its stored form cannot be read."""
    if item.kind == "weight" and item.declared:
        return weight_entry(checkpoint.entries, checkpoint.config, item.name, item.layout)
    return checkpoint.entries.get(item.name)


def fault_of(
    checkpoint: Checkpoint, item: Wanted, entry: TensorEntry | StorageFault | None, sizes: Sizes, layer: int | None
) -> LayerFault | None:
    """What is wrong with the tensor that was found for `item`, or with there being none."""
    if not item.declared:
        return None
    if entry is None or isinstance(entry, StorageFault):
        return _unread(checkpoint, item, entry, layer)
    fault = _useless(entry, layer)
    if fault is not None or item.axes is None:
        return fault
    sizes.learn(item.axes, entry)
    lengths = [_length(axis, sizes) for axis in item.axes]
    if len(lengths) == len(entry.shape) and all(
        length is None or length == found for length, found in zip(lengths, entry.shape, strict=True)
    ):
        return None
    expected = ", ".join("any" if length is None else str(length) for length in lengths)
    reasons = {
        f"{size} {known.value} ({known.source})"
        for axis in item.axes
        for size in axis.every_size
        if (known := sizes.of(size)) is not None
    }
    message = f"{entry.name} has the shape {list(entry.shape)} where [{expected}] is expected"
    if reasons:
        message += f": {', '.join(sorted(reasons))}"
    hint = _shape_hint(list(entry.shape), [length or 0 for length in lengths])
    return LayerFault("shape", layer, entry.name, entry.file, message, hint)


def _length(axis: Axis, sizes: Sizes) -> int | None:
    if axis.sizes is None:
        return None
    known = [sizes.of(size) for size in axis.sizes]
    own = None if None in known else axis.times * prod(size.value for size in known if size is not None)
    rest = [_length(more, sizes) for more in axis.then]
    return None if own is None or None in rest else own + sum(length for length in rest if length is not None)


def _unread(checkpoint: Checkpoint, item: Wanted, fault: StorageFault | None, layer: int | None) -> LayerFault | None:
    """The fault of a tensor that is absent, or a weight whose stored form cannot be read."""
    if fault is not None:
        kind: LayerFaultKind = "empty" if fault.kind == "empty" else "quantised"
        if fault.kind == "scale-missing":
            kind = "scale-missing"
        elif fault.kind == "misfit":
            kind = "shape" if fault.tensor == fault.entry.name else "scale-missing"
        return LayerFault(kind, layer, fault.tensor, fault.entry.file, fault.message, fault.hint)
    return None if item.optional else _missing(checkpoint, item, layer)


def _useless(entry: TensorEntry, layer: int | None) -> LayerFault | None:
    """The fault of a tensor whose numbers are none, whatever its shape."""
    if entry.dtype not in FLOAT_CODES and not isinstance(entry, StoredEntry):
        message = f"{entry.name} is stored as {entry.dtype}, where one of {', '.join(sorted(FLOAT_CODES))} is expected"
        return LayerFault("quantised", layer, entry.name, entry.file, message, "Dequantise the checkpoint first.")
    if entry.elements == 0:
        message = f"{entry.name} has the shape {list(entry.shape)} and holds nothing"
        hint = "Sharded parameters may have been saved without being gathered (ZeRO-3): save the model again."
        return LayerFault("empty", layer, entry.name, entry.file, message, hint)
    return None


def _missing(checkpoint: Checkpoint, item: Wanted, layer: int | None) -> LayerFault:
    kinds: dict[str, LayerFaultKind] = {
        "weight": "missing-tensor",
        "bias": "missing-bias",
        "gain": "missing-norm",
        "norm-bias": "missing-norm",
    }
    kind = "final-missing" if item.place == "final" else kinds.get(item.kind, "missing-tensor")
    name = row_of(checkpoint).name
    message = f"{item.name} is missing: the family {name} has it"
    return LayerFault(kind, layer, item.name, checkpoint.path, message, _missing_hint(checkpoint, item))


def _missing_hint(checkpoint: Checkpoint, item: Wanted) -> str:
    """What to do about a tensor that is absent: of a row of somebody's own, the row may be what is wrong."""
    again = "Convert or download the checkpoint again."
    row = checkpoint.contents.asked
    if row is None or not is_given(row):
        return again
    field = field_naming(row, item.name)
    where = "" if field is None else f"{field} of "
    return f"Look at {where}the row that was given (family_row, --family-file): it names this tensor. Or else: {again}"


def _shape_hint(found: list[int], expected: list[int]) -> str:
    if len(found) == len(expected) and found == expected[::-1]:
        return "It lies there transposed: transpose it, or look for the family that stores it so."
    off = [pair for pair in zip(found, expected, strict=False) if pair[0] != pair[1]]
    if len(found) == len(expected) and len(off) == 1:
        length, wanted = off[0]
        if not wanted:
            return "Convert the checkpoint again."
        for times, over, words in _TELLING_RATIOS:
            if length * over == wanted * times:
                return f"{length} is {words} the config says: the two may count another thing under that name."
        if 0 < length - wanted < wanted // 4 and length % 8 == 0:
            return f"{length - wanted} more than the config says: if those are zeros, the width was padded."
    return "Correct the config, or convert the checkpoint again."
