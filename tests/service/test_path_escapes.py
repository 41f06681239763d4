"""Names that would lead out of the roots, against every endpoint that takes one: nothing beyond is opened or told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import numpy as np
import pytest
import torch
from glassblock.api.app import create_app
from glassblock.api.entry import in_process
from glassblock.api.settings import Settings
from glassblock.wire.endpoints import AUDITS, ENDPOINTS, Endpoint
from makers import tiny_checkpoint
from safetensors.numpy import save, save_file

NAMED = ("checkpoint", "output", "reference", "captures")
"""Fields of requests that name something on disk."""

CANARY = "canary.of.what.lies.beyond"
D_MODEL = 48
STAGES = ("x", "output")

# What each endpoint needs beside the name; `NAME` is where it goes.
NAME = object()
SAMPLE = {"rows": 1}
BODIES: dict[str, dict[str, Any]] = {
    "run_block.checkpoint": {"checkpoint": NAME, "layer": 0, "sample": SAMPLE},
    "explain_block.checkpoint": {"checkpoint": NAME, "layer": 0, "pairs": False},
    "norm_statistics.checkpoint": {"checkpoint": NAME, "layer": 0, "norm": "ffn_in", "sample": SAMPLE},
    "compare_residuals.checkpoint": {"checkpoint": NAME, "layer": 0, "sample": SAMPLE},
    "jacobians.checkpoint": {"checkpoint": NAME, "layers": [0], "sample": SAMPLE},
    "likelihoods.checkpoint": {"checkpoint": NAME, "token_ids": [1, 2]},
    "budgets.checkpoint": {"checkpoint": NAME},
    "plan.request": {"operation": "run_block", "request": {"checkpoint": NAME, "layer": 0, "sample": SAMPLE}},
    "start_audit.checkpoint": {"checkpoint": NAME},
    "start_audit.reference": {"checkpoint": "llama", "reference": NAME},
    "start_audit.captures": {"checkpoint": "llama", "captures": NAME},
    "repair.checkpoint": {"checkpoint": NAME, "dry_run": True},
    "repair.output": {"checkpoint": "llama", "output": NAME},
    "repair.reference": {"checkpoint": "llama", "dry_run": True, "reference": NAME},
    "selftest.checkpoint": {"checkpoint": NAME, "rules": ["ffn/gate-up-swapped"], "layers": [0]},
}

HEALTHY = {"repair.output": "mended", "start_audit.captures": "captured.safetensors"}

ESCAPES = (
    "../beyond", "..", "../", "../../etc", "llama/../../beyond", "./../beyond", "llama/..//../beyond", "/../beyond",
    "{beyond}", "/etc/passwd", "//etc/passwd", "/proc/self/environ", "/dev/zero", "~", "~root/x", "$HOME/beyond",
    "file:///etc/passwd", "file://{beyond}", "http://localhost/x", "..\\beyond", "..\\/beyond", "C:\\beyond",
    "\\\\server\\share", "link", "link/", "link/model.safetensors", "linked-file.safetensors", "link/../beyond",
    "inner-link/model.safetensors/../../../beyond", "chain", "loop", "loop/loop", "llama\0", "\0",
    "llama\0/../../beyond",
    "../beyond\0.safetensors", "llama\n", "llama\r\nX: y", "llama\x7f", "\u202e/beyond", "\uff0e\uff0e/beyond",
    "..\u2215beyond", "..\u2044beyond", "..%2fbeyond", "%2e%2e/beyond", "%2e%2e%2fbeyond", "..%252fbeyond",
    "%c0%ae%c0%ae/beyond", "..%c0%afbeyond", "..%5cbeyond", "..;/beyond", ".../beyond", "....//beyond", "LLAMA",
    "llama ", " llama", "llama.", "llama/model.safetensors/../../../beyond",
    "a" * 300, "a" * 5000, "a/" * 2000, "../" * 1000 + "etc", "llama/" + "../llama/" * 500, "llama/" + "x/../" * 2000,
    "\u00e9" * 2000, "-rf", "--help", "*", "?", "llama*", "[l]lama", "{llama}",
)  # fmt: skip

INSIDE = ("llama/config.json", "llama/config.json/..", "llama/.", "./llama", "llama//", "inner-link")
"""Odd, and under the root all the same: may be answered, and tells nothing of what lies beyond."""

ENCODED = (
    "..%2Fbeyond", "%2E%2E%2Fbeyond", "%2e%2e/beyond", "..%252Fbeyond", "%252e%252e%252fbeyond", "..%5Cbeyond",
    "%c0%ae%c0%ae%c0%afbeyond", "%e0%80%ae%e0%80%ae/beyond", "..%00/beyond", "llama%00", "%00", "%2Fetc%2Fpasswd",
    "//etc/passwd", "%2F..%2F..%2Fetc%2Fpasswd", "..;/beyond", "%ff%fe", "link", "link%2Fmodel.safetensors", "LLAMA",
    "llama/..%2F..%2Fbeyond", "llama%2F..%2F..%2Fbeyond", "llama%0d%0aX:%20y", "%2e%2e", "a" * 5000,
)  # fmt: skip
"""As they stand in a URL."""

REFUSED = {400, 403, 404, 405, 409, 413, 422}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with links that lead out of it, a folder beyond with a healthy checkpoint, a folder for output."""
    folder = tmp_path_factory.mktemp("escapes")
    root, beyond = folder / "root", folder / "beyond"
    tiny_checkpoint("llama", root / "llama")
    tiny_checkpoint("llama", beyond, tensors={CANARY: torch.ones(3)})
    (folder / "output").mkdir()
    stages = {f"layers.0.{stage}": np.ones((2, D_MODEL), np.float32) for stage in STAGES}
    save_file(stages, root / HEALTHY["start_audit.captures"])
    (root / "link").symlink_to(beyond)
    (root / "chain").symlink_to(root / "link")
    (root / "loop").symlink_to(root / "loop")
    (root / "linked-file.safetensors").symlink_to(beyond / "model.safetensors")
    (root / "inner-link").mkdir()
    (root / "inner-link" / "config.json").write_bytes((root / "llama" / "config.json").read_bytes())
    (root / "inner-link" / "model.safetensors").symlink_to(beyond / "model.safetensors")
    (folder / "output" / "link").symlink_to(beyond)
    return folder


@pytest.fixture(scope="module")
def http(place: Path) -> Iterator[httpx.Client]:
    settings = Settings(
        roots=(place / "root",), device="cpu", output_root=place / "output", rate="1000000/second", waiting=10_000
    )
    with in_process(create_app(settings)) as transport, httpx.Client(base_url="http://gb", transport=transport) as http:
        yield http


BY_BODY = tuple(
    (endpoint, field)
    for endpoint in ENDPOINTS
    for field in (*NAMED, "request")
    if field in endpoint.request.model_fields and endpoint is not AUDITS
)
"""`GET /v1/audits?checkpoint=` compares texts and opens nothing."""

BY_PATH = tuple(endpoint for endpoint in ENDPOINTS if "{" in endpoint.path)


def test_every_endpoint_that_takes_a_name_has_a_body_here() -> None:
    assert {f"{endpoint.name}.{field}" for endpoint, field in BY_BODY} == set(BODIES)


@pytest.mark.parametrize(("endpoint", "field"), BY_BODY, ids=lambda part: getattr(part, "name", part))
def test_a_name_in_a_body_leads_nowhere_else(
    http: httpx.Client, place: Path, endpoint: Endpoint[Any, Any], field: str
) -> None:
    row = f"{endpoint.name}.{field}"
    before = _beyond(place)
    for escape in ESCAPES:
        name = escape.replace("{beyond}", str(place / "beyond"))
        # A new folder may be called anything, as long as it lies where it belongs: that is looked at below.
        _check(_ask(http, endpoint, BODIES[row], name), name, refused=field != "output")
    # An explanation takes seconds where it is given.
    for name in INSIDE[: 1 if endpoint.name == "explain_block" else None]:
        _check(_ask(http, endpoint, BODIES[row], name), name, refused=False)
    assert _beyond(place) == before
    answer = _ask(http, endpoint, BODIES[row], HEALTHY.get(row, "llama"))
    assert answer.status_code == endpoint.status, answer.text  # it is the name that was refused above


@pytest.mark.parametrize("endpoint", BY_PATH, ids=lambda endpoint: endpoint.name)
def test_a_name_in_a_path_leads_nowhere_else(http: httpx.Client, place: Path, endpoint: Endpoint[Any, Any]) -> None:
    before = _beyond(place)
    plain = [escape.replace("{beyond}", str(place / "beyond")) for escape in ESCAPES]
    inside = {quote(name, safe=safe) for name in INSIDE for safe in ("", "/")}
    written = {quote(name, safe=safe) for name in plain for safe in ("", "/")} | {*ENCODED, *inside}
    for name in sorted(written):
        path = endpoint.path.replace("{name}", name).replace("{id}", name)
        body: dict[str, Any] = {"json": {}} if endpoint.method == "PUT" else {}
        request = http.build_request(endpoint.method, path, **body)
        # Some the client itself makes another path of; what becomes of those is no name any more.
        same = request.url.raw_path.lower() == path.lower().encode()
        _check(http.send(request), path, refused=same and name not in inside)
    assert _beyond(place) == before


def test_a_list_tells_nothing_of_what_lies_beyond(http: httpx.Client) -> None:
    listed = {row["name"] for row in http.get("/v1/checkpoints").json()["checkpoints"]}
    inside = {"llama", "inner-link", "linked-file.safetensors", HEALTHY["start_audit.captures"]}
    assert listed <= inside  # the links' own names lie inside
    assert CANARY not in http.get("/v1/checkpoints").text
    for name in ("inner-link", "inner-link/model.safetensors"):
        answer = http.get(f"/v1/checkpoints/{name}")
        assert CANARY not in answer.text
    audit = http.post("/v1/audits", json={"checkpoint": "inner-link"})
    assert CANARY not in audit.text


def _ask(http: httpx.Client, endpoint: Endpoint[Any, Any], body: dict[str, Any], name: str) -> httpx.Response:
    text = json.dumps(_filled(body, name))
    if endpoint.name != "explain_block":
        return http.request(endpoint.method, endpoint.path, content=text, headers={"Content-Type": "application/json"})
    stages = {stage: np.ones((2, D_MODEL), np.float32) for stage in STAGES}
    framed = save(stages, metadata={"request": text})
    return http.post(endpoint.path, content=framed, headers={"Content-Type": "application/x-safetensors"})


def _filled(value: Any, name: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, name) for key, item in value.items()}
    return name if value is NAME else value


def _check(answer: httpx.Response, name: str, *, refused: bool) -> None:
    told = (name[:100], answer.status_code, answer.text[:300])
    assert answer.status_code < 500, told
    assert CANARY not in answer.text, told
    if refused:
        assert answer.status_code in REFUSED, told
        assert answer.headers["content-type"] == "application/problem+json", told
        assert len(answer.content) < 20_000, told


def _beyond(place: Path) -> set[tuple[str, int]]:
    """Whatever lies outside the root and the folder for output, with its time of change."""
    found = {entry for entry in place.iterdir() if entry.name not in {"root", "output"}}
    found |= set((place / "beyond").iterdir())
    return {(str(entry), entry.stat().st_mtime_ns) for entry in found}
