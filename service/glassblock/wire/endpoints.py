"""Every endpoint as a value: method, path, request and answer, tied together once.

The service makes its routes from this table and the client its methods; a test proves that
neither has more nor less.
"""

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from glassblock.wire.audits import Audit, AuditEvent, AuditList, AuditQuery, AuditRequest, JobAnswer, Report
from glassblock.wire.blocks import BlockRunAnswer, BlockRunRequest
from glassblock.wire.budgets import BudgetAnswer, BudgetRequest
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency, ResidencyRequest
from glassblock.wire.explain import CAPTURED_STAGES, ExplainAnswer, ExplainRequest, stage_of
from glassblock.wire.jacobians import JacobiansAnswer, JacobiansRequest
from glassblock.wire.keys import Scope
from glassblock.wire.likelihoods import LikelihoodAnswer, LikelihoodRequest
from glassblock.wire.norms import (
    NormStatisticsAnswer,
    NormStatisticsRequest,
    ResidualCompareAnswer,
    ResidualCompareRequest,
)
from glassblock.wire.plans import PlanAnswer, PlanRequest
from glassblock.wire.repairs import RepairAnswer, RepairRequest
from glassblock.wire.selftests import SelftestAnswer, SelftestRequest
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList
from glassblock.wire.values import Answer, Request

RequestT = TypeVar("RequestT", bound=Request)
AnswerT = TypeVar("AnswerT", bound=Answer)


class Nothing(Request):
    """The request of an endpoint that is asked by its path alone."""


class Text(Answer):
    """The answer of an endpoint that sends plain text."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Endpoint(Generic[RequestT, AnswerT]):
    """One operation over HTTP.

    Attributes:
        name: What the service's operation and the client's method are called.
        tensors_in: Names of the tensors a safetensors request may carry.
        layered: Whether these names may stand under `layers.{i}.`.
        tensors_out: Whether the answer may be asked for as safetensors.
        status: HTTP status of success.
        headers: Names of request headers that say something to this endpoint alone.
        media_type: What an answer is sent as that is no JSON message; `answer` then says what it holds.
        scope: What a key must allow, where that is not what the method says; "open" asks for no key.
        job: Whether it may be asked for as a job: `Prefer: respond-async` is answered with 202 and an `Audit`.

    The request of a GET travels in the query of the URL, one parameter for each field.
    """

    name: str
    method: str
    path: str
    request: type[RequestT]
    answer: type[AnswerT]
    summary: str
    tensors_in: tuple[str, ...] = ()
    layered: bool = False
    tensors_out: bool = False
    status: int = 200
    headers: tuple[str, ...] = ()
    media_type: str | None = None
    scope: Scope | Literal["open"] | None = None
    job: bool = False

    def reads_tensor(self, name: str) -> bool:
        """Whether a request may carry a tensor of this name."""
        return (stage_of(name)[1] if self.layered else name) in self.tensors_in

    @property
    def needs(self) -> Scope | None:
        """What a key must allow: to read for a GET, else to run. None: no key is asked for."""
        if self.scope == "open":
            return None
        return self.scope or ("read" if self.method == "GET" else "run")


LIVE = Endpoint(
    name="live",
    method="GET",
    path="/health/live",
    request=Nothing,
    answer=Health,
    scope="open",
    summary="The process answers.",
)
READY = Endpoint(
    name="ready",
    method="GET",
    path="/health/ready",
    request=Nothing,
    answer=Health,
    scope="open",
    summary="The device is usable and every root readable.",
)
METRICS = Endpoint(
    name="metrics",
    method="GET",
    path="/metrics",
    request=Nothing,
    answer=Text,
    media_type="text/plain",
    summary="Numbers for Prometheus.",
)
CAPABILITIES = Endpoint(
    name="capabilities",
    method="GET",
    path="/v1",
    request=Nothing,
    answer=Capabilities,
    summary="Versions, and what this service offers.",
)
CHECKPOINTS = Endpoint(
    name="checkpoints",
    method="GET",
    path="/v1/checkpoints",
    request=Nothing,
    answer=CheckpointList,
    summary="What lies under the configured roots.",
)
PIN = Endpoint(
    name="pin",
    method="PUT",
    path="/v1/checkpoints/{name}/residency",
    request=ResidencyRequest,
    answer=Residency,
    scope="admin",
    summary="Hold a checkpoint's blocks on the device.",
)
EVICT = Endpoint(
    name="evict",
    method="DELETE",
    path="/v1/checkpoints/{name}/residency",
    request=Nothing,
    answer=Residency,
    scope="admin",
    summary="Let a checkpoint's blocks go.",
)
CHECKPOINT = Endpoint(
    name="checkpoint",
    method="GET",
    path="/v1/checkpoints/{name}",
    request=Nothing,
    answer=CheckpointDetail,
    summary="Family, shapes, types, layers, residency, and every declared epsilon with its source.",
)
RUN_BLOCK = Endpoint(
    name="run_block",
    method="POST",
    path="/v1/blocks/run",
    request=BlockRunRequest,
    answer=BlockRunAnswer,
    tensors_in=("x",),
    tensors_out=True,
    job=True,
    summary="Run one block with its stages captured.",
)
EXPLAIN_BLOCK = Endpoint(
    name="explain_block",
    method="POST",
    path="/v1/blocks/explain",
    request=ExplainRequest,
    answer=ExplainAnswer,
    tensors_in=CAPTURED_STAGES,
    layered=True,
    job=True,
    summary="Name the mistake that explains tensors captured elsewhere.",
)
NORM_STATISTICS = Endpoint(
    name="norm_statistics",
    method="POST",
    path="/v1/norms/statistics",
    request=NormStatisticsRequest,
    answer=NormStatisticsAnswer,
    tensors_in=("x", "gain"),
    tensors_out=True,
    job=True,
    summary="Statistics, outputs, Jacobians and invariances of the norms of x.",
)
COMPARE_RESIDUALS = Endpoint(
    name="compare_residuals",
    method="POST",
    path="/v1/residuals/compare",
    request=ResidualCompareRequest,
    answer=ResidualCompareAnswer,
    tensors_in=("x", "matrix"),
    tensors_out=True,
    job=True,
    summary="The same sublayer wired pre-, post- and sandwich-norm.",
)
JACOBIANS = Endpoint(
    name="jacobians",
    method="POST",
    path="/v1/jacobians",
    request=JacobiansRequest,
    answer=JacobiansAnswer,
    tensors_in=("x",),
    tensors_out=True,
    job=True,
    summary="Norms of Jacobians per layer and token, each with how it was had.",
)
LIKELIHOODS = Endpoint(
    name="likelihoods",
    method="POST",
    path="/v1/likelihoods",
    request=LikelihoodRequest,
    answer=LikelihoodAnswer,
    job=True,
    summary="How likely a checkpoint finds a text, token by token.",
)
BUDGETS = Endpoint(
    name="budgets",
    method="POST",
    path="/v1/budgets",
    request=BudgetRequest,
    answer=BudgetAnswer,
    summary="Parameters, activations and FLOPs, counted.",
)
PLAN = Endpoint(
    name="plan",
    method="POST",
    path="/v1/plan",
    request=PlanRequest,
    answer=PlanAnswer,
    summary="What a request would read, hold and compute, without doing it.",
)
START_AUDIT = Endpoint(
    name="start_audit",
    method="POST",
    path="/v1/audits",
    request=AuditRequest,
    answer=Audit,
    status=202,
    headers=("Idempotency-Key",),
    summary="Start an audit. The same Idempotency-Key with the same request is the same audit.",
)
AUDITS = Endpoint(
    name="audits",
    method="GET",
    path="/v1/audits",
    request=AuditQuery,
    answer=AuditList,
    summary="The audits of this service, a page at a time.",
)
AUDIT_EVENTS = Endpoint(
    name="audit_events",
    method="GET",
    path="/v1/audits/{id}/events",
    request=Nothing,
    answer=AuditEvent,
    headers=("Last-Event-ID",),
    media_type="text/event-stream",
    summary="What happens to an audit, as Server-Sent Events; ends when the audit does.",
)
AUDIT_REPORT = Endpoint(
    name="audit_report",
    method="GET",
    path="/v1/audits/{id}/report",
    request=Nothing,
    answer=Report,
    summary="The report of an audit, in the format asked for by ?format= or Accept.",
)
AUDIT_ANSWER = Endpoint(
    name="audit_answer",
    method="GET",
    path="/v1/audits/{id}/answer",
    request=Nothing,
    answer=JobAnswer,
    tensors_out=True,
    summary="What a job ended with, in the form it was asked for.",
)
AUDIT = Endpoint(
    name="audit",
    method="GET",
    path="/v1/audits/{id}",
    request=Nothing,
    answer=Audit,
    summary="State, progress and, when it ended, the report.",
)
CANCEL_AUDIT = Endpoint(
    name="cancel_audit",
    method="DELETE",
    path="/v1/audits/{id}",
    request=Nothing,
    answer=Audit,
    summary="Cancel an audit that has not ended.",
)
REPAIR = Endpoint(
    name="repair",
    method="POST",
    path="/v1/repairs",
    request=RepairRequest,
    answer=RepairAnswer,
    job=True,
    summary="Repair a checkpoint into a new directory, or say what would be done.",
)
SELFTEST = Endpoint(
    name="selftest",
    method="POST",
    path="/v1/selftests",
    request=SelftestRequest,
    answer=SelftestAnswer,
    job=True,
    summary="Plant each mistake in a checkpoint, in memory, and say what an audit finds.",
)
RULES = Endpoint(
    name="rules", method="GET", path="/v1/rules", request=Nothing, answer=RuleList, summary="The rules, explained."
)
FAMILIES = Endpoint(
    name="families",
    method="GET",
    path="/v1/families",
    request=Nothing,
    answer=FamilyList,
    summary="The family table, readable.",
)

ENDPOINTS: tuple[Endpoint[Request, Answer], ...] = (  # pyright: ignore[reportAssignmentType]
    LIVE,
    READY,
    METRICS,
    CAPABILITIES,
    CHECKPOINTS,
    PIN,
    EVICT,
    CHECKPOINT,
    RUN_BLOCK,
    EXPLAIN_BLOCK,
    NORM_STATISTICS,
    COMPARE_RESIDUALS,
    JACOBIANS,
    LIKELIHOODS,
    BUDGETS,
    PLAN,
    START_AUDIT,
    AUDITS,
    AUDIT_EVENTS,
    AUDIT_REPORT,
    AUDIT_ANSWER,
    AUDIT,
    CANCEL_AUDIT,
    REPAIR,
    SELFTEST,
    RULES,
    FAMILIES,
)
