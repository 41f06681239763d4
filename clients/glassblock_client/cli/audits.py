"""`glassblock audits`: the audits and other jobs of a service, listed, followed, cancelled."""

import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from glassblock.errors import InvalidValue, ServiceUnavailable
from glassblock.reports import REPORTS
from glassblock.wire.audits import ENDED, Audit, AuditEvent, AuditList
from glassblock.wire.endpoints import START_AUDIT
from glassblock.wire.printable import printable
from rich import box
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.audit import exit_status
from glassblock_client.cli.connection import TimeoutOption, UrlOption, connected
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import coloured, columns, show
from glassblock_client.cli.streams import tell
from glassblock_client.client import Client
from glassblock_client.jobs import OnEvent, ended_well, report_of
from glassblock_client.progress import progress_bar

RECONNECTS = 10
RECONNECT_SECONDS = 2.0
STYLES = {"queued": "dim", "running": "cyan", "succeeded": "green", "failed": "red", "cancelled": "yellow"}
State = Literal["queued", "running", "succeeded", "failed", "cancelled"]


def audits(
    context: typer.Context,
    *,
    follow: Annotated[
        str | None, typer.Option(metavar="ID", help="Follow this audit to its report.", show_default=False)
    ] = None,
    cancel: Annotated[str | None, typer.Option(metavar="ID", help="Cancel this audit.", show_default=False)] = None,
    state: Annotated[State | None, typer.Option(help="Only those in this state.", show_default=False)] = None,
    operation: Annotated[
        str | None, typer.Option(help="Only those of this operation, jacobians for instance.", show_default=False)
    ] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Only those of this checkpoint.", show_default=False)] = None,
    since: Annotated[
        datetime | None,
        typer.Option(help="Only those created then or later, UTC.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=500, help="How many at most.")] = 20,
    answer_format: FormatOption = "text",
    url: UrlOption = None,
    timeout: TimeoutOption = None,
) -> int:
    """List, follow or cancel the audits of a service.

    And whatever else was asked for as a job. Without --follow and --cancel the newest come first. Exit status of
    --follow: that of `glassblock audit`; of another operation, whose answer is printed as JSON, 0.
    """
    if not url:
        raise InvalidValue(
            "no service to ask: one in this process has no history",
            field="url",
            hint="give --url, or set GLASSBLOCK_URL",
        )
    if follow is not None and cancel is not None:
        raise InvalidValue("give one of --follow and --cancel", field="follow")
    with connected(context, url=url, timeout=timeout, device=None) as client:
        if follow is not None:
            return _follow(client, follow, as_json=answer_format == "json")
        if cancel is not None:
            found = AuditList(audits=(client.cancel_audit(cancel),))
        else:
            zoned = None if since is None else since.replace(tzinfo=UTC)
            found = client.audits(state=state, operation=operation, checkpoint=checkpoint, since=zoned, limit=limit)
    if answer_format == "json":
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        show([_table(found)])
        if found.next is not None:
            tell(f"there are more: --limit, up to 500, or --since; the next begins at cursor {found.next}")
    return 0


def _follow(client: Client, audit_id: str, *, as_json: bool) -> int:
    if as_json:
        audit = _events(client, audit_id, _write_now)
    else:
        with progress_bar(f"job {audit_id}") as on_progress:

            def on_event(event: AuditEvent) -> None:
                if event.finding is not None:
                    tell(printable(f"{event.finding.level}: {event.finding.rule}: {event.finding.message}"))
                on_progress(event.progress)

            audit = _events(client, audit_id, on_event)
    ended_well(audit)
    if audit.operation != START_AUDIT.name:
        if not as_json:
            sys.stdout.write(client.audit_answer(audit_id).answer.model_dump_json(indent=2) + "\n")
        return 0
    report = report_of(audit)
    if not as_json:
        sys.stdout.write(REPORTS["text"].render(report, width=columns(), colour=coloured()))
    return exit_status(report, fail_on="error", allow_inconclusive=False)


def _write_now(event: AuditEvent) -> None:
    sys.stdout.write(event.model_dump_json() + "\n")
    sys.stdout.flush()  # whoever reads a pipe follows too


def _events(client: Client, audit_id: str, on_event: OnEvent) -> Audit:
    """The audit once it has ended; every event of it once, over some broken connections without anything new too."""
    last, left = None, RECONNECTS

    def note(event: AuditEvent) -> None:
        nonlocal last, left
        last, left = str(event.id), RECONNECTS
        on_event(event)

    while True:
        try:
            client.audit_events(audit_id, last_event_id=last, on_event=note)
            return _ended(client.audit(audit_id))
        except ServiceUnavailable as error:
            if not left:
                raise
            left -= 1
            tell(printable(f"{error.message}; trying again"))
            time.sleep(RECONNECT_SECONDS)


def _ended(audit: Audit) -> Audit:
    if audit.state not in ENDED:
        raise ServiceUnavailable(f"job {audit.id} is still {audit.state}", hint="follow it again")
    return audit


def _table(found: AuditList) -> Table:
    """Four columns, so that at 80 characters none but the last is ever broken into lines, and none is cut."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim", padding=(0, 1, 0, 0))
    for title in ("id", "created", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("job", overflow="fold")
    for audit in found.audits:
        table.add_row(
            audit.id,
            "" if audit.created is None else f"{audit.created:%m-%d %H:%M}",
            Text(" ".join((audit.state, *_progress(audit))), STYLES[audit.state]),
            printable(" ".join((audit.operation.removeprefix("start_"), audit.checkpoint)).rstrip()),
        )
    return table


def _progress(audit: Audit) -> tuple[str, ...]:
    """How much of it is done, while that says something."""
    done, total = audit.progress.done, audit.progress.total
    return (f"{done / total:.0%}",) if total and audit.state in {"running", "failed", "cancelled"} else ()
