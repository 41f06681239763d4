"""`glassblock audit`: the gate that a checkpoint passes before it ships."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from glassblock.errors import InvalidValue
from glassblock.reports import REPORTS
from glassblock.reports.baseline import baseline_of, compared, read_baseline, written
from glassblock.wire.audits import Report

from glassblock_client.cli.connection import (
    CheckpointArgument,
    DeviceOption,
    TimeoutOption,
    UrlOption,
    connected_to_all,
)
from glassblock_client.cli.family import FamilyFileOption, FamilyOption, read_family_row
from glassblock_client.cli.files import config_in, read_json_object, require_writable, write_whole
from glassblock_client.cli.screen import coloured, columns, progress_bar
from glassblock_client.cli.streams import tell

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
        bool, typer.Option("--allow-inconclusive", help="Exit 0, not 3, when a question stayed open.")
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
        str | None,
        typer.Option(
            metavar="PATH",
            help="Another checkpoint: every tensor is compared with its counterpart. With --url its name there.",
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
    family: FamilyOption = None,
    family_file: FamilyFileOption = None,
    rules: Annotated[str | None, typer.Option(metavar="RULE,...", help="Only these rules.", show_default=False)] = None,
    certify: Annotated[
        bool, typer.Option("--certify", help="Certify the p-value of every tensor, not of suspects alone.")
    ] = False,
    url: UrlOption = None,
    timeout: TimeoutOption = None,
    device: DeviceOption = None,
) -> int:
    """Name the mistakes in a checkpoint that raise no error.

    Exit status 0: nothing found.

    1: a finding at or above --fail-on, which no baseline knows.

    2: no report was possible.

    3: no such finding, but a question stayed open.
    """
    if report_format not in REPORTS:
        raise InvalidValue(f"--format: no format {report_format!r}", field="format", known=tuple(REPORTS))
    chosen = None if rules is None else [rule.strip() for rule in rules.split(",") if rule.strip()]
    if chosen == []:
        raise InvalidValue("--rules names no rule", field="rules", hint="`glassblock rules` lists them")
    if output is not None:
        require_writable(output)
    if write_baseline is not None:
        require_writable(write_baseline, option="--write-baseline")
    known = None
    if baseline is not None:
        known = read_baseline(read_json_object(baseline, option="--baseline"), name=f"--baseline: {baseline}")
    row = read_family_row(family, family_file)
    config = None if against is None else read_json_object(config_in(against), option="--against")
    with (
        connected_to_all(context, path, (reference, captures), url=url, timeout=timeout, device=device) as (
            client,
            name,
            (other, recorded),
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
            reference=other,
            captures=recorded,
            on_progress=on_progress,
        )
    if known is not None:
        report = compared(report, known, name=str(baseline))
    if write_baseline is not None:
        write_whole(write_baseline, [written(baseline_of(report)).encode()])
        tell(f"{len(report.findings)} findings are known from now on: {write_baseline}")
    render = REPORTS[report_format].render
    if output is None:
        sys.stdout.write(render(report, width=columns(), colour=coloured()))
    else:
        write_whole(output, [render(report, width=FILE_COLUMNS).encode()])
        tell(f"{report.verdict}: the report is in {output}")
    return exit_status(report, fail_on=fail_on, allow_inconclusive=allow_inconclusive)


def exit_status(report: Report, *, fail_on: FailOn, allow_inconclusive: bool) -> int:
    """What a pipeline sees of a report."""
    if any(finding.level in FAILING[fail_on] and not finding.known for finding in report.findings):
        return 1
    return 3 if report.verdict == "inconclusive" and not allow_inconclusive else 0
