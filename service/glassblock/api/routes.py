"""What runs behind each endpoint: one row per endpoint of the wire."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glassblock.api.abandoned import abandoned
from glassblock.api.bodies import as_tensors
from glassblock.api.entity_tags import answer_report, answer_stored
from glassblock.api.envelope import visit_of
from glassblock.api.events import stream_events
from glassblock.api.metrics import Metrics
from glassblock.errors import InvalidValue, NotPermitted
from glassblock.jobs.audits import AuditJobs
from glassblock.jobs.history import Asked
from glassblock.operations.operations import Operations
from glassblock.operations.reply import Reply
from glassblock.operations.works import WORKS, Follower
from glassblock.wire import endpoints as wire
from glassblock.wire import framing
from glassblock.wire.endpoints import Endpoint
from glassblock.wire.framing import WireTensor
from glassblock.wire.tables import Health


@dataclass(frozen=True)
class Service:
    """What the routes stand on."""

    operations: Operations
    audits: AuditJobs
    metrics: Metrics


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
        lane: `inline` in the event loop, for what must never wait; the others in threads, each lane with its own number
            of them, so that questions are answered while work is done or a database is slow for those who write to it.
            `heavy` works on the device, `long` on files; in both callers take turns (`lanes`).
        kept: the answer follows from the message, the tensors and the checkpoint's files: it has a tag, the same asked
            at the same time is computed once, and it may be stored (`results`).
    """

    endpoint: Endpoint[Any, Any]
    handler: Handler
    lane: Literal["inline", "light", "ready", "jobs", "heavy", "long"] = "light"
    kept: bool = False


def work_of(endpoint: Endpoint[Any, Any]) -> Handler:
    """Does at once what an endpoint asks for, and stops where its caller has gone."""
    work = WORKS[endpoint.name]
    return lambda call: work(call.operations, call.message, call.tensors, Follower(cancelled=abandoned))


def job_of(endpoint: Endpoint[Any, Any]) -> Handler:
    """Queues as a job what an endpoint asks for."""

    def start(call: Call) -> Reply[Any]:
        call.operations.check(call.message, call.tensors)
        visit, headers = visit_of(call.http), call.http.headers
        asked = Asked(
            call.message,
            operation=endpoint.name,
            tensors=tuple(framing.frame("request", "{}", call.tensors)) if call.tensors else (),
            form="tensors" if as_tensors(endpoint, headers.get("accept", "")) else "json",
            caller=visit.caller.name,
            key=headers.get("idempotency-key"),
            request_id=visit.id,
        )
        audit = call.service.audits.start(asked)
        return Reply(audit, headers={"Location": f"/v1/audits/{audit.id}"})

    return start


def _work(endpoint: Endpoint[Any, Any], lane: Literal["heavy", "long"] = "heavy", *, kept: bool = True) -> Route:
    return Route(endpoint, work_of(endpoint), lane, kept)


def _audits(call: Call) -> Reply[Any]:
    """A page of them; an operation that no job can be is a mistake, and no empty page."""
    wanted = call.message.operation
    if wanted is not None and wanted not in WORKS:
        raise InvalidValue(f"no job does {wanted!r}", field="operation", known=tuple(WORKS), hint="name one, or none")
    return Reply(call.service.audits.listed(call.message))


def _audit_report(call: Call) -> Response:
    stored = call.service.audits.report(call.path("id"))
    return answer_report(stored, wanted=call.http.query_params.get("format"), headers=call.http.headers)


def _audit_answer(call: Call) -> Response:
    return answer_stored(call.service.audits.answer(call.path("id")), headers=call.http.headers)


def _audit_events(call: Call) -> Response:
    return stream_events(call.service.audits, call.path("id"), last=call.http.headers.get("last-event-id"))


def _cancel_audit(call: Call) -> Reply[Any]:
    caller, audit_id = visit_of(call.http).caller, call.path("id")
    if caller.scope != "admin" and call.service.audits.caller_of(audit_id) != caller.name:
        raise NotPermitted("this job was asked for with another key", hint="a key of scope 'admin' may cancel it")
    return Reply(call.service.audits.cancel(audit_id))


def _metrics(call: Call) -> Response:
    return Response(call.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _ready(call: Call) -> Reply[Any]:
    """The device and the roots, then the database; what is wrong with one of them is told as it is."""
    health: Health = call.operations.ready().answer
    return Reply(health.model_copy(update={"checks": {**health.checks, **call.service.audits.checks()}}))


def _table(*rows: Route) -> Mapping[str, Route]:
    table = {row.endpoint.name: row for row in rows}
    if len(table) != len(rows):
        raise InvalidValue("two routes share an endpoint")
    return table


ROUTES: Mapping[str, Route] = _table(
    Route(wire.LIVE, lambda _: Reply(Health(status="alive")), "inline"),
    Route(wire.READY, _ready, "ready"),
    Route(wire.METRICS, _metrics, "jobs"),
    Route(wire.CAPABILITIES, lambda call: call.operations.capabilities()),
    Route(wire.CHECKPOINTS, lambda call: call.operations.checkpoints()),
    Route(wire.CHECKPOINT, lambda call: call.operations.checkpoint(call.path("name"))),
    Route(wire.PIN, lambda call: call.operations.pin(call.path("name"), call.message), "heavy"),
    Route(wire.EVICT, lambda call: call.operations.evict(call.path("name"))),
    _work(wire.RUN_BLOCK),
    _work(wire.EXPLAIN_BLOCK),
    _work(wire.NORM_STATISTICS),
    _work(wire.COMPARE_RESIDUALS),
    _work(wire.JACOBIANS),
    _work(wire.LIKELIHOODS),
    Route(wire.BUDGETS, lambda call: call.operations.budgets(call.message), kept=True),
    Route(wire.PLAN, lambda call: call.operations.plan(call.message)),
    Route(wire.START_AUDIT, job_of(wire.START_AUDIT), "jobs"),
    Route(wire.AUDITS, _audits, "jobs"),
    Route(wire.AUDIT, lambda call: Reply(call.service.audits.get(call.path("id"))), "jobs"),
    Route(wire.AUDIT_EVENTS, _audit_events, "jobs"),
    Route(wire.AUDIT_REPORT, _audit_report, "jobs"),
    Route(wire.AUDIT_ANSWER, _audit_answer, "jobs"),
    Route(wire.CANCEL_AUDIT, _cancel_audit, "jobs"),
    _work(wire.REPAIR, "long", kept=False),
    _work(wire.SELFTEST, "long", kept=False),
    Route(wire.RULES, lambda call: call.operations.rules()),
    Route(wire.FAMILIES, lambda call: call.operations.families()),
)
