"""Gate and up put where they belong: exchanged by name, or the rows of one fused tensor in another order.

What belongs to a weight moves with it: its bias, its scales and its zero points.
"""

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import cast

from glassblock.audit.fix import Unrepaired
from glassblock.checkpoint.changes import Reorder, Within
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.layer_map import resolve_layer
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.patches import Alter, Patch, Rename
from glassblock.numerics.fused_layouts import RowLayout
from glassblock.wire.audits import Finding


def swap_of(checkpoint: Checkpoint, one: str, other: str) -> Rename:
    """Two modules exchanged: the tensors named, and their biases, scales and zero points, wherever they lie."""
    return Rename(MappingProxyType(_moved(checkpoint, one, other) | _moved(checkpoint, other, one)))


def _moved(checkpoint: Checkpoint, weight: str, home: str) -> dict[str, str]:
    """The names of a weight and of what belongs to it, each with its name under another module."""
    mine, its = _module(weight), _module(home)
    return {name: its + name[len(mine) :] for name in checkpoint.entries if _belongs(name, weight)}


def _module(name: str) -> str:
    """The module that a weight belongs to; the name itself where it is no module's `weight`."""
    module, _, last = name.rpartition(".")
    return module if module and "weight" in last else name


def _belongs(name: str, weight: str) -> bool:
    """Whether a tensor is the weight or belongs to it: in its module, or of a weight that is no module's, beside it."""
    module = _module(weight)
    return name == weight or name.startswith(f"{module}." if module != weight else (f"{module}.", f"{module}_"))


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
            names |= _moved(checkpoint, entry.name, networks[str(home)].weights[part].name)
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


_WITHOUT_ROWS = frozenset(
    {"weight_shape", "g_idx", "weight_g_idx", "input_scale", "input_global_scale", "input_zero_point", "_extra_state"}
)
"""What lies in the module of a weight and holds nothing of its rows."""


def _reordered(
    checkpoint: Checkpoint, finding: Finding, order: Callable[[int, RowLayout], tuple[Reorder, ...]]
) -> Patch | Unrepaired:
    """The rows of fused weights in another order, those of their biases and scales with them."""
    if finding.layer is None or not finding.tensors:
        return Unrepaired("the finding names no layer", "the layer and its fused tensor")
    tensors = resolve_layer(checkpoint, finding.layer)[0]
    norms = {entry.name for norm in tensors.norms.values() for entry in norm.entries}
    edits: dict[str, Alter] = {}
    for network in tensors.networks:
        entry, layout = network.weights.get("fused"), network.fused_layout
        weight = None if entry is None else checkpoint.entries.get(entry.name)
        if entry is None or layout is None or weight is None or entry.name not in finding.tensors:
            continue
        transposed, rows = network.row.layouts[0] == "in_out", network.fused_rows
        if weight.name in edits or finding.expert not in {None, network.expert}:
            continue
        if len(weight.shape) < 2 or weight.shape[-1 if transposed else -2] != rows:
            continue  # codes that are packed otherwise than row by row
        stacked = len(weight.shape) == len(entry.shape) + 1
        alone = (finding.expert,) if stacked and finding.expert is not None else ()
        for part in _with_rows(checkpoint, weight.name, norms):
            axis = _row_axis(part, weight, rows, transposed=transposed)
            if axis is None:
                continue
            turned = _in_blocks(order(rows, layout), axis, rows // part.shape[axis])
            if turned is None:
                reason = f"a number of {part.name} stands for rows of gate and of up"
                return Unrepaired(reason, "the weights before they were quantised")
            edits[part.name] = Alter(part.name, tuple(Within(alone, one) if alone else one for one in turned))
    left = [name for name in finding.tensors if name not in edits]
    if left:
        return Unrepaired(f"the rows of {left[0]} cannot be told apart", "the weights before they were quantised")
    return tuple(edits.values())


def _with_rows(checkpoint: Checkpoint, weight: str, norms: Container[str]) -> Iterator[TensorEntry]:
    """A weight, and its biases, scales and zero points: of its module all but what is known to be something else."""
    for name, entry in checkpoint.entries.items():
        if _belongs(name, weight) and name not in norms and name.rpartition(".")[2] not in _WITHOUT_ROWS:
            yield entry


def _row_axis(entry: TensorEntry, weight: TensorEntry, rows: int, *, transposed: bool) -> int | None:
    """The axis on which what belongs to a weight has that one's rows; None where it has none."""
    own, experts = entry.name == weight.name, len(weight.shape) - 2  # axes in front, which no order of rows touches
    for axis in (-1,) if transposed else (-2, -1):
        length = entry.shape[axis] if len(entry.shape) + axis >= experts else 0
        # A scale may stand for a block of rows.
        if length == rows or (not own and length > 1 and rows % length == 0 and length % 2 == 0):
            return axis
    return None


def _in_blocks(order: Sequence[Reorder], axis: int, block: int) -> tuple[Reorder, ...] | None:
    """An order of rows, for numbers of which each stands for `block` rows; None where these do not stay together."""
    if any(one.sizes[-1] % block for one in order):
        return None
    return tuple(replace(one, axis=axis, sizes=(*one.sizes[:-1], one.sizes[-1] // block)) for one in order)
