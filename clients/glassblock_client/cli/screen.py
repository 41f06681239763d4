"""What goes to the terminal: answers on stdout, everything else on stderr."""

import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from glassblock.reports.page import page
from glassblock.wire import audits
from glassblock.wire.printable import printable
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

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
    with Console(stderr=True).status(what):
        yield


@contextmanager
def progress_bar(what: str) -> Generator[Callable[[audits.Progress], None]]:
    """A bar on stderr for a job's progress; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    parts = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*parts, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(progress: audits.Progress) -> None:
            bar.update(
                task,
                completed=progress.done,
                total=progress.total or None,
                description=printable(progress.message or what),
            )

        yield advance
