"""A bar on stderr for a job's progress, where stderr is a terminal."""

import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from glassblock.wire.audits import Progress
from glassblock.wire.printable import printable

from glassblock_client.jobs import OnProgress


@contextmanager
def progress_bar(what: str) -> Generator[OnProgress]:
    """What draws the bar when it is told the progress; nothing where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich import progress as drawn  # noqa: PLC0415  most who import a client draw nothing
    from rich.console import Console  # noqa: PLC0415

    parts = (
        drawn.SpinnerColumn(),
        drawn.TextColumn("{task.description}", markup=False),
        drawn.BarColumn(),
        drawn.TaskProgressColumn(),
        drawn.TimeElapsedColumn(),
    )
    # rich draws what others print above the bar: on stderr, and so only what goes to this terminal anyway.
    here = sys.stdout.isatty()
    with drawn.Progress(*parts, console=Console(stderr=True), transient=True, redirect_stdout=here) as bar:
        task = bar.add_task(printable(what), total=None)

        def advance(told: Progress) -> None:
            description = printable(told.message or what)
            bar.update(task, completed=told.done, total=told.total or None, description=description)

        yield advance


def told(what: str, on_progress: OnProgress | None) -> AbstractContextManager[OnProgress]:
    """`on_progress` itself, or a bar where nobody wants to be told."""
    return progress_bar(what) if on_progress is None else nullcontext(on_progress)
