"""Sixty-four callers at once, a tenth of them hostile, while health is asked all along; then blocks alone, timed.

    python evidence/load.py [SECONDS]      # 60 by default; 300 for the long run

Everything is on loopback, and ends by itself.
"""

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from glassblock.operations.operations import Operations
from glassblock.operations.store import CheckpointStore
from glassblock.wire.blocks import BlockRunRequest
from record import ROOT, Promise, publish, table
from safetensors.numpy import save

CALLERS, HOSTILE = 64, 6
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
RUN = {"checkpoint": "tiny-llama", "layer": 1}
ROWS = 512
TIMED = 40
EXPECTED = {
    "run": {200, 503},
    "norms": {200, 503},
    "audit": {202, 503},
    "16 MiB": {200, 503},
    "bad body": {422},
    "oversize": {413},
    "slow writer": {408},
    "disconnect": {0},
}


class Load:
    """What many callers saw."""

    def __init__(self, url: str, service: psutil.Process) -> None:
        self.url, self.service = url, service
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.health: list[float] = []
        self.memory: list[tuple[float, int]] = []
        self.audits: list[str] = []
        self.told_when = 0  # answers of 503 with Retry-After
        self._lock = threading.Lock()
        self._since = time.perf_counter()
        width = json.loads((ROOT / "examples/tiny-llama/config.json").read_text())["hidden_size"]
        x = np.random.default_rng(0).standard_normal((2**22 // width, width), dtype=np.float32)
        self._large = save({"x": x}, metadata={"request": json.dumps(RUN | {"capture": ["normed"]})})

    @property
    def elapsed(self) -> float:
        """Seconds since the first call."""
        return time.perf_counter() - self._since

    def go(self) -> None:
        """Call for `SECONDS`, then wait until every audit has ended."""
        threads = [threading.Thread(target=self._calls, args=(number,)) for number in range(CALLERS)]
        threads += [threading.Thread(target=self._health), threading.Thread(target=self._memory)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def unended(self, seconds: float) -> int:
        """Audits that have not ended after so long."""
        waiting, until = set(self.audits), time.perf_counter() + seconds
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while waiting and time.perf_counter() < until:
                states = {audit: http.get(f"/v1/audits/{audit}").json()["state"] for audit in waiting}
                waiting = {audit for audit, state in states.items() if state in {"queued", "running"}}
                time.sleep(0.5)
        return len(waiting)

    def _calls(self, number: int) -> None:
        chance = random.Random(number)
        kinds = self._hostile() if number < HOSTILE else self._friendly()
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while self.elapsed < SECONDS:
                kind, call = chance.choice(kinds)
                status = call(http, chance)
                with self._lock:
                    self.statuses[kind, status] += 1
                if status == 503:
                    time.sleep(0.2)

    def _friendly(self) -> list[tuple[str, Callable[[httpx.Client, random.Random], int]]]:
        return [("run", self._run), ("run", self._run), ("norms", self._norms), ("16 MiB", self._tensor),
                ("audit", self._audit)]  # fmt: skip

    def _hostile(self) -> list[tuple[str, Callable[[httpx.Client, random.Random], int]]]:
        return [("bad body", self._bad), ("oversize", self._oversize), ("disconnect", self._disconnect),
                ("slow writer", self._slow)]  # fmt: skip

    def _seen(self, answer: httpx.Response) -> int:
        if answer.status_code == 503 and "retry-after" in answer.headers:
            with self._lock:
                self.told_when += 1
        return answer.status_code

    def _run(self, http: httpx.Client, chance: random.Random) -> int:
        sample = {"rows": 64, "seed": chance.randrange(10**6)}
        return self._seen(http.post("/v1/blocks/run", json=RUN | {"sample": sample}))

    def _norms(self, http: httpx.Client, chance: random.Random) -> int:
        sample = {"rows": 16, "seed": chance.randrange(10**6)}
        return self._seen(http.post("/v1/norms/statistics", json=RUN | {"norm": "ffn_in", "sample": sample}))

    def _tensor(self, http: httpx.Client, chance: random.Random) -> int:
        del chance
        headers = {"Content-Type": "application/x-safetensors"}
        return self._seen(http.post("/v1/blocks/run", content=self._large, headers=headers))

    def _audit(self, http: httpx.Client, chance: random.Random) -> int:
        del chance
        answer = http.post("/v1/audits", json={"checkpoint": "tiny-llama"})
        if answer.status_code == 202:
            with self._lock:
                self.audits.append(answer.json()["id"])
        return self._seen(answer)

    def _bad(self, http: httpx.Client, chance: random.Random) -> int:
        bodies = [b'{"checkpoint": "../..", "layer": ', b"[" * 5000, b'{"layer": "x"}', b"\xff\xfe"]
        return http.post(
            "/v1/blocks/run", content=chance.choice(bodies), headers={"Content-Type": "application/json"}
        ).status_code

    def _oversize(self, http: httpx.Client, chance: random.Random) -> int:
        del http, chance
        return _raw(self.url, b"Content-Length: 99999999999\r\n", b"{", patience=30)

    def _slow(self, http: httpx.Client, chance: random.Random) -> int:
        del http, chance
        return _raw(self.url, b"Content-Length: 1000\r\n", b"{", patience=30)

    def _disconnect(self, http: httpx.Client, chance: random.Random) -> int:
        del http
        body = json.dumps(RUN | {"sample": {"rows": 4096, "seed": chance.randrange(10**6)}}).encode()
        return _raw(self.url, f"Content-Length: {len(body)}\r\n".encode(), body, patience=0)

    def _health(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while self.elapsed < SECONDS:
                asked = time.perf_counter()
                http.get("/health/live").raise_for_status()
                self.health.append(time.perf_counter() - asked)
                time.sleep(0.05)

    def _memory(self) -> None:
        while self.elapsed < SECONDS:
            self.memory.append((self.elapsed, self.service.memory_info().rss))
            time.sleep(0.2)

    def growth(self) -> float:
        """How much larger the resident set is in the last third than in the middle one, medians."""
        thirds = [[rss for at, rss in self.memory if int(3 * at / SECONDS) == third] for third in (1, 2)]
        return statistics.median(thirds[1]) / statistics.median(thirds[0]) - 1


def _raw(url: str, headers: bytes, body: bytes, *, patience: float) -> int:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        head = b"POST /v1/blocks/run HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(head + headers + b"\r\n" + body)
        if not patience:
            return 0
        connection.settimeout(patience)
        return int((connection.recv(64) or b"HTTP/1.1 0").split()[1])


class Service:
    """The command `glassblock serve`, for the length of a `with`."""

    def __init__(self, roots: Path, data: Path) -> None:
        command = [sys.executable, "-m", "glassblock_client", "serve", "--port", "0"]
        environment = {"GLASSBLOCK_DATA": str(data), "GLASSBLOCK_ANSWERS_MIB": "0", "GLASSBLOCK_SILENCE_SECONDS": "2"}
        self._command, self._roots, self._environment = command, roots, environment

    def __enter__(self) -> tuple[str, psutil.Process]:
        command = [*self._command, "--checkpoints", str(self._roots)]
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            command, stdout=self._errors, stderr=subprocess.PIPE, env={**os.environ, **self._environment}
        )
        stderr = self._process.stderr
        assert stderr is not None
        url = stderr.readline().decode().split()[3]
        threading.Thread(target=lambda: [None for _ in stderr], daemon=True).start()
        return url, psutil.Process(self._process.pid)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._errors.close()


def throughput(folder: Path) -> tuple[float, float, float]:
    """Seconds of one block's work, then requests per second in process and over HTTP."""
    directory = folder / "roots" / "block"
    directory.mkdir(parents=True)
    d, m, vocabulary = 768, 3072, 4096
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / d**0.5

    names = {"gate_proj": (m, d), "up_proj": (m, d), "down_proj": (d, m)}
    tensors = {f"model.layers.0.mlp.{name}.weight": weight(*shape) for name, shape in names.items()}
    tensors |= {f"model.layers.0.self_attn.{name}_proj.weight": weight(d, d) for name in "qkvo"}
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    tensors |= {f"model.{name}.weight": torch.ones(d) for name in norms}
    tensors["model.embed_tokens.weight"] = weight(vocabulary, d)
    (directory / "model.safetensors").write_bytes(save({name: tensor.numpy() for name, tensor in tensors.items()}))
    config = {"model_type": "llama", "hidden_size": d, "intermediate_size": m, "num_hidden_layers": 1,
              "num_attention_heads": 12, "num_key_value_heads": 12, "vocab_size": vocabulary, "hidden_act": "silu",
              "rms_norm_eps": 1e-5, "tie_word_embeddings": True}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    requests = [{"checkpoint": "block", "layer": 0, "sample": {"rows": ROWS, "seed": seed}} for seed in range(TIMED)]
    operations = Operations(CheckpointStore([folder / "roots"], device="cpu"))

    def alone(message: dict[str, Any]) -> object:
        return operations.run_block(BlockRunRequest.model_validate(message), {}).answer.model_dump_json()

    def posted(message: dict[str, Any]) -> httpx.Response:
        return http.post("/v1/blocks/run", json=message)

    with Service(folder / "roots", folder / "data") as (url, _), httpx.Client(base_url=url, timeout=60) as http:
        for message in requests[:3]:
            alone(message)
            http.post("/v1/blocks/run", json=message).raise_for_status()
        seconds: dict[str, list[float]] = {"alone": [], "http": []}
        with ThreadPoolExecutor(4) as callers:
            for _ in range(3):  # in turns, so that a machine that changes its speed changes both
                since = time.perf_counter()
                for message in requests:
                    alone(message)
                seconds["alone"].append(time.perf_counter() - since)
                since = time.perf_counter()
                for answer in callers.map(posted, requests):
                    answer.raise_for_status()
                seconds["http"].append(time.perf_counter() - since)
    alone_seconds, http_seconds = (statistics.median(times) for times in seconds.values())
    return alone_seconds / TIMED, TIMED / alone_seconds, TIMED / http_seconds


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        with Service(ROOT / "examples", Path(name) / "data") as (url, process):
            load = Load(url, process)
            load.go()
            seconds = load.elapsed
            unended = load.unended(max(120.0, 2 * SECONDS))
        work, alone, served = throughput(Path(name))
    slowest = sorted(load.health)[int(0.99 * (len(load.health) - 1))]
    broken = sum(count for (_, status), count in load.statuses.items() if status >= 500 and status != 503)
    busy = sum(count for (_, status), count in load.statuses.items() if status == 503)
    wrong = sum(count for (kind, status), count in load.statuses.items() if status not in EXPECTED[kind])
    growth = load.growth()
    promises = [
        Promise("no answer of 500", str(broken), broken == 0),
        Promise("every request is answered as its kind should be", f"{wrong} exceptions", wrong == 0),
        Promise("who has to come back is told when", f"{load.told_when} of {busy}", load.told_when == busy),
        Promise("memory grows by less than 5 % after the warm-up", f"{100 * growth:.1f} %", growth < 0.05),
        Promise("every accepted audit ends", f"{unended} of {len(load.audits)} left", unended == 0),
        Promise("health answers under 250 ms at the 99th percentile", f"{1e3 * slowest:.0f} ms", slowest < 0.25),
        Promise(
            f"blocks of {1e3 * work:.0f} ms keep 85 % of their throughput",
            f"{served / alone:.0%}",
            work >= 0.05 and served >= 0.85 * alone,
        ),
    ]
    rows: list[tuple[object, ...]] = [(kind, status, count) for (kind, status), count in sorted(load.statuses.items())]
    rows.append(("health", 200, len(load.health)))
    says = (
        f"{CALLERS} callers, {HOSTILE} of them hostile, {seconds:.0f} s, health at a median of"
        f" {1e3 * statistics.median(load.health):.1f} ms. Status 0 is a caller who hung up. Then {TIMED} runs of one"
        f" block by 4 callers ({served:.1f} a second), and the same called in process one after the other"
        f" ({alone:.1f})."
    )
    return publish("Load", says, promises, [table(("requests", "status", "count"), rows)])


if __name__ == "__main__":
    sys.exit(main())
