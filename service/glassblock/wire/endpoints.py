"""Every endpoint as a value: method, path, request and answer, tied together once.

The service makes its routes from this table and the client its methods; a test proves that
neither has more nor less.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from glassblock.wire.audits import Audit, AuditList, AuditRequest, Report
from glassblock.wire.blocks import BlockRunAnswer, BlockRunRequest
from glassblock.wire.budgets import BudgetAnswer, BudgetRequest
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency, ResidencyRequest
from glassblock.wire.norms import (
    NormStatisticsAnswer,
    NormStatisticsRequest,
    ResidualCompareAnswer,
    ResidualCompareRequest,
)
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList
from glassblock.wire.values import Answer, Request

RequestT = TypeVar("RequestT", bound=Request)
AnswerT = TypeVar("AnswerT", bound=Answer)


class Nothing(Request):
    """The request of an endpoint that is asked by its path alone."""


@dataclass(frozen=True, kw_only=True)
class Endpoint(Generic[RequestT, AnswerT]):
    """One operation over HTTP.

    Attributes:
        name: What the service's operation and the client's method are called.
        tensors_in: Names of the tensors a safetensors request may carry.
        tensors_out: Whether the answer may be asked for as safetensors.
        status: HTTP status of success.
    """

    name: str
    method: str
    path: str
    request: type[RequestT]
    answer: type[AnswerT]
    summary: str
    tensors_in: tuple[str, ...] = ()
    tensors_out: bool = False
    status: int = 200


LIVE = Endpoint(
    name="live", method="GET", path="/health/live", request=Nothing, answer=Health, summary="The process answers."
)
READY = Endpoint(
    name="ready",
    method="GET",
    path="/health/ready",
    request=Nothing,
    answer=Health,
    summary="The device is usable and every root readable.",
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
    summary="Hold a checkpoint's blocks on the device.",
)
EVICT = Endpoint(
    name="evict",
    method="DELETE",
    path="/v1/checkpoints/{name}/residency",
    request=Nothing,
    answer=Residency,
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
    summary="Run one block with its stages captured.",
)
NORM_STATISTICS = Endpoint(
    name="norm_statistics",
    method="POST",
    path="/v1/norms/statistics",
    request=NormStatisticsRequest,
    answer=NormStatisticsAnswer,
    tensors_in=("x", "gain"),
    tensors_out=True,
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
    summary="The same sublayer wired pre-, post- and sandwich-norm.",
)
BUDGETS = Endpoint(
    name="budgets",
    method="POST",
    path="/v1/budgets",
    request=BudgetRequest,
    answer=BudgetAnswer,
    summary="Parameters, activations and FLOPs, counted.",
)
START_AUDIT = Endpoint(
    name="start_audit",
    method="POST",
    path="/v1/audits",
    request=AuditRequest,
    answer=Audit,
    status=202,
    summary="Start an audit.",
)
AUDITS = Endpoint(
    name="audits",
    method="GET",
    path="/v1/audits",
    request=Nothing,
    answer=AuditList,
    summary="The audits of this service.",
)
AUDIT_REPORT = Endpoint(
    name="audit_report",
    method="GET",
    path="/v1/audits/{id}/report",
    request=Nothing,
    answer=Report,
    summary="The report of an audit, in the format asked for by ?format= or Accept.",
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
    CAPABILITIES,
    CHECKPOINTS,
    PIN,
    EVICT,
    CHECKPOINT,
    RUN_BLOCK,
    NORM_STATISTICS,
    COMPARE_RESIDUALS,
    BUDGETS,
    START_AUDIT,
    AUDITS,
    AUDIT_REPORT,
    AUDIT,
    CANCEL_AUDIT,
    RULES,
    FAMILIES,
)
