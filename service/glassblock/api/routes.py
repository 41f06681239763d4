"""What runs behind each endpoint: one row per endpoint of the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glassblock.api.reports import render_report
from glassblock.errors import InvalidValue
from glassblock.jobs.audits import AuditJobs
from glassblock.operations.operations import Operations
from glassblock.operations.reply import Reply
from glassblock.wire import endpoints as wire
from glassblock.wire.audits import AuditList, AuditRequest
from glassblock.wire.endpoints import Endpoint
from glassblock.wire.framing import WireTensor
from glassblock.wire.tables import Health


@dataclass(frozen=True)
class Service:
    """What the routes stand on."""

    operations: Operations
    audits: AuditJobs


@dataclass(frozen=True)
class Call:
    """One request, parsed."""

    service: Service
    message: Any
    tensors: dict[str, WireTensor]
    http: HttpRequest

    @property
    def operations(self) -> Operations:
        """The operations of the service that was called."""
        return self.service.operations

    def path(self, parameter: str) -> str:
        """A parameter of the path."""
        return self.http.path_params[parameter]


Handler = Callable[[Call], Reply[Any] | Response]


@dataclass(frozen=True)
class Route:
    """An endpoint and what answers it.

    Attributes:
        lane: `inline` in the event loop, for what must never wait; `light` and `heavy` in threads, each lane with
            its own number of them, so that questions are answered while work is done.
    """

    endpoint: Endpoint[Any, Any]
    handler: Handler
    lane: Literal["inline", "light", "heavy"] = "light"


def _start_audit(call: Call) -> Reply[Any]:
    request: AuditRequest = call.message
    call.operations.check_audit(request)
    audit = call.service.audits.start(request)
    return Reply(audit, headers={"Location": f"/v1/audits/{audit.id}"})


def _audit_report(call: Call) -> Response:
    report = call.service.audits.report(call.path("id"))
    wanted, accept = call.http.query_params.get("format"), call.http.headers.get("accept", "")
    return render_report(report, wanted=wanted, accept=accept)


def _table(*rows: Route) -> Mapping[str, Route]:
    table = {row.endpoint.name: row for row in rows}
    if len(table) != len(rows):
        raise InvalidValue("two routes share an endpoint")
    return table


ROUTES: Mapping[str, Route] = _table(
    Route(wire.LIVE, lambda _: Reply(Health(status="alive")), "inline"),
    Route(wire.READY, lambda call: call.operations.ready()),
    Route(wire.CAPABILITIES, lambda call: call.operations.capabilities()),
    Route(wire.CHECKPOINTS, lambda call: call.operations.checkpoints()),
    Route(wire.CHECKPOINT, lambda call: call.operations.checkpoint(call.path("name"))),
    Route(wire.PIN, lambda call: call.operations.pin(call.path("name"), call.message), "heavy"),
    Route(wire.EVICT, lambda call: call.operations.evict(call.path("name"))),
    Route(wire.RUN_BLOCK, lambda call: call.operations.run_block(call.message, call.tensors), "heavy"),
    Route(wire.NORM_STATISTICS, lambda call: call.operations.norm_statistics(call.message, call.tensors), "heavy"),
    Route(
        wire.COMPARE_RESIDUALS, lambda call: call.operations.compare_residuals(call.message, call.tensors), lane="heavy"
    ),
    Route(wire.BUDGETS, lambda call: call.operations.budgets(call.message)),
    Route(wire.START_AUDIT, _start_audit),
    Route(wire.AUDITS, lambda call: Reply(AuditList(audits=call.service.audits.every()))),
    Route(wire.AUDIT, lambda call: Reply(call.service.audits.get(call.path("id")))),
    Route(wire.AUDIT_REPORT, _audit_report),
    Route(wire.CANCEL_AUDIT, lambda call: Reply(call.service.audits.cancel(call.path("id")))),
    Route(wire.RULES, lambda call: call.operations.rules()),
    Route(wire.FAMILIES, lambda call: call.operations.families()),
)
