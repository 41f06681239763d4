"""From a finding to the patch that repairs it: one table, by the action that the finding's fix names.

A repair never guesses. Where the files alone do not decide what is right, the answer is what would.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from glassblock.checkpoint.attention_map import bias_setting
from glassblock.checkpoint.changes import Add, Reorder, Transpose, Within
from glassblock.checkpoint.config import find
from glassblock.checkpoint.entries import TensorEntry
from glassblock.checkpoint.fitting import layer_prefix
from glassblock.checkpoint.layer_map import resolve_layer, row_at, shape_faults
from glassblock.checkpoint.opened import Checkpoint
from glassblock.checkpoint.outer_tensors import head_entry
from glassblock.checkpoint.patches import Alter, Compact, Declare, Drop, Edit, Patch, Relist, Rename, patched
from glassblock.checkpoint.wrappers import wrapped_names
from glassblock.errors import CheckpointUnusable, GlassblockError
from glassblock.numerics.fused_layouts import RowLayout
from glassblock.wire.audits import Finding

MOST_TRIALS = 200
"""Sizes tried for a config that does not fit the tensors; each takes a look at the headers."""


@dataclass(frozen=True)
class Unrepaired:
    """Why the files alone do not tell how to repair a finding, and what would be needed."""

    reason: str
    needs: str


Repair = Callable[[Checkpoint, Finding], Patch | Unrepaired]


def repair_of(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The patch that repairs a finding, or what is needed for one."""
    if finding.fix is None:
        return Unrepaired("the finding names no repair", "somebody who looks at it")
    repair = FIXES.get(finding.fix.action)
    if repair is None:
        return Unrepaired(f"nothing here carries out {finding.fix.action}", finding.fix.description)
    try:
        patch = repair(checkpoint, finding)
        if not isinstance(patch, Unrepaired):
            patched(checkpoint, patch)
    except GlassblockError as error:
        return Unrepaired(error.message, error.hint or finding.fix.description)
    return patch


def joined(checkpoint: Checkpoint, patches: Iterable[Patch]) -> Patch:
    """One patch out of several.

    Each edit once; experts that have a finding of their own are left out of what is done to their stack as a whole;
    names are exchanged last, since the other edits go by the old ones.
    """
    edits = list[Edit]()
    for edit in (edit for patch in patches for edit in patch):
        if edit not in edits:
            edits.append(edit)
    alone: dict[str, set[int]] = {}
    for edit in edits:
        for change in edit.changes if isinstance(edit, Alter) else ():
            if isinstance(edit, Alter) and isinstance(change, Within):
                alone.setdefault(edit.tensor, set()).update(change.slices)
    apart = [_for_the_others(checkpoint, edit, alone) for edit in edits]
    return tuple(sorted(apart, key=lambda edit: isinstance(edit, Rename) + 2 * isinstance(edit, Relist)))


def _for_the_others(checkpoint: Checkpoint, edit: Edit, alone: Mapping[str, set[int]]) -> Edit:
    """An edit of a whole stack, as one of the slices that have none of their own."""
    if not isinstance(edit, Alter) or edit.tensor not in alone:
        return edit
    others = tuple(
        index for index in range(checkpoint.entries[edit.tensor].shape[0]) if index not in alone[edit.tensor]
    )
    changes = (Within(others, change) if isinstance(change, Reorder) else change for change in edit.changes)
    return Alter(edit.tensor, tuple(changes))


def _needs(reason: str, needs: str) -> Repair:
    """For what no patch can bring back."""
    return lambda _checkpoint, _finding: Unrepaired(reason, needs)


def swap_of(checkpoint: Checkpoint, one: str, other: str) -> Rename:
    """Two modules exchanged: the tensors named, and their biases, scales and zero points, wherever they lie."""
    first, second = _module(one), _module(other)
    names: dict[str, str] = {}
    for name in checkpoint.entries:
        for mine, its in ((first, second), (second, first)):
            if name == mine or name.startswith((f"{mine}.", f"{mine}_")):
                names[name] = its + name[len(mine) :]
    return Rename(MappingProxyType(names))


def _module(name: str) -> str:
    """The module that a weight belongs to; the name itself where it is no module's `weight`."""
    module, _, last = name.rpartition(".")
    return module if module and "weight" in last else name


def _swap_tensors(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Gate and up by name; of several experts, one pair after the other."""
    pairs = list(zip(finding.tensors[::2], finding.tensors[1::2], strict=False))
    if not pairs or len(finding.tensors) % 2:
        return Unrepaired("the finding does not name pairs of tensors", "the names of gate and up")
    names: dict[str, str] = {}
    for one, other in pairs:
        names |= swap_of(checkpoint, one, other).names
    return (Rename(MappingProxyType(names)),)


def _swap_halves(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    return _reordered(checkpoint, finding, lambda rows, declared: (exchanged_rows(rows, declared),))


def _reorder_rows(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
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
    module = _module(weight)
    for name, entry in checkpoint.entries.items():
        if name == module or name.startswith((f"{module}.", f"{module}_")):
            yield entry


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


def _cut(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    return (Compact(finding.file),) if finding.file else Unrepaired("no file is named", "the file")


def _write_again(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """A hole is closed and an index written anew; which of two overlapping tensors is right, no header tells."""
    if finding.rule == "container/hole" and finding.file is not None:
        return (Compact(finding.file),)
    index = checkpoint.index
    if finding.rule == "container/header" and index is not None and finding.file == index.file.name:
        return (Relist(),)
    return Unrepaired("what the header contradicts itself about is not told by the data", "the file from its source")


def _relist(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    if finding.file is not None and finding.file not in checkpoint.containers and finding.rule != "index/total-size":
        return Unrepaired(f"no loader of these weights reads {finding.file}", "to know what it is for")
    return (Relist(),)


def _drop_copy(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Of equal copies the one that the index names stays, else the first."""
    if finding.evidence.get("equal") is not True:
        return Unrepaired("the copies differ, and nothing tells which is right", "the source of the checkpoint")
    return tuple(
        Drop(name, copy.file.name)
        for name in finding.tensors
        for copy in checkpoint.duplicates.get(name, ())
        if copy.file != checkpoint.entries[name].file
    )


def _drop_tensor(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    return tuple(Drop(name) for name in finding.tensors)


def _declare_bias(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Zeros are dropped; a bias with numbers is declared, where the family has a flag and all biases are there."""
    if finding.level == "note":
        return tuple(Drop(name) for name in finding.tensors)
    config, layer = checkpoint.config, finding.layer
    if config is None or layer is None:
        return Unrepaired("there is no config in which it could be declared", "config.json")
    row = row_at(checkpoint, layer)
    name = finding.tensors[0].removeprefix(layer_prefix(checkpoint, layer))
    network = next(iter(row.networks), None)
    setting = bias_setting(row.attention, name) or (None if network is None else network.bias)
    if setting is None or not setting.keys:
        return Unrepaired(f"the family {row.name} has no flag for such a bias", "the code that trained the model")
    stated = find(config, row, setting.keys)
    nested = next((f"{name}." for name in row.nested if isinstance(config.values.get(name), dict)), "")
    edit = Declare(stated.key if stated else nested + setting.keys[0], value=True)
    after = patched(checkpoint, (edit,))
    absent = [fault.tensor for fault in shape_faults(after) if fault.kind == "missing-bias"]
    if absent:
        words = f"{edit.key} would declare biases in all layers, and {len(absent)} of them are absent"
        return Unrepaired(words, "the missing biases, or the reason for this one")
    if any(entry.name in finding.tensors for entry in resolve_layer(after, layer)[0].undeclared):
        return Unrepaired(f"{edit.key} does not declare {finding.tensors[0]}", "the code that trained the model")
    return (edit,)


def _correct_config(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    if finding.rule == "config/tied-head":
        return _one_tie(checkpoint, finding)
    key = finding.evidence.get("key")
    if isinstance(key, str):
        return _whole_number(checkpoint, key)
    transposed = _transposed(checkpoint, finding)
    return transposed or _fitting_size(checkpoint, finding)


def _one_tie(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """One answer at every level: tied where there is no head of its own or an equal one, untied where they differ."""
    flags = cast("Mapping[str, bool]", finding.evidence.get("flags", {}))
    equal = finding.evidence.get("equal")
    head = head_entry(checkpoint)
    if head is not None and not isinstance(equal, bool):
        return Unrepaired("the head could not be compared with the embedding", "readable tensors")
    tied = head is None or equal is True
    return tuple(Declare(key, value=tied) for key, value in flags.items() if value is not tied)


def _whole_number(checkpoint: Checkpoint, key: str) -> Patch | Unrepaired:
    """A size that is written as a text or a float, where that names a whole number."""
    value = None if checkpoint.config is None else _value_at(checkpoint.config.values, key)
    number = None
    if (isinstance(value, str) and value.strip().isdecimal()) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
    if number is None:
        return Unrepaired(f"{key} names no number", "the config that the model was trained with")
    return (Declare(key, number),)


def _value_at(values: Mapping[str, object], key: str) -> object:
    first, _, rest = key.partition(".")
    value = values.get(first)
    if not rest:
        return value
    return _value_at(cast("dict[str, object]", value), rest) if isinstance(value, dict) else None


def _transposed(checkpoint: Checkpoint, finding: Finding) -> Patch | None:
    """The tensors of a finding laid the other way round, where they fit then."""
    entries = [checkpoint.entries[name] for name in finding.tensors if name in checkpoint.entries]
    if not entries or any(len(entry.shape) != 2 or entry.shape[0] == entry.shape[1] for entry in entries):
        return None
    if len(entries) == len(checkpoint.layer_indices) > 1:
        return None  # all of a kind: rather a family that stores it so
    edits = tuple(Alter(entry.name, (Transpose(),)) for entry in entries)
    misfits = {fault.tensor for fault in shape_faults(patched(checkpoint, edits))}
    return None if misfits.intersection(finding.tensors) else edits


def _fitting_size(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The one size of the config with another value of which all tensors fit, the layers counted too."""
    needs = "the config that the model was trained with, or the tensors that it declares"
    config, family = checkpoint.config, checkpoint.family
    if config is None or family is None:
        return Unrepaired("there is no config that could be corrected", needs)
    declared = checkpoint.declared_layers
    if declared is not None and declared.value > checkpoint.layers:
        reason = f"{declared.source} is {declared.value}, and {checkpoint.layers} layers are there: whether the others "
        return Unrepaired(f"{reason}were lost or never were is not told by the files", "the missing layers")
    lengths = {checkpoint.layers}
    for name in finding.tensors:
        shape = checkpoint.entries[name].shape if name in checkpoint.entries else ()
        lengths.update(length // part for length in shape for part in (1, 2) if length % part == 0)
    keys = {
        stated.key: stated.value for setting in family.sizes.values() if (stated := find(config, family, setting.keys))
    }
    trials = [(key, length) for key in keys for length in sorted(lengths) if length != keys[key]][:MOST_TRIALS]
    fitting = [Declare(key, length) for key, length in trials if _fits(checkpoint, Declare(key, length))]
    if len(fitting) != 1:
        told = ", ".join(f"{edit.key} {edit.value}" for edit in fitting)
        return Unrepaired(f"several changes would fit: {told}" if told else "no one size explains it", needs)
    return (fitting[0],)


def _fits(checkpoint: Checkpoint, edit: Declare) -> bool:
    try:
        after = patched(checkpoint, (edit,))
    except CheckpointUnusable:
        return False
    wrong = [fault for fault in after.faults if fault.rule.startswith("config/")]
    return not wrong and after.trunk is not None and all(fault.kind != "shape" for fault in shape_faults(after))


def _align_eps(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The value that evidence decided for, at the place that states the other one; no weight tells it."""
    decided, key = finding.evidence.get("decided"), finding.evidence.get("decided_key")
    if isinstance(decided, float) and isinstance(key, str):
        return (Declare(key, decided),)
    if isinstance(decided, float):
        reason = f"{decided:g} was decided for, and what states the other value is no entry of config.json"
        return Unrepaired(reason, "whoever wrote that file")
    return Unrepaired(
        "no weight carries an epsilon, so the files do not tell which of the two was trained with",
        "captured inputs and outputs of a norm (`glassblock explain`), or the config of the training run",
    )


def _declare_eps(checkpoint: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """The family's default stated, where another engine's config or a reference bears it out."""
    if "decided_key" in finding.evidence:
        return _align_eps(checkpoint, finding)
    return Unrepaired(
        "that the family's default was trained with is not told by the files", "the config of the training run"
    )


def _add_to_gains(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    """Gains as the family stores them; in the file's dtype, so rounded once more."""
    offset = finding.evidence.get("add")
    if not isinstance(offset, int | float):
        return Unrepaired("which of the two conventions is meant was not decided", "a reference checkpoint")
    return tuple(Alter(name, (Add(float(offset)),)) for name in finding.tensors)


def _transpose(_: Checkpoint, finding: Finding) -> Patch | Unrepaired:
    if finding.certainty == "statistical":
        reason = "what the weights show of their axes convicts nothing by itself"
        return Unrepaired(reason, "a reference checkpoint, or captured hidden and down of the layer")
    return tuple(Alter(name, (Transpose(),)) for name in finding.tensors)


def _unwrap_names(checkpoint: Checkpoint, _: Finding) -> Patch | Unrepaired:
    wrapped = wrapped_names(checkpoint.entries, checkpoint.family)
    if wrapped is None:
        return Unrepaired("no part of the names stands between them and the family's", "the script that wrote them")
    return (Rename(MappingProxyType({old: new for old, new in wrapped.names.items() if old != new})),)


_SOURCE = "the file, or the checkpoint, from its source"

FIXES: Mapping[str, Repair] = MappingProxyType(
    {
        "swap-tensors": _swap_tensors,
        "swap-halves": _swap_halves,
        "reorder-rows": _reorder_rows,
        "add-to-gains": _add_to_gains,
        "transpose": _transpose,
        "cut": _cut,
        "write-again": _write_again,
        "correct-index": _relist,
        "complete-index": _relist,
        "correct-total-size": _relist,
        "drop-copy": _drop_copy,
        "drop-tensor": _drop_tensor,
        "declare-bias": _declare_bias,
        "correct-config": _correct_config,
        "align-eps": _align_eps,
        "correct-engine": _needs(
            "it is the other engine's config that differs, and neither tells which was trained with",
            "the config of the training run",
        ),
        "declare-eps": _declare_eps,
        "tie-or-restore": _needs(
            "whether the head was left out by mistake or the flag is wrong is not told by the files",
            "the output head, or the config of the training run",
        ),
        "untie-or-drop": _needs(
            "which of the two heads the model was trained with is not told by the weights",
            "the config of the training run",
        ),
        "name-family": _needs(
            "no row of the family table is named by the config", "--family, or the right config.json"
        ),
        "unwrap-names": _unwrap_names,
        "keep-one-set": _needs("which of the two sets is meant is not told by the files", "somebody who removes one"),
        "fetch": _needs("what is absent cannot be made up", _SOURCE),
        "fetch-again": _needs("what is lost cannot be made up", _SOURCE),
        "convert-again": _needs("the numbers that are wrong or absent cannot be made up", _SOURCE),
        "save-again": _needs("the numbers were never saved", "the run that saved the checkpoint"),
    }
)
"""How each action that a finding's fix may name is carried out."""
