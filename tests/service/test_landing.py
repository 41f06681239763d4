"""Large bodies over a real socket: received where they will lie and sent from there, and the connection lives on."""

import http.client
import json
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h11
import numpy as np
import pytest
from glassblock.api.landing import LANDING_BYTES
from glassblock.wire import framing
from glassblock_client import Client
from glassblock_client.tensors import wire_from_array
from makers import tiny_checkpoint
from served import served

D = 48
ROWS = 20_000
X = np.random.default_rng(0).standard_normal((ROWS, D), dtype=np.float32)
RUN = "/v1/blocks/run"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("landing")
    tiny_checkpoint("llama", folder / "llama")
    with served(folder, GLASSBLOCK_SILENCE_SECONDS="1", GLASSBLOCK_MAX_BODY_MIB="16") as service:
        yield service.port


@pytest.fixture
def wire(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
        yield wire


def _body(x: np.ndarray = X) -> bytes:
    message = json.dumps({"checkpoint": "llama", "layer": 0, "capture": ["x"], "return_tensors": True})
    return b"".join(framing.frame("request", message, {"x": wire_from_array(x)}))


def _head(length: int, *further: str) -> bytes:
    lines = [f"POST {RUN} HTTP/1.1", "Host: localhost", f"Content-Length: {length}", *further]
    kinds = [f"Content-Type: {framing.MEDIA_TYPE}", f"Accept: {framing.MEDIA_TYPE}"]
    return "\r\n".join([*lines, *kinds, "", ""]).encode()


def _answer(wire: socket.socket) -> tuple[int, bytes]:
    answer = http.client.HTTPResponse(wire)
    answer.begin()
    return answer.status, answer.read()


def _check_echo(status: int, body: bytes, x: np.ndarray = X) -> None:
    assert status == 200, body[:300]
    _, tensors = framing.unframe("response", memoryview(body))
    assert bytes(tensors["x"].data) == x.tobytes()


def test_the_body_is_large_enough_for_its_own_way() -> None:
    assert len(_body()) > LANDING_BYTES


def test_what_was_sent_comes_back_again_and_again_over_one_connection(wire: socket.socket) -> None:
    body = _body()
    for _ in range(3):
        wire.sendall(_head(len(body)))
        wire.sendall(body)
        _check_echo(*_answer(wire))


@pytest.mark.parametrize("first", [0, 1, 70_000, LANDING_BYTES - 1, -2, -1])
def test_a_pause_anywhere_in_the_body_does_no_harm(wire: socket.socket, first: int) -> None:
    body = _body()
    cut = first % len(body)
    wire.sendall(_head(len(body)) + body[:cut])
    time.sleep(0.15)
    wire.sendall(body[cut:])
    _check_echo(*_answer(wire))


def test_the_next_request_may_come_right_behind(wire: socket.socket) -> None:
    body = _body()
    wire.sendall(_head(len(body)))
    wire.sendall(body + b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
    came = b""
    while b'"alive"' not in came:  # by hand: a reader of one answer would take some of the next
        more = wire.recv(1 << 20)
        assert more, came[-300:]
        came += more
    assert came.count(b"HTTP/1.1 200 OK") == 2
    assert X.tobytes() in came


def test_a_caller_who_asks_first_is_told_to_go_on(wire: socket.socket) -> None:
    body = _body()
    wire.sendall(_head(len(body), "Expect: 100-continue"))
    assert wire.recv(4096).startswith(b"HTTP/1.1 100")
    wire.sendall(body)
    _check_echo(*_answer(wire))


def test_chunked_bodies_take_the_usual_way(wire: socket.socket) -> None:
    body = _body()
    head = _head(0, "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
    pieces = [body[start : start + 300_000] for start in range(0, len(body), 300_000)]
    wire.sendall(head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
    _check_echo(*_answer(wire))


def test_silence_in_the_middle_is_told_and_harms_nobody_else(wire: socket.socket, port: int) -> None:
    body = _body()
    wire.sendall(_head(len(body)) + body[: len(body) // 2])
    status, told = _answer(wire)
    assert (status, json.loads(told)["field"]) == (408, "body")
    _check_alive(port)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999999])
def test_a_caller_who_hangs_up_harms_nobody_else(wire: socket.socket, port: int, share: float) -> None:
    body = _body()
    wire.sendall(_head(len(body)) + body[: int(share * len(body))])
    time.sleep(0.1)
    wire.close()
    _check_alive(port)


def test_more_than_the_limit_is_refused_before_it_comes(wire: socket.socket, port: int) -> None:
    wire.sendall(_head(17 << 20) + b"x" * 100_000)
    assert _answer(wire)[0] == 413
    _check_alive(port)


def test_what_was_received_and_sent_is_counted(port: int, wire: socket.socket) -> None:
    def counted(way: str) -> float:
        with Client(f"http://127.0.0.1:{port}") as client:
            lines = client.metrics().splitlines()
        rows = [line for line in lines if line.startswith(f'glassblock_{way}_bytes_total{{endpoint="run_block"}}')]
        return float(rows[0].split()[-1])

    body = _body()
    wire.sendall(_head(len(body)) + body)
    _check_echo(*_answer(wire))
    received, sent = counted("received"), counted("sent")
    wire.sendall(_head(len(body)) + body)
    _, answer = _answer(wire)
    assert counted("received") - received == len(body)
    assert counted("sent") - sent == len(answer)


def test_an_answer_may_be_read_slowly(port: int) -> None:
    x = np.concatenate([X] * 4)  # 15 MiB: more than the system takes of it at once
    body = _body(x)
    with socket.socket() as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
        wire.settimeout(30)
        wire.connect(("127.0.0.1", port))
        wire.sendall(_head(len(body), "Connection: close") + body)
        came = bytearray()
        while more := wire.recv(1 << 18):
            came += more
            time.sleep(0.02)
    head, _, answer = bytes(came).partition(b"\r\n\r\n")
    assert f"content-length: {len(answer)}".encode() in head.lower()
    _check_echo(200, answer, x)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what the other end has taken")
def test_whoever_takes_a_little_at_a_time_is_not_silent(wire: socket.socket) -> None:
    """A socket takes more only once a third of what it holds, MiB here, is gone: later than silence may last."""
    x = np.concatenate([X] * 4)
    body = _body(x)
    wire.sendall(_head(len(body), "Connection: close") + body)
    came, until = bytearray(), time.monotonic() + 4
    while more := wire.recv(1 << 15):
        came += more
        time.sleep(0.1 if time.monotonic() < until else 0)
    _check_echo(200, bytes(came).partition(b"\r\n\r\n")[2], x)


@pytest.mark.parametrize("read", [0, 1000, 5_000_000])
def test_a_caller_who_hangs_up_while_the_answer_comes_harms_nobody_else(port: int, read: int) -> None:
    body = _body(np.concatenate([X] * 4))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as wire:
        wire.sendall(_head(len(body)) + body)
        while read > 0:
            read -= len(wire.recv(min(read, 1 << 18)))
    _check_alive(port)


def test_whoever_hangs_up_in_the_middle_of_a_body_is_counted_as_gone(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "llama")
    body = _body()
    with served(tmp_path, log=tmp_path / "log") as service, Client(service.url) as client:
        with service.wire() as wire:
            wire.sendall((_head(len(body)) + body)[: len(body) // 2])
        gone = 'glassblock_requests_total{endpoint="run_block",status="0"} 1.0'
        service.wait_until(lambda: gone in client.metrics())
        assert 'endpoint="run_block",status="4' not in client.metrics(), "nobody was refused"
    assert "error" not in (tmp_path / "log").read_text()


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="descriptors are counted in /proc")
def test_an_answer_that_nobody_reads_holds_one_descriptor_and_no_thread(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path / "llama")
    body, unread = _body(np.concatenate([X] * 4)), 12  # more than socket and kernel take of each
    with served(tmp_path, GLASSBLOCK_SILENCE_SECONDS="600") as service, ExitStack() as wires:
        open_files, threads = Path(f"/proc/{service.process}/fd"), Path(f"/proc/{service.process}/task")
        before = len(list(open_files.iterdir()))
        for _ in range(unread):
            wire = wires.enter_context(service.wire())
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            wire.sendall(_head(len(body)) + body)
            assert wire.recv(1, socket.MSG_PEEK)
        service.wait_until(lambda: len(list(open_files.iterdir())) <= before + unread)
        assert len(list(threads.iterdir())) < unread  # those that work, and those that sent
        _check_alive(service.port)


def test_the_next_request_is_answered_behind_a_large_answer(wire: socket.socket) -> None:
    body = _body()
    for _ in range(3):
        wire.sendall((_head(len(body)) + body) * 2)
        for _ in range(2):
            _check_echo(*_answer_alone(wire))


def _answer_alone(wire: socket.socket) -> tuple[int, bytes]:
    """One answer, and nothing of the next."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += wire.recv(1)
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    body = bytearray()
    while len(body) < length:
        body += wire.recv(length - len(body))
    return int(head.split()[1]), bytes(body)


def test_a_body_has_a_tag_of_its_bytes(port: int) -> None:
    other = X.copy()
    other[-1, -1] += 1

    def asked(x: np.ndarray, **further: str) -> tuple[int, str | None]:
        kinds = {"Content-Type": framing.MEDIA_TYPE, "Accept": framing.MEDIA_TYPE}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("POST", RUN, _body(x), kinds | further)
        answer = connection.getresponse()
        answer.read()
        connection.close()
        return answer.status, answer.headers["ETag"]

    status, tag = asked(X)
    assert status == 200
    assert tag is not None
    assert asked(X) == (200, tag)
    assert asked(X, **{"If-None-Match": tag}) == (304, tag)
    status, changed = asked(other, **{"If-None-Match": tag})
    assert (status, changed == tag) == (200, False)


def _check_alive(port: int) -> None:
    with Client(f"http://127.0.0.1:{port}") as client:
        assert client.live().status == "alive"
        run: Any = client.run_block("llama", 0, x=X, capture=("x",), return_tensors=True)
        assert run.tensors["x"].tobytes() == X.tobytes()


def test_the_module_says_what_it_relies_on() -> None:
    """h11's own count of what is still to come has no public name; without it every body takes the usual way."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(_head(5))
    connection.next_event()
    assert connection._reader._remaining == 5  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
