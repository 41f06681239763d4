"""Sixteen callers for half a minute on loopback, a quarter of them hostile, while health is asked all along.

A first proof that mixed load breaks nothing; the bound on time and callers keeps it to a minute.
"""

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter

import httpx
from record import ROOT, Promise, publish, table

CALLERS, SECONDS = 16, 30.0
GOOD = {"checkpoint": "tiny-llama", "layer": 1, "sample": {"rows": 64}}


def main() -> int:
    serve = [sys.executable, "-m", "glassblock_client", "serve", "--checkpoints", str(ROOT / "examples"), "--port", "0"]
    with (
        tempfile.TemporaryFile() as nowhere,
        subprocess.Popen(serve, stdout=nowhere, stderr=subprocess.PIPE) as service,
    ):
        assert service.stderr is not None
        url = service.stderr.readline().decode().split()[3]
        try:
            statuses, health, seconds = loaded(url)
        finally:
            service.terminate()
    slowest = sorted(health)[int(0.99 * (len(health) - 1))]
    broken = sum(count for (_, status), count in statuses.items() if status >= 500 and status != 503)
    wrong = sum(count for (kind, status), count in statuses.items() if (kind == "good") != (status == 200))
    promises = [
        Promise("no answer of 500", str(broken), broken == 0),
        Promise("every good request is answered, every hostile one refused", f"{wrong} exceptions", wrong == 0),
        Promise("health answers under 250 ms at the 99th percentile", f"{1e3 * slowest:.0f} ms", slowest < 0.25),
    ]
    rows = [(kind, status, count) for (kind, status), count in sorted(statuses.items())]
    rows.append(("health", 200, len(health)))
    says = f"{CALLERS} callers, {seconds:.0f} s, health at a median of {1e3 * statistics.median(health):.1f} ms."
    return publish("Load", says, promises, [table(("requests", "status", "count"), rows)])


def loaded(url: str) -> tuple[Counter[tuple[str, int]], list[float], float]:
    statuses: Counter[tuple[str, int]] = Counter()
    health: list[float] = []
    lock, start = threading.Lock(), time.perf_counter()

    def calls(number: int) -> None:
        hostile = number % 4 == 0
        body = {"content": b'{"checkpoint": "../..", "layer": '} if hostile else {"json": GOOD}
        with httpx.Client(base_url=url, timeout=60) as http:
            while time.perf_counter() - start < SECONDS:
                status = http.post("/v1/blocks/run", headers={"Content-Type": "application/json"}, **body).status_code
                with lock:
                    statuses["hostile" if hostile else "good", status] += 1

    def asks() -> None:
        with httpx.Client(base_url=url, timeout=60) as http:
            while time.perf_counter() - start < SECONDS:
                asked = time.perf_counter()
                http.get("/health/live").raise_for_status()
                health.append(time.perf_counter() - asked)
                time.sleep(0.05)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(CALLERS)]
    threads.append(threading.Thread(target=asks))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statuses, health, time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
