"""Both clients, against a service that answers from a table."""

import gzip
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import anyio
import httpx
import numpy as np
import pytest
from glassblock.errors import (
    GlassblockError,
    InternalFault,
    InvalidValue,
    NoRoom,
    NotReady,
    ServiceUnavailable,
    StorageUnavailable,
    UnknownCheckpoint,
    UnknownRoute,
)
from glassblock.wire import framing
from glassblock.wire.audits import Audit, AuditEvent, AuditList, Progress
from glassblock.wire.blocks import BlockRunAnswer, Overrides
from glassblock.wire.endpoints import ENDPOINTS
from glassblock.wire.likelihoods import LikelihoodAnswer
from glassblock.wire.problems import problem_from_error
from glassblock.wire.tables import Health
from glassblock.wire.values import BytesRead, Sample, Sourced
from glassblock_client import AsyncClient, Client
from glassblock_client.cli import app, audits
from glassblock_client.tensors import array_from_wire, wire_from_array
from reports.report_makers import report
from typer.testing import CliRunner

from client.fake_service import (
    BUDGET,
    CAPABILITIES,
    DETAIL,
    FAMILIES,
    HEALTH,
    NO_CHECKPOINTS,
    RESIDENCY,
    RULES,
    FakeService,
    Handler,
    finished_audit,
    json_response,
    listening,
    problem_response,
)

URL = "http://glassblock.test"


def sync_call(service: FakeService, call: Callable[[Any], Any], **options: Any) -> Any:
    with Client(URL, transport=service.transport, **options) as client:
        return call(client)


def async_call(service: FakeService, call: Callable[[Any], Awaitable[Any]], **options: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(URL, transport=service.transport, **options) as client:
            return await call(client)

    return anyio.run(run)


BOTH = pytest.mark.parametrize("ask", [sync_call, async_call], ids=["sync", "async"])


def block_answer(**changes: Any) -> BlockRunAnswer:
    fields: dict[str, Any] = {
        "checkpoint": "tiny",
        "layer": 0,
        "part": "ffn",
        "family": "llama",
        "verified": "bit for bit",
        "device": "cpu",
        "compute_dtype": "float32",
        "placement": "pre",
        "activation": Sourced(value="silu", source="config.json: hidden_act"),
        "eps": {"ffn_in": Sourced(value=1e-5, source="config.json: rms_norm_eps")},
        "stages": {},
        "recombination_error": None,
        "recombination": {},
        "parameters": 12,
        "hidden_elements": 2,
        "read": BytesRead(bytes=24, tensors=3),
    }
    return BlockRunAnswer(**fields | changes)


LIKELIHOOD = LikelihoodAnswer(
    checkpoint="tiny",
    family="llama",
    verified="executed",
    device="cpu",
    compute_dtype="float32",
    token_ids=[1, 2],
    log_likelihoods=[-0.5],
    mean=-0.5,
    read=BytesRead(bytes=24, tensors=3),
)


def tensor_response(answer: BlockRunAnswer, **arrays: np.ndarray) -> httpx.Response:
    tensors = {name: wire_from_array(array) for name, array in arrays.items()}
    body = b"".join(framing.frame("response", answer.model_dump_json(), tensors))
    return httpx.Response(200, content=body, headers={"Content-Type": framing.MEDIA_TYPE})


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_endpoint_has_a_method_and_every_method_an_endpoint(kind: type):
    methods = {name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_")}
    beside = {"close", "ask", "as_job", "start_job", "audit_checkpoint"}
    assert methods - beside == {endpoint.name for endpoint in ENDPOINTS}


def test_the_two_clients_differ_only_in_waiting():
    for name, method in inspect.getmembers(Client, inspect.isfunction):
        if name.startswith("_"):
            continue
        awaited = getattr(AsyncClient, name)
        assert inspect.signature(method) == inspect.signature(awaited), name
        assert inspect.getdoc(method) == inspect.getdoc(awaited), name
        assert inspect.iscoroutinefunction(awaited) is (name != "as_job"), name


FIELDS_BESIDE_THE_MESSAGE = {"return_tensors", "on_event", "captures"}


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: endpoint.name)
def test_a_method_takes_every_field_of_its_message(endpoint: Any):
    parameters = set(inspect.signature(getattr(Client, endpoint.name)).parameters) - {"self"}
    fields = set(endpoint.request.model_fields)
    if endpoint.name not in {"jacobians", "run_block"}:
        fields -= {"part"}  # elsewhere "ffn" is the only part there is
    in_path = {"name": "name", "id": "audit_id"}
    path = {in_path[field] for field in in_path if f"{{{field}}}" in endpoint.path}
    path |= {header.lower().replace("-", "_") for header in endpoint.headers}
    assert parameters - FIELDS_BESIDE_THE_MESSAGE == (fields | path) - FIELDS_BESIDE_THE_MESSAGE


CALLS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "GET /health/live": (lambda c: c.live(), HEALTH),
    "GET /health/ready": (lambda c: c.ready(), HEALTH),
    "GET /v1": (lambda c: c.capabilities(), CAPABILITIES),
    "GET /v1/checkpoints": (lambda c: c.checkpoints(), NO_CHECKPOINTS),
    "PUT /v1/checkpoints/tiny/residency": (lambda c: c.pin("tiny", layers=[0]), RESIDENCY),
    "DELETE /v1/checkpoints/tiny/residency": (lambda c: c.evict("tiny"), RESIDENCY),
    "GET /v1/checkpoints/tiny": (lambda c: c.checkpoint("tiny"), DETAIL),
    "POST /v1/likelihoods": (lambda c: c.likelihoods("tiny", token_ids=[1, 2]), LIKELIHOOD),
    "POST /v1/budgets": (lambda c: c.budgets(d_model=4, d_ff=8, kind="gated"), BUDGET),
    "POST /v1/audits": (lambda c: c.start_audit("tiny"), finished_audit()),
    "GET /v1/audits": (lambda c: c.audits(), AuditList(audits=())),
    "GET /v1/audits/a1/report": (lambda c: c.audit_report("a1"), report()),
    "GET /v1/audits/a1": (lambda c: c.audit("a1"), finished_audit()),
    "DELETE /v1/audits/a1": (lambda c: c.cancel_audit("a1"), finished_audit()),
    "GET /v1/rules": (lambda c: c.rules(), RULES),
    "GET /v1/families": (lambda c: c.families(), FAMILIES),
}


@BOTH
@pytest.mark.parametrize("line", CALLS)
def test_answers_come_back_as_the_service_sent_them(ask: Any, line: str):
    call, answer = CALLS[line]
    service = FakeService({line: answer})
    assert ask(service, call) == answer
    assert service.asked[0].headers["Accept"] == "application/json"


@BOTH
def test_an_array_travels_as_safetensors_and_stages_come_back_as_arrays(ask: Any):
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    hidden = np.ones((2, 5), np.float16)
    service = FakeService({"POST /v1/blocks/run": lambda _: tensor_response(block_answer(), hidden=hidden)})
    reply = ask(
        service,
        lambda c: c.run_block(
            "tiny", 3, x=x, capture=["hidden"], overrides=Overrides(swap=True, eps=1e-6), return_tensors=True
        ),
    )
    request = service.asked[0]
    assert request.headers["Content-Type"] == request.headers["Accept"] == framing.MEDIA_TYPE
    assert int(request.headers["Content-Length"]) == len(request.content)
    assert "Transfer-Encoding" not in request.headers
    text, tensors = framing.unframe("request", memoryview(request.content))
    assert json.loads(text) == {
        "checkpoint": "tiny",
        "layer": 3,
        "capture": ["hidden"],
        "overrides": {"swap": True, "eps": 1e-6},
        "return_tensors": True,
    }
    np.testing.assert_array_equal(array_from_wire(tensors["x"]), x)
    assert reply.answer == block_answer()
    np.testing.assert_array_equal(reply.tensors["hidden"], hidden)
    assert reply.tensors["hidden"].dtype == np.float16


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_large_array_crosses_a_real_socket_bit_for_bit(kind: Any):
    x = np.random.default_rng(1).standard_normal((1024, 2048)).astype(np.float32)  # 8 MiB: many writes, many reads

    def echo(request: httpx.Request) -> httpx.Response:
        _, tensors = framing.unframe("request", memoryview(request.content))
        return tensor_response(block_answer(), x=array_from_wire(tensors["x"]))

    async def run(client: Any) -> Any:
        async with client:
            return await client.run_block("tiny", 0, x=x, return_tensors=True)

    with listening(FakeService({"POST /v1/blocks/run": echo})) as url:
        client = kind(url)
        if kind is AsyncClient:
            reply = anyio.run(run, client)
        else:
            with client:
                reply = client.run_block("tiny", 0, x=x, return_tensors=True)
    assert reply.tensors["x"].tobytes() == x.tobytes()


@BOTH
def test_lists_and_samples_travel_as_json(ask: Any):
    service = FakeService({"POST /v1/blocks/run": block_answer()})
    ask(service, lambda c: c.run_block("tiny", 0, x=[[1.0, float("nan")]]))
    assert service.sent() == {"checkpoint": "tiny", "layer": 0, "x": [[1.0, "NaN"]]}
    ask(service, lambda c: c.run_block("tiny", 0, sample=Sample(rows=4, seed=7)))
    assert service.sent() == {"checkpoint": "tiny", "layer": 0, "sample": {"rows": 4, "seed": 7}}
    assert service.asked[-1].headers["Accept"] == "application/json"


@BOTH
def test_a_checkpoint_is_not_asked_for_with_sizes_that_nobody_gave(ask: Any):
    service = FakeService({"POST /v1/budgets": BUDGET})
    ask(service, lambda c: c.budgets(checkpoint="tiny"))
    assert service.sent() == {"checkpoint": "tiny"}


NAMES = {
    "org/model": "org%2Fmodel",
    "a b?c#d%2F": "a%20b%3Fc%23d%252F",
    "..": "%2E%2E",
    ".": "%2E",
    "../../etc": "..%2F..%2Fetc",
    "größe": "gr%C3%B6%C3%9Fe",
    "a\\b\n": "a%5Cb%0A",
}


@BOTH
@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_one_segment_of_the_path(ask: Any, name: str):
    service = FakeService({f"GET /v1/checkpoints/{NAMES[name]}": DETAIL})
    ask(service, lambda c: c.checkpoint(name))


@BOTH
@pytest.mark.parametrize("name", ["", "\ud800"])
def test_what_cannot_be_a_path_is_refused_before_it_is_sent(ask: Any, name: str):
    with pytest.raises(InvalidValue) as caught:
        ask(FakeService({}), lambda c: c.checkpoint(name))
    assert caught.value.field == "name"


@BOTH
def test_a_service_mounted_under_a_path_is_asked_there(ask: Any):
    service = FakeService({"GET /proxy/gb/v1/rules": RULES})
    if ask is sync_call:
        with Client(URL + "/proxy/gb", transport=service.transport) as client:
            assert client.rules() == RULES
    else:

        async def run() -> Any:
            async with AsyncClient(URL + "/proxy/gb/", transport=service.transport) as client:
                return await client.rules()

        assert anyio.run(run) == RULES


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wrong stage": (lambda c: c.run_block("tiny", 0, capture=["gat"]), "capture.0"),
    "layer": (lambda c: c.run_block("tiny", 1.5), "layer"),
    "rows": (lambda c: c.run_block("tiny", 0, sample={"rows": 0}), "sample.rows"),
    "no name": (lambda c: c.start_audit(""), "checkpoint"),
    "half a character": (lambda c: c.start_audit("\ud800"), "checkpoint"),
    "list of sizes": (lambda c: c.budgets(d_model=[4, 0], d_ff=8, kind="plain"), "d_model.1"),
    "kind": (lambda c: c.budgets(d_model=4, d_ff=8, kind="sparse"), "kind"),
    "norm": (lambda c: c.norm_statistics(checkpoint="tiny", norm="middle"), "norm"),
    "matrix": (lambda c: c.compare_residuals(x=[1.0], matrix="identity"), "matrix"),
}


@BOTH
@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_no_service_would_take_names_its_field(ask: Any, name: str):
    call, field = REFUSED[name]
    with pytest.raises(InvalidValue) as caught:
        ask(FakeService({}), call)
    assert caught.value.field == field
    assert field.partition(".")[0] in caught.value.message


def test_a_closed_set_is_told():
    with pytest.raises(InvalidValue) as caught:
        sync_call(FakeService({}), REFUSED["kind"][0])
    assert caught.value.known == ("plain", "gated")


ERRORS = [
    (UnknownCheckpoint("no checkpoint 'x'", hint="see the list", known=("tiny",)), 404),
    (InvalidValue("x[0, 1] is nan", field="x", tensor="x", file="a.safetensors", byte=3), 422),
    (NoRoom("full", retry_after=5.0), 503),
    (InternalFault("the service failed on this request"), 500),
]


@BOTH
@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: getattr(value, "code", value))
def test_the_error_of_the_service_is_raised_here(ask: Any, error: GlassblockError, status: int):
    service = FakeService({"GET /v1/rules": lambda _: problem_response(error, status)})
    with pytest.raises(type(error)) as caught:
        ask(service, lambda c: c.rules())
    assert vars(caught.value) == vars(error)


@BOTH
def test_a_path_that_the_service_has_not_is_told_by_the_url(ask: Any):
    wrong = problem_response(UnknownRoute("no such path", hint="see GET /openapi.json"), 404)
    with pytest.raises(UnknownRoute) as caught:
        ask(FakeService({"GET /v1/checkpoints": lambda _: wrong}), lambda c: c.checkpoints())
    assert "does the URL point at the root" in (caught.value.hint or "")


def test_an_error_of_a_newer_service_is_still_one_of_ours():
    document = problem_from_error(InvalidValue("new"), 418).model_copy(update={"code": "brand-new"})
    body = document.model_dump_json()
    service = FakeService(
        {
            "GET /v1/rules": lambda _: httpx.Response(
                418, content=body, headers={"Content-Type": "application/problem+json"}
            )
        }
    )
    with pytest.raises(GlassblockError, match="new"):
        sync_call(service, lambda c: c.rules())


def plain(status: int, body: bytes | str = b"", **headers: str) -> Callable[[httpx.Request], httpx.Response]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: httpx.Response(status, content=body, headers=named)


FOREIGN: dict[str, tuple[Any, str]] = {
    "html": (plain(200, "<html>", content_type="text/html"), "text/html"),
    "nothing": (plain(200), "of type none"),
    "a proxy's 502": (plain(502, "<html>", content_type="text/html"), "HTTP 502"),
    "a redirect": (plain(307, location="https://elsewhere.test/"), "HTTP 307"),
    "a gateway's 401": (plain(401, "{}", content_type="application/json"), "HTTP 401"),
    "a foreign 404": (plain(404, "nope", content_type="text/plain"), "HTTP 404"),
    "another problem": (plain(400, '{"title": "x"}', content_type="application/problem+json"), "HTTP 400"),
    "broken problem": (plain(400, "{", content_type="application/problem+json"), "HTTP 400"),
    "no JSON": (plain(200, "{", content_type="application/json"), "none of Glassblock's"),
    "not UTF-8": (plain(200, b'"\xff"', content_type="application/json"), "none of Glassblock's"),
    "another message": (plain(200, '{"hello": 1}', content_type="application/json"), "none of Glassblock's"),
    "a broken frame": (plain(200, b"123", content_type=framing.MEDIA_TYPE), "safetensors"),
    "cut short": (plain(200, "{}", content_type="application/json", content_length="9"), "announced 9 bytes"),
    "too long": (plain(200, "{}", content_type="application/json", content_length="1"), "announced 1 bytes"),
    "no memory for it": (
        plain(200, "{}", content_type="application/json", content_length=str(2**62)),
        "no memory for an answer",
    ),
    "longer than any number": (
        plain(200, "{}", content_type="application/json", content_length=str(2**80)),
        "no memory for an answer",
    ),
    "refused": (httpx.ConnectError("[Errno 111] Connection refused"), "cannot connect to http://glassblock.test"),
    "connect timeout": (httpx.ConnectTimeout(""), "no connection"),
    "read timeout": (httpx.ReadTimeout(""), "no answer"),
    "hung up": (httpx.RemoteProtocolError("Server disconnected"), "Server disconnected"),
    "bad gzip": (plain(200, b"nonsense", content_type="application/json", content_encoding="gzip"), "broke"),
}


@BOTH
@pytest.mark.parametrize("name", FOREIGN)
def test_what_speaks_no_protocol_of_ours_is_told_with_a_way_out(ask: Any, name: str):
    answer, told = FOREIGN[name]
    with pytest.raises(ServiceUnavailable) as caught:
        ask(FakeService({"GET /v1/rules": answer}), lambda c: c.rules())
    assert told in caught.value.message
    assert caught.value.hint


def test_a_proxy_that_says_when_is_believed():
    service = FakeService({"GET /v1/rules": plain(503, retry_after="7")})
    with pytest.raises(ServiceUnavailable) as caught:
        sync_call(service, lambda c: c.rules())
    assert caught.value.retry_after == 7


@BOTH
def test_compressed_answers_and_answers_without_a_length_are_read(ask: Any):
    packed = gzip.compress(RULES.model_dump_json().encode())
    service = FakeService(
        {
            "GET /v1/rules": plain(200, packed, content_type="application/json", content_encoding="gzip"),
            "GET /v1/families": lambda _: httpx.Response(
                200,
                stream=Chunks([FAMILIES.model_dump_json().encode()[:10], FAMILIES.model_dump_json().encode()[10:]]),
                headers={"Content-Type": "application/json; charset=utf-8"},
            ),
        }
    )
    assert ask(service, lambda c: c.rules()) == RULES
    assert ask(service, lambda c: c.families()) == FAMILIES


class Chunks(httpx.SyncByteStream, httpx.AsyncByteStream):
    def __init__(self, chunks: list[bytes]) -> None:
        self._chunks = chunks

    def __iter__(self) -> Any:
        return iter(self._chunks)

    async def __aiter__(self) -> Any:
        for chunk in self._chunks:
            yield chunk


@BOTH
def test_the_key_goes_into_the_header_and_nowhere_else(ask: Any):
    service = FakeService({"GET /v1/rules": RULES})
    ask(service, lambda c: c.rules(), api_key="s3cret")
    assert service.asked[0].headers["Authorization"] == "Bearer s3cret"
    assert service.asked[0].headers["User-Agent"].startswith("glassblock-client/")
    with pytest.raises(InvalidValue) as caught:
        ask(service, lambda c: c.rules(), api_key="s3cret\r\nX: 1")
    assert "s3cret" not in caught.value.message
    ask(service, lambda c: c.rules(), api_key=None)
    assert "Authorization" not in service.asked[-1].headers


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("url", ["", "localhost:8080", "ftp://x", "http://", "http://[::1", "http://x:port", "/v1"])
def test_a_url_that_cannot_be_asked_is_refused(kind: Any, url: str):
    with pytest.raises(InvalidValue) as caught:
        kind(url)
    assert caught.value.field == "base_url"


def test_a_password_in_the_url_is_not_repeated():
    service = FakeService({"GET /v1/rules": httpx.ConnectError("refused")})
    client = Client("http://me:hidden@glassblock.test", transport=service.transport)
    with client, pytest.raises(ServiceUnavailable) as caught:
        client.rules()
    assert "hidden" not in caught.value.message
    assert "glassblock.test" in caught.value.message


def waiting(state: Any, done: int = 0, **more: Any) -> Audit:
    return Audit(id="a1", state=state, checkpoint="tiny", progress=Progress(done=done, total=4), **more)


class Steps:
    """One answer after another; the last one stays."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def __call__(self, _: httpx.Request) -> httpx.Response:
        return json_response(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])


@BOTH
def test_an_audit_is_started_watched_and_its_report_returned(ask: Any):
    told: list[int] = []
    service = FakeService(
        {
            "POST /v1/audits": waiting("queued"),
            "GET /v1/audits/a1": Steps(waiting("running", 2), waiting("running", 3), finished_audit()),
        }
    )
    answer = ask(
        service,
        lambda c: c.audit_checkpoint(
            "tiny",
            against={"eps": None},
            against_name="other.json",
            rules=["config/shape"],
            certify=True,
            on_progress=lambda progress: told.append(progress.done),
        ),
    )
    assert answer == report()
    assert told == [0, 2, 3]
    assert service.sent(0) == {
        "checkpoint": "tiny",
        "against": {"eps": None},
        "against_name": "other.json",
        "rules": ["config/shape"],
        "certify": True,
    }


@BOTH
def test_a_failed_audit_raises_what_it_failed_with(ask: Any):
    error = UnknownCheckpoint("gone", hint="look")
    problem = problem_from_error(error, 404).model_dump(exclude_none=True)
    service = FakeService({"POST /v1/audits": waiting("failed", problem=problem)})
    with pytest.raises(UnknownCheckpoint) as caught:
        ask(service, lambda c: c.audit_checkpoint("tiny"))
    assert vars(caught.value) == vars(error)
    assert len(service.asked) == 1


@BOTH
def test_an_audit_that_somebody_cancelled_is_no_report(ask: Any):
    service = FakeService({"POST /v1/audits": waiting("queued"), "GET /v1/audits/a1": waiting("cancelled")})
    with pytest.raises(NotReady, match="cancelled"):
        ask(service, lambda c: c.audit_checkpoint("tiny"))


@BOTH
@pytest.mark.parametrize("reached", [True, False])
def test_an_interrupt_cancels_the_audit(ask: Any, reached: bool):
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    cancelled = waiting("cancelled") if reached else httpx.ConnectError("gone")
    service = FakeService({"POST /v1/audits": waiting("running"), "DELETE /v1/audits/a1": cancelled})
    with pytest.raises(KeyboardInterrupt):
        ask(service, lambda c: c.audit_checkpoint("tiny", on_progress=interrupt))
    assert service.asked[-1].method == "DELETE"


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_interrupt_waits_for_no_service_that_hangs(kind: Any, monkeypatch: pytest.MonkeyPatch):
    for module in ("client", "async_client"):
        monkeypatch.setattr(f"glassblock_client.{module}.GIVE_UP_SECONDS", 0.2)

    def hang(_: httpx.Request) -> httpx.Response:
        threading.Event().wait()
        raise AssertionError("nobody sets it")

    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    def audit(url: str) -> None:
        if kind is Client:
            with Client(url) as client:
                client.audit_checkpoint("tiny", on_progress=interrupt)
        else:
            anyio.run(audit_async, url)

    async def audit_async(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.audit_checkpoint("tiny", on_progress=interrupt)

    service = FakeService({"POST /v1/audits": waiting("running"), "DELETE /v1/audits/a1": hang})
    with listening(service) as url:
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            audit(url)
        took = time.monotonic() - began
    assert took < 10
    assert service.asked[-1].method == "DELETE"


def away(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("refused")


@BOTH
def test_a_service_that_is_away_for_a_while_does_not_end_its_audit(ask: Any):
    looks = iter([away, lambda _: problem_response(StorageUnavailable("busy"), 503), away, Steps(finished_audit())])

    def look(request: httpx.Request) -> httpx.Response:
        return next(looks)(request)

    service = FakeService({"POST /v1/audits": waiting("running"), "GET /v1/audits/a1": look})
    assert ask(service, lambda c: c.audit_checkpoint("tiny")) == report()


@BOTH
def test_a_service_that_stays_away_ends_the_wait(ask: Any, monkeypatch: pytest.MonkeyPatch):
    for module in ("client", "async_client"):
        monkeypatch.setattr(f"glassblock_client.{module}.AWAY_SECONDS", 0.3)
    service = FakeService(
        {"POST /v1/audits": waiting("running"), "GET /v1/audits/a1": away, "DELETE /v1/audits/a1": waiting("cancelled")}
    )
    with pytest.raises(ServiceUnavailable, match="refused"):
        ask(service, lambda c: c.audit_checkpoint("tiny"))
    assert [asked.method for asked in service.asked[-2:]] == ["GET", "DELETE"]


def event_stream(*events: AuditEvent) -> Handler:
    text = "".join(f"data: {event.model_dump_json()}\n\n" for event in events)
    return lambda _: httpx.Response(200, text=text, headers={"Content-Type": "text/event-stream"})


def events_in(*states: Any) -> list[AuditEvent]:
    at, progress = datetime(2026, 1, 1, tzinfo=UTC), Progress(done=0, total=1)
    return [AuditEvent(id=n, kind="state", at=at, state=state, progress=progress) for n, state in enumerate(states, 1)]


@BOTH
def test_events_that_break_off_in_good_order_are_no_end(ask: Any):
    service = FakeService({"GET /v1/audits/a1/events": event_stream(*events_in("queued", "running"))})
    with pytest.raises(ServiceUnavailable, match="broke off") as caught:
        ask(service, lambda c: c.audit_events("a1"))
    assert caught.value.hint == "ask for those after it: last_event_id='2'"
    service.answers["GET /v1/audits/a1/events"] = event_stream()
    with pytest.raises(ServiceUnavailable, match="broke off"):
        ask(service, lambda c: c.audit_events("a1"))
    assert ask(service, lambda c: c.audit_events("a1", last_event_id="2")) == ()


def test_events_are_followed_over_as_many_broken_streams_as_tell_something_new(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audits, "RECONNECTS", 1)
    monkeypatch.setattr(audits, "RECONNECT_SECONDS", 0.0)
    told = events_in("queued", "running", "running", "running", "succeeded")
    left = list(told)

    def one_more(request: httpx.Request) -> httpx.Response:
        assert request.headers.get("Last-Event-ID", "0") == str(len(told) - len(left))
        return event_stream(left.pop(0))(request)

    service = FakeService({"GET /v1/audits/a1/events": one_more, "GET /v1/audits/a1": finished_audit()})
    with listening(service) as url:
        followed = CliRunner().invoke(app, ["audits", "--follow", "a1", "--format", "json", "--url", url])
    assert followed.exit_code == 0, followed.output
    assert [json.loads(line)["id"] for line in followed.stdout.splitlines()] == [event.id for event in told]


def test_a_cancelled_task_cancels_its_audit():
    service = FakeService({"POST /v1/audits": waiting("running"), "GET /v1/audits/a1": waiting("running")})
    service.answers["DELETE /v1/audits/a1"] = waiting("cancelled")

    async def run() -> None:
        async with AsyncClient(URL, transport=service.transport) as client:
            with anyio.move_on_after(0.2):
                await client.audit_checkpoint("tiny")

    anyio.run(run)
    assert service.asked[-1].method == "DELETE"


def test_health_of_a_newer_service_is_read_past_what_is_new():
    service = FakeService(
        {"GET /health/live": plain(200, '{"status": "alive", "mood": 1}', content_type="application/json")}
    )
    assert sync_call(service, lambda c: c.live()) == Health(status="alive", checks={})


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_timeout_that_no_clock_can_hold_waits_for_ever(kind: Any):
    for seconds in (float("inf"), 1e300, None):
        assert kind("http://x.test", timeout=seconds)._http.timeout.read is None
    for seconds in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidValue, match="timeout is"):
            kind("http://x.test", timeout=seconds)
