"""Edits of a checkpoint in words, and as what travels."""

from math import prod

from glassblock.checkpoint.changes import Add, Cast, Change, InHeads, Put, Reorder, Shuffle, Transpose, Within
from glassblock.checkpoint.patches import (
    Alter,
    Compact,
    Declare,
    Drop,
    Edit,
    LoseEnd,
    LoseFile,
    Relist,
    Rename,
    Stand,
)
from glassblock.wire.repairs import RepairEdit

_SHOWN = 8
"""Pairs of names that are told."""


def told_edit(edit: Edit) -> RepairEdit:
    """An edit as it travels."""
    match edit:
        case Rename():
            told = RepairEdit(kind="rename", description=_renamed(edit), tensors=tuple(edit.names))
        case Alter():
            words = f"{edit.tensor}: {', '.join(map(_changed, edit.changes))}"
            told = RepairEdit(kind="alter", description=words, tensors=(edit.tensor,))
        case Drop():
            words = f"{edit.tensor}{f' of {edit.file}' if edit.file else ''} is left out"
            told = RepairEdit(kind="drop", description=words, tensors=(edit.tensor,), file=edit.file)
        case Declare():
            words = f"config: no {edit.key}" if edit.value is None else f"config: {edit.key} is {edit.value!r}"
            told = RepairEdit(kind="declare", description=words, key=edit.key, value=edit.value)
        case Relist():
            told = RepairEdit(kind="relist", description="the index is written anew from the shards' headers")
        case Compact():
            words = f"{edit.file} is written anew, without bytes that belong to no tensor"
            told = RepairEdit(kind="compact", description=words, file=edit.file)
        case Stand():
            words = f"{edit.tensor} holds the numbers of {edit.source}"
            told = RepairEdit(kind="stand", description=words, tensors=(edit.tensor, edit.source))
        case LoseFile() | LoseEnd():
            told = RepairEdit(kind="lose", description=f"bytes of {edit.file} are left out", file=edit.file)
    return told


def _renamed(edit: Rename) -> str:
    exchanged = all(edit.names.get(new) == old for old, new in edit.names.items())
    between, what = ("and", "exchanged") if exchanged else ("to", "renamed")
    pairs = [f"{old} {between} {new}" for old, new in edit.names.items() if not exchanged or old < new]
    more = f", and {len(pairs) - _SHOWN:,} more" if len(pairs) > _SHOWN else ""
    return f"{what} in the header: {', '.join(pairs[:_SHOWN])}{more}"


def _changed(change: Change) -> str:
    match change:
        case Reorder():
            words = _reordered(change)
        case Within():
            words = f"of the experts {', '.join(map(str, change.slices))}: {_reordered(change.change)}"
        case InHeads():
            into = "pairs into halves" if change.sizes[1] == 2 < change.sizes[0] else "halves into pairs"
            words = f"of every {change.width} rows the first {prod(change.sizes)} brought from {into}"
        case Transpose():
            words = "transposed"
        case Add():
            words = f"{change.value:+g} added to every number"
        case Cast():
            words = f"stored as {change.dtype}"
        case Shuffle():
            words = "put into another order"
        case Put():
            words = f"element {change.element} is {change.value}"
    return words


def _reordered(change: Reorder) -> str:
    if change.flip is not None:
        return "neighbouring rows exchanged" if change.flip else "halves exchanged"
    return "alternating rows brought into halves" if len(change.sizes) == 2 else "blocks of ranks joined into halves"
