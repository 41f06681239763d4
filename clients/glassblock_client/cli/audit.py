"""`glassblock audit`: the gate that a checkpoint passes before it ships."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import typer
from glassblock.errors import GlassblockError, InvalidValue
from glassblock.reports import REPORTS
from glassblock.reports.baseline import Baseline, baseline_of, compared, read_baseline, written
from glassblock.wire.audits import Report

from glassblock_client.cli.connection import (
    CheckpointArgument,
    DeviceOption,
    TimeoutOption,
    UrlOption,
    connected_to_all,
    root_and_name,
)
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, read_family_row
from glassblock_client.cli.files import config_in, read_json_object, require_writable, write_whole
from glassblock_client.cli.inputs import TextOption, TokensOption, chosen_text
from glassblock_client.cli.lists import rules_of
from glassblock_client.cli.screen import coloured, columns
from glassblock_client.cli.streams import tell
from glassblock_client.progress import progress_bar

WitnessIdsOption = Annotated[
    str | None,
    typer.Option(
        "--token-ids",
        metavar="ID,...",
        help="A text, as a witness beside the weights.",
        show_default=False,
    ),
]

FILE_COLUMNS = 100
FailOn = Literal["error", "warning", "never"]
FAILING = {"error": {"error"}, "warning": {"error", "warning"}, "never": set[str]()}


def audit(
    context: typer.Context,
    path: CheckpointArgument,
    *,
    report_format: Annotated[str, typer.Option("--format", help=f"One of {', '.join(REPORTS)}.")] = "text",
    output: Annotated[
        Path | None,
        typer.Option(help="Write the report to this file, whole or not at all.", readable=False, show_default=False),
    ] = None,
    fail_on: Annotated[FailOn, typer.Option(help="Lowest level of a finding that makes the exit status 1.")] = "error",
    allow_inconclusive: Annotated[
        bool, typer.Option("--allow-inconclusive", help="Exit 0, not 3, when such a question stayed open.")
    ] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="What is known already: a JSON report, or a file of --write-baseline. Only other findings fail.",
            readable=False,
            show_default=False,
        ),
    ] = None,
    write_baseline: Annotated[
        Path | None,
        typer.Option(
            help="Write every finding to this file, to be known from now on.", readable=False, show_default=False
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            help="Another engine's config (JSON), or a folder with one: differences are errors.", show_default=False
        ),
    ] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Another checkpoint: every tensor is compared with its counterpart. Several times: which tensors are "
            "made of which. With --url its name there.",
            show_default=False,
        ),
    ] = None,
    captures: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Tensors captured in an engine, to explain layer by layer. With --url their name there.",
            show_default=False,
        ),
    ] = None,
    token_ids: WitnessIdsOption = None,
    text: TextOption = None,
    tokens: TokensOption = None,
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    rules: Annotated[str | None, typer.Option(metavar="RULE,...", help="Only these rules.", show_default=False)] = None,
    certify: Annotated[
        bool,
        typer.Option("--certify", help="Certify every tensor, not suspects alone; ask a text of every layer."),
    ] = False,
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> int:
    """Name the mistakes in a checkpoint that raise no error.

    Exit status 0: no finding at or above --fail-on, but those that a baseline knows.

    1: such a finding.

    2: no report was possible.

    3: no such finding, but a question that counts stayed open: whether gate and up are exchanged, where no layer could
    be decided; what --against, --reference or --captures asked; a rotary order in doubt. The report says what would
    decide.
    """
    if report_format not in REPORTS:
        raise InvalidValue(f"--format: no format {report_format!r}", field="format", known=tuple(REPORTS))
    chosen = rules_of(rules)
    if output is not None:
        require_writable(output)
    if write_baseline is not None:
        require_writable(write_baseline, option="--write-baseline")
    known = None
    if baseline is not None:
        known = read_baseline(read_json_object(baseline, option="--baseline"), name=f"--baseline: {baseline}")
    row = read_family_row(family, family_file)
    given = {} if token_ids is text is tokens is None else chosen_text(token_ids, text, tokens)
    config = None if against is None else read_json_object(config_in(against), option="--against")
    references = reference or []
    beside = ("--captures", captures), *(("--reference", other) for other in references)
    with (
        connected_to_all(context, path, beside, url=url, timeout=timeout, device=device) as (
            client,
            name,
            (recorded, *named),
        ),
        progress_bar(f"auditing {name}") as on_progress,
    ):
        report = client.audit_checkpoint(
            name,
            family=family,
            family_row=row,
            against=config,
            against_name="against" if against is None else f"{against} (--against)",
            rules=chosen,
            certify=certify,
            reference=_one_or_several(named),
            captures=recorded,
            **given,
            on_progress=on_progress,
        )
        table = None
        if REPORTS[report_format].explains:
            with suppress(GlassblockError):  # the report is there, and is not lost for want of its rules' words
                table = client.rules()
    if not url and Path(path).is_file():  # many folders hold a file of that name
        titled = f"{root_and_name(path)[0].name}/{report.checkpoint.path}".lstrip("/")
        report = report.model_copy(update={"checkpoint": report.checkpoint.model_copy(update={"path": titled})})
    if known is not None:
        report = _beside(known, report, name=str(baseline))
    if write_baseline is not None:
        write_whole(write_baseline, [written(baseline_of(report)).encode()])
        count = len(report.findings)
        tell(f"{count} finding{' is' if count == 1 else 's are'} known from now on: {write_baseline}")
    render = REPORTS[report_format].render
    asked = arguments_of_fix(
        path,
        ("--family", family),
        ("--family-file", family_file),
        ("--against", against),
        ("--reference", references[0] if len(references) == 1 else None),
        ("--url", url),
    )
    place = None if url else _place_here(path)
    if output is None:
        sys.stdout.write(render(report, width=columns(), colour=coloured(), asked=asked, rules=table, place=place))
    else:
        write_whole(output, [render(report, width=FILE_COLUMNS, asked=asked, rules=table, place=place).encode()])
        tell(f"{outcome(report)}: the report is in {output}")
    return exit_status(report, fail_on=fail_on, allow_inconclusive=allow_inconclusive)


def _beside(known: Baseline, report: Report, *, name: str) -> Report:
    if known.checkpoint != report.checkpoint.path:  # of a build of another name, or given by mistake
        tell(f"{name} was made of {known.checkpoint}; this is {report.checkpoint.path}")
    return compared(report, known, name=name)


def _one_or_several(names: Sequence[str | None]) -> str | list[str] | None:
    given = [name for name in names if name is not None]
    return None if not given else given[0] if len(given) == 1 else given


def _place_here(path: str) -> str | None:
    """Where a checkpoint lies below the current folder, which code hosts take for the repository's; None elsewhere."""
    place = Path(os.path.relpath(path))
    return None if ".." in place.parts or place.is_absolute() else place.as_posix()


def arguments_of_fix(path: str, *options: tuple[str, str | Path | None]) -> str:
    """What `glassblock fix` must be told to see what this audit saw, as a shell reads it."""
    words = [path]
    for name, value in options:
        if value is not None and not (name == "--url" and "@" in str(value)):  # a password is not repeated
            words += [name, str(value)]
    return shlex.join(words)


def outcome(report: Report) -> str:
    """The verdict, and what of it a baseline knows already."""
    known = sum(finding.known for finding in report.findings)
    if not known:
        return report.verdict
    count = len(report.findings)
    if known < count:
        return f"{report.verdict}, {known} of {count} findings known in the baseline"
    return f"{report.verdict}, {'its one finding' if count == 1 else f'all {count} findings'} known in the baseline"


def exit_status(report: Report, *, fail_on: FailOn, allow_inconclusive: bool) -> int:
    """What a pipeline sees of a report."""
    if any(finding.level in FAILING[fail_on] and not finding.known for finding in report.findings):
        return 1
    return 3 if report.verdict == "inconclusive" and not allow_inconclusive else 0
