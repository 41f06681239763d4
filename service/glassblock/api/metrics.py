"""Numbers for Prometheus: requests, seconds and bytes per endpoint, jobs, findings, memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glassblock.api.envelope import Visit
from glassblock.api.results import Counted
from glassblock.errors import GlassblockError
from glassblock.jobs.leases import Lease
from glassblock.operations.admission import Memory
from glassblock.operations.residency import Usage
from glassblock.wire.audits import ENDED, JobState, Report

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
JOB_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0)


class Looked(NamedTuple):
    """What is asked for when somebody looks.

    Attributes:
        jobs: how many jobs are in each state.
        usage: what lies on the device between requests.
        memory: how the device's budget is used.
        lines: how many work and how many wait, by lane.
        stored: the stored answers; None where none are stored.
        bodies: the bytes that bodies hold, and may.
    """

    jobs: Callable[[], Mapping[JobState, int]]
    usage: Callable[[], Usage]
    memory: Callable[[], Memory]
    lines: Callable[[], Mapping[str, tuple[int, int]]]
    stored: Callable[[], Counted | None]
    bodies: Callable[[], tuple[int, int]]


class Metrics:
    """The counters of one service.

    Args:
        looked: what is asked for when somebody looks.
        device: of the service, as torch names it.
    """

    def __init__(self, looked: Looked, *, device: str) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("glassblock_requests", "Requests answered.", ("endpoint", "status"), registry=registry)
        self._seconds = Histogram(
            "glassblock_request_seconds", "From head to last byte.", ("endpoint",), buckets=SECONDS, registry=registry
        )
        self._received = Counter("glassblock_received_bytes", "Bodies of requests.", ("endpoint",), registry=registry)
        self._sent = Counter("glassblock_sent_bytes", "Bodies of answers.", ("endpoint",), registry=registry)
        self._jobs = Counter("glassblock_audits_ended", "Audits that ended here.", ("state",), registry=registry)
        self._job_seconds = Histogram(
            "glassblock_audit_seconds", "Of their last attempt.", ("state",), buckets=JOB_SECONDS, registry=registry
        )
        self._findings = Counter(
            "glassblock_findings", "Findings of audits that ended here.", ("rule", "level"), registry=registry
        )
        registry.register(_Looked(looked, device))
        ProcessCollector(registry=registry)

    def __call__(self, visit: Visit) -> None:
        """Count a request."""
        endpoint = visit.endpoint or "none"
        self._requests.labels(endpoint, str(visit.status)).inc()
        self._seconds.labels(endpoint).observe(visit.seconds)
        self._received.labels(endpoint).inc(visit.received)
        self._sent.labels(endpoint).inc(visit.sent)

    def observe_job(self, lease: Lease, state: JobState, *, seconds: float, report: Report | None) -> None:
        """Count a job that has ended. One that is handed back has not: whoever takes it up counts it."""
        del lease  # a label for each would never end
        if state not in ENDED:
            return
        self._jobs.labels(state).inc()
        self._job_seconds.labels(state).observe(seconds)
        for finding in report.findings if report is not None else ():
            self._findings.labels(finding.rule, finding.level).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus's text format."""
        return generate_latest(self._registry)


class _Looked(Collector):
    """What is looked at when somebody asks, and counted by nobody meanwhile."""

    def __init__(self, looked: Looked, device: str) -> None:
        self._looked = looked
        self._device = device

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not ask a database that is not open yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Jobs by state, the lines, what is kept, and the device's memory."""
        try:
            counted: Mapping[JobState, int] = self._looked.jobs()
        except GlassblockError:
            counted = {}  # no number is better than a wrong one
        jobs = GaugeMetricFamily("glassblock_audits", "Audits that are remembered.", labels=("state",))
        for state, number in counted.items():
            jobs.add_metric((state,), number)
        yield jobs
        yield from self._lines()
        yield from self._residents()
        yield from self._answers()
        held, budget = self._looked.bodies()
        bodies = GaugeMetricFamily("glassblock_bodies_bytes", "Of requests and answers.", labels=("kind",))
        bodies.add_metric(("held",), held)
        bodies.add_metric(("budget",), budget)
        yield bodies
        if self._device.startswith("cuda"):
            free, total = torch.cuda.mem_get_info(self._device)
            memory = GaugeMetricFamily("glassblock_device_memory_bytes", "Of the device.", labels=("kind",))
            memory.add_metric(("free",), free)
            memory.add_metric(("total",), total)
            memory.add_metric(("tensors",), torch.cuda.memory_allocated(self._device))
            yield memory

    def _lines(self) -> Iterable[Metric]:
        lines = GaugeMetricFamily("glassblock_line", "Requests that work and that wait.", labels=("lane", "state"))
        for lane, (working, waiting) in self._looked.lines().items():
            lines.add_metric((lane, "working"), working)
            lines.add_metric((lane, "waiting"), waiting)
        yield lines

    def _residents(self) -> Iterable[Metric]:
        usage, memory = self._looked.usage(), self._looked.memory()
        budget = GaugeMetricFamily("glassblock_device_budget_bytes", "Of the device's budget.", labels=("kind",))
        for kind, number in (
            ("budget", memory.budget),
            ("reserved", memory.reserved),
            ("resident", usage.bytes),
            ("pinned", usage.pinned),
        ):
            budget.add_metric((kind,), number)
        yield budget
        yield GaugeMetricFamily("glassblock_resident_parts", "Parts of layers on the device.", value=usage.entries)
        looked = CounterMetricFamily("glassblock_resident_lookups", "Parts looked for.", labels=("result",))
        looked.add_metric(("hit",), usage.hits)
        looked.add_metric(("miss",), usage.misses)
        yield looked
        yield CounterMetricFamily("glassblock_resident_evictions", "Parts that left for room.", value=usage.evictions)

    def _answers(self) -> Iterable[Metric]:
        stored = self._looked.stored()
        if stored is None:
            return
        yield GaugeMetricFamily("glassblock_answers_bytes", "Of stored answers.", value=stored.bytes)
        looked = CounterMetricFamily("glassblock_answers_lookups", "Answers looked for.", labels=("result",))
        looked.add_metric(("hit",), stored.hits)
        looked.add_metric(("miss",), stored.misses)
        yield looked
