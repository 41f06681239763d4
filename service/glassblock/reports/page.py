"""From rich's renderables to text, the same on a terminal, in a file and in an answer."""

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.table import Table

USUAL = 80
"""Columns of a screen for which tables are made."""
UNBOUNDED = 10_000
CUT = "…"
"""Where rich cuts a cell."""


def page(parts: Iterable[RenderableType], *, width: int, colour: bool) -> str:
    """`parts` below one another as text of at most `width` columns.

    Without `colour` there is no escape sequence and no space at a line's end. The environment
    has no say here (NO_COLOR, COLUMNS): whoever calls knows where the text goes. A table whose
    cells a narrow page would cut is written cell by cell: half a number is none.
    """
    text = _written((_fitting(part, width) for part in parts), width, colour=colour)
    return text if colour else "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def _written(parts: Iterable[RenderableType], width: int, *, colour: bool) -> str:
    paper = io.StringIO()
    console = Console(
        file=paper,
        width=width,
        force_terminal=colour,
        force_jupyter=False,
        color_system="standard" if colour else None,
        no_color=not colour,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    return paper.getvalue()


def _fitting(part: RenderableType, width: int) -> RenderableType:
    if width >= USUAL or not isinstance(part, Table) or not part.show_header:
        return part
    cuts, whole = (_written([part], across, colour=False).count(CUT) for across in (width, UNBOUNDED))
    if cuts <= whole:
        return part
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    titles = [" ".join(str(column.header).split()) for column in part.columns]
    for cells in zip(*(column.cells for column in part.columns), strict=True):
        for title, cell in zip(titles, cells, strict=True):
            grid.add_row(title, cell)
        grid.add_row("", "")
    return grid
