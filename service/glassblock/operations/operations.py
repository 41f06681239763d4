"""Every operation of the service, as one object with one method each.

A method takes a message of `wire` with the tensors posted beside it and returns a `Reply`.
It knows nothing of HTTP; it may be called from any thread.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

import glassblock
from glassblock.numerics.watching import Watch
from glassblock.operations import (
    audits,
    block_runs,
    budgets,
    checkpoints,
    explanations,
    jacobians,
    likelihoods,
    norm_statistics,
    plans,
    repairs,
    residuals,
    selftests,
    tables,
)
from glassblock.operations.admission import Memory
from glassblock.operations.content import Content, content_of
from glassblock.operations.device_faults import device_faults, end_process
from glassblock.operations.posted import check_posted
from glassblock.operations.repairs import Outputs
from glassblock.operations.reply import Reply
from glassblock.operations.residency import Usage
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import AuditRequest, Finding, Report
from glassblock.wire.blocks import BlockRunAnswer, BlockRunRequest
from glassblock.wire.budgets import BudgetAnswer, BudgetRequest
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency, ResidencyRequest
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.explain import ExplainAnswer, ExplainRequest
from glassblock.wire.framing import WireTensor
from glassblock.wire.jacobians import JacobiansAnswer, JacobiansRequest
from glassblock.wire.likelihoods import LikelihoodAnswer, LikelihoodRequest
from glassblock.wire.norms import (
    NormStatisticsAnswer,
    NormStatisticsRequest,
    ResidualCompareAnswer,
    ResidualCompareRequest,
)
from glassblock.wire.plans import PlanAnswer, PlannedOperation, PlanRequest
from glassblock.wire.repairs import RepairAnswer, RepairRequest
from glassblock.wire.selftests import SelftestAnswer, SelftestRequest
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList
from glassblock.wire.values import SCHEMA_VERSION, Request

Tensors = Mapping[str, WireTensor]

ReplyT = TypeVar("ReplyT", bound=Reply[Any])


class Operations:
    """What the service can do with the checkpoints of one store.

    Work on the device begins only where its estimated peak of memory fits (`plans`, `admission`).

    Args:
        store: where checkpoints are.
        outputs: where repaired ones may go.
        lost: called where the device cannot be used any more by this process.
    """

    def __init__(
        self,
        store: CheckpointStore,
        outputs: Outputs | None = None,
        *,
        lost: Callable[[BaseException], None] = end_process,
    ) -> None:
        self._store = store
        self._outputs = outputs or Outputs()
        self._lost = lost

    def content_of(
        self, operation: str, message: Request, tensors: Tensors, *, form: str, posted: bytes = b""
    ) -> Content | None:
        """What the answer to a request follows from; see `content`."""
        return content_of(self._store, operation, message, tensors, form=form, posted=posted)

    def memory(self) -> Memory:
        """How the device's budget is used."""
        return self._store.admission.memory()

    def usage(self) -> Usage:
        """What lies on the device between requests."""
        return self._store.residency.usage()

    def plan(self, request: PlanRequest) -> Reply[PlanAnswer]:
        """What a request would read, hold and compute."""
        return Reply(plans.quote(self._store, request))

    def ready(self) -> Reply[Health]:
        """Whether the device answers and every root can be listed."""
        return Reply(checkpoints.health(self._store))

    def capabilities(self) -> Reply[Capabilities]:
        """Versions, device and endpoints."""
        return Reply(
            Capabilities(
                glassblock=glassblock.__version__,
                schema_version=SCHEMA_VERSION,
                torch=str(torch.__version__),
                device=str(self._store.device),
                endpoints=tuple(f"{endpoint.method} {endpoint.path}" for endpoint in ENDPOINTS),
            )
        )

    def checkpoints(self) -> Reply[CheckpointList]:
        """What lies under the roots."""
        return Reply(checkpoints.every(self._store))

    def checkpoint(self, name: str) -> Reply[CheckpointDetail]:
        """One checkpoint, from its headers and configs."""
        return Reply(checkpoints.detail(self._store, name))

    def pin(self, name: str, request: ResidencyRequest) -> Reply[Residency]:
        """Hold blocks on the device."""
        with self._device():
            return Reply(checkpoints.pin(self._store, name, request))

    def evict(self, name: str) -> Reply[Residency]:
        """Let a checkpoint's blocks go."""
        return Reply(checkpoints.evict(self._store, name))

    def run_block(
        self,
        request: BlockRunRequest,
        tensors: Tensors,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[BlockRunAnswer]:
        """Run a part of one layer with its stages captured; `progress` and `cancelled` as in an audit."""
        with self._admitted("run_block", request, tensors):
            return self._remarked(
                block_runs.run(self._store, request, tensors, watch=Watch(progress, cancelled)), request.checkpoint
            )

    def likelihoods(
        self,
        request: LikelihoodRequest,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[LikelihoodAnswer]:
        """Log-likelihoods of a text, token by token; `progress` and `cancelled` as in an audit."""
        with self._admitted("likelihoods", request, {}):
            return likelihoods.likelihoods(self._store, request, watch=Watch(progress, cancelled))

    def explain_block(
        self,
        request: ExplainRequest,
        tensors: Tensors,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[ExplainAnswer]:
        """Name the mistake that explains captured tensors; `progress` and `cancelled` as in an audit."""
        with self._admitted("explain_block", request, tensors):
            return self._remarked(
                explanations.explain_block(self._store, request, tensors, watch=Watch(progress, cancelled)),
                request.checkpoint,
            )

    def norm_statistics(
        self,
        request: NormStatisticsRequest,
        tensors: Tensors,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[NormStatisticsAnswer]:
        """Statistics, outputs and invariances of norms; `progress` and `cancelled` as in an audit."""
        with self._admitted("norm_statistics", request, tensors):
            return self._remarked(
                norm_statistics.statistics(self._store, request, tensors, watch=Watch(progress, cancelled)),
                request.checkpoint,
            )

    def compare_residuals(
        self,
        request: ResidualCompareRequest,
        tensors: Tensors,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[ResidualCompareAnswer]:
        """One sublayer in three wirings; `progress` and `cancelled` as in an audit."""
        with self._admitted("compare_residuals", request, tensors):
            return self._remarked(
                residuals.compare(self._store, request, tensors, watch=Watch(progress, cancelled)), request.checkpoint
            )

    def jacobians(
        self,
        request: JacobiansRequest,
        tensors: Tensors,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[JacobiansAnswer]:
        """Norms of Jacobians per layer and token; `progress` and `cancelled` as in an audit."""
        with self._admitted("jacobians", request, tensors):
            return self._remarked(
                jacobians.jacobians(self._store, request, tensors, watch=Watch(progress, cancelled)), request.checkpoint
            )

    def budgets(self, request: BudgetRequest) -> Reply[BudgetAnswer]:
        """Parameters, activations and FLOPs, counted."""
        return Reply(budgets.count(self._store, request))

    def audit(
        self,
        request: AuditRequest,
        *,
        progress: Callable[[int, int, str], None],
        cancelled: Callable[[], bool],
        found: Callable[[Finding], None] = lambda _finding: None,
    ) -> Report:
        """Audit a checkpoint to its report; it waits for room on the device, for nobody waits for it.

        Args:
            found: told every finding as soon as its rule reports it.
        """
        estimate = plans.estimate(self._store, "start_audit", request, {}).peak_bytes
        self._store.admission.wait(estimate, given_up=cancelled)
        with self._admitted("start_audit", request, {}):
            return audits.audit(self._store, request, progress=progress, cancelled=cancelled, found=found)

    def check(self, request: Request, tensors: Tensors) -> None:
        """Refuse at once, before a job is queued, what no work could answer, as far as that costs little."""
        if isinstance(request, AuditRequest):
            audits.check(self._store, request)
            return
        checkpoint, name = None, getattr(request, "checkpoint", None)
        if name is not None:
            checkpoint = self._store.open(
                name, **{field: getattr(request, field, None) for field in ("family", "family_row", "tower")}
            )
        check_posted(checkpoint, request, tensors)

    def cost(self, operation: str, request: Request, tensors: Tensors) -> plans.Plan:
        """What a request will cost, as `plan` quotes it; nothing of one that cannot be answered."""
        return plans.estimate(self._store, operation, request, tensors)

    def repair(
        self,
        request: RepairRequest,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[RepairAnswer]:
        """Repair what the files tell how to; `progress` and `cancelled` as in an audit."""
        with self._admitted("repair", request, {}):
            return Reply(
                repairs.repair(self._store, request, outputs=self._outputs, progress=progress, cancelled=cancelled)
            )

    def selftest(
        self,
        request: SelftestRequest,
        *,
        progress: Callable[[int, int, str], None] = lambda _done, _total, _message: None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Reply[SelftestAnswer]:
        """Plant mistakes in memory and see what is found; `progress` counts mistakes."""
        with self._admitted("selftest", request, {}):
            return Reply(selftests.selftest(self._store, request, progress=progress, cancelled=cancelled))

    def rules(self) -> Reply[RuleList]:
        """The rule table."""
        return Reply(tables.rules())

    def families(self) -> Reply[FamilyList]:
        """The family table."""
        return Reply(tables.families())

    def _device(self) -> AbstractContextManager[None]:
        return device_faults(self._store.device, self._store.residency, lost=self._lost)

    @contextmanager
    def _admitted(self, operation: PlannedOperation, request: Request, tensors: Tensors) -> Generator[None]:
        """Hold the estimated peak while the work runs.

        Raises:
            TooLarge, NoRoom: as `Admission.reserved`.
        """
        plan = plans.estimate(self._store, operation, request, tensors)
        with (
            self._store.admission.reserved(plan.peak_bytes, resident=plan.pinned_bytes),
            self._device(),
        ):
            yield

    def _remarked(self, reply: ReplyT, name: str | None) -> ReplyT:
        """The reply, with what must be said about files that are not what was used."""
        remarks = () if name is None else self._store.remarks(name)
        if not remarks or not hasattr(reply.answer, "notes"):
            return reply
        return replace(reply, answer=reply.answer.model_copy(update={"notes": (*reply.answer.notes, *remarks)}))
