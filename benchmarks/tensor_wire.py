"""16 MiB over loopback: each way against a raw socket, and there and back against JSON lists written with orjson.

Each way is timed with the work taken out: the service is the real one, but a block run answers with a
tensor that lies ready. What is left is the door, the framing, the digest by which equal requests find
each other, the threads and the sockets. The raw
socket carries the same bytes the same way, in a process of its own as the service is: a short question
and 16 MiB back, or 16 MiB and a short answer. Both ends of it write from and read into memory that is
there already, as does the bare HTTP client that asks the service.

There and back goes to an untouched service, for the stage `x` of a tiny checkpoint: what comes back
must be what was sent, bit for bit.
"""

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import orjson
import torch
from glassblock.api.entry import serve
from glassblock.operations.operations import Operations
from glassblock.operations.reply import Reply
from glassblock.wire import framing
from glassblock.wire.blocks import BlockRunAnswer, BlockRunRequest
from glassblock_client import Client
from glassblock_client.tensors import wire_from_array
from pairs import in_pairs, table

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-llama"
MIB = 1024 * 1024
SIZE = 16 * MIB
SMALL = [[0.0] * 64]
SHORT = b"." * 256
"""A question or an answer on the raw socket, about as long as a head of HTTP."""

RUNS = 101
PROMISED_JSON = 20.0
PROMISED_BARE = 0.60
PROMISED_CLIENT = 0.30


def main() -> int:
    if sys.argv[1:2] == ["--without-mathematics"]:
        return serve_without_mathematics(int(sys.argv[2]))
    if sys.argv[1:2] == ["--raw"]:
        return serve_raw(int(sys.argv[2]))
    kept = each_way()
    port = free_port()
    folder = ["--checkpoints", str(EXAMPLE.parent)]
    with running("-m", "glassblock_client", "serve", *folder, "--port", str(port)):
        return there_and_back(port) or kept


def each_way() -> int:
    port, raw_port = free_port(), free_port()
    with running(__file__, "--without-mathematics", str(port)), running(__file__, "--raw", str(raw_port)):
        wait_until_ready(port)
        x = np.random.default_rng(0).standard_normal((SIZE // 4 // 64, 64), dtype=np.float32)
        with connected(raw_port) as raw, Client(f"http://127.0.0.1:{port}", timeout=120) as client:
            ways = {
                "download": (
                    lambda: raw_download(raw),
                    Bare.download,
                    lambda: client.run_block(EXAMPLE.name, 0, x=SMALL, capture=("x",), return_tensors=True),
                ),
                "upload": (
                    lambda: raw_upload(raw, x),
                    lambda bare: bare.upload(x),
                    lambda: client.run_block(EXAMPLE.name, 0, x=x, capture=("x",)),
                ),
            }
            kept = max(compare(way, port, *contenders) for way, contenders in ways.items())
    return kept


def compare(
    way: str, port: int, raw: Callable[[], object], bare: Callable[["Bare"], object], client: Callable[[], object]
) -> int:
    """Share of the raw socket's speed that a bare HTTP client and the Python client have."""
    with connected(port) as connection:  # now: the service closes one that nobody uses
        shares = [share(way, "bare HTTP", partial(bare, Bare(connection)), raw)]
    shares.append(share(way, "Python client", client, raw))
    print(
        f"Of the raw socket's speed: bare HTTP **{shares[0]:.0%}**, promised {PROMISED_BARE:.0%};"
        f" Python client **{shares[1]:.0%}**, promised {PROMISED_CLIENT:.0%}.\n"
    )
    return 0 if shares[0] >= PROMISED_BARE and shares[1] >= PROMISED_CLIENT else 1


def share(way: str, name: str, ours: Callable[[], object], raw: Callable[[], object]) -> float:
    paired = in_pairs(ours, raw, runs=RUNS, warm_up=5)
    print(table(f"16 MiB, {way}", (f"glassblock, {name}", "raw socket"), paired))
    return paired.ratio


class Bare:
    """HTTP by hand over an open socket: the answer's body is received into memory that is there already."""

    _landing = memoryview(bytearray(SIZE + MIB))

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def download(self) -> None:
        message = BlockRunRequest(checkpoint=EXAMPLE.name, layer=0, x=SMALL, capture=("x",), return_tensors=True)
        body = message.model_dump_json(exclude_defaults=True).encode()
        self._ask("application/json", len(body), [body], least=SIZE)

    def upload(self, x: np.ndarray) -> None:
        message = BlockRunRequest(checkpoint=EXAMPLE.name, layer=0, capture=("x",))
        text = message.model_dump_json(exclude_defaults=True)
        pieces = list(framing.frame("request", text, {"x": wire_from_array(x)}))
        self._ask(framing.MEDIA_TYPE, sum(len(piece) for piece in pieces), pieces, least=1)

    def _ask(self, kind: str, length: int, body: list[bytes | memoryview], *, least: int) -> None:
        head = (
            "POST /v1/blocks/run HTTP/1.1\r\nHost: localhost\r\n"
            f"Accept: {framing.MEDIA_TYPE if least == SIZE else 'application/json'}\r\n"
            f"Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        )
        first, *rest = body
        for piece in (head.encode() + bytes(first), *rest):  # a head alone would wake the service for nothing
            self._socket.sendall(piece)
        came = self._socket.recv_into(self._landing)
        while (end := bytes(self._landing[: min(came, 4096)]).find(b"\r\n\r\n")) < 0:
            came += self._socket.recv_into(self._landing[came:])
        headers = dict(line.lower().split(b": ", 1) for line in bytes(self._landing[:end]).split(b"\r\n")[1:])
        assert self._landing[9:12] == b"200", bytes(self._landing[:came])
        whole = end + 4 + int(headers[b"content-length"])
        while came < whole:
            came += self._socket.recv_into(self._landing[came:whole])
        assert whole >= least


def raw_download(connection: socket.socket) -> None:
    connection.sendall(b"d" + SHORT)
    receive(connection, LANDING)


def raw_upload(connection: socket.socket, x: np.ndarray) -> None:
    connection.sendall(b"u" + SHORT)
    connection.sendall(x.data.cast("B"))
    receive(connection, LANDING[: len(SHORT)])


def receive(connection: socket.socket, landing: memoryview) -> None:
    came = 0
    while came < len(landing):
        more = connection.recv_into(landing[came:])
        if not more:
            raise ConnectionError("the other end of the raw socket is gone")
        came += more


LANDING = memoryview(bytearray(SIZE))


def serve_raw(port: int) -> int:
    """The other end of the raw socket, until it is closed."""
    with socket.create_server(("127.0.0.1", port)) as server:
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    question = memoryview(bytearray(1 + len(SHORT)))
    with connection, contextlib.suppress(ConnectionError):
        while True:
            receive(connection, question)
            if question[:1] == b"d":
                connection.sendall(LANDING)
            else:
                receive(connection, LANDING)
                connection.sendall(SHORT)


def serve_without_mathematics(port: int) -> int:
    """The service, whose block runs answer with a tensor that lies ready."""
    ready = torch.zeros(SIZE // 4 // 64, 64)

    def run_block(_self: Operations, request: BlockRunRequest, *_: object, **__: object) -> Reply[BlockRunAnswer]:
        answer = BlockRunAnswer.model_validate(dict.fromkeys(BlockRunAnswer.model_fields) | ANSWER)
        return Reply(answer, {"x": ready} if request.return_tensors else {}, nest_under="tensors")

    Operations.run_block = run_block
    serve(roots=(EXAMPLE.parent,), port=port)
    return 0


ANSWER = {
    "checkpoint": "any", "layer": 0, "part": "ffn", "family": "llama", "verified": "", "device": "cpu",
    "compute_dtype": "float32", "placement": "pre", "eps": {}, "overrides": {}, "stages": {}, "recombination": {},
    "parameters": 0, "hidden_elements": 0, "read": {"bytes": 0, "tensors": 0}, "notes": (),
}  # fmt: skip


def there_and_back(port: int) -> int:
    wait_until_ready(port)
    with Client(f"http://127.0.0.1:{port}", timeout=120) as client, httpx.Client(timeout=120) as plain:
        d = client.checkpoint(EXAMPLE.name).d_model
        assert d is not None
        x = np.random.default_rng(0).standard_normal((SIZE // 4 // d, d), dtype=np.float32)

        def as_safetensors() -> None:
            run = client.run_block(EXAMPLE.name, 0, x=x, capture=("x",), return_tensors=True)
            assert run.tensors["x"].tobytes() == x.tobytes()

        def as_json() -> None:
            body = orjson.dumps(
                {"checkpoint": EXAMPLE.name, "layer": 0, "x": x, "capture": ["x"], "return_tensors": True},
                option=orjson.OPT_SERIALIZE_NUMPY,
            )
            response = plain.post(
                f"http://127.0.0.1:{port}/v1/blocks/run", content=body, headers={"Content-Type": "application/json"}
            )
            response.raise_for_status()
            returned = np.asarray(orjson.loads(response.content)["tensors"]["x"], dtype=np.float32)
            assert returned.tobytes() == x.tobytes()

        paired = in_pairs(as_safetensors, as_json, runs=5)
        print(table("16 MiB there and back over loopback", ("safetensors", "JSON lists, orjson"), paired))
        return 0 if paired.ratio >= PROMISED_JSON else 1


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[None]:
    """A Python process for as long as the block lasts."""
    with tempfile.TemporaryFile() as log, subprocess.Popen([sys.executable, *arguments], stdout=log, stderr=log) as it:
        try:
            yield
        finally:
            it.terminate()


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    for _ in range(600):
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(("127.0.0.1", port))
            break
        time.sleep(0.1)
    else:
        raise TimeoutError("nobody listens")
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection:
        yield connection


def wait_until_ready(port: int) -> None:
    with Client(f"http://127.0.0.1:{port}") as client:
        for _ in range(600):
            try:
                client.ready()
            except Exception:
                time.sleep(0.1)
            else:
                return
    raise TimeoutError("the service did not become ready")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
