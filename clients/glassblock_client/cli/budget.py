"""`glassblock budget`: what a feed-forward block costs, before anybody trains it."""

import sys
from typing import Annotated, Literal

import typer
from glassblock.errors import InvalidValue
from glassblock.reports.wording import byte_count
from glassblock.wire.budgets import Budget, BudgetAnswer
from rich import box
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import DeviceOption, TimeoutOption, UrlOption, connected, connected_to
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, TowerOption, read_family_row
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show
from glassblock_client.client import Client

Sizes = str | None


def budget(
    context: typer.Context,
    path: Annotated[
        str | None, typer.Argument(metavar="PATH", help="Take the sizes from this checkpoint.", show_default=False)
    ] = None,
    *,
    d_model: Annotated[Sizes, typer.Option(metavar="N,...", help="Model width.", show_default=False)] = None,
    d_ff: Annotated[Sizes, typer.Option(metavar="N,...", help="Hidden width.", show_default=False)] = None,
    kind: Annotated[Literal["plain", "gated"] | None, typer.Option(help="Two or three matrices.")] = None,
    batch: Annotated[str, typer.Option(metavar="N,...", help="Sequences.")] = "1",
    tokens: Annotated[str, typer.Option(metavar="N,...", help="Tokens of a sequence.")] = "1",
    layers: Annotated[int, typer.Option(help="Layers.")] = 1,
    dtype: Annotated[
        Literal["float64", "float32", "bfloat16", "float16", "float8"] | None,
        typer.Option(help="Of weights and activations; the checkpoint's own, else bfloat16.", show_default=False),
    ] = None,
    multiple_of: Annotated[int, typer.Option(help="Round the equal-parameter width up to this.")] = 256,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    tower: TowerOption = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """Count parameters, activations and FLOPs of a feed-forward block.

    One size may be a list, as in --d-ff 8192,11008,16384, and is swept.
    """
    width = None if d_model is None else counts_of("d_model", d_model)
    hidden = None if d_ff is None else counts_of("d_ff", d_ff)
    sequences, length = counts_of("batch", batch), counts_of("tokens", tokens)
    row = read_family_row(family, family_file)

    def ask(client: Client, name: str | None) -> BudgetAnswer:
        return client.budgets(
            checkpoint=name,
            family=family,
            family_row=row,
            tower=tower,
            d_model=width,
            d_ff=hidden,
            kind=kind,
            batch=sequences,
            tokens=length,
            layers=layers,
            dtype=dtype,
            multiple_of=multiple_of,
        )

    if path is None:
        _require_sizes(d_model=d_model, d_ff=d_ff, kind=kind)
        with connected(context, url=url, timeout=timeout, device=device) as client:
            answer = ask(client, None)
    else:
        with connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name):
            answer = ask(client, name)
    if answer_format == "json":
        sys.stdout.write(answer.model_dump_json(indent=2) + "\n")
    else:
        show([_sweep_table(answer) if answer.sweep else _count_table(answer), Text(f"\n{answer.note}", "dim")])


def _require_sizes(**sizes: str | None) -> None:
    for name, value in sizes.items():
        if value is None:
            raise InvalidValue(
                f"--{name.replace('_', '-')} is missing",
                field=name,
                hint="give --d-model, --d-ff and --kind, or a checkpoint to take them from",
            )


def counts_of(option: str, text: str) -> int | list[int]:
    """`4096`, or `1,2,4` as a list.

    Raises:
        InvalidValue: not whole numbers.
    """
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        flag = "--" + option.replace("_", "-")
        raise InvalidValue(f"{flag}: {text!r} is no whole number, nor a list of them", field=option) from None
    return counts[0] if len(counts) == 1 else counts


def _count_table(budget: Budget) -> Table:
    width = budget.equal_parameter_width
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    rows = [
        ("block", f"{budget.kind}, d_model {budget.d_model:,}, d_ff {budget.d_ff:,}, {budget.dtype}"),
        ("input", f"{budget.batch:,} × {budget.tokens:,} tokens, {budget.layers:,} layer{'s' * (budget.layers != 1)}"),
        ("parameters", f"{budget.parameters:,} ({byte_count(budget.parameter_bytes)})"),
        ("per layer", f"{budget.parameters_per_layer:,}"),
        ("per token", f"{budget.macs_per_token:,} MACs, {budget.flops_per_token:,} FLOPs, in each layer"),
        ("all tokens", f"{budget.flops:,} FLOPs"),
        ("same parameters", f"gated width {width.exact} = {width.value:.2f}, {width.rounded:,} as a multiple"),
    ]
    for label, value in rows:
        grid.add_row(label, value)
    for stage, activation in budget.activations.items():
        grid.add_row(f"stage {stage}", f"{activation.elements:,} elements ({byte_count(activation.bytes)})")
    return grid


def _sweep_table(answer: BudgetAnswer) -> Table:
    swept = answer.swept or "size"
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for title in (f"\n{swept}", "\nparameters", "\nbytes", "hidden\nelements", "FLOPs\nper token", "\nFLOPs"):
        table.add_column(title, justify="right", no_wrap=True)
    for point in answer.sweep:
        size: int = getattr(point, swept)
        table.add_row(
            f"{size:,}",
            f"{point.parameters:,}",
            byte_count(point.parameter_bytes),
            f"{point.hidden_elements:,}",
            f"{point.flops_per_token:,}",
            f"{point.flops:,}",
        )
    return table
