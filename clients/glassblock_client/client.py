"""The client that waits."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, cast

from glassblock.errors import GlassblockError
from glassblock.wire import endpoints as wire
from glassblock.wire.audits import ENDED, Audit, AuditEvent, Report
from glassblock.wire.endpoints import AnswerT, Nothing
from glassblock.wire.framing import WireTensor
from glassblock.wire.values import Answer, Request

from glassblock_client import exchange, questions
from glassblock_client.backend import httpx
from glassblock_client.exchange import Call, Reply
from glassblock_client.jobs import (
    AWAY,
    AWAY_SECONDS,
    GIVE_UP_SECONDS,
    EventFeed,
    OnEvent,
    OnProgress,
    answer_model,
    ended_well,
    pauses,
    report_of,
)
from glassblock_client.progress import told
from glassblock_client.questions import Question, ResultT, signature_of_method
from glassblock_client.tensors import Array
from glassblock_client.texts import TokenIds

P = ParamSpec("P")


def _asks(build: Callable[P, Question[ResultT]]) -> "Callable[Concatenate[Client, P], ResultT]":
    """The method that asks what `build` puts together: its arguments, its docstring."""

    @wraps(build)
    def method(client: "Client", /, *args: P.args, **fields: P.kwargs) -> ResultT:
        return client.ask(build(*args, **fields))

    cast("Any", method).__signature__ = signature_of_method(build)
    return method


class Client:
    """A Glassblock service, one method per endpoint.

        with Client("http://localhost:8080") as client:
            run = client.run_block("llama", 7, sample=Sample(rows=16), return_tensors=True)
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
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        reach = exchange.connection(base_url, api_key=api_key, timeout=timeout)
        self._shown_url = reach.shown
        self._on_job: OnProgress | None = None
        self._http = httpx.Client(
            base_url=reach.base_url, headers=reach.headers, timeout=reach.timeout, transport=transport
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def as_job(self, on_progress: OnProgress | None = None) -> Self:
        """The same service, where whatever may take long runs as a job; methods wait, and answer as before.

        For what is over the cost that a caller may wait for, or should outlive a broken connection, and a service that
        is away for up to two minutes. Whatever ends the wait early, Ctrl-C too, cancels the job. It shares the
        connections of this client.

            client.as_job(print).jacobians("llama", range(80))

        Args:
            on_progress: told the progress of the job at every look.
        """
        other = copy.copy(self)
        other._on_job = on_progress or (lambda _progress: None)
        return other

    def start_job(
        self,
        operation: str,
        request: Mapping[str, object] | Request,
        *,
        tensors: Mapping[str, Array | WireTensor] | None = None,
        return_tensors: bool = False,
        idempotency_key: str | None = None,
    ) -> Audit:
        """Start any operation that may take long as a job, and return at once; `audit` tells how it goes.

        Args:
            operation: as the method is called that would wait for it.
            request: its message, as a mapping or as the model of `glassblock.wire`.
            tensors: of its body, by name.
            return_tensors: keep the answer's tensors as such; `audit_answer` then has them as arrays.
            idempotency_key: of your choosing; asked again with the same key, the same job is the answer.
        """
        call = questions.job_of(
            operation,
            request,
            tensors=tensors,
            return_tensors=return_tensors,
            idempotency_key=idempotency_key,
        )
        response, landing = self._send(call)
        exchange.require_job(call, response.status_code, response.headers, landing)
        return exchange.conclude(
            call.answered_by(Audit), response.status_code, response.headers, landing.close()
        ).answer

    live = _asks(questions.live)
    ready = _asks(questions.ready)
    metrics = _asks(questions.metrics)
    capabilities = _asks(questions.capabilities)
    checkpoints = _asks(questions.checkpoints)
    pin = _asks(questions.pin)
    evict = _asks(questions.evict)
    checkpoint = _asks(questions.checkpoint)
    run_block = _asks(questions.run_block)
    explain_block = _asks(questions.explain_block)
    norm_statistics = _asks(questions.norm_statistics)
    compare_residuals = _asks(questions.compare_residuals)
    jacobians = _asks(questions.jacobians)
    likelihoods = _asks(questions.likelihoods)
    plan = _asks(questions.plan)
    budgets = _asks(questions.budgets)
    start_audit = _asks(questions.start_audit)
    audits = _asks(questions.audits)

    def audit_events(
        self, audit_id: str, *, last_event_id: str | None = None, on_event: OnEvent | None = None
    ) -> tuple[AuditEvent, ...]:
        """What happens to an audit, until it ends.

        Args:
            audit_id: as `start_audit` said it.
            last_event_id: `id` of the last event seen, to go on after it; from the beginning when left out.
            on_event: told every event as it comes.

        Raises:
            ServiceUnavailable: the stream broke off before the end of the audit.
        """
        feed, said = EventFeed(on_event, after=last_event_id), {"Last-Event-ID": last_event_id}
        call = exchange.prepare(wire.AUDIT_EVENTS, Nothing(), parameters={"id": audit_id}, said=said)
        response, landing = self._send(call, feed)
        exchange.require_stream(call, response.status_code, response.headers, landing)
        return feed.close()

    audit_report = _asks(questions.audit_report)

    def audit_answer(self, audit_id: str) -> Reply[Answer]:
        """What a job ended with: the answer that its operation's own method returns, and its tensors as arrays."""
        audit = self.audit(audit_id)
        return self._answer_of(audit_id, answer_model(audit.operation))

    audit = _asks(questions.audit)
    cancel_audit = _asks(questions.cancel_audit)
    repair = _asks(questions.repair)
    selftest = _asks(questions.selftest)
    rules = _asks(questions.rules)
    families = _asks(questions.families)

    def audit_checkpoint(
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
        reference: str | Sequence[str] | None = None,
        captures: str | None = None,
        token_ids: TokenIds | None = None,
        text: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Report:
        """Audit a checkpoint and wait for the report. Arguments as `start_audit`.

        A service that is away for up to two minutes is waited for. Whatever ends the wait early, Ctrl-C too, cancels
        the audit.

        Args:
            on_progress: told the progress at every look; left out, a bar shows it where stderr is a terminal.

        Raises:
            NotReady: somebody else cancelled it.
        """
        audit = self.start_audit(
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
            token_ids=token_ids,
            text=text,
        )
        with told(f"auditing {checkpoint}", on_progress) as advance:
            return report_of(self._waited(audit, advance))

    def _answer_of(self, audit_id: str, kind: type[AnswerT]) -> Reply[AnswerT]:
        call = exchange.prepare(wire.AUDIT_ANSWER, Nothing(), parameters={"id": audit_id}).answered_by(kind)
        return self._exchange(call)

    def _waited(self, audit: Audit, on_progress: OnProgress | None) -> Audit:
        """The job once it has ended well; whatever ends the wait early cancels it."""
        waits, seen = pauses(), time.monotonic()
        try:
            while not ended_well(audit):
                if on_progress is not None:
                    on_progress(audit.progress)
                time.sleep(next(waits))
                try:
                    audit, seen = self.audit(audit.id), time.monotonic()
                except AWAY:
                    if time.monotonic() - seen > AWAY_SECONDS:
                        raise
        except BaseException:
            if audit.state not in ENDED:
                self._give_up(audit)
            raise
        return audit

    def _give_up(self, audit: Audit) -> None:
        # What ended the wait is what the caller must hear of, soon also where the service hangs.
        call = questions.cancel_audit(audit.id).call
        with suppress(GlassblockError), exchange.transport_failures(self._shown_url):
            self._http.request(call.endpoint.method, call.path, headers=call.headers, timeout=GIVE_UP_SECONDS)

    def ask(self, question: Question[ResultT]) -> ResultT:
        """Send a question of `glassblock_client.questions`; every method named after an endpoint does this."""
        call = question.call
        if self._on_job is not None and call.endpoint.job:
            call = call.saying("Prefer", "respond-async")
        return question.read(self._exchange(call))

    def _exchange(self, call: Call[AnswerT]) -> Reply[AnswerT]:
        response, landing = self._send(call)
        if not exchange.is_job(call, response.status_code):
            return exchange.conclude(call, response.status_code, response.headers, landing.close())
        told = exchange.conclude(call.answered_by(Audit), response.status_code, response.headers, landing.close())
        audit = self._waited(told.answer, self._on_job)
        return self._answer_of(audit.id, call.endpoint.answer)

    def _send(self, call: Call[Any], feed: EventFeed | None = None) -> tuple[httpx.Response, exchange.Landing]:
        """Send a call and receive its answer; a stream of events goes into `feed` as it comes."""
        content = call.pieces() if call.body else None
        with (
            exchange.transport_failures(self._shown_url),
            self._http.stream(call.endpoint.method, call.path, headers=call.headers, content=content) as response,
        ):
            landing = exchange.Landing(response.headers)
            take = landing.add if feed is None or not exchange.is_stream(response.headers) else feed.add
            chunks = response.iter_raw() if exchange.is_plain(response) else response.iter_bytes()
            for chunk in chunks:
                take(chunk)
        return response, landing
