"""Sixty-four callers at once, a tenth of them hostile, while health is asked all along; then blocks alone, timed.

    python evidence/load.py [SECONDS]      # 300 by default

Every caller asks one kind of thing again and again, so that as much is under way at the end as at the beginning; the
hostile ones take turns in what they do. No two tensors are the same: nothing is shared or kept.

Memory is the resident set of the service. The warm-up is over once every kind of request has been answered WARM times
and 30 seconds have passed. Then everybody pauses, the audits end, and what the service holds at rest is noted. At rest
it gives memory back, so a minute of load warms it again; SECONDS of load follow, and another rest.

Rest is compared with rest. Under load the mean of the last two minutes is compared with that of the first two: what
lies free in the heap comes and goes in pieces of the size of a tensor, and moves the mean of one minute by 2 %. The
least in each minute moves by less, and is what nothing gave back: the last minute's is compared with the first's.

Everything is on loopback, and ends by itself.
"""

import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
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

ASKING = {"run": 24, "norms": 12, "16 MiB": 12, "audit": 10, "hostile": 6}
CALLERS = sum(ASKING.values())
SECONDS = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
WARM, WARM_SECONDS = 50, 30.0
WARM_AGAIN_SECONDS = 60.0
REST_SECONDS = 15.0  # longer than the service waits before it gives back what lies free
MIB = 1 << 20
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
        self.memory: list[tuple[float, int]] = []  # under load, after the warm-up
        self.resting: list[int] = []
        self.audits: list[str] = []
        self.told_when = 0  # answers of 503 with Retry-After
        self.warm_seconds = 0.0
        self._ended: set[str] = set()
        self._calling = 0
        self._go, self._over = threading.Event(), threading.Event()
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
        """Warm up, rest, call for `SECONDS`, and rest again."""
        asks = [kind for kind, callers in ASKING.items() for _ in range(callers)]
        threads = [threading.Thread(target=self._calls, args=each) for each in enumerate(asks)]
        threads.append(threading.Thread(target=self._health))
        self._go.set()
        for thread in threads:
            thread.start()
        while self.elapsed < WARM_SECONDS or min(self._answered(kind) for kind in EXPECTED) < WARM:
            time.sleep(0.2)
        self.warm_seconds = self.elapsed
        self._rest()
        self._go.set()
        time.sleep(WARM_AGAIN_SECONDS)
        since = time.perf_counter()
        while (at := time.perf_counter() - since) < SECONDS:
            self.memory.append((at, self.service.memory_info().rss))
            time.sleep(0.1)
        self._rest()
        self._over.set()
        self._go.set()
        for thread in threads:
            thread.join()

    def _rest(self) -> None:
        """Wait until nothing is under way, and note what the service holds then."""
        self._go.clear()
        time.sleep(0.5)  # who has just been let go counts himself
        while self._calling:
            time.sleep(0.1)
        self.unended(max(120.0, SECONDS))
        time.sleep(REST_SECONDS)
        self.resting.append(self.service.memory_info().rss)

    def _answered(self, kind: str) -> int:
        with self._lock:
            return sum(count for (asked, _), count in self.statuses.items() if asked == kind)

    def unended(self, seconds: float) -> int:
        """Audits that have not ended after so long."""
        waiting, until = set(self.audits) - self._ended, time.perf_counter() + seconds
        with httpx.Client(base_url=self.url, timeout=60) as http:
            while waiting and time.perf_counter() < until:
                states = {audit: http.get(f"/v1/audits/{audit}").json()["state"] for audit in waiting}
                ended = {audit for audit, state in states.items() if state not in {"queued", "running"}}
                self._ended |= ended
                waiting -= ended
                time.sleep(0.5)
        return len(waiting)

    def _calls(self, number: int, asks: str) -> None:
        chance = random.Random(number)
        kinds = self._hostile() if asks == "hostile" else [self._friendly(asks)]
        with httpx.Client(base_url=self.url, timeout=120) as http:
            while self._go.wait() and not self._over.is_set():
                kind, call = chance.choice(kinds)
                with self._lock:
                    self._calling += 1
                status = call(http, chance)
                with self._lock:
                    self._calling -= 1
                    self.statuses[kind, status] += 1

    def _friendly(self, asks: str) -> tuple[str, Callable[[httpx.Client, random.Random], int]]:
        calls = {"run": self._run, "norms": self._norms, "16 MiB": self._tensor, "audit": self._audit}
        return asks, calls[asks]

    def _hostile(self) -> list[tuple[str, Callable[[httpx.Client, random.Random], int]]]:
        return [("bad body", self._bad), ("oversize", self._oversize), ("disconnect", self._disconnect),
                ("slow writer", self._slow)]  # fmt: skip

    def _seen(self, answer: httpx.Response) -> int:
        if answer.status_code == 503 and "retry-after" in answer.headers:
            with self._lock:
                self.told_when += 1
            time.sleep(min(2.0, float(answer.headers["retry-after"])))
        return answer.status_code

    def _run(self, http: httpx.Client, chance: random.Random) -> int:
        sample = {"rows": 64, "seed": chance.randrange(10**6)}
        return self._seen(http.post("/v1/blocks/run", json=RUN | {"sample": sample}))

    def _norms(self, http: httpx.Client, chance: random.Random) -> int:
        sample = {"rows": 16, "seed": chance.randrange(10**6)}
        return self._seen(http.post("/v1/norms/statistics", json=RUN | {"norm": "ffn_in", "sample": sample}))

    def _tensor(self, http: httpx.Client, chance: random.Random) -> int:
        body = bytearray(self._large)
        body[-8:-4] = struct.pack("<f", chance.gauss(0, 1))  # the last number but one is another one each time
        headers = {"Content-Type": "application/x-safetensors"}
        return self._seen(http.post("/v1/blocks/run", content=bytes(body), headers=headers))

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
            while not self._over.is_set():
                asked = time.perf_counter()
                http.get("/health/live").raise_for_status()
                if self._go.is_set():
                    self.health.append(time.perf_counter() - asked)
                time.sleep(0.05)

    def minutes(self) -> list[list[int]]:
        """The resident set in each minute under load, bytes; the last one may be longer."""
        last = max(1, int(SECONDS / 60)) - 1
        parts: list[list[int]] = [[] for _ in range(last + 1)]
        for at, rss in self.memory:
            parts[min(last, int(at / 60))].append(rss)
        return parts


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


def _spread(values: list[int]) -> tuple[str, str, str, str]:
    """Least, median, mean and most, MiB."""
    least, median, mean, most = (f"{of(values) / MIB:.0f}" for of in (min, statistics.median, statistics.fmean, max))
    return least, median, mean, most


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        with Service(ROOT / "examples", Path(name) / "data") as (url, process):
            load = Load(url, process)
            load.go()
            unended = load.unended(max(120.0, 2 * SECONDS))
        work, alone, served = throughput(Path(name))
    slowest = sorted(load.health)[int(0.99 * (len(load.health) - 1))]
    broken = sum(count for (_, status), count in load.statuses.items() if status >= 500 and status != 503)
    busy = sum(count for (_, status), count in load.statuses.items() if status == 503)
    wrong = sum(count for (kind, status), count in load.statuses.items() if status not in EXPECTED[kind])
    refused = load.statuses["run", 503] + load.statuses["norms", 503]
    minutes = load.minutes()
    least = [min(minute) for minute in minutes]
    first, last = (statistics.fmean(chain.from_iterable(part)) for part in (minutes[:2], minutes[-2:]))
    under_load, kept, at_rest = last / first - 1, least[-1] / least[0] - 1, load.resting[-1] / load.resting[0] - 1
    promises = [
        Promise("no answer of 500", str(broken), broken == 0),
        Promise("every request is answered as its kind should be", f"{wrong} exceptions", wrong == 0),
        Promise("small requests are not refused for want of room", f"{refused} refused", refused == 0),
        Promise("who has to come back is told when", f"{load.told_when} of {busy}", load.told_when == busy),
        Promise(
            "memory under load: the last two minutes' mean is less than 5 % above the first two's after the warm-up",
            f"{100 * under_load:+.1f} %",
            under_load < 0.05,
        ),
        Promise(
            "the least of the last minute is less than 5 % above the least of the first",
            f"{100 * kept:+.1f} %",
            kept < 0.05,
        ),
        Promise(
            "memory at rest: less than 5 % above that after the warm-up", f"{100 * at_rest:+.1f} %", at_rest < 0.05
        ),
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
    held = [("at rest after the warm-up", *_spread([load.resting[0]]))]
    held += [(f"minute {number}", *_spread(minute)) for number, minute in enumerate(minutes, 1)]
    held += [("at rest at the end", *_spread([load.resting[-1]]))]
    asking = ", ".join(f"{callers} {kind}" for kind, callers in ASKING.items())
    says = (
        f"{CALLERS} callers ({asking}), {SECONDS:.0f} s after a warm-up of {load.warm_seconds:.0f} s: until every kind"
        f" of request had been answered {WARM} times and {WARM_SECONDS:.0f} s had passed. Then a rest, and"
        f" {WARM_AGAIN_SECONDS:.0f} s of load that are not counted. Health at a median of"
        f" {1e3 * statistics.median(load.health):.1f} ms. Status 0 is a caller who hung up. Then {TIMED} runs of one"
        f" block by 4 callers ({served:.1f} a second), and the same called in process one after the other"
        f" ({alone:.1f})."
    )
    sections = [
        table(("requests, those of the warm-up among them", "status", "count"), rows),
        table(("resident set of the service, MiB", "least", "median", "mean", "most"), held),
    ]
    return publish("Load", says, promises, sections)


if __name__ == "__main__":
    sys.exit(main())
