"""`glassblock checkpoints`: what a service can be asked about, or what lies under a folder."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from glassblock.errors import InvalidValue
from glassblock.reports.wording import byte_count
from glassblock.wire.checkpoints import CheckpointList, CheckpointSummary
from glassblock.wire.printable import printable
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import DeviceOption, TimeoutOption, UrlOption, connected
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show


def checkpoints(
    context: typer.Context,
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", help="Without a service: the folder to look under.", file_okay=False, show_default=False
        ),
    ] = None,
    *,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """List the checkpoints of a service, or under a folder.

    The names are those that every other command takes with --url. Only headers and configs are read.
    """
    if url and folder is not None:
        raise InvalidValue(
            "DIR has no effect with --url: that service has folders of its own", field="DIR", hint="leave one out"
        )
    if not url and folder is None:
        raise InvalidValue(
            "nothing says where to look", field="DIR", hint="give --url URL (or GLASSBLOCK_URL), or a folder"
        )
    if folder is not None and not folder.is_dir():
        raise InvalidValue(f"{folder} is no folder", field="DIR", hint="give a folder that holds checkpoints")
    roots = () if folder is None else (folder.resolve(),)
    with connected(context, roots, url=url, timeout=timeout, device=device) as client:
        found = client.checkpoints()
    if answer_format == "json":
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        show(_told(found))


def _told(found: CheckpointList) -> list[RenderableType]:
    notes = [Text(printable(note), "yellow") for note in found.notes]
    if not found.checkpoints:
        return [Text("no checkpoint: neither a folder with .safetensors files nor such a file"), *notes]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("name", style="bold", overflow="fold")
    table.add_column("family", overflow="fold")
    for title in ("layers", "size"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("dtype", overflow="fold")
    faulty = any(row.faults for row in found.checkpoints)
    if faulty:
        table.add_column("faults", justify="right", no_wrap=True)
    for row in found.checkpoints:
        cells = (
            printable(row.name),
            printable(row.family or "unknown"),
            "" if row.layers is None else f"{row.layers:,}",
            byte_count(row.bytes),
            printable(_dtypes(row)),
        )
        table.add_row(*cells, *([Text(f"{row.faults or ''}", "red")] if faulty else []))
    return [table, *notes]


def _dtypes(row: CheckpointSummary) -> str:
    """The types of its tensors, that of most of them first."""
    return ", ".join(sorted(row.dtypes, key=lambda name: (-row.dtypes[name], name)))
