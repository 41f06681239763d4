"""What goes to the terminal: answers on stdout, everything else on stderr."""

import os
import shutil
import sys
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from glassblock.reports.page import page
from glassblock.wire.printable import printable
from rich.console import Console, RenderableType
from rich.text import Text

WIDEST = 120
"""Longer lines are hard to read, also where a terminal has room for them."""


def columns() -> int:
    """Width of a line: the terminal's, COLUMNS, or 80."""
    return max(20, min(shutil.get_terminal_size(fallback=(80, 24)).columns, WIDEST))


def coloured() -> bool:
    """Whether stdout is a terminal that wants colour (no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def show(parts: Iterable[RenderableType]) -> None:
    """Renderables on stdout."""
    sys.stdout.write(page(parts, width=columns(), colour=coloured()))


@contextmanager
def working(what: str) -> Generator[None]:
    """A spinner on stderr while something takes its time; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield
        return
    with Console(stderr=True).status(Text(printable(what))):  # as text alone rich would read a name as markup
        yield
