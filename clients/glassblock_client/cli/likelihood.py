"""`glassblock likelihood`: how likely a checkpoint finds a text, token by token."""

import json
import math
import sys
from collections.abc import Sequence
from typing import Annotated, cast

import typer
from glassblock.reports.wording import byte_count
from glassblock.wire.likelihoods import LikelihoodAnswer
from glassblock.wire.printable import printable
from glassblock.wire.values import ComputeDtype
from rich import box
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import (
    CheckpointArgument,
    DeviceOption,
    TimeoutOption,
    UrlOption,
    as_job_where_long,
    connected_to,
)
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, read_family_row
from glassblock_client.cli.inputs import TextOption, TokenIdsOption, TokensOption, chosen_text
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show, working

LISTED = 24


def likelihood(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    token_ids: TokenIdsOption = None,
    text: TextOption = None,
    tokens: TokensOption = None,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    dtype: Annotated[
        ComputeDtype | None,
        typer.Option(help="Every step in this type; float32 at least when left out.", show_default=False),
    ] = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """Show how likely a checkpoint finds a text, token by token.

    ln p of every token but the first, given those before it. The layers are read one after the
    other, so that a large checkpoint takes the memory of one.
    """
    given = chosen_text(token_ids, text, tokens)
    row = read_family_row(family, family_file)
    with (
        connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name),
        working(f"reading {name}"),
    ):
        answer = as_job_where_long(
            client, lambda asked: asked.likelihoods(name, dtype=dtype, family=family, family_row=row, **given)
        )
    if answer_format == "json":
        sys.stdout.write(answer.model_dump_json(indent=2) + "\n")
    else:
        show([_facts(answer), Text(), _table(answer), *_rest(answer)])


def _facts(answer: LikelihoodAnswer) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    rows = [
        ("family", f"{answer.family} (verified: {answer.verified})"),
        ("run as", f"{answer.compute_dtype} on {answer.device}"),
        ("mean ln p", f"{answer.mean:.6f}, a perplexity of {math.exp(min(-answer.mean, 700)):.6g}"),
        ("read", f"{byte_count(answer.read.bytes)} in {answer.read.tensors} tensor{'s' * (answer.read.tensors != 1)}"),
        *(("note", note) for note in answer.notes),
    ]
    grid.add_row("checkpoint", Text(printable(answer.checkpoint), "bold"))
    for label, value in rows:
        grid.add_row(printable(label), printable(value))
    return grid


def _table(answer: LikelihoodAnswer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for title in ("text", "token", "id", "ln p"):
        table.add_column(title, justify="right", no_wrap=True)
    ids, logs, pieces = _texts(answer.token_ids), _texts(answer.log_likelihoods), _pieces(answer.pieces)
    if pieces:
        table.add_column("piece", no_wrap=True, overflow="ellipsis")
    rows = [
        (str(number), str(place + 1), str(row[place + 1]), f"{told:.4f}")
        + ((_shown(pieces[number][place + 1]),) if pieces else ())
        for number, (row, found) in enumerate(zip(ids, logs, strict=True))
        for place, told in enumerate(found)
    ]
    for cells in rows[:LISTED]:
        table.add_row(*cells)
    return table


def _rest(answer: LikelihoodAnswer) -> list[Text]:
    count = sum(map(len, _texts(answer.log_likelihoods)))
    return [Text(f"and {count - LISTED:,} more; --format json lists all", "dim")] if count > LISTED else []


def _shown(piece: str) -> str:
    """In quotes, which show spaces; what is no character of a line as an escape."""
    return printable(json.dumps(piece, ensure_ascii=False))


def _pieces(told: tuple[str, ...] | tuple[tuple[str, ...], ...] | None) -> list[Sequence[str]]:
    """One row for each text; none where they are not told."""
    if not told:
        return []
    return [cast("Sequence[str]", told)] if isinstance(told[0], str) else [*cast("Sequence[Sequence[str]]", told)]


def _texts(nested: object) -> list[list[float]]:
    """One list for each text."""
    rows = cast("list[object]", nested)
    return cast("list[list[float]]", rows if rows and isinstance(rows[0], list) else [rows])
