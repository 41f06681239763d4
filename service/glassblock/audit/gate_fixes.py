"""Gate and up put where they belong: exchanged by name, or the rows of one fused tensor in another order.

What belongs to a weight moves with it: its bias, its scales and its zero points.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import cast

from glassblock.audit.fix import Unrepaired
from glassblock.checkpoint.changes import Reorder, Within
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layer_map import resolve_layer
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.patches import Alter, Edit, Patch, Rename
from glassblock.numerics.fused_layouts import RowLayout
from glassblock.wire.audits import Finding


def swap_of(checkpoint: Checkpoint, one: str, other: str) -> Rename:
    """Two modules exchanged: the tensors named, and their biases, scales and zero points, wherever they lie."""
    first, second = _module(one), _module(other)
    names: dict[str, str] = {}
    for name in checkpoint.entries:
        for mine, its in ((first, second), (second, first)):
            if _belongs(name, mine):
                names[name] = its + name[len(mine) :]
    return Rename(MappingProxyType(names))


def _module(name: str) -> str:
    """The module that a weight belongs to; the name itself where it is no module's `weight`."""
    module, _, last = name.rpartition(".")
    return module if module and "weight" in last else name


def _belongs(name: str, module: str) -> bool:
    return name == module or name.startswith((f"{module}.", f"{module}_"))


def swap_tensors(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Gate and up by name; of several experts, one pair after the other."""
    pairs = list(zip(finding.tensors[::2], finding.tensors[1::2], strict=False))
    if not pairs or len(finding.tensors) % 2:
        return Unrepaired("the finding does not name pairs of tensors", "the names of gate and up")
    names: dict[str, str] = {}
    for one, other in pairs:
        names |= swap_of(checkpoint, one, other).names
    return (Rename(MappingProxyType(names)),)


def renumber_experts(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Each expert under the number that it has in the reference, by name; the router stays."""
    homes = finding.evidence.get("homes")
    if not isinstance(homes, dict) or finding.layer is None:
        reason = "experts in one stacked tensor, or of which one is there twice and another is not, are not moved yet"
        return Unrepaired(reason, "the layer converted again from the reference, each expert under its own number")
    networks = {str(network.expert): network for network in resolve_layer(checkpoint, finding.layer)[0].networks}
    names: dict[str, str] = {}
    for expert, home in cast("dict[str, int]", homes).items():
        for part, entry in networks[expert].weights.items():
            mine, its = _module(entry.name), _module(networks[str(home)].weights[part].name)
            names |= {name: its + name[len(mine) :] for name in checkpoint.entries if _belongs(name, mine)}
    return (Rename(MappingProxyType(names)),)


def swap_halves(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Gate and up by their rows, in one fused tensor."""
    return _reordered(checkpoint, finding, lambda rows, declared: (exchanged_rows(rows, declared),))


def reorder_rows(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Rows from the layout that was recovered to the one that the family declares."""
    groups, gate_first = finding.evidence.get("groups"), finding.evidence.get("gate_first")
    if not isinstance(groups, int) or groups < 1 or not isinstance(gate_first, bool):
        needs = "captured gate and up of one layer, or weights in which one layout alone is shown"
        return Unrepaired("the layout that is stored was not recovered", needs)
    stored = RowLayout(groups, gate_first)
    return _reordered(checkpoint, finding, lambda rows, declared: relaid_rows(rows, stored, declared))


def exchanged_rows(rows: int, layout: RowLayout) -> Reorder:
    """Gate where up is and the other way round, in every group of a fused tensor of so many rows."""
    return Reorder(-2, (layout.groups, 2, rows // 2 // layout.groups), flip=1)


def relaid_rows(rows: int, stored: RowLayout, wanted: RowLayout) -> tuple[Reorder, ...]:
    """From one layout to another: first to gate over up, then to what is wanted."""
    turn = None if stored.gate_first else 1
    to_halves = Reorder(-2, (stored.groups, 2, rows // 2 // stored.groups), onto=(1, 0, 2), flip=turn)
    if wanted == RowLayout(1):
        return (to_halves,)
    turn = None if wanted.gate_first else 0
    return to_halves, Reorder(-2, (2, wanted.groups, rows // 2 // wanted.groups), onto=(1, 0, 2), flip=turn)


def _reordered(
    checkpoint: Checkpoint, finding: Finding, order: Callable[[int, RowLayout], tuple[Reorder, ...]]
) -> Patch | Unrepaired:
    """The rows of fused weights in another order, those of their biases and scales with them."""
    if finding.layer is None or not finding.tensors:
        return Unrepaired("the finding names no layer", "the layer and its fused tensor")
    edits: list[Edit] = []
    for network in resolve_layer(checkpoint, finding.layer)[0].networks:
        entry, layout = network.weights.get("fused"), network.fused_layout
        weight = None if entry is None else checkpoint.entries.get(entry.name)
        if entry is None or layout is None or weight is None or entry.name not in finding.tensors:
            continue
        if finding.expert in {None, network.expert} and all(edit.tensor != weight.name for edit in _alters(edits)):
            transposed = network.row.layouts[0] == "in_out"
            wanted = order(network.fused_rows, layout)
            stack = isinstance(finding.expert, int) and len(weight.shape) == len(entry.shape) + 1
            edits.extend(_with_companions(checkpoint, weight, wanted, finding.expert if stack else None, transposed))
    laid = {edit.tensor for edit in _alters(edits)}
    left = [name for name in finding.tensors if name not in laid]
    if left:
        return Unrepaired(f"the rows of {left[0]} cannot be told apart", "the weights before they were quantised")
    return tuple(edits)


def _alters(edits: Iterable[Edit]) -> Iterator[Alter]:
    return (edit for edit in edits if isinstance(edit, Alter))


def _with_companions(
    checkpoint: Checkpoint,
    weight: TensorEntry,
    wanted: Sequence[Reorder],
    expert: int | None,
    transposed: bool,  # noqa: FBT001
) -> Iterator[Edit]:
    """A fused weight and what belongs to its rows in the wanted order; of a stack one expert alone where it is told."""
    rows = weight.shape[-1 if transposed else -2]
    for entry in _companions(checkpoint, weight.name):
        axis = _row_axis(entry, weight, transposed=transposed)
        if axis is None:
            continue
        length = entry.shape[axis]
        turned = [Reorder(axis, _scaled(one.sizes, length, rows), one.onto, one.flip) for one in wanted]
        changes = tuple(one if expert is None else Within((expert,), one) for one in turned)
        yield Alter(entry.name, changes)


def _companions(checkpoint: Checkpoint, weight: str) -> Iterator[TensorEntry]:
    """The weight itself, and its module's biases, scales and zero points."""
    module = _module(weight)
    return (entry for name, entry in checkpoint.entries.items() if _belongs(name, module))


def _row_axis(entry: TensorEntry, weight: TensorEntry, *, transposed: bool) -> int | None:
    """The axis on which what belongs to a weight has that one's rows; None where it has none."""
    rows, own = weight.shape[-1 if transposed else -2], entry.name == weight.name
    experts = len(weight.shape) - 2  # axes in front, which no order of rows touches
    for axis in (-1,) if transposed else (-2, -1):
        length = entry.shape[axis] if len(entry.shape) + axis >= experts else 0
        # A scale may stand for a block of rows.
        if length == rows or (not own and length > 1 and rows % length == 0 and length % 2 == 0):
            return axis
    return None


def _scaled(sizes: tuple[int, ...], length: int, rows: int) -> tuple[int, ...]:
    """The sizes of an axis that stands for `rows`, where it has only `length`: the longest of them shrinks."""
    longest = max(range(len(sizes)), key=sizes.__getitem__)
    return tuple(size * length // rows if place == longest else size for place, size in enumerate(sizes))
