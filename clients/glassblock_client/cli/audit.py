"""`glassblock audit`: the gate that a checkpoint passes before it ships."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from glassblock.errors import InvalidValue
from glassblock.reports import REPORTS
from glassblock.wire.audits import Report

from glassblock_client.cli.connection import CheckpointArgument, DeviceOption, TimeoutOption, UrlOption, connected_to
from glassblock_client.cli.files import read_json_object, require_writable, write_whole
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
    against: Annotated[
        Path | None,
        typer.Option(help="Another engine's config (JSON): differences are errors.", show_default=False),
    ] = None,
    family: Annotated[
        str | None, typer.Option(help="Row of the family table, where no config names one.", show_default=False)
    ] = None,
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

    1: a finding at or above --fail-on.

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
    config = None if against is None else read_json_object(against, option="--against")
    with (
        connected_to(context, path, url=url, timeout=timeout, device=device) as (client, name),
        progress_bar(f"auditing {name}") as on_progress,
    ):
        report = client.audit_checkpoint(
            name,
            family=family,
            against=config,
            against_name="against" if against is None else f"{against} (--against)",
            rules=chosen,
            certify=certify,
            on_progress=on_progress,
        )
    render = REPORTS[report_format].render
    if output is None:
        sys.stdout.write(render(report, width=columns(), colour=coloured()))
    else:
        write_whole(output, [render(report, width=FILE_COLUMNS).encode()])
        tell(f"{report.verdict}: the report is in {output}")
    return exit_status(report, fail_on=fail_on, allow_inconclusive=allow_inconclusive)


def exit_status(report: Report, *, fail_on: FailOn, allow_inconclusive: bool) -> int:
    """What a pipeline sees of a report."""
    if any(finding.level in FAILING[fail_on] for finding in report.findings):
        return 1
    return 3 if report.verdict == "inconclusive" and not allow_inconclusive else 0
