"""What a repair does, and what it leaves, for a screen: equal steps of many tensors and layers told once."""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from glassblock.reports.ranges import layer_ranges
from glassblock.wire.printable import printable
from glassblock.wire.repairs import RefusedRepair, RepairAnswer, RepairEdit, RepairStep
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

LISTED = 8
"""Messages, edits and names of tensors of one kind; of more it is told how many."""

_LAYER = re.compile(r"^(.*?(?:layers|h|blocks|layer)\.)(\d{1,9})\.")


class _Edited(NamedTuple):
    """An edit but for its layer: what stands before the layer's number, the tensor in there, what is done to it."""

    before: str
    tensor: str
    words: str


def repair_lines(answer: RepairAnswer) -> Iterator[RenderableType]:
    """Rule by rule: what was found, what was changed for it; then what was not repaired, and why."""
    for rule, steps in groupby(answer.steps, lambda step: step.rule):
        group = list(steps)
        yield Text()
        yield from _heading(rule, group)
        yield _bulleted(_cut(edit_lines(edit for step in group for edit in step.edits)))
    for (rule, reason, needs), refusals in groupby(answer.refused, lambda one: (one.rule, one.reason, one.needs)):
        yield Text()
        yield from _heading(rule, list(refusals))
        yield _indented(f"not repaired: {reason}", "yellow")
        yield _indented(f"needed: {needs}", "dim")


def edit_lines(edits: Iterable[RepairEdit]) -> list[str]:
    """Edits in words: of layers and tensors to which the same is done, all in one line."""
    layers: dict[_Edited, list[int]] = {}
    whole: dict[_Edited, str] = {}
    for edit in edits:
        edited, layer = _edited(edit)
        whole.setdefault(edited, edit.description)
        layers.setdefault(edited, []).append(layer)
    alike: dict[tuple[str, str, tuple[int, ...]], list[_Edited]] = {}
    for edited, where in layers.items():
        alike.setdefault((edited.before, edited.words, tuple(sorted({*where}))), []).append(edited)
    several = len({edited.before for edited in layers if edited.before}) > 1
    return [
        whole[group[0]]
        if len(group) == len(where) == 1 or not before
        else _line(before if several else "", words, where, [edited.tensor for edited in group])
        for (before, words, where), group in alike.items()
    ]


def _edited(edit: RepairEdit) -> tuple[_Edited, int]:
    """An edit but for its layer, and that layer; as it is told where it is not of one layer."""
    of = _LAYER.match(edit.tensors[0]) if edit.tensors else None
    if of is None or not all(name.startswith(of[0]) for name in edit.tensors):
        return _Edited("", "", edit.description), 0
    only = edit.tensors[0] if len(edit.tensors) == 1 and edit.description.startswith(edit.tensors[0]) else ""
    return _Edited(of[1], only.removeprefix(of[0]), edit.description[len(only) :].replace(of[0], "")), int(of[2])


def _line(before: str, words: str, where: Sequence[int], names: Sequence[str]) -> str:
    of = layer_ranges(where) + (f" of {before.rpartition('.')[0].rpartition('.')[0]}" if before else "")
    if names == [""]:
        return f"{of}: {words}"
    told = _cut(names, "more")
    listed = told[0] if len(told) == 1 else f"{', '.join(told[:-1])} and {told[-1]}"
    return f"{listed} of {of}{words}"


def _heading(rule: str, group: Sequence[RepairStep | RefusedRepair]) -> Iterator[RenderableType]:
    yield Text(printable(f"{rule}:"))
    yield from (_indented(line) for line in _cut([one.message for one in group]))


def _cut(lines: Sequence[str], rest: str = "and {} more; --format json lists all") -> list[str]:
    """The first of many, and in words how many more there are."""
    left = len(lines) - LISTED
    if left <= 0:
        return list(lines)
    return [*lines[:LISTED], f"{left:,} {rest}" if rest == "more" else rest.format(f"{left:,}")]


def _indented(line: str, style: str = "") -> RenderableType:
    return Padding(Text(printable(line), style, overflow="fold"), (0, 0, 0, 2))


def _bulleted(lines: Iterable[str]) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("->", Text(printable(line)), style="green")
    return Padding(grid, (0, 0, 0, 2))
