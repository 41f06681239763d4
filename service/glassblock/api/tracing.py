"""OpenTelemetry traces, where an endpoint for them is configured; nothing of it is loaded otherwise."""

import time
from typing import Any

from glassblock.api.envelope import Visit
from glassblock.errors import InvalidValue
from glassblock.jobs.leases import Lease
from glassblock.wire.audits import JobState, Report


class Tracer:
    """A span for every request that reached an endpoint, and for every attempt at an audit.

    Args:
        endpoint: base URL of a collector that takes OTLP over HTTP.

    Raises:
        InvalidValue: the packages for it are not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as fault:
            raise InvalidValue(
                f"traces need a package that is not installed: {fault.name}",
                field="otlp_endpoint",
                hint="pip install 'glassblock[tracing]', or leave GLASSBLOCK_OTLP_ENDPOINT unset",
            ) from fault
        self._provider = TracerProvider(resource=Resource.create({"service.name": "glassblock"}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("glassblock")

    def __call__(self, visit: Visit) -> None:
        """A request that is over."""
        if not visit.endpoint:
            return
        facts = {
            "http.request.method": visit.method,
            "http.response.status_code": visit.status,
            "glassblock.request_id": visit.id,
            "glassblock.checkpoint": visit.inspected or "",
        }
        self._span(visit.endpoint, visit.seconds, facts, failed=visit.status >= 500)

    def observe_job(self, lease: Lease, state: JobState, *, seconds: float, report: Report | None) -> None:
        """An attempt at a job that is over."""
        facts = {
            "glassblock.audit": lease.id,
            "glassblock.request_id": lease.request_id,
            "glassblock.checkpoint": lease.checkpoint,
            "glassblock.state": state,
            "glassblock.findings": 0 if report is None else len(report.findings),
        }
        self._span(lease.operation, seconds, facts, failed=state == "failed")

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()

    def _span(self, name: str, seconds: float, facts: dict[str, Any], *, failed: bool) -> None:
        from opentelemetry.trace import SpanKind, StatusCode  # noqa: PLC0415

        end = time.time_ns()
        span = self._tracer.start_span(
            name, kind=SpanKind.SERVER, attributes=facts, start_time=end - round(1e9 * seconds)
        )
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(end_time=end)
