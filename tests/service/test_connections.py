"""Connections that say nothing, or say it slowly, make room for those that ask; health is answered whatever comes."""

import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from glassblock.api.connections import SHARE_FOR_HEALTH
from glassblock.wire import framing
from glassblock_client.tensors import wire_from_array
from makers import tiny_checkpoint
from served import WAIT_S, Served, raw_answer, served

MOST = 64
HEAD_SECONDS = 2.0
FLOOD = 500
LOG = "said"
X_ROW = [0.1] * 48
BROKEN_CHUNK = b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("connections")
    tiny_checkpoint("llama", folder / "llama")
    settings = {
        "GLASSBLOCK_CONNECTIONS": str(MOST),
        "GLASSBLOCK_HEAD_SECONDS": str(HEAD_SECONDS),
        "GLASSBLOCK_SILENCE_SECONDS": "30",
    }
    with served(folder, log=folder / LOG, **settings) as service:
        yield service
        assert "Traceback" not in (folder / LOG).read_text()


def sockets_of(service: Served) -> int:
    """Open sockets of the service's process."""
    links = [Path(f"/proc/{service.process}/fd/{number.name}") for number in _files(service)]
    return sum(_is_socket(link) for link in links)


def peers_of(service: Served) -> set[int]:
    """Ports of those that the service is connected with."""
    return {one.raddr.port for one in psutil.Process(service.process).net_connections() if one.raddr}


def _files(service: Served) -> list[Path]:
    return list(Path(f"/proc/{service.process}/fd").iterdir())


def _is_socket(link: Path) -> bool:
    try:
        return str(link.readlink()).startswith("socket:")
    except FileNotFoundError:
        return False


def is_closed(wire: socket.socket) -> bool:
    """Whether the service has hung up."""
    wire.setblocking(False)
    try:
        return wire.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    finally:
        wire.settimeout(WAIT_S)


def check_healthy(service: Served) -> None:
    # Each on a connection of its own.
    for path in ("/health/live", "/health/ready"):
        assert httpx.get(f"{service.url}{path}", timeout=WAIT_S).status_code == 200


@pytest.mark.parametrize("said", [b"", b"POST /v1/blocks/run HTTP/1.1\r\nHost: local"])
def test_a_flood_of_half_open_connections_closes_itself(service: Served, said: bytes) -> None:
    with ExitStack() as opened:
        flood: list[socket.socket] = []
        for number in range(FLOOD):
            flood.append(opened.enter_context(service.wire()))
            flood[-1].sendall(said)
            if number % 50 == 49:
                check_healthy(service)
                assert sockets_of(service) < MOST + 64, "those of the service itself are few"
        service.wait_until(lambda: sum(map(is_closed, flood)) >= FLOOD - MOST)
        check_healthy(service)
        # Those that are left are closed for their silence.
        service.wait_until(lambda: all(map(is_closed, flood)))


@pytest.mark.parametrize(
    ("said", "status"),
    [
        pytest.param(b"hello\r\n\r\n", 400, id="a word"),
        pytest.param(b"GET /v1 HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /v1/\xff HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="a byte that no path has"),
        pytest.param(b"GET /v1 HTTP/1.1\r\nHost: x\r\nA: \0\r\n\r\n", 400, id="a byte that no header has"),
        pytest.param(b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", 400, id="a length below zero"),
        pytest.param(BROKEN_CHUNK, 400, id="a broken chunk"),
        pytest.param(
            b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", 400, id="an unknown encoding"
        ),
        pytest.param(b"GET /v1 HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 40_000 + b"\r\n\r\n", 431, id="a long head"),
        pytest.param(b"GET /v1 HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 250_000, 431, id="a head without end"),
        pytest.param(b"GET /v1 HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 10_000_000, 431, id="a head of many megabytes"),
    ],
)
def test_what_is_no_request_is_told_as_every_refusal_is(service: Served, said: bytes, status: int) -> None:
    with service.wire() as wire:
        wire.sendall(said)
        answered, headers, body = raw_answer(wire)
        assert (answered, json.loads(body)["status"]) == (status, status)
        assert headers["Content-Type"] == "application/problem+json"
        assert all(headers[name] for name in ("X-Request-ID", "Glassblock-Schema", "X-Content-Type-Options"))
    check_healthy(service)


def test_rubbish_after_an_answer_closes_the_connection(service: Served) -> None:
    with service.wire() as wire:  # the log must hold no trace of it, which the fixture looks after
        wire.sendall(b"POST /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert raw_answer(wire)[0] == 404
        wire.sendall(b"ZZ\r\n")
        service.wait_until(lambda: is_closed(wire))


def test_a_length_that_is_told_twice_ends_the_connection(service: Served) -> None:
    """Else what a proxy takes for the body is taken for another request here."""
    hidden = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n"
    head = b"POST /v1/plan HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    with service.wire() as wire:
        wire.sendall(b"%bContent-Length: %d\r\n\r\n0\r\n\r\n%b" % (head, 5 + len(hidden), hidden))
        told = b"".join(iter(lambda: wire.recv(1 << 16), b""))
        assert re.findall(rb"HTTP/1.1 (\d+)", told) == [b"400"]


def test_rubbish_in_place_of_a_body_is_refused_and_the_long_answer_dropped(service: Served) -> None:
    message = {"checkpoint": "llama", "layer": 0, "capture": ["hidden"], "return_tensors": True, "x": [X_ROW] * 1500}
    job = httpx.post(f"{service.url}/v1/blocks/run", json=message, headers={"Prefer": "respond-async"}, timeout=WAIT_S)
    path = job.headers["location"] + "/answer"
    service.wait_until(lambda: httpx.get(f"{service.url}{path}").status_code == 200)
    with service.wire() as wire:  # the log must hold no trace of it, which the fixture looks after
        wire.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n".encode())
        told = b"".join(iter(lambda: wire.recv(1 << 16), b""))
        assert re.findall(rb"HTTP/1.1 (\d+)", told) == [b"400"]
        time.sleep(0.5)  # the answer comes while the caller is there yet
    check_healthy(service)


def test_rubbish_behind_a_request_is_refused_after_its_answer(service: Served) -> None:
    body = b'{"checkpoint": "llama", "layer": 0, "sample": {"rows": 2}}'
    head = b"POST /v1/blocks/run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with service.wire() as wire:
        wire.sendall(b"%bContent-Length: %d\r\n\r\n%brubbish\r\n\r\n" % (head, len(body), body))
        told = b"".join(iter(lambda: wire.recv(1 << 16), b""))  # to its end: the connection is closed
        assert re.findall(rb"HTTP/1.1 (\d+)", told) == [b"200", b"400"]


@pytest.mark.parametrize("answered", [False, True])
def test_a_head_that_never_ends_is_not_waited_for(service: Served, answered: bool) -> None:
    with service.wire() as wire:
        if answered:
            wire.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raw_answer(wire)[0] == 200
        since = time.monotonic()
        wire.sendall(b"GET /health/live HTTP/1.1\r\n")
        while not is_closed(wire):
            assert time.monotonic() - since < WAIT_S
            try:
                wire.sendall(b"X-Slow: 1\r\n")
            except ConnectionError:
                break
            time.sleep(0.1)
        # It may have been cut a little early by the clock's grain, and late by whatever the machine was busy with.
        assert time.monotonic() - since > 0.8 * HEAD_SECONDS


def test_a_body_that_was_refused_is_not_read_over_for_ever(service: Served) -> None:
    with service.wire() as wire:
        wire.sendall(head_of(1 << 40))
        assert raw_answer(wire)[0] == 413
        since = time.monotonic()
        while not is_closed(wire):
            assert time.monotonic() - since < WAIT_S
            try:
                wire.sendall(b"x" * 10)
            except ConnectionError:
                break
            time.sleep(0.1)


def test_where_nearly_all_are_at_work_health_alone_is_answered(service: Served) -> None:
    with ExitStack() as opened:
        for _ in range(MOST - MOST // SHARE_FOR_HEALTH):
            opened.enter_context(service.wire()).sendall(head_of(100))  # and the body does not come
        service.wait_until(lambda: httpx.get(f"{service.url}/v1").status_code == 503)
        refused = httpx.get(f"{service.url}/v1")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert refused.headers["x-request-id"]
        assert json.loads(refused.content)["code"] == "service-unavailable"
        for _ in range(5):
            check_healthy(service)
    service.wait_until(lambda: httpx.get(f"{service.url}/v1").status_code == 200)


def test_one_who_asks_in_time_is_left_alone(service: Served) -> None:
    """Work that takes longer than a head may is no owed head."""
    with service.wire() as wire:
        body = b'{"checkpoint": "llama", "layer": 0, "sample": {"rows": 1}}'
        wire.sendall(head_of(len(body), "application/json"))
        time.sleep(1.5 * HEAD_SECONDS)
        wire.sendall(body)
        assert raw_answer(wire)[0] == 200


def test_one_who_reads_a_long_answer_slowly_has_it_whole_and_is_counted_until_then(service: Served) -> None:
    """Nothing of it is left to a connection that owes the next head already."""
    message = {"checkpoint": "llama", "layer": 0, "capture": ["gate", "up", "hidden"], "return_tensors": True}
    many = json.dumps(message | {"x": [X_ROW] * 5000}).encode()
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # what the system holds for us is no part of it
        wire.settimeout(WAIT_S)
        wire.connect(("127.0.0.1", service.port))
        wire.sendall(head_of(len(many), "application/json"))
        wire.sendall(many)
        assert wire.recv(15) == b"HTTP/1.1 200 OK"
        time.sleep(2 * HEAD_SECONDS)
        held = re.search(r'glassblock_bodies_bytes{kind="held"} (\S+)', httpx.get(f"{service.url}/metrics").text)
        assert held is not None
        told = b"".join(iter(lambda: wire.recv(1 << 20), b""))  # to its end: nothing more is asked for
    head, _, answer = told.partition(b"\r\n\r\n")
    declared = re.search(rb"content-length: (\d+)", head)
    assert declared is not None
    assert len(answer) == int(declared[1]) <= float(held[1])


@pytest.mark.parametrize("said", [b"hello\r\n\r\n", BROKEN_CHUNK], ids=["a word", "a broken chunk"])
def test_what_is_no_request_keeps_no_connection(service: Served, said: bytes) -> None:
    with service.wire() as wire:
        wire.sendall(said)
        assert raw_answer(wire)[0] == 400
        ours = wire.getsockname()[1]
        service.wait_until(lambda: ours not in peers_of(service))


def test_what_is_no_request_holds_up_no_stop(tmp_path: Path) -> None:
    with ExitStack() as opened:
        with served(tmp_path, GLASSBLOCK_HEAD_SECONDS="3600") as service:
            wire = opened.enter_context(service.wire())
            wire.sendall(BROKEN_CHUNK)
            assert raw_answer(wire)[0] == 400
            since = time.monotonic()
        assert time.monotonic() - since < 15.0, "it waited for whoever was refused, as long as for a request"


def test_an_answer_that_nobody_reads_is_given_up(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "llama")
    message = json.dumps({"checkpoint": "llama", "layer": 0, "capture": ["x"], "return_tensors": True})
    x = np.ones((350_000, 48), np.float32)  # 64 MiB, far beyond what the system keeps of an answer
    body = b"".join(framing.frame("request", message, {"x": wire_from_array(x)}))
    settings = {"GLASSBLOCK_SILENCE_SECONDS": "1", "GLASSBLOCK_HEAD_SECONDS": "3600"}
    with served(tmp_path, log=tmp_path / LOG, **settings) as service, service.wire() as wire:
        accept = f"Accept: {framing.MEDIA_TYPE}\r\n\r\n".encode()
        wire.sendall(head_of(len(body)).removesuffix(b"\r\n") + accept)
        wire.sendall(body)
        assert wire.recv(15) == b"HTTP/1.1 200 OK"
        ours = wire.getsockname()[1]
        assert ours in peers_of(service)
        service.wait_until(lambda: ours not in peers_of(service))


def head_of(length: int, kind: str = framing.MEDIA_TYPE) -> bytes:
    lines = ("POST /v1/blocks/run HTTP/1.1", "Host: localhost", f"Content-Length: {length}", f"Content-Type: {kind}")
    return "\r\n".join([*lines, "", ""]).encode()
