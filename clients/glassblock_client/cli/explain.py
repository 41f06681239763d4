"""`glassblock explain`: which mistake explains tensors captured elsewhere."""

import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from glassblock.reports.ranges import layer_ranges
from glassblock.wire.audits import Progress
from glassblock.wire.explain import ExplainAnswer, RankedHypothesis, Verdict
from glassblock.wire.printable import printable
from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.captures import Stages, read_captures
from glassblock_client.cli.connection import (
    CheckpointArgument,
    DeviceOption,
    TimeoutOption,
    UrlOption,
    as_job_where_long,
    connected_to,
)
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, TowerOption, read_family_row
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import show
from glassblock_client.client import Client
from glassblock_client.progress import progress_bar

STATUS: dict[Verdict, int] = {"as-declared": 0, "explained": 1, "indistinguishable": 3, "unexplained": 3}
COLOURS: dict[Verdict, str] = {
    "as-declared": "green",
    "explained": "red",
    "indistinguishable": "yellow",
    "unexplained": "yellow",
}
LISTED = 8


def explain(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    captures: Annotated[
        Path,
        typer.Option(
            metavar="FILE|DIR",
            help="Captured stages: a .safetensors file, or a folder of them with one for each layer.",
            show_default=False,
        ),
    ],
    layer: Annotated[
        int | None,
        typer.Option(help="Layer, counted from 0; all that were recorded when left out.", show_default=False),
    ] = None,
    pairs: Annotated[bool, typer.Option(help="Look for two mistakes where one explains nothing.")] = True,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    tower: TowerOption = None,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> int:
    """Name the mistake that explains tensors captured elsewhere.

    Of many recorded layers, the first that departs from the checkpoint is explained.

    Exit status 0: as declared.

    1: a mistake, or two, explain the captures.

    2: no answer was possible.

    3: several explain them alike, or none does.
    """
    row = read_family_row(family, family_file)
    recorded = read_captures(captures, layer)
    answers: list[ExplainAnswer] = []
    with (
        connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name),
        progress_bar(f"explaining {name}") as on_progress,
    ):
        for done, (number, stages) in enumerate(recorded.items()):
            on_progress(Progress(done=done, total=len(recorded), message=f"layer {number}"))
            ask = partial(_asked, name, number, stages, family=family, family_row=row, tower=tower, pairs=pairs)
            answers.append(as_job_where_long(client, ask))
            if answers[-1].verdict != "as-declared":
                break
    last = answers[-1]
    if answer_format == "json":
        sys.stdout.write(_as_json(answers, asked=layer) + "\n")
    else:
        show(_of_all(answers) if len(recorded) > 1 else _told(last))
    return STATUS[last.verdict]


def _asked(name: str, layer: int, stages: Stages, client: Client, **how: Any) -> ExplainAnswer:
    return client.explain_block(name, layer, stages, **how)


def _as_json(answers: list[ExplainAnswer], *, asked: int | None) -> str:
    """The answer about the layer asked for; of many layers all answers, and the number of the first that departs."""
    if asked is not None:
        return answers[-1].model_dump_json(indent=2)
    departs = answers[-1].layer if answers[-1].verdict != "as-declared" else None
    layers = [json.loads(answer.model_dump_json()) for answer in answers]
    return json.dumps({"first_departure": departs, "layers": layers}, indent=2)


def _of_all(answers: list[ExplainAnswer]) -> Iterator[RenderableType]:
    """Of many layers: the first that departs in full; where none does, each in a line."""
    *good, last = answers
    if last.verdict != "as-declared":
        before = f"{layer_ranges(answer.layer for answer in good)}: as declared; " if good else ""
        after = "those after it were not looked at"
        yield Text(f"{before}the first that departs is layer {last.layer}; {after}")
        yield Text()
        yield from _told(last)
        return
    yield Text(f"all {len(answers)} recorded layers are as declared", COLOURS["as-declared"])
    yield Text()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for title in ("layer", "tokens", "residual", "floor", "not excluded"):
        table.add_column(title, justify="right", no_wrap=True)
    for answer in answers:
        best = answer.ranked[0]
        numbers = f"{answer.tokens:,}", f"{best.residual:.2g}", f"{best.floor:.2g}", f"{len(answer.not_excluded)}"
        table.add_row(f"{answer.layer}", *numbers)
    yield table
    if any(answer.not_excluded for answer in answers):
        yield Text()
        yield Text("what these captures would not show, and what would: --layer N tells it of one layer", "dim")


def _deciders(answer: ExplainAnswer) -> list[str]:
    """What would decide, each once; of tokens that are quiet enough for one, the one that is for all."""
    quiet = [decider for decider in answer.would_decide if decider.by == "token" and decider.needed is not None]
    quietest = min(quiet, key=lambda decider: decider.needed or 0.0, default=None)
    others = (decider for decider in answer.would_decide if decider not in quiet or decider is quietest)
    return list(dict.fromkeys(decider.message for decider in others))


def _told(answer: ExplainAnswer) -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("block", Text(printable(f"{answer.checkpoint}, layer {answer.layer}"), "bold"))
    grid.add_row("verdict", Text(answer.verdict, f"bold {COLOURS[answer.verdict]}"))
    grid.add_row("", printable(answer.message))
    grid.add_row("captured", f"{', '.join(answer.captured)}; {answer.tokens:,} tokens in {answer.capture_dtype}")
    for other in answer.not_excluded[:LISTED]:
        grid.add_row("not excluded", printable(other.hypothesis))
    if len(answer.not_excluded) > LISTED:
        grid.add_row("", f"and {len(answer.not_excluded) - LISTED} more; --format json lists all")
    for message in _deciders(answer)[:LISTED]:
        grid.add_row("would decide", printable(message))
    for note in answer.notes:
        grid.add_row("note", printable(note))
    yield grid
    yield Text()
    yield _ranking(answer)
    yield Text()
    yield _stages(answer.ranked[0])


def _ranking(answer: ExplainAnswer) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("hypothesis", overflow="fold")
    for title in ("residual", "floor"):
        table.add_column(title, justify="right", no_wrap=True)
    nearer = [_nearer(ranked) for ranked in answer.ranked]
    if any(nearer):
        table.add_column("nearer in", justify="right", no_wrap=True)
    for ranked, won in zip(answer.ranked, nearer, strict=True):
        cells = [printable(ranked.hypothesis), f"{ranked.residual:.2g}", f"{ranked.floor:.2g}"]
        table.add_row(*cells, *([won] if any(nearer) else []), style="bold" if ranked.at_floor else "")
    return table


def _nearer(ranked: RankedHypothesis) -> str:
    """In how many of the places that differ the hypothesis is nearer; nothing where none do."""
    votes = ranked.votes
    return "" if votes is None or not votes.differing else f"{votes.won:,} of {votes.differing:,} {votes.unit}"


def _stages(ranked: RankedHypothesis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("replayed from")
    for title in ("residual", "floor"):
        table.add_column(title, justify="right", no_wrap=True)
    for stage in ranked.stages:
        style = "" if stage.at_floor else "red"
        cells = (stage.stage, ", ".join(stage.sources), f"{stage.residual:.2g}", f"{stage.floor:.2g}")
        table.add_row(*cells, style=style)
    return table
