"""The client for asyncio and trio."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, Self

import anyio
from glassblock.errors import GlassblockError
from glassblock.wire import endpoints as wire
from glassblock.wire.audits import ENDED, Audit, AuditEvent, AuditList, AuditQuery, AuditRequest, JobState, Report
from glassblock.wire.blocks import BlockPart, BlockRunAnswer, BlockRunRequest, Overrides
from glassblock.wire.budgets import BudgetAnswer, BudgetRequest
from glassblock.wire.checkpoints import CheckpointDetail, CheckpointList, Residency, ResidencyRequest
from glassblock.wire.endpoints import AnswerT, Endpoint, Nothing, RequestT
from glassblock.wire.explain import ExplainAnswer, ExplainRequest
from glassblock.wire.framing import WireTensor
from glassblock.wire.jacobians import (
    CHEAP_NORMS,
    Certificate,
    JacobianNorm,
    JacobianPart,
    JacobiansAnswer,
    JacobiansRequest,
)
from glassblock.wire.likelihoods import LikelihoodAnswer, LikelihoodRequest
from glassblock.wire.norms import (
    NormRole,
    NormStatisticsAnswer,
    NormStatisticsRequest,
    ResidualCompareAnswer,
    ResidualCompareRequest,
)
from glassblock.wire.plans import PlanAnswer, PlannedOperation, PlanRequest, TensorShape
from glassblock.wire.repairs import RepairAnswer, RepairRequest
from glassblock.wire.selftests import SelftestAnswer, SelftestRequest
from glassblock.wire.tables import Capabilities, FamilyList, Health, RuleList
from glassblock.wire.values import ComputeDtype, PlacementName, Request, RunStage, Sample

from glassblock_client import exchange
from glassblock_client.backend import httpx
from glassblock_client.exchange import Call, Reply, compose
from glassblock_client.jobs import EventFeed, OnEvent, OnProgress, pauses, report_when_ended
from glassblock_client.tensors import Array, Numbers, divide
from glassblock_client.texts import TokenIds, as_token_ids

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

    async def metrics(self) -> str:
        """Numbers for Prometheus, in its text format."""
        return (await self._ask(wire.METRICS)).text

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
        part: BlockPart = "ffn",
        expert: int | Literal["shared"] | None = None,
        x: Numbers | WireTensor | None = None,
        sample: Sample | None = None,
        token_ids: TokenIds | None = None,
        text: str | None = None,
        capture: Sequence[RunStage] | None = None,
        overrides: Overrides | None = None,
        family: str | None = None,
        family_row: Mapping[str, Any] | None = None,
        tower: str | None = None,
        return_tensors: bool = False,
        dtype: Literal["float32", "native"] = "float32",
    ) -> Reply[BlockRunAnswer]:
        """Run a part of one layer with its stages captured.

        Args:
            checkpoint: its name, a path under a root of the service.
            layer: counted from 0.
            part: the feed-forward block; attention, of whole sequences; or the layer, attention first.
            expert: one network of a mixture alone: its number, or "shared".
            x: what enters the part, [..., d_model]; for attention [..., tokens, d_model].
            sample: rows of the checkpoint's own embedding, in place of `x`.
            token_ids: a text from its first token, or several of one length, in place of `x`: the layers below are run.
            text: the same, tokenised with the checkpoint's own tokenizer.json.
            capture: stages to answer for; all that the part has when left out.
            overrides: what to change about the feed-forward block first.
            family: row of the family table, instead of what the config says.
            family_row: a row of your own, instead of one.
            tower: another stack of layers in the files, such as `encoder`.
            return_tensors: send the captured stages, in `.tensors`; else their statistics only.
            dtype: of the tensors returned: float32, or as computed (bfloat16 arrives as float32, bit for bit).
        """
        nested, tensors = divide(x=x)
        message = compose(
            BlockRunRequest,
            checkpoint=checkpoint,
            layer=layer,
            part=part,
            expert=expert,
            x=nested["x"],
            sample=sample,
            token_ids=as_token_ids(token_ids),
            text=text,
            capture=None if capture is None else tuple(capture),
            overrides=overrides or Overrides(),
            family=family,
            family_row=None if family_row is None else dict(family_row),
            tower=tower,
            return_tensors=return_tensors,
            dtype=dtype,
        )
        return await self._exchange(wire.RUN_BLOCK, message, tensors=tensors, want_tensors=return_tensors)

    async def explain_block(
        self, checkpoint: str, layer: int, captures: Mapping[str, Array | WireTensor], *, pairs: bool = True
    ) -> ExplainAnswer:
        """Name the mistake, or the two, that explains tensors captured elsewhere.

        Args:
            checkpoint: its name, a path under a root of the service.
            layer: counted from 0.
            captures: stages by name, or under `layers.{layer}.`; [..., d_model], or [..., d_ff] for those between
                gate and hidden. In the type they were computed in: `WireTensor` carries bfloat16.
            pairs: look for two mistakes where one does not explain the captures.
        """
        _, tensors = divide(**captures)
        message = compose(ExplainRequest, checkpoint=checkpoint, layer=layer, pairs=pairs)
        return (await self._exchange(wire.EXPLAIN_BLOCK, message, tensors=tensors)).answer

    async def norm_statistics(
        self,
        *,
        x: Numbers | WireTensor | None = None,
        eps: float | None = None,
        gain: Numbers | WireTensor | None = None,
        offset: float = 0.0,
        checkpoint: str | None = None,
        family: str | None = None,
        family_row: Mapping[str, Any] | None = None,
        tower: str | None = None,
        layer: int | None = None,
        norm: NormRole | None = None,
        sample: Sample | None = None,
        token_ids: TokenIds | None = None,
        text: str | None = None,
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
            family: row of the family table, instead of what the config says.
            family_row: a row of your own, instead of one.
            tower: another stack of layers in the files, such as `encoder`.
            layer: counted from 0.
            norm: which of the checkpoint's norms.
            sample: rows of the checkpoint's own embedding, in place of `x`.
            token_ids: a text, in place of `x`: what this norm reads of it, through the layers below.
            text: the same, tokenised with the checkpoint's own tokenizer.json.
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
            family=family,
            family_row=None if family_row is None else dict(family_row),
            tower=tower,
            layer=layer,
            norm=norm,
            sample=sample,
            token_ids=as_token_ids(token_ids),
            text=text,
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
        family: str | None = None,
        family_row: Mapping[str, Any] | None = None,
        tower: str | None = None,
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
            family: row of the family table, instead of what the config says.
            family_row: a row of your own, instead of one.
            tower: another stack of layers in the files, such as `encoder`.
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
            family=family,
            family_row=None if family_row is None else dict(family_row),
            tower=tower,
            layer=layer,
            sample=sample,
            dense_up_to=dense_up_to,
        )
        return await self._exchange(wire.COMPARE_RESIDUALS, message, tensors=tensors, want_tensors=return_tensors)

    async def jacobians(
        self,
        checkpoint: str,
        layers: Sequence[int],
        *,
        part: JacobianPart = "block",
        expert: int | Literal["shared"] | None = None,
        placement: PlacementName | Sequence[PlacementName] | None = None,
        x: Numbers | WireTensor | None = None,
        token_ids: Sequence[int] | None = None,
        sample: Sample | None = None,
        norms: Sequence[JacobianNorm] = CHEAP_NORMS,
        tolerance: float = 0.01,
        certificate: Certificate = "probabilistic",
        failure_probability: float = 1e-9,
        seed: int = 0,
        vectors: bool = False,
        depth: bool = False,
        probes: int = 16,
        input_positions: Sequence[int] | None = None,
        output_positions: Sequence[int] | None = None,
    ) -> Reply[JacobiansAnswer]:
        """Norms of Jacobians per layer and token, each with how it was had.

        Args:
            checkpoint: its name, a path under a root of the service.
            layers: counted from 0.
            part: norm, ffn, branch, block, attention, mixture or layer.
            expert: of a mixture: this network alone, at every token; each at its own tokens when left out.
            placement: the same weights with the norm elsewhere; several stand side by side.
            x: what enters the block, [..., d_model], the same for every layer.
            token_ids: their embedding rows as x; of attention, a mixture and a layer, the text's states there.
            sample: rows of the checkpoint's own embedding as x.
            norms: of frobenius, spectral, trace, radial_gain, smallest, condition_number.
            tolerance: how narrow the bracket of a spectral norm is to be, relative.
            certificate: of its upper bound: "probabilistic" or "certain".
            failure_probability: of an upper bound that is not certain.
            seed: of starts, probes and the self-check's directions.
            vectors: the top singular vectors of every token, in `.tensors`.
            depth: also the curves of the chain of these layers' feed-forward blocks; of the layers with that part.
            probes: random vectors behind an estimate; as many as J has rows make it exact.
            input_positions: of a part that couples tokens: by which positions it is differentiated.
            output_positions: likewise: which positions are differentiated.
        """
        nested, tensors = divide(x=x)
        message = compose(
            JacobiansRequest,
            checkpoint=checkpoint,
            layers=tuple(layers),
            part=part,
            expert=expert,
            placement=placement if placement is None or isinstance(placement, str) else tuple(placement),
            x=nested["x"],
            token_ids=None if token_ids is None else tuple(token_ids),
            sample=sample,
            norms=tuple(norms),
            tolerance=tolerance,
            certificate=certificate,
            failure_probability=failure_probability,
            seed=seed,
            vectors=vectors,
            depth=depth,
            probes=probes,
            input_positions=None if input_positions is None else tuple(input_positions),
            output_positions=None if output_positions is None else tuple(output_positions),
        )
        return await self._exchange(wire.JACOBIANS, message, tensors=tensors, want_tensors=vectors)

    async def likelihoods(
        self,
        checkpoint: str,
        *,
        token_ids: TokenIds | None = None,
        text: str | None = None,
        dtype: ComputeDtype | None = None,
        family: str | None = None,
        family_row: Mapping[str, Any] | None = None,
    ) -> LikelihoodAnswer:
        """How likely a checkpoint finds a text: ln p of every token but the first, given those before it.

        Args:
            checkpoint: its name, a path under a root of the service.
            token_ids: a text from its first token, or several of one length.
            text: the same, tokenised with the checkpoint's own tokenizer.json.
            dtype: run every step in this type, as an engine would; float32 at least when left out.
            family: row of the family table, instead of what the config says.
            family_row: a row of your own, instead of one.
        """
        message = compose(
            LikelihoodRequest,
            checkpoint=checkpoint,
            token_ids=as_token_ids(token_ids),
            text=text,
            dtype=dtype,
            family=family,
            family_row=None if family_row is None else dict(family_row),
        )
        return (await self._exchange(wire.LIKELIHOODS, message)).answer

    async def plan(
        self,
        operation: PlannedOperation,
        request: Mapping[str, object] | Request,
        *,
        tensors: Mapping[str, TensorShape | tuple[int, ...]] | None = None,
    ) -> PlanAnswer:
        """What a request would read, hold and compute; it is not made.

        Args:
            operation: as the method is called that would make it.
            request: its message, as a mapping or as the model of `glassblock.wire`.
            tensors: of its body, by name: shapes of float32, or `TensorShape`.
        """
        message = request.model_dump(mode="json", exclude_unset=True) if isinstance(request, Request) else dict(request)
        shapes = {
            name: one if isinstance(one, TensorShape) else TensorShape(shape=one)
            for name, one in (tensors or {}).items()
        }
        asked = compose(PlanRequest, operation=operation, request=message, tensors=shapes)
        return (await self._exchange(wire.PLAN, asked)).answer

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
        family_row: Mapping[str, Any] | None = None,
        against: Mapping[str, Any] | None = None,
        against_name: str = "against",
        rules: Sequence[str] | None = None,
        certify: bool = False,
        digest: Literal["fast", "sha256", "none"] = "fast",
        reference: str | None = None,
        captures: str | None = None,
        idempotency_key: str | None = None,
    ) -> Audit:
        """Start an audit and return at once.

        Args:
            checkpoint: its name, a path under a root of the service.
            family: row of the family table, instead of what the config says.
            family_row: a row of your own, instead of one.
            against: another engine's config, to compare every setting with (docs/comparing.md).
            against_name: what findings call that config.
            rules: rules to apply; all when left out.
            certify: compute the certified bound of every tensor, not of suspects alone.
            digest: of each tensor's bytes: fast, or one that cannot be forged, or none.
            reference: name of another checkpoint, to compare every tensor with.
            captures: name of a safetensors file, or a folder of them, with tensors captured in an engine.
            idempotency_key: of your choosing; asked again with the same key, the same audit is the answer.
        """
        message = compose(
            AuditRequest,
            checkpoint=checkpoint,
            family=family,
            family_row=None if family_row is None else dict(family_row),
            against=None if against is None else dict(against),
            against_name=against_name,
            rules=None if rules is None else tuple(rules),
            certify=certify,
            digest=digest,
            reference=reference,
            captures=captures,
        )
        said = {"Idempotency-Key": idempotency_key}
        return (await self._exchange(wire.START_AUDIT, message, said=said)).answer

    async def audits(
        self,
        *,
        state: JobState | None = None,
        checkpoint: str | None = None,
        since: datetime | None = None,
        limit: int = 50,
        cursor: str | None = None,
    ) -> AuditList:
        """The audits of this service, the newest first, a page at a time, without their reports.

        Args:
            state: only those in this state.
            checkpoint: only those of this checkpoint.
            since: only those created then or later; with its zone.
            limit: how many at most, up to 500.
            cursor: `next` of the page before.
        """
        message = compose(AuditQuery, state=state, checkpoint=checkpoint, since=since, limit=limit, cursor=cursor)
        return (await self._exchange(wire.AUDITS, message)).answer

    async def audit_events(
        self, audit_id: str, *, last_event_id: str | None = None, on_event: OnEvent | None = None
    ) -> tuple[AuditEvent, ...]:
        """What happens to an audit, until it ends.

        Args:
            audit_id: as `start_audit` said it.
            last_event_id: `id` of the last event seen, to go on after it; from the beginning when left out.
            on_event: told every event as it comes.
        """
        feed, said = EventFeed(on_event), {"Last-Event-ID": last_event_id}
        call = exchange.prepare(wire.AUDIT_EVENTS, Nothing(), parameters={"id": audit_id}, said=said)
        response, landing = await self._send(call, feed)
        exchange.require_stream(call, response.status_code, response.headers, landing)
        return feed.events

    async def audit_report(self, audit_id: str) -> Report:
        """The report of an audit that ended. For other formats see `glassblock.reports.REPORTS`."""
        return await self._ask(wire.AUDIT_REPORT, id=audit_id)

    async def audit(self, audit_id: str) -> Audit:
        """State, progress and, when it ended well, the report."""
        return await self._ask(wire.AUDIT, id=audit_id)

    async def cancel_audit(self, audit_id: str) -> Audit:
        """Cancel an audit that has not ended."""
        return await self._ask(wire.CANCEL_AUDIT, id=audit_id)

    async def repair(
        self,
        checkpoint: str,
        *,
        output: str | None = None,
        dry_run: bool = False,
        rules: Sequence[str] | None = None,
        reference: str | None = None,
        family: str | None = None,
    ) -> RepairAnswer:
        """Repair a checkpoint into a new directory of the service, or say what would be done.

        Args:
            checkpoint: its name, a path under a root of the service.
            output: name of the new directory under the service's output root.
            dry_run: write nothing; `after` is the audit of the patched checkpoint.
            rules: repair only what these find; all when left out.
            reference: name of another checkpoint, whose tensors decide more.
            family: row of the family table, where no config names one.
        """
        message = compose(
            RepairRequest,
            checkpoint=checkpoint,
            output=output,
            dry_run=dry_run,
            rules=None if rules is None else tuple(rules),
            reference=reference,
            family=family,
        )
        return (await self._exchange(wire.REPAIR, message)).answer

    async def selftest(
        self,
        checkpoint: str,
        *,
        rules: Sequence[str] | None = None,
        layers: Sequence[int] | None = None,
        family: str | None = None,
    ) -> SelftestAnswer:
        """Plant each mistake in a checkpoint, in memory, and say what an audit finds.

        Args:
            checkpoint: its name, a path under a root of the service.
            rules: only mistakes that these are meant for; all when left out.
            layers: layers to plant in; all when left out.
            family: row of the family table, where no config names one.
        """
        message = compose(
            SelftestRequest,
            checkpoint=checkpoint,
            rules=None if rules is None else tuple(rules),
            layers=None if layers is None else tuple(layers),
            family=family,
        )
        return (await self._exchange(wire.SELFTEST, message)).answer

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
        family_row: Mapping[str, Any] | None = None,
        against: Mapping[str, Any] | None = None,
        against_name: str = "against",
        rules: Sequence[str] | None = None,
        certify: bool = False,
        digest: Literal["fast", "sha256", "none"] = "fast",
        reference: str | None = None,
        captures: str | None = None,
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
            checkpoint,
            family=family,
            family_row=family_row,
            against=against,
            against_name=against_name,
            rules=rules,
            certify=certify,
            digest=digest,
            reference=reference,
            captures=captures,
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
        said: Mapping[str, str | None] | None = None,
    ) -> Reply[AnswerT]:
        call = exchange.prepare(
            endpoint, message, tensors=tensors, want_tensors=want_tensors, parameters=parameters, said=said
        )
        response, landing = await self._send(call)
        return exchange.conclude(call, response.status_code, response.headers, landing.close())

    async def _send(self, call: Call[Any], feed: EventFeed | None = None) -> tuple[httpx.Response, exchange.Landing]:
        """Send a call and receive its answer; a stream of events goes into `feed` as it comes."""
        content = _pieces(call) if call.body else None
        with exchange.transport_failures(self._shown_url):
            async with self._http.stream(
                call.endpoint.method, call.path, headers=call.headers, content=content
            ) as response:
                landing = exchange.Landing(response.headers)
                take = landing.add if feed is None or not exchange.is_stream(response.headers) else feed.add
                async for chunk in response.aiter_raw() if exchange.is_plain(response) else response.aiter_bytes():
                    take(chunk)
        return response, landing


async def _pieces(call: Call[Any]) -> AsyncIterator[bytes]:
    for piece in call.pieces():
        yield piece
