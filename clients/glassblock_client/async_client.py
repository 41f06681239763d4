"""The client for asyncio and trio."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from glassblock.errors import GlassblockError
from glassblock.wire import endpoints as wire
from glassblock.wire.audits import ENDED, Audit, AuditList, AuditRequest, Report
from glassblock.wire.blocks import ALL_STAGES, BlockRunAnswer, BlockRunRequest, Overrides
from glassblock.wire.budgets import BudgetAnswer, BudgetRequest
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency, ResidencyRequest
from glassblock.wire.endpoints import AnswerT, Endpoint, Nothing, RequestT
from glassblock.wire.framing import WireTensor
from glassblock.wire.norms import (
    NormRole,
    NormStatisticsAnswer,
    NormStatisticsRequest,
    ResidualCompareAnswer,
    ResidualCompareRequest,
)
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList
from glassblock.wire.values import Sample, Stage

from glassblock_client import exchange
from glassblock_client.backend import httpx
from glassblock_client.exchange import Call, Reply, compose
from glassblock_client.jobs import OnProgress, pauses, report_when_ended
from glassblock_client.tensors import Numbers, divide

GIVE_UP_SECONDS = 5.0


class AsyncClient:
    """A Glassblock service, one method per endpoint.

        async with AsyncClient("http://localhost:8080") as client:
            run = await client.run_block("llama", 7, sample=Sample(rows=16), return_tensors=True)
            run.answer.stages["hidden"].rms, run.tensors["hidden"].shape

    Every method raises the error that the service raised (`glassblock.errors`), or
    `ServiceUnavailable` where none answered.

    Args:
        base_url: of the service, `http://host:port`, with a path where it is mounted under one.
        api_key: sent as `Authorization: Bearer`.
        timeout: longest silence of the service, seconds; None waits for ever.
        transport: stands in for the network: a service in this process, or a test's.

    Raises:
        InvalidValue: the URL or the key cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float | None = 60.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        reach = exchange.connection(base_url, api_key=api_key, timeout=timeout)
        self._shown_url = reach.shown
        self._http = httpx.AsyncClient(
            base_url=reach.base_url, headers=reach.headers, timeout=reach.timeout, transport=transport
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def live(self) -> Health:
        """Whether the process answers."""
        return await self._ask(wire.LIVE)

    async def ready(self) -> Health:
        """Whether the device is usable and every root readable."""
        return await self._ask(wire.READY)

    async def capabilities(self) -> Capabilities:
        """Versions, and what this service offers."""
        return await self._ask(wire.CAPABILITIES)

    async def checkpoints(self) -> CheckpointList:
        """What lies under the service's roots."""
        return await self._ask(wire.CHECKPOINTS)

    async def pin(self, name: str, *, layers: Sequence[int] | None = None) -> Residency:
        """Hold a checkpoint's blocks on the device: those of `layers`, or all."""
        message = compose(ResidencyRequest, layers=None if layers is None else tuple(layers))
        return (await self._exchange(wire.PIN, message, parameters={"name": name})).answer

    async def evict(self, name: str) -> Residency:
        """Let a checkpoint's blocks go."""
        return await self._ask(wire.EVICT, name=name)

    async def checkpoint(self, name: str) -> CheckpointDetail:
        """Family, shapes, types, layers, residency, and every declared epsilon with its source."""
        return await self._ask(wire.CHECKPOINT, name=name)

    async def run_block(
        self,
        checkpoint: str,
        layer: int,
        *,
        x: Numbers | WireTensor | None = None,
        sample: Sample | None = None,
        capture: Sequence[Stage] = ALL_STAGES,
        overrides: Overrides | None = None,
        return_tensors: bool = False,
        dtype: Literal["float32", "native"] = "float32",
    ) -> Reply[BlockRunAnswer]:
        """Run one feed-forward block with its stages captured.

        Args:
            checkpoint: its name, a path under a root of the service.
            layer: counted from 0.
            x: residual stream, [..., d_model].
            sample: rows of the checkpoint's own embedding, in place of `x`.
            capture: stages to answer for.
            overrides: what to change about the block first.
            return_tensors: send the captured stages, in `.tensors`; else their statistics only.
            dtype: of the tensors returned: float32, or as computed (bfloat16 arrives as float32, bit for bit).
        """
        nested, tensors = divide(x=x)
        message = compose(
            BlockRunRequest,
            checkpoint=checkpoint,
            layer=layer,
            x=nested["x"],
            sample=sample,
            capture=tuple(capture),
            overrides=overrides or Overrides(),
            return_tensors=return_tensors,
            dtype=dtype,
        )
        return await self._exchange(wire.RUN_BLOCK, message, tensors=tensors, want_tensors=return_tensors)

    async def norm_statistics(
        self,
        *,
        x: Numbers | WireTensor | None = None,
        eps: float | None = None,
        gain: Numbers | WireTensor | None = None,
        offset: float = 0.0,
        checkpoint: str | None = None,
        layer: int | None = None,
        norm: NormRole | None = None,
        sample: Sample | None = None,
        jacobian: bool = False,
        return_tensors: bool = True,
    ) -> Reply[NormStatisticsAnswer]:
        """Statistics, outputs, Jacobians and invariances of the norms of `x`.

        Args:
            x: [..., d].
            eps: epsilon; with `checkpoint`, in place of the declared one.
            gain: [d]; ones when left out.
            offset: added to the gain.
            checkpoint: take norm `norm` of layer `layer` from here.
            layer: counted from 0.
            norm: which of the checkpoint's norms.
            sample: rows of the checkpoint's own embedding, in place of `x`.
            jacobian: also the dense Jacobians, [..., d, d].
            return_tensors: outputs and Jacobians as arrays in `.tensors`; else as lists in the answer.
        """
        nested, tensors = divide(x=x, gain=gain)
        message = compose(
            NormStatisticsRequest,
            x=nested["x"],
            eps=eps,
            gain=nested["gain"],
            offset=offset,
            checkpoint=checkpoint,
            layer=layer,
            norm=norm,
            sample=sample,
            jacobian=jacobian,
        )
        return await self._exchange(wire.NORM_STATISTICS, message, tensors=tensors, want_tensors=return_tensors)

    async def compare_residuals(
        self,
        *,
        x: Numbers | WireTensor | None = None,
        matrix: Numbers | WireTensor | None = None,
        eps: float | None = None,
        checkpoint: str | None = None,
        layer: int | None = None,
        sample: Sample | None = None,
        dense_up_to: int = 128,
        return_tensors: bool = True,
    ) -> Reply[ResidualCompareAnswer]:
        """The same sublayer wired pre-, post- and sandwich-norm: outputs and Jacobians.

        Args:
            x: [..., d].
            matrix: [d, d], the sublayer F(x) = matrix @ x.
            eps: epsilon of the norms.
            checkpoint: take the feed-forward block of layer `layer` as the sublayer.
            layer: counted from 0.
            sample: rows of the checkpoint's own embedding, in place of `x`.
            dense_up_to: widest d whose Jacobians are written out; norms beyond.
            return_tensors: outputs and Jacobians as arrays in `.tensors`; else as lists in the answer.
        """
        nested, tensors = divide(x=x, matrix=matrix)
        message = compose(
            ResidualCompareRequest,
            x=nested["x"],
            matrix=nested["matrix"],
            eps=eps,
            checkpoint=checkpoint,
            layer=layer,
            sample=sample,
            dense_up_to=dense_up_to,
        )
        return await self._exchange(wire.COMPARE_RESIDUALS, message, tensors=tensors, want_tensors=return_tensors)

    async def budgets(
        self,
        *,
        d_model: int | list[int] | None = None,
        d_ff: int | list[int] | None = None,
        kind: Literal["plain", "gated"] | None = None,
        batch: int | list[int] = 1,
        tokens: int | list[int] = 1,
        layers: int = 1,
        dtype: Literal["float64", "float32", "bfloat16", "float16", "float8"] | None = None,
        multiple_of: int = 256,
        checkpoint: str | None = None,
    ) -> BudgetAnswer:
        """Parameters, activations and FLOPs of a feed-forward block, counted.

        Sizes, or a `checkpoint` to take them from. A list in one size sweeps it. Without `dtype` the
        one that the checkpoint is stored in, else bfloat16.
        """
        message = compose(
            BudgetRequest,
            d_model=d_model,
            d_ff=d_ff,
            kind=kind,
            batch=batch,
            tokens=tokens,
            layers=layers,
            dtype=dtype,
            multiple_of=multiple_of,
            checkpoint=checkpoint,
        )
        return (await self._exchange(wire.BUDGETS, message)).answer

    async def start_audit(
        self,
        checkpoint: str,
        *,
        family: str | None = None,
        against: Mapping[str, Any] | None = None,
        against_name: str = "against",
        rules: Sequence[str] | None = None,
        certify: bool = False,
    ) -> Audit:
        """Start an audit and return at once.

        Args:
            checkpoint: its name, a path under a root of the service.
            family: row of the family table, where no config names one.
            against: another engine's config, to compare every declared epsilon with.
            against_name: what findings call that config.
            rules: rules to apply; all when left out.
            certify: compute the certified bound of every tensor, not of suspects alone.
        """
        message = compose(
            AuditRequest,
            checkpoint=checkpoint,
            family=family,
            against=None if against is None else dict(against),
            against_name=against_name,
            rules=None if rules is None else tuple(rules),
            certify=certify,
        )
        return (await self._exchange(wire.START_AUDIT, message)).answer

    async def audits(self) -> AuditList:
        """The audits of this service, the newest first, without their reports."""
        return await self._ask(wire.AUDITS)

    async def audit_report(self, audit_id: str) -> Report:
        """The report of an audit that ended. For other formats see `glassblock.reports.REPORTS`."""
        return await self._ask(wire.AUDIT_REPORT, id=audit_id)

    async def audit(self, audit_id: str) -> Audit:
        """State, progress and, when it ended well, the report."""
        return await self._ask(wire.AUDIT, id=audit_id)

    async def cancel_audit(self, audit_id: str) -> Audit:
        """Cancel an audit that has not ended."""
        return await self._ask(wire.CANCEL_AUDIT, id=audit_id)

    async def rules(self) -> RuleList:
        """The rules, explained."""
        return await self._ask(wire.RULES)

    async def families(self) -> FamilyList:
        """The family table, and the names that overrides take."""
        return await self._ask(wire.FAMILIES)

    async def audit_checkpoint(
        self,
        checkpoint: str,
        *,
        family: str | None = None,
        against: Mapping[str, Any] | None = None,
        against_name: str = "against",
        rules: Sequence[str] | None = None,
        certify: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Report:
        """Audit a checkpoint and wait for the report. Arguments as `start_audit`.

        Whatever ends the wait early, Ctrl-C too, cancels the audit.

        Args:
            on_progress: told the progress at every look.

        Raises:
            NotReady: somebody else cancelled it.
        """
        audit = await self.start_audit(
            checkpoint, family=family, against=against, against_name=against_name, rules=rules, certify=certify
        )
        waits = pauses()
        try:
            while (report := report_when_ended(audit)) is None:
                if on_progress is not None:
                    on_progress(audit.progress)
                await anyio.sleep(next(waits))
                audit = await self.audit(audit.id)
        except BaseException:
            if audit.state not in ENDED:
                await self._give_up(audit)
            raise
        return report

    async def _give_up(self, audit: Audit) -> None:
        # Shielded: a cancelled task could not ask any more. What ended the wait is what the caller must hear of.
        with anyio.move_on_after(GIVE_UP_SECONDS, shield=True), suppress(GlassblockError):
            await self.cancel_audit(audit.id)

    async def _ask(self, endpoint: Endpoint[Nothing, AnswerT], **parameters: str) -> AnswerT:
        return (await self._exchange(endpoint, Nothing(), parameters=parameters)).answer

    async def _exchange(
        self,
        endpoint: Endpoint[RequestT, AnswerT],
        message: RequestT,
        *,
        tensors: Mapping[str, WireTensor] | None = None,
        want_tensors: bool = False,
        parameters: Mapping[str, str] | None = None,
    ) -> Reply[AnswerT]:
        call = exchange.prepare(endpoint, message, tensors=tensors, want_tensors=want_tensors, parameters=parameters)
        content = _pieces(call) if call.body else None
        with exchange.transport_failures(self._shown_url):
            async with self._http.stream(endpoint.method, call.path, headers=call.headers, content=content) as response:
                landing = exchange.Landing(response.headers)
                async for chunk in response.aiter_bytes():
                    landing.add(chunk)
        return exchange.conclude(call, response.status_code, response.headers, landing.close())


async def _pieces(call: Call[Any]) -> AsyncIterator[bytes]:
    for piece in call.pieces():
        yield piece
