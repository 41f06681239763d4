"""Records one exchange with every endpoint of the version that is on the path, over the shipped example.

    PYTHONPATH=service:clients python tests/compatibility/record.py tests/compatibility/v1

Run it once, before the schema changes; the files then stay as they are.
"""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
from glassblock.api.entry import connect

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny-llama"
X = [[0.25 * (column % 5) - 0.5 for column in range(64)], [0.125 * (column % 7) for column in range(64)]]

# name of the endpoint, method, path, request
ASKED: tuple[tuple[str, str, str, dict[str, Any] | None], ...] = (
    ("live", "GET", "/health/live", None),
    ("ready", "GET", "/health/ready", None),
    ("capabilities", "GET", "/v1", None),
    ("checkpoints", "GET", "/v1/checkpoints", None),
    ("checkpoint", "GET", f"/v1/checkpoints/{NAME}", None),
    ("pin", "PUT", f"/v1/checkpoints/{NAME}/residency", {"layers": [0]}),
    ("evict", "DELETE", f"/v1/checkpoints/{NAME}/residency", None),
    ("run_block", "POST", "/v1/blocks/run", {
        "checkpoint": NAME, "layer": 1, "x": X, "capture": ["normed", "hidden", "output"], "return_tensors": True,
        "overrides": {"eps": 1e-6, "swap": True, "activation": "gelu_tanh", "dtype": "float32"},
    }),
    ("run_block", "POST", "/v1/blocks/run", {"checkpoint": NAME, "layer": 0, "sample": {"rows": 4, "seed": 3}}),
    ("norm_statistics", "POST", "/v1/norms/statistics", {"x": X, "eps": 1e-5, "jacobian": False}),
    ("norm_statistics", "POST", "/v1/norms/statistics", {"checkpoint": NAME, "layer": 0, "norm": "ffn_in", "x": X}),
    ("compare_residuals", "POST", "/v1/residuals/compare", {
        "x": [[1, 2, 3]], "matrix": [[1, 0, 0], [0, 2, 0], [0, 0, 3]], "eps": 1e-5,
    }),
    ("budgets", "POST", "/v1/budgets", {"checkpoint": NAME}),
    ("rules", "GET", "/v1/rules", None),
    ("families", "GET", "/v1/families", None),
)  # fmt: skip


def main() -> None:
    folder = Path(sys.argv[1])
    with (
        connect(roots=[ROOT / "examples"], device="cpu") as transport,
        httpx.Client(base_url="http://glassblock", transport=transport) as http,
    ):
        exchanges: list[dict[str, Any]] = []
        for name, method, path, request in ASKED:
            answer = http.request(method, path, json=request)
            recorded = {"endpoint": name, "method": method, "path": path, "request": request}
            exchanges.append(recorded | {"status": answer.status_code, "answer": answer.json()})
        started = http.post("/v1/audits", json={"checkpoint": NAME, "certify": True})
        audit = started.json()
        while audit["state"] in {"queued", "running"}:
            audit = http.get(started.headers["location"]).json()
        refused = http.post("/v1/blocks/run", json={"checkpoint": NAME, "layer": 99, "x": X})
    exchanges.append({
        "endpoint": "start_audit", "method": "POST", "path": "/v1/audits",
        "request": {"checkpoint": NAME, "certify": True}, "status": started.status_code, "answer": started.json(),
    })  # fmt: skip
    for file, what in {"exchanges": exchanges, "audit": audit, "problem": refused.json()}.items():
        (folder / f"{file}.json").write_text(json.dumps(what, indent=1) + "\n")


if __name__ == "__main__":
    main()
