"""From rich's renderables to text, the same on a terminal, in a file and in an answer."""

import io
from collections.abc import Iterable

from rich.console import Console, RenderableType


def page(parts: Iterable[RenderableType], *, width: int, colour: bool) -> str:
    """`parts` below one another as text of at most `width` columns.

    Without `colour` there is no escape sequence and no space at a line's end. The environment
    has no say here (NO_COLOR, COLUMNS): whoever calls knows where the text goes.
    """
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
    text = paper.getvalue()
    return text if colour else "".join(f"{line.rstrip()}\n" for line in text.splitlines())
