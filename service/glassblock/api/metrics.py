"""Numbers for Prometheus: requests, seconds and bytes per endpoint, jobs, findings, memory."""

from collections.abc import Callable, Iterable, Mapping

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glassblock.api.envelope import Visit
from glassblock.errors import GlassblockError
from glassblock.jobs.leases import Lease
from glassblock.wire.audits import JobState, Report

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
JOB_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)


class Metrics:
    """The counters of one service.

    Args:
        jobs: how many jobs are in each state, asked for when somebody looks.
        device: of the service, as torch names it.
    """

    def __init__(self, *, jobs: Callable[[], Mapping[JobState, int]], device: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("glassblock_requests", "Requests answered.", ("endpoint", "status"), registry=registry)
        self._seconds = Histogram(
            "glassblock_request_seconds", "From head to last byte.", ("endpoint",), buckets=SECONDS, registry=registry
        )
        self._received = Counter("glassblock_received_bytes", "Bodies of requests.", ("endpoint",), registry=registry)
        self._sent = Counter("glassblock_sent_bytes", "Bodies of answers.", ("endpoint",), registry=registry)
        self._jobs = Counter("glassblock_audits_ended", "Audits that ended here.", ("state",), registry=registry)
        self._job_seconds = Histogram(
            "glassblock_audit_seconds", "Of one attempt.", ("state",), buckets=JOB_SECONDS, registry=registry
        )
        self._findings = Counter(
            "glassblock_findings", "Findings of audits that ended here.", ("rule", "level"), registry=registry
        )
        registry.register(_Looked(jobs, device))
        ProcessCollector(registry=registry)

    def __call__(self, visit: Visit) -> None:
        """Count a request."""
        endpoint = visit.endpoint or "none"
        self._requests.labels(endpoint, str(visit.status)).inc()
        self._seconds.labels(endpoint).observe(visit.seconds)
        self._received.labels(endpoint).inc(visit.received)
        self._sent.labels(endpoint).inc(visit.sent)

    def observe_job(self, lease: Lease, state: JobState, *, seconds: float, report: Report | None) -> None:
        """Count a job that was worked on."""
        del lease  # a label for each would never end
        self._jobs.labels(state).inc()
        self._job_seconds.labels(state).observe(seconds)
        for finding in report.findings if report is not None else ():
            self._findings.labels(finding.rule, finding.level).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Looked(Collector):
    """What is looked at when somebody asks, and counted by nobody meanwhile."""

    def __init__(self, jobs: Callable[[], Mapping[JobState, int]], device: str) -> None:
        self._jobs = jobs
        self._device = device

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not ask a database that is not open yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Jobs by state, and the device's memory."""
        try:
            counted: Mapping[JobState, int] = self._jobs()
        except GlassblockError:
            counted = {}  # no number is better than a wrong one
        jobs = GaugeMetricFamily("glassblock_audits", "Audits that are remembered.", labels=("state",))
        for state, number in counted.items():
            jobs.add_metric((state,), number)
        yield jobs
        if self._device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info(self._device)
            memory = GaugeMetricFamily("glassblock_device_memory_bytes", "Of the device.", labels=("kind",))
            memory.add_metric(("free",), free)
            memory.add_metric(("total",), total)
            memory.add_metric(("tensors",), torch.cuda.memory_allocated(self._device))
            yield memory
