"""`glassblock norms`: what one norm of a checkpoint does to its input."""

import sys
from typing import Annotated, Any, cast

import typer
from glassblock.wire.norms import NormRole, NormStatisticsAnswer
from glassblock.wire.printable import printable
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
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, TowerOption, read_family_row
from glassblock_client.cli.inputs import (
    InputOption,
    SampleOption,
    SeedOption,
    TextOption,
    TokenIdsOption,
    TokensOption,
    chosen_input,
)
from glassblock_client.cli.run import FormatOption, told
from glassblock_client.cli.screen import show, working

LISTED_ROWS = 24


def norms(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    norm: Annotated[NormRole, typer.Option(help="Which norm.", show_default=False)],
    layer: Annotated[
        int | None, typer.Option(help="Layer, counted from 0; not for the final norm.", show_default=False)
    ] = None,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    tower: TowerOption = None,
    input_file: InputOption = None,
    sample: SampleOption = None,
    seed: SeedOption = None,
    token_ids: TokenIdsOption = None,
    text: TextOption = None,
    tokens: TokensOption = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """Show the statistics of a norm's input and output.

    One line per row of x: its mean, mean square and variance, the Frobenius norms of the
    Jacobians, and what a 16-bit engine would lose.
    """
    given = chosen_input(input_file, sample, seed, token_ids=token_ids, text=text, tokens=tokens)
    row = read_family_row(family, family_file)
    with (
        connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name),
        working(f"looking at {norm}"),
    ):
        reply = as_job_where_long(
            client,
            lambda asked: asked.norm_statistics(
                checkpoint=name,
                family=family,
                family_row=row,
                tower=tower,
                layer=layer,
                norm=norm,
                return_tensors=answer_format == "text",
                **given,
            ),
        )
    if answer_format == "json":
        sys.stdout.write(reply.answer.model_dump_json(indent=2) + "\n")
    else:
        show([_facts(reply.answer, norm, layer), Text(), _row_table(reply.answer), *_notes(reply.answer)])


def _facts(answer: NormStatisticsAnswer, norm: str, layer: int | None) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("norm", Text(norm if layer is None else f"{norm} of layer {layer}", "bold"))
    if answer.norm_kind is not None:
        grid.add_row("arithmetic", printable(answer.norm_kind))
    grid.add_row("eps", printable(told(answer.eps)))
    return grid


def _row_table(answer: NormStatisticsAnswer) -> Table:
    columns = {
        "\nmean": answer.mean,
        "mean\nsquare": answer.square_mean,
        "\nvariance": answer.variance,
        "\nrms": answer.rms,
        **{f"‖J‖\n{name}": values for name, values in answer.jacobian_frobenius.items()},
    }
    flat = {title: _flattened(values) for title, values in columns.items()}
    rows = len(flat["\nrms"])
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("\nrow", justify="right", no_wrap=True)
    for title in flat:
        table.add_column(title, justify="right", no_wrap=True)
    listed = range(min(rows, LISTED_ROWS))
    troubles = [_trouble(answer, row) for row in listed]
    if any(troubles):
        table.add_column("\ntrouble")
    for row in listed:
        cells = [str(row), *(f"{float(values[row]):.4g}" for values in flat.values())]
        table.add_row(*cells, *([Text(troubles[row], "red")] if any(troubles) else []))
    return table


def _trouble(answer: NormStatisticsAnswer, row: int) -> str:
    """What the row would lose in each type that norms are computed in; the first loss of each."""
    told: list[str] = []
    for dtype, fit in answer.dtype_report.items():
        losses = {
            "overflows": fit.value_overflow,
            "squares overflow": fit.square_overflow,
            "sum of squares overflows": fit.square_sum_overflow,
            "squares vanish": fit.square_underflow,
        }
        told += [f"{dtype}: {loss}" for loss, rows in losses.items() if _flattened(rows)[row]][:1]
    return "; ".join(told)


def _notes(answer: NormStatisticsAnswer) -> list[Text]:
    rows = len(_flattened(answer.rms))
    notes = [f"and {rows - LISTED_ROWS:,} more rows; --format json lists all"] if rows > LISTED_ROWS else []
    for dtype, fit in answer.dtype_report.items():
        if fit.eps_zero or fit.eps_subnormal:
            notes.append(f"eps is {'zero' if fit.eps_zero else 'subnormal'} in {dtype}")
    return [Text(note, "yellow") for note in notes]


def _flattened(nested: object) -> list[Any]:
    """Numbers of nested lists in order, one per row of x."""
    if not isinstance(nested, list):
        return [nested]
    return [number for inner in cast("list[object]", nested) for number in _flattened(inner)]
