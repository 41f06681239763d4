"""Every operation of the service, as one object with one method each.

A method takes a message of `wire` with the tensors posted beside it and returns a `Reply`.
It knows nothing of HTTP; it may be called from any thread.
"""

from collections.abc import Callable, Mapping

import torch

import glassblock
from glassblock.errors import NoRoom
from glassblock.operations import audits, block_runs, budgets, checkpoints, norm_statistics, residuals, tables
from glassblock.operations.reply import Reply
from glassblock.operations.store import CheckpointStore
from glassblock.wire.audits import AuditRequest, Report
from glassblock.wire.blocks import BlockRunAnswer, BlockRunRequest
from glassblock.wire.budgets import BudgetAnswer, BudgetRequest
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency, ResidencyRequest
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.framing import WireTensor
from glassblock.wire.norms import (
    NormStatisticsAnswer,
    NormStatisticsRequest,
    ResidualCompareAnswer,
    ResidualCompareRequest,
)
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList
from glassblock.wire.values import SCHEMA_VERSION

Tensors = Mapping[str, WireTensor]

_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""How torch says on the CPU, as a plain RuntimeError, that there is no memory."""


class Operations:
    """What the service can do with the checkpoints of one store."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store

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
        with _device_memory():
            return Reply(checkpoints.pin(self._store, name, request))

    def evict(self, name: str) -> Reply[Residency]:
        """Let a checkpoint's blocks go."""
        return Reply(checkpoints.evict(self._store, name))

    def run_block(self, request: BlockRunRequest, tensors: Tensors) -> Reply[BlockRunAnswer]:
        """Run one block with its stages captured."""
        with _device_memory():
            return block_runs.run(self._store, request, tensors)

    def norm_statistics(self, request: NormStatisticsRequest, tensors: Tensors) -> Reply[NormStatisticsAnswer]:
        """Statistics, outputs and invariances of norms."""
        with _device_memory():
            return norm_statistics.statistics(self._store, request, tensors)

    def compare_residuals(self, request: ResidualCompareRequest, tensors: Tensors) -> Reply[ResidualCompareAnswer]:
        """One sublayer in three wirings."""
        with _device_memory():
            return residuals.compare(self._store, request, tensors)

    def budgets(self, request: BudgetRequest) -> Reply[BudgetAnswer]:
        """Parameters, activations and FLOPs, counted."""
        return Reply(budgets.count(self._store, request))

    def audit(
        self, request: AuditRequest, *, progress: Callable[[int, int, str], None], cancelled: Callable[[], bool]
    ) -> Report:
        """Audit a checkpoint to its report."""
        with _device_memory():
            return audits.audit(self._store, request, progress=progress, cancelled=cancelled)

    def check_audit(self, request: AuditRequest) -> None:
        """Refuse at once, before a job is queued, what no audit could answer."""
        audits.check(self._store, request)

    def rules(self) -> Reply[RuleList]:
        """The rule table."""
        return Reply(tables.rules())

    def families(self) -> Reply[FamilyList]:
        """The family table."""
        return Reply(tables.families())


class _device_memory:  # noqa: N801  a context manager reads like a word of the language
    """Turns the device's "out of memory" into an answer: memory is freed, the caller told to come back."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or _CPU_ALLOCATOR in str(error):
            torch.cuda.empty_cache()
            raise NoRoom(
                "the device has no memory for this", hint="send fewer rows, or later", retry_after=5
            ) from error
