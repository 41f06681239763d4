"""Bodies of all requests together stay within their budget, and give it back whatever becomes of them."""

import asyncio
import gc
import json
import socket
import tracemalloc
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from glassblock.api.bodies import Patience, TooSlow, read_body
from glassblock.api.body_budget import SMALL_BODY, BodyBudget, object_bytes
from glassblock.api.settings import MIB, Settings
from glassblock.errors import GlassblockError, NoRoom, TooLarge
from glassblock.wire import framing
from glassblock_client.tensors import wire_from_array
from makers import tiny_checkpoint
from served import Served, raw_answer, served
from starlette.requests import Request
from starlette.responses import Response


@contextmanager
def no_collection() -> Generator[None]:
    """What is given back here is given back by reference counts."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def request_of(chunks: Sequence[bytes], *, declared: int | None = None, pause: float = 0.0) -> Request:
    headers = [] if declared is None else [(b"content-length", str(declared).encode())]
    waiting = list(chunks)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    return Request({"type": "http", "method": "POST", "headers": headers}, receive)


def read(
    chunks: Sequence[bytes],
    budget: BodyBudget,
    *,
    declared: bool = True,
    pause: float = 0.0,
    limit: int = 8 * MIB,
    caller: str = "one",
) -> memoryview:
    request = request_of(chunks, declared=sum(map(len, chunks)) if declared else None, pause=pause)
    patience = Patience(10.0, 0.02)
    return asyncio.run(read_body(request, limit=limit, patience=patience, budget=budget.of(caller)))


def refusal(chunks: Sequence[bytes], budget: BodyBudget, **how: Any) -> Exception:
    """What is raised, without the frames that would hold the body."""
    try:
        read(chunks, budget, **how)
    except (GlassblockError, TooSlow) as fault:
        fault.__traceback__ = None
        return fault
    raise AssertionError("it was read")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_is_counted_until_its_last_view_is_gone(declared: bool) -> None:
    budget = BodyBudget(4 * MIB)
    with no_collection():
        never = refusal([bytes(MIB)] * 5, budget, declared=declared)
        assert isinstance(never, TooLarge)
        assert "GLASSBLOCK_BODIES_MIB" in (never.hint or "")
        body = read([bytes(MIB)] * 3, budget, declared=declared)
        assert budget.held == 3 * MIB == len(body)
        view = body[5:7]
        del body
        assert budget.held == 3 * MIB
        now = refusal([bytes(MIB)] * 2, budget, declared=declared)
        assert isinstance(now, NoRoom)
        assert now.retry_after
        assert len(read([bytes(SMALL_BODY)], budget, declared=declared)) == SMALL_BODY, "a question has its way in"
        del view
        assert budget.held == 0


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_breaks_off_gives_back_what_it_held(declared: bool) -> None:
    budget = BodyBudget(4 * MIB)
    with no_collection():
        assert isinstance(refusal([bytes(MIB)] * 3, budget, declared=declared, pause=0.1), TooSlow)
        assert budget.held == 0
        assert isinstance(refusal([bytes(MIB)] * 3, budget, declared=declared, limit=2 * MIB), TooLarge)
        assert budget.held == 0


def test_more_than_was_declared_gives_back_what_it_held() -> None:
    budget = BodyBudget(4 * MIB)
    with no_collection():
        request = request_of([bytes(MIB)] * 3, declared=2 * MIB)
        try:
            asyncio.run(read_body(request, limit=8 * MIB, patience=Patience(10.0, 10.0), budget=budget.of("one")))
        except TooLarge as fault:
            fault.__traceback__ = None
        assert budget.held == 0


@pytest.mark.parametrize("declared", [True, False])
def test_one_caller_leaves_room_for_the_next(declared: bool) -> None:
    budget = BodyBudget(16 * MIB)
    with no_collection():
        mine = [read([bytes(MIB)] * 4, budget, declared=declared) for _ in range(3)]
        refused = refusal([bytes(MIB)] * 4, budget, declared=declared)  # there would be room for it
        assert isinstance(refused, NoRoom)
        assert "your bodies of 12,582,912 bytes" in refused.message
        assert refused.retry_after
        assert len(read([bytes(SMALL_BODY)], budget, declared=declared)) == SMALL_BODY, "a question has its way in"
        other = read([bytes(MIB)] * 2, budget, declared=declared, caller="another")
        assert budget.held == 14 * MIB
        assert isinstance(refusal([bytes(MIB)] * 2, budget, declared=declared, caller="another"), NoRoom)
        del mine
        assert len(read([bytes(MIB)] * 8, budget, declared=declared, caller="another")) == 8 * MIB
        del other
        assert budget.held == 0


def test_one_request_alone_may_take_all_that_is_free() -> None:
    budget = BodyBudget(8 * MIB)
    with no_collection():
        assert len(read([bytes(MIB)] * 8, budget)) == budget.total
        room = budget.of("one")
        room.grow(0, 3 * MIB)
        with room.unfolded(5 * MIB):
            assert budget.held == 8 * MIB, "its objects are no second request"
            with pytest.raises(NoRoom), budget.of("one").unfolded(MIB):
                pass
        with pytest.raises(TooLarge, match="read as JSON"), room.unfolded(5 * MIB + 1):
            pass
        room.give_back(3 * MIB)
        assert budget.held == 0


def test_answers_count_until_they_are_sent() -> None:
    budget = BodyBudget(16 * MIB)
    with no_collection():
        room = budget.of("one")
        large = Response(bytes(20 * MIB))
        room.until_sent(large)  # one alone is always sent
        assert budget.held == 20 * MIB
        with pytest.raises(NoRoom, match="unread answers"):
            budget.of("one").until_sent(Response(bytes(MIB)))
        budget.of("one").until_sent(Response(bytes(SMALL_BODY)))
        assert budget.held == 20 * MIB
        other = Response(bytes(MIB))
        budget.of("another").until_sent(other)
        assert budget.held == 21 * MIB
        del other
        del large
        assert budget.held == 0
        kept = [Response(bytes(4 * MIB)) for _ in range(4)]
        for response in kept[:3]:
            room.until_sent(response)
        with pytest.raises(NoRoom):
            room.until_sent(kept[3])
        del response, kept
        assert budget.held == 0


def test_an_answer_is_no_second_request_of_the_body_that_asks_for_it() -> None:
    budget = BodyBudget(8 * MIB)
    with no_collection():
        room = budget.of("one")
        room.grow(0, 5 * MIB)
        with room.unfolded(MIB):
            pass
        answer = Response(bytes(5 * MIB))
        room.until_sent(answer)
        assert budget.held == 10 * MIB
        room.give_back(5 * MIB)
        del answer
        assert budget.held == 0


def test_callers_who_have_gone_leave_nothing_behind() -> None:
    budget = BodyBudget(MIB)
    for number in range(100):
        read([bytes(2 * SMALL_BODY)], budget, caller=f"caller {number}")
        read([b"{}"], budget, caller=f"small {number}")
    assert budget.held == 0
    assert not budget._held


def test_what_nobody_has_set_is_a_share_of_the_memory() -> None:
    assert Settings(bodies_mib=7).bodies_bytes == 7 * MIB
    assert 0 < Settings().bodies_bytes <= 8192 * MIB


D = 48
BUDGET_MIB = 32
LOG = "said"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("bodies")
    tiny_checkpoint("llama", folder / "llama")
    settings = {"GLASSBLOCK_BODIES_MIB": str(BUDGET_MIB), "GLASSBLOCK_SILENCE_SECONDS": "20"}
    with served(folder, log=folder / LOG, **settings) as service:
        yield service
        assert "Traceback" not in (folder / LOG).read_text()


def body_of(mib: int) -> bytes:
    x = np.zeros((mib * MIB // (4 * D), D), np.float32) + 1
    message = json.dumps({"checkpoint": "llama", "layer": 0, "capture": ["x"]})
    return b"".join(framing.frame("request", message, {"x": wire_from_array(x)}))


def held_of(service: Served) -> float:
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith('glassblock_bodies_bytes{kind="held"}')).split()[-1])


def head_of(length: int | None, path: str = "/v1/blocks/run") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{size}\r\nContent-Type: {framing.MEDIA_TYPE}\r\n\r\n".encode()


@pytest.mark.parametrize("chunked", [False, True])
def test_uploads_at_once_are_admitted_as_far_as_the_budget_goes(service: Served, chunked: bool) -> None:
    body = body_of(10)
    held = [service.wire() for _ in range(2)]
    half = body[: len(body) // 2] if not chunked else body[:-MIB]
    for wire in held:
        wire.sendall(head_of(None if chunked else len(body)))
        wire.sendall(b"%x\r\n%b\r\n" % (len(half), half) if chunked else half)
    service.wait_until(lambda: held_of(service) >= (2 * len(half) if chunked else 2 * len(body)))

    with service.wire() as third:  # while two are half received
        third.sendall(head_of(len(body)))
        status, headers, told = raw_answer(third)
        assert (status, json.loads(told)["field"]) == (503, "body")
        assert int(headers["Retry-After"]) >= 1
    with service.wire() as giant:
        giant.sendall(head_of((BUDGET_MIB + 1) * MIB))
        assert raw_answer(giant)[0] == 413
    small = httpx.post(f"{service.url}/v1/blocks/run", json={"checkpoint": "llama", "layer": 0, "x": [[1.0] * D]})
    assert small.status_code == 200, "a question is answered meanwhile"

    for wire in held:
        rest = body[len(half) :]
        wire.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(rest), rest) if chunked else rest)
    assert [raw_answer(wire)[0] for wire in held] == [200, 200], "nobody waits for anybody"
    for wire in held:
        wire.close()
    service.wait_until(lambda: held_of(service) == 0)
    again = httpx.post(f"{service.url}/v1/blocks/run", content=body, headers={"Content-Type": framing.MEDIA_TYPE})
    assert again.status_code == 200


def unread(service: Served) -> socket.socket:
    """A connection whose answer of 9 MiB is under way and not read."""
    wire = socket.socket()
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that it does not lie in the system's buffers
    wire.settimeout(60)
    wire.connect(("127.0.0.1", service.port))
    stages = ["gate", "up", "activated", "hidden"]
    message = json.dumps({"checkpoint": "llama", "layer": 0, "capture": stages, "return_tensors": True})
    x = np.random.default_rng().standard_normal((MIB // (4 * D), D), dtype=np.float32)
    body = b"".join(framing.frame("request", message, {"x": wire_from_array(x)}))
    wire.sendall(head_of(len(body)).replace(b"\r\n\r\n", f"\r\nAccept: {framing.MEDIA_TYPE}\r\n\r\n".encode()) + body)
    return wire


def test_answers_that_nobody_reads_do_not_pile_up(service: Served) -> None:
    statuses, wires = list[bytes](), list[socket.socket]()
    for _ in range(8):
        wires.append(unread(service))
        statuses.append(wires[-1].recv(12)[-3:])
    assert statuses[:2] == [b"200", b"200"]
    assert set(statuses[2:]) == {b"503"}
    assert 2 * 9 * MIB < held_of(service) <= 0.75 * BUDGET_MIB * MIB
    assert httpx.get(f"{service.url}/v1/checkpoints").status_code == 200, "what is small is answered"
    for wire in wires:
        wire.close()
    service.wait_until(lambda: held_of(service) == 0)
    with unread(service) as again:
        assert again.recv(12)[-3:] == b"200"
    service.wait_until(lambda: held_of(service) == 0)


def test_who_hangs_up_in_the_middle_of_an_answer_leaves_no_trace(service: Served) -> None:
    for _ in range(10):  # the fixture looks for one in the log
        with unread(service) as wire:
            assert wire.recv(12)[-3:] == b"200"
        service.wait_until(lambda: held_of(service) == 0)


@pytest.mark.parametrize("fate", ["hangs up", "is refused"])
def test_bodies_that_come_to_nothing_give_their_room_back(service: Served, fate: str) -> None:
    body = body_of(10)
    for _ in range(6):  # more than fit together
        with service.wire() as wire:
            if fate == "hangs up":
                wire.sendall(head_of(len(body)) + body[: len(body) // 2])
            else:
                wire.sendall(head_of(len(body)) + body.replace(b'layer\\": 0', b'layer\\": 9'))
                assert raw_answer(wire)[0] == 422
        service.wait_until(lambda: held_of(service) == 0)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param([float(number) + 0.123456 for number in range(40_000)], id="floats"),
        pytest.param([[number + 0.5] * 4 for number in range(20_000)], id="rows of four"),
        pytest.param([1] * 200_000, id="short numbers"),
        pytest.param([[] for _ in range(100_000)], id="empty lists"),
        pytest.param([{} for _ in range(100_000)], id="empty objects"),
        pytest.param({f"key{number}": number for number in range(50_000)}, id="names"),
        pytest.param(["\u00e9", *[number + 0.123456 for number in range(40_000)]], id="floats beside Latin"),
        pytest.param(["\u4e2d", *[number + 0.123456 for number in range(40_000)]], id="floats beside Chinese"),
        pytest.param(["\U0001f600", *[number + 0.123456 for number in range(40_000)]], id="floats beside a face"),
    ],
)
def test_json_is_counted_as_no_less_than_what_becomes_of_it(values: object) -> None:
    text = json.dumps({"x": values}, separators=(",", ":"), ensure_ascii=False).encode()
    tracemalloc.start()
    try:
        read = json.loads(bytes(text))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read
    assert peak <= object_bytes(memoryview(text)) <= 5 * peak


@pytest.mark.parametrize("kind", ["application/json", framing.MEDIA_TYPE])
def test_json_that_would_become_more_than_all_bodies_may_hold_is_refused(service: Served, kind: str) -> None:
    body = b'{"checkpoint": "llama", "layer": 0, "x": [' + b"[]," * (MIB // 2) + b"[]]}"  # 1.5 MiB, as objects 58 MiB
    if kind == framing.MEDIA_TYPE:
        body = b"".join(framing.frame("request", body.decode(), {}))
    refused = httpx.post(f"{service.url}/v1/blocks/run", content=body, headers={"Content-Type": kind})
    assert (refused.status_code, refused.json()["field"]) == (413, "body")
    assert "safetensors" in refused.json()["hint"]
    service.wait_until(lambda: held_of(service) == 0)
    smaller = b'{"checkpoint": "llama", "layer": 0, "x": [' + b"[]," * 50_000 + b"[]]}"
    answered = httpx.post(f"{service.url}/v1/blocks/run", content=smaller, headers={"Content-Type": "application/json"})
    assert answered.status_code == 422  # read, and no tensor
    service.wait_until(lambda: held_of(service) == 0)
