"""`glassblock selftest`: what an audit would find in this checkpoint, measured on mistakes planted in memory."""

import os
import sys
from collections.abc import Iterator
from typing import Annotated

import typer
from glassblock.errors import InvalidValue
from glassblock.wire.audits import Progress
from glassblock.wire.printable import printable
from glassblock.wire.selftests import Outcome, PlantedMistake, SelftestAnswer, SelftestRequest
from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import (
    CheckpointArgument,
    DeviceOption,
    TimeoutOption,
    UrlOption,
    as_job_where_long,
    connected,
    door,
    name_there,
    root_and_name,
)
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, read_family_row
from glassblock_client.cli.lists import numbers_of, rules_of
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show
from glassblock_client.exchange import compose
from glassblock_client.progress import progress_bar

COLOURS: dict[Outcome, str] = {
    "found": "green",
    "found-in-part": "yellow",
    "found-otherwise": "yellow",
    "undecidable": "yellow",
    "not-found": "red",
    "not-applicable": "dim",
}


def selftest(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    rules: Annotated[
        str | None,
        typer.Option(metavar="RULE,...", help="Only mistakes that these rules are meant for.", show_default=False),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="N,A-B", help="Layers to plant in; all when left out.", show_default=False)
    ] = None,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> int:
    """Plant mistakes in a checkpoint, in memory, and see what is found.

    Nothing is written. The checkpoint is read once for each mistake.

    Exit status 0: every mistake was planted and told, found or not.

    2: no answer was possible.
    """
    chosen = rules_of(rules)
    numbers = None if layers is None else numbers_of(layers, "--layers")
    row = read_family_row(family, family_file)
    with progress_bar(f"testing on {path}") as on_progress:

        def progress(done: int, total: int, what: str) -> None:
            on_progress(Progress(done=done, total=total, message=what))

        if url:
            with connected(context, url=url, timeout=timeout, device=device) as client:
                name = name_there(path)
                answer = as_job_where_long(
                    client,
                    lambda asked: asked.selftest(name, rules=chosen, layers=numbers, family=family, family_row=row),
                    on_progress,
                )
        else:
            if timeout is not None:
                raise InvalidValue("--timeout has no effect without --url", field="timeout")
            root, name = root_and_name(path)
            answer = door().selftest(
                root,
                compose(SelftestRequest, checkpoint=name, rules=chosen, layers=numbers, family=family, family_row=row),
                device=device or os.environ.get("GLASSBLOCK_DEVICE") or "auto",
                progress=progress,
            )
    if answer_format == "json":
        sys.stdout.write(answer.model_dump_json(indent=2) + "\n")
    else:
        show(_told(answer))
    return 0


def _told(answer: SelftestAnswer) -> Iterator[RenderableType]:
    count = f"{len(answer.layers)} layer{'s' * (len(answer.layers) != 1)}"
    yield Text(printable(f"{answer.checkpoint} ({answer.family}, {count} planted in)"), "bold")
    if answer.healthy:
        yield Text(printable(f"before anything was planted: findings of {', '.join(answer.healthy)}"), "yellow")
    yield Text()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("mistake", overflow="fold")
    table.add_column("outcome", no_wrap=True)
    table.add_column("layers", justify="right", no_wrap=True)
    table.add_column("rules that fired", overflow="fold")
    for told in answer.mistakes:
        outcome = Text(told.outcome, COLOURS[told.outcome])
        table.add_row(printable(told.description), outcome, _sensitivity(told), printable(", ".join(told.fired)))
    yield table
    for reason, of in _reasons(answer).items():
        yield Text()
        yield from (Text(printable(description)) for description in of)
        yield Padding(Text(printable(reason), "dim"), (0, 0, 0, 2))
    tried = [told for told in answer.mistakes if told.outcome != "not-applicable"]
    found = sum(told.outcome == "found" for told in tried)
    yield Text()
    yield Text(f"{found} of {len(tried)} planted mistakes found, by the rule and in the layers meant", "bold")


def _reasons(answer: SelftestAnswer) -> dict[str, list[str]]:
    """Why mistakes were not found, each with the mistakes it is told of."""
    reasons: dict[str, list[str]] = {}
    for told in answer.mistakes:
        if told.reason:
            reasons.setdefault(told.reason, []).append(told.description)
    return reasons


def _sensitivity(told: PlantedMistake) -> str:
    return f"{len(told.named)} of {len(told.planted)}" if told.planted else ""
