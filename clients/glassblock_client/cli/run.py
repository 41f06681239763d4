"""`glassblock run`: one block with its stages captured, as it is or changed in one respect."""

import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import typer
from glassblock.errors import InvalidValue
from glassblock.reports.text import byte_count
from glassblock.wire.blocks import ALL_STAGES, BlockRunAnswer, Overrides, StageStatistics
from glassblock.wire.framing import WireTensor, frame
from glassblock.wire.printable import printable
from glassblock.wire.values import ComputeDtype, PlacementName, Sample, Sourced, Stage
from rich import box
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.connection import CheckpointArgument, DeviceOption, TimeoutOption, UrlOption, connected_to
from glassblock_client.cli.files import read_x, require_writable, write_whole
from glassblock_client.cli.screen import show, working
from glassblock_client.cli.streams import tell
from glassblock_client.exchange import compose
from glassblock_client.tensors import wire_from_array

InputOption = Annotated[
    Path | None,
    typer.Option("--input", metavar="FILE", help="x: in a .safetensors file, or an .npy file.", show_default=False),
]
SampleOption = Annotated[
    int | None,
    typer.Option(
        "--sample", metavar="ROWS", help="So many rows of the checkpoint's embedding as x.", show_default=False
    ),
]
SeedOption = Annotated[
    int | None, typer.Option("--seed", help="Of the sample's draw; 0 when left out.", show_default=False)
]
FormatOption = Annotated[Literal["text", "json"], typer.Option("--format", help="A table, or the answer as JSON.")]


def run(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    layer: Annotated[int, typer.Option(help="Layer, counted from 0.", show_default=False)],
    input_file: InputOption = None,
    sample: SampleOption = None,
    seed: SeedOption = None,
    capture: Annotated[
        str | None,
        typer.Option(metavar="STAGE,...", help=f"Stages of {', '.join(ALL_STAGES)}; all.", show_default=False),
    ] = None,
    eps: Annotated[
        float | None, typer.Option(help="Epsilon of the norms.", rich_help_panel="What if", show_default=False)
    ] = None,
    activation: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another activation.", rich_help_panel="What if", show_default=False),
    ] = None,
    swap: Annotated[bool, typer.Option("--swap", help="Exchange gate and up.", rich_help_panel="What if")] = False,
    norm_offset: Annotated[
        float | None,
        typer.Option(help="Added to the stored gain.", rich_help_panel="What if", show_default=False),
    ] = None,
    norm_kind: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Another norm arithmetic.", rich_help_panel="What if", show_default=False),
    ] = None,
    placement: Annotated[
        PlacementName | None,
        typer.Option(help="The norm elsewhere.", rich_help_panel="What if", show_default=False),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(help="Only the first so many hidden units.", rich_help_panel="What if", show_default=False),
    ] = None,
    dtype: Annotated[
        ComputeDtype | None,
        typer.Option(help="Every step in this type.", rich_help_panel="What if", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the stages to this .safetensors file.", readable=False, show_default=False
        ),
    ] = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> None:
    """Run one feed-forward block and show its stages."""
    stages = ALL_STAGES if capture is None else tuple(stage.strip() for stage in capture.split(",") if stage.strip())
    if not stages:
        raise InvalidValue("--capture names no stage", field="capture", known=ALL_STAGES)
    x, rows = chosen_input(input_file, sample, seed)
    overrides = compose(
        Overrides,
        eps=eps,
        activation=activation,
        swap=swap,
        norm_offset=norm_offset,
        norm_kind=norm_kind,
        placement=placement,
        width=width,
        dtype=dtype,
    )
    if output is not None:
        require_writable(output)
    with (
        connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name),
        working(f"running layer {layer}"),
    ):
        reply = client.run_block(
            name,
            layer,
            x=x,
            sample=rows,
            capture=cast("tuple[Stage, ...]", stages),
            overrides=overrides,
            return_tensors=output is not None,
        )
    if output is not None:
        tensors = {stage: wire_from_array(array, field=stage) for stage, array in reply.tensors.items()}
        write_whole(output, frame("response", reply.answer.model_dump_json(), tensors))
        tell(f"{', '.join(tensors)}: written to {output}")
    if answer_format == "json":
        sys.stdout.write(reply.answer.model_dump_json(indent=2) + "\n")
    else:
        show([_facts(reply.answer), Text(), _stage_table(reply.answer)])


def chosen_input(file: Path | None, rows: int | None, seed: int | None) -> tuple[WireTensor | None, Sample | None]:
    """What goes into the block: a file's `x`, or a sample.

    Raises:
        InvalidValue: neither, both, or a seed of no sample.
    """
    if (file is None) == (rows is None):
        raise InvalidValue("give one of --input FILE and --sample ROWS", field="input")
    if file is not None:
        if seed is not None:
            raise InvalidValue("--seed has no effect without --sample", field="seed")
        return read_x(file), None
    return None, compose(Sample, rows=rows or 0, seed=seed or 0)


def _facts(answer: BlockRunAnswer) -> Table:
    error = answer.recombination_error
    rows = [
        ("family", f"{answer.family} (verified: {answer.verified})"),
        ("run as", f"{answer.placement}-norm, {told(answer.activation)}, {answer.compute_dtype} on {answer.device}"),
        *((f"eps {norm}", told(eps)) for norm, eps in answer.eps.items()),
        ("size", f"{answer.parameters:,} parameters, {answer.hidden_elements:,} hidden elements"),
        ("read", f"{byte_count(answer.read.bytes)} in {answer.read.tensors} tensors"),
        ("recombination", "not captured" if error is None else f"{error:.1e} of the largest output"),
        *(("note", note) for note in answer.notes),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("block", Text(printable(f"{answer.checkpoint}, layer {answer.layer}"), "bold"))
    for label, value in rows:
        grid.add_row(printable(label), printable(value))
    return grid


def told(sourced: Sourced) -> str:
    """A value with its source."""
    return f"{sourced.value} ({sourced.source})"


def _stage_table(answer: BlockRunAnswer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    troubles = {stage: _trouble(statistics) for stage, statistics in answer.stages.items()}
    table.add_column("stage", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("type")
    for title in ("mean", "rms", "min", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    if any(troubles.values()):
        table.add_column("trouble")
    for stage, statistics in answer.stages.items():
        numbers = (statistics.mean, statistics.rms, statistics.min, statistics.max)
        shape = "×".join(str(axis) for axis in statistics.shape)
        cells = [Text(stage, "bold"), shape, statistics.dtype, *(f"{number:.4g}" for number in numbers)]
        table.add_row(*cells, *([Text(troubles[stage], "red")] if any(troubles.values()) else []))
    return table


def _trouble(statistics: StageStatistics) -> str:
    told = [f"{statistics.non_finite:,} not finite"] if statistics.non_finite else []
    return ", ".join(told + (["overflows float16"] if statistics.fp16_overflow else []))
