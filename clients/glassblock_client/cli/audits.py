"""`glassblock audits`: the audits of a service, listed, followed, cancelled."""

import sys
import time
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer
from glassblock.errors import InvalidValue, ServiceUnavailable
from glassblock.reports import REPORTS
from glassblock.wire.audits import Audit, AuditEvent, AuditList, Report
from glassblock.wire.printable import printable
from rich import box
from rich.table import Table
from rich.text import Text

from glassblock_client.cli.audit import exit_status
from glassblock_client.cli.connection import TimeoutOption, UrlOption, connected
from glassblock_client.cli.run import FormatOption
from glassblock_client.cli.screen import coloured, columns, progress_bar, show
from glassblock_client.cli.streams import tell
from glassblock_client.client import Client
from glassblock_client.jobs import OnEvent, report_when_ended

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

    Without --follow and --cancel the newest come first. Exit status of --follow: that of `glassblock audit`.
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
            found = client.audits(state=state, checkpoint=checkpoint, since=zoned, limit=limit)
    if answer_format == "json":
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    else:
        show([_table(found)])
        if found.next is not None:
            tell(f"there are more: --limit, up to 500, or --since; the next begins at cursor {found.next}")
    return 0


def _follow(client: Client, audit_id: str, *, as_json: bool) -> int:
    if as_json:
        _events(client, audit_id, lambda event: sys.stdout.write(event.model_dump_json() + "\n"))
        report = _report(client.audit(audit_id))
    else:
        with progress_bar(f"audit {audit_id}") as on_progress:
            _events(client, audit_id, lambda event: on_progress(event.progress))
        report = _report(client.audit(audit_id))
        sys.stdout.write(REPORTS["text"].render(report, width=columns(), colour=coloured()))
    return exit_status(report, fail_on="error", allow_inconclusive=False)


def _events(client: Client, audit_id: str, on_event: OnEvent) -> None:
    """Every event once, over broken connections too."""
    last: list[str] = []

    def note(event: AuditEvent) -> None:
        last[:] = [str(event.id)]
        on_event(event)

    for left in reversed(range(RECONNECTS)):
        try:
            client.audit_events(audit_id, last_event_id=last[0] if last else None, on_event=note)
        except ServiceUnavailable as error:
            if not left:
                raise
            tell(printable(f"{error.message}; trying again"))
            time.sleep(RECONNECT_SECONDS)
        else:
            if client.audit(audit_id).state not in {"queued", "running"}:
                return


def _report(audit: Audit) -> Report:
    report = report_when_ended(audit)
    if report is None:
        raise ServiceUnavailable(f"audit {audit.id} is still {audit.state}", hint="follow it again")
    return report


def _table(found: AuditList) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="dim")
    for title in ("audit", "state", "done", "created"):
        table.add_column(title, no_wrap=True)
    table.add_column("checkpoint", overflow="fold")
    for audit in found.audits:
        table.add_row(
            audit.id,
            Text(audit.state, STYLES[audit.state]),
            _progress(audit),
            "" if audit.created is None else f"{audit.created:%m-%d %H:%M}",
            printable(audit.checkpoint),
        )
    return table


def _progress(audit: Audit) -> str:
    done, total = audit.progress.done, audit.progress.total
    return f"{done / total:.0%}" if total else ""
