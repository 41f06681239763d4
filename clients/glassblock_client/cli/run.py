"""`glassblock run`: one block with its stages captured, as it is or changed in one respect."""

import sys
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer
from glassblock.errors import InvalidValue
from glassblock.reports.wording import byte_count
from glassblock.wire.blocks import ALL_STAGES, BlockPart, BlockRunAnswer, Overrides, StageStatistics
from glassblock.wire.framing import frame
from glassblock.wire.printable import printable
from glassblock.wire.values import ComputeDtype, PlacementName, RunStage, Sourced
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
from glassblock_client.cli.files import require_writable, write_whole
from glassblock_client.cli.inputs import (
    InputOption,
    SampleOption,
    SeedOption,
    TextOption,
    TokenIdsOption,
    TokensOption,
    chosen_input,
)
from glassblock_client.cli.lists import expert_of
from glassblock_client.cli.screen import show, working
from glassblock_client.cli.streams import tell
from glassblock_client.exchange import compose
from glassblock_client.tensors import wire_from_array

FormatOption = Annotated[Literal["text", "json"], typer.Option("--format", help="A table, or the answer as JSON.")]


def run(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    layer: Annotated[int, typer.Option(help="Layer, counted from 0.", show_default=False)],
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    tower: TowerOption = None,
    part: Annotated[BlockPart, typer.Option(help="The feed-forward block, attention, or the whole layer.")] = "ffn",
    expert: Annotated[
        str | None, typer.Option(metavar="N|shared", help="One network of a mixture alone.", show_default=False)
    ] = None,
    input_file: InputOption = None,
    sample: SampleOption = None,
    seed: SeedOption = None,
    token_ids: TokenIdsOption = None,
    text: TextOption = None,
    tokens: TokensOption = None,
    capture: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE,...",
            help=f"Stages: {', '.join(ALL_STAGES)}, those of attention and of mixtures. Every one when left out.",
            show_default=False,
        ),
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
    """Run a part of one layer and show its stages.

    The feed-forward block where nothing else is said. A text is run through the layers below first.
    """
    stages = None if capture is None else tuple(stage.strip() for stage in capture.split(",") if stage.strip())
    if stages is not None and not stages:
        raise InvalidValue("--capture names no stage", field="capture", known=get_args(RunStage))
    network = expert_of(expert)
    given = chosen_input(input_file, sample, seed, token_ids=token_ids, text=text, tokens=tokens)
    row = read_family_row(family, family_file)
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
        reply = as_job_where_long(
            client,
            lambda asked: asked.run_block(
                name,
                layer,
                part=part,
                expert=network,
                capture=cast("tuple[RunStage, ...] | None", stages),
                overrides=overrides,
                family=family,
                family_row=row,
                tower=tower,
                return_tensors=output is not None,
                **given,
            ),
        )
    if output is not None:
        tensors = {stage: wire_from_array(array, field=stage) for stage, array in reply.tensors.items()}
        write_whole(output, frame("response", reply.answer.model_dump_json(), tensors))
        tell(f"{', '.join(tensors)}: written to {output}")
    if answer_format == "json":
        sys.stdout.write(reply.answer.model_dump_json(indent=2) + "\n")
    else:
        show([_facts(reply.answer), *([Text(), _stage_table(reply.answer)] if reply.answer.stages else [])])


def _facts(answer: BlockRunAnswer) -> Table:
    error = answer.recombination_error
    activation = [] if answer.activation is None else [told(answer.activation)]
    where = "" if answer.part == "ffn" else f", {answer.part}"
    dtypes = {statistics.dtype for statistics in answer.stages.values()}
    rows = [
        ("family", f"{answer.family} (verified: {answer.verified})"),
        ("run as", ", ".join((f"{answer.placement}-norm", *activation, f"{answer.compute_dtype} on {answer.device}"))),
        *((f"eps {norm}", told(eps)) for norm, eps in answer.eps.items()),
        *([("stages", f"all in {dtypes.pop()}")] if len(dtypes) == 1 else []),
        *([("changed", _changes(answer))] if answer.overrides else []),
        ("size", f"{answer.parameters:,} parameters, {answer.hidden_elements:,} hidden elements"),
        ("read", f"{byte_count(answer.read.bytes)} in {answer.read.tensors} tensor{'s' * (answer.read.tensors != 1)}"),
        ("recombination", "not captured" if error is None else f"{error:.1e} of the largest output"),
        *(("note", note) for note in answer.notes),
    ]
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("block", Text(printable(f"{answer.checkpoint}, layer {answer.layer}{where}"), "bold"))
    for label, value in rows:
        grid.add_row(printable(label), printable(value))
    return grid


def _changes(answer: BlockRunAnswer) -> str:
    """What the block is not as it stands in the files: `gate and up exchanged, eps 1e-05`."""
    return ", ".join(
        "gate and up exchanged" if name == "swap" else f"{name.replace('_', ' ')} {value}"
        for name, value in answer.overrides.items()
    )


def told(sourced: Sourced) -> str:
    """A value with its source."""
    return f"{sourced.value} ({sourced.source})"


def _stage_table(answer: BlockRunAnswer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    troubles = {stage: _trouble(statistics) for stage, statistics in answer.stages.items()}
    table.add_column("stage", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    several = len({statistics.dtype for statistics in answer.stages.values()}) > 1
    if several:
        table.add_column("type", no_wrap=True)
    for title in ("mean", "rms", "min", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    if any(troubles.values()):
        table.add_column("trouble")
    for stage, statistics in answer.stages.items():
        numbers = (statistics.mean, statistics.rms, statistics.min, statistics.max)
        shape = "×".join(str(axis) for axis in statistics.shape)
        dtype = [statistics.dtype] if several else []
        cells = [Text(stage, "bold"), shape, *dtype, *(f"{number:.4g}" for number in numbers)]
        table.add_row(*cells, *([Text(troubles[stage], "red")] if any(troubles.values()) else []))
    return table


def _trouble(statistics: StageStatistics) -> str:
    told = [f"{statistics.non_finite:,} not finite"] if statistics.non_finite else []
    return ", ".join(told + (["overflows float16"] if statistics.fp16_overflow else []))
