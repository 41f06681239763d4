"""16 MiB posted and returned, over loopback: one safetensors body against JSON lists written with orjson.

The request asks a service for the stage `x` of a tiny checkpoint: the tensor goes there and comes
back, and nothing is multiplied. What comes back must be what was sent, bit for bit, either way.
"""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import numpy as np
import orjson
from glassblock_client import Client
from pairs import in_pairs, table

EXAMPLE = Path(__file__).parent.parent / "examples" / "tiny-llama"
MIB = 1024 * 1024
PROMISED = 20.0


def main() -> int:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "glassblock_client",
        "serve",
        "--checkpoints",
        str(EXAMPLE.parent),
        "--port",
        str(port),
    ]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as service:
        try:
            with Client(f"http://127.0.0.1:{port}", timeout=120) as client, httpx.Client(timeout=120) as plain:
                wait_until_ready(client)
                return measure(client, plain, port)
        finally:
            service.terminate()


def measure(client: Client, plain: httpx.Client, port: int) -> int:
    d = client.checkpoint(EXAMPLE.name).d_model
    assert d is not None
    x = np.random.default_rng(0).standard_normal((16 * MIB // 4 // d, d), dtype=np.float32)

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
    return 0 if paired.ratio >= PROMISED else 1


def wait_until_ready(client: Client) -> None:
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
