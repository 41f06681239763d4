"""`glassblock fix`: a checkpoint repaired, by what its audit found."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from glassblock.errors import InvalidValue
from glassblock.wire.audits import Finding, Progress, Report
from glassblock.wire.printable import printable
from glassblock.wire.repairs import RepairAnswer, RepairRequest
from rich.console import RenderableType
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
    roots_of_all,
)
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, read_family_row
from glassblock_client.cli.files import config_in, read_json_object
from glassblock_client.cli.lists import rules_of
from glassblock_client.cli.repair_lines import repair_lines
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show
from glassblock_client.exchange import compose
from glassblock_client.progress import progress_bar

REPAIRED, REMAINING, IMPOSSIBLE = 0, 1, 2
LOUD = {"error", "warning"}


def fix(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write the repaired checkpoint there, whole or not at all. With --url its name at the service.",
            readable=False,
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: show the patch, and audit the checkpoint through it.")
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Exchange headers and config where they lie; what they were is kept beside."),
    ] = False,
    rules: Annotated[
        str | None, typer.Option(metavar="RULE,...", help="Repair only what these find.", show_default=False)
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Another checkpoint, whose tensors decide more. With --url its name there.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Another engine's config (JSON), or a folder with one: it may bear out one of two epsilons.",
            show_default=False,
        ),
    ] = None,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> int:
    """Repair a checkpoint into a new folder, and audit the result.

    Exit status 0: repaired, or nothing to repair; the audit of the result finds no error and no warning.

    1: some was repaired, and errors or warnings remain.

    2: nothing could be repaired, or nothing could be written.
    """
    chosen = rules_of(rules)
    if sum((output is not None, dry_run, in_place)) != 1:
        raise InvalidValue(
            "one of --output DIR, --in-place and --dry-run says where the repair goes",
            field="output",
            hint="--dry-run shows it first",
        )
    row = read_family_row(family, family_file)
    config = None if against is None else read_json_object(config_in(against), option="--against")
    against_name = "against" if against is None else f"{against} (--against)"
    with progress_bar(f"repairing {path}") as on_progress:

        def progress(done: int, total: int, what: str) -> None:
            on_progress(Progress(done=done, total=total, message=what))

        if url:
            if in_place:
                raise InvalidValue("--in-place has no effect with --url", field="in_place")
            with connected(context, url=url, timeout=timeout, device=device) as client:
                name = None if output is None else str(output)
                answer = as_job_where_long(
                    client,
                    lambda asked: asked.repair(
                        name_there(path),
                        output=name,
                        dry_run=dry_run,
                        rules=chosen,
                        reference=reference,
                        against=config,
                        against_name=against_name,
                        family=family,
                        family_row=row,
                    ),
                    on_progress,
                )
        else:
            if timeout is not None:
                raise InvalidValue("--timeout has no effect without --url", field="timeout")
            if reference is None:
                root, name = root_and_name(path)
                roots, other = [root], None
            else:
                roots, (name, other) = roots_of_all(path, [("--reference", reference)])
            place = None if output is None else Path(os.path.abspath(output))  # noqa: PTH100  links stay
            request = compose(
                RepairRequest,
                checkpoint=name,
                output=None if place is None else place.name,
                dry_run=dry_run,
                rules=chosen,
                reference=other,
                against=config,
                against_name=against_name,
                family=family,
                family_row=row,
            )
            answer = door().repair(
                roots,
                request,
                output_root=None if place is None else place.parent,
                in_place=in_place,
                device=device or os.environ.get("GLASSBLOCK_DEVICE") or "auto",
                progress=progress,
            )
    if answer_format == "json":
        sys.stdout.write(answer.model_dump_json(indent=2) + "\n")
    else:
        show(_told(answer, dry_run=dry_run, place=str(output) if output else path))
    return exit_status(answer)


def exit_status(answer: RepairAnswer) -> int:
    """What a pipeline sees of a repair."""
    if not any(finding.level in LOUD for finding in answer.after.findings):
        return REPAIRED
    return REMAINING if answer.steps else IMPOSSIBLE


def _told(answer: RepairAnswer, *, dry_run: bool, place: str) -> Iterator[RenderableType]:
    yield Text(printable(answer.checkpoint), "bold")
    if answer.undone:
        yield Text(printable(f"a change that was broken off was undone first: {', '.join(answer.undone)}"), "yellow")
    yield from repair_lines(answer)
    yield Text()
    yield _before_and_after(answer)
    yield Text()
    yield Text(printable(_outcome(answer, dry_run=dry_run, place=place)), "bold")


def _before_and_after(answer: RepairAnswer) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, report in (("before", answer.before), ("after", answer.after)):
        grid.add_row(title, printable(f"{report.verdict}: {_counted(report)}"))
    return grid


def _counted(report: Report) -> str:
    def count(level: str) -> int:
        return sum(finding.level == level for finding in report.findings)

    told = [
        f"{number} {level}{'s' * (number != 1)}" for level in ("error", "warning", "note") if (number := count(level))
    ]
    return ", ".join(told) or "no findings"


def _outcome(answer: RepairAnswer, *, dry_run: bool, place: str) -> str:
    remaining: list[Finding] = [finding for finding in answer.after.findings if finding.level in LOUD]
    if not answer.steps:
        return (
            "nothing could be repaired: nothing was written" if remaining else "nothing to repair: nothing was written"
        )
    where = "in headers and config alone" if answer.header_only else "in a new file"
    if dry_run:
        return f"nothing was written: the repair would be {where}"
    kept = f"; what was there is kept in {', '.join(answer.backups)}" if answer.backups else ""
    return f"{place}: {answer.bytes_written:,} bytes written{kept}"
