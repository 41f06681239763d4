"""Bad input gets the right status and a message that names the culprit, and harms nobody after it."""

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from makers import tiny_checkpoint, write_container
from safetensors.numpy import save

RUN = "/v1/blocks/run"
STATISTICS = "/v1/norms/statistics"
COMPARE = "/v1/residuals/compare"
X = [[0.5] * 48]
JSON = {"Content-Type": "application/json"}


def run(**fields: Any) -> dict[str, Any]:
    return {"checkpoint": "llama", "layer": 0, "x": X, **fields}


# path, body, status, code, field that must be named, words that must be in the message
REFUSED: list[tuple[str, dict[str, Any], int, str, str | None, str]] = [
    (RUN, run(layer=2), 422, "invalid-value", "layer", "2"),
    (RUN, run(layer=-1), 422, "invalid-value", "layer", "-1"),
    (RUN, run(layer="0"), 422, "invalid-value", "layer", "whole number"),
    (RUN, run(layer=True), 422, "invalid-value", "layer", "whole number"),
    (RUN, run(layer=0.0), 422, "invalid-value", "layer", "whole number"),
    (RUN, run(layer=10**30), 422, "invalid-value", "layer", "layer"),
    (RUN, run(x=[[0.5] * 47]), 422, "invalid-value", "x", "47"),
    (RUN, run(x=[]), 422, "invalid-value", "x", "empty"),
    (RUN, run(x=[[]]), 422, "invalid-value", "x", "empty"),
    (RUN, run(x=[[0.5], [0.5, 0.5]]), 422, "invalid-value", "x", "rectangular"),
    (RUN, run(x=[["1.0"] * 48]), 422, "invalid-value", "x", "number"),
    (RUN, run(x=None), 422, "invalid-value", "x", "missing"),
    (RUN, run(sample={"rows": 2}), 422, "invalid-value", "sample", "both"),
    (RUN, run(x=None, sample={"rows": 97}), 422, "invalid-value", "sample.rows", "97"),
    (RUN, run(x=None, sample={"rows": 0}), 422, "invalid-value", "sample.rows", "too small"),
    (RUN, run(overrides={"eps": -1e-6}), 422, "invalid-value", "overrides.eps", "-1e-06"),
    (RUN, run(overrides={"eps": "1e-5"}), 422, "invalid-value", "overrides.eps", "number"),
    (RUN, run(overrides={"eps": True}), 422, "invalid-value", "overrides.eps", "number"),
    (RUN, run(overrides={"eps": float("nan")}), 422, "invalid-value", "overrides.eps", "nan"),
    (RUN, run(overrides={"eps": float("inf")}), 422, "invalid-value", "overrides.eps", "inf"),
    (RUN, run(overrides={"swap": 1}), 422, "invalid-value", "overrides.swap", "true or false"),
    (
        RUN,
        run(overrides={"norm_kind": "rms_noweight", "norm_offset": 1}),
        422,
        "invalid-value",
        "overrides.norm_offset",
        "gain",
    ),
    (RUN, run(x=[[True, *[0.5] * 47]]), 422, "invalid-value", "x", "number"),
    (RUN, run(overrides={"activation": "silux"}), 422, "invalid-value", "overrides.activation", "silux"),
    (RUN, run(overrides={"norm_kind": "rms"}), 422, "invalid-value", "overrides.norm_kind", "rms"),
    (RUN, run(overrides={"norm_offset": float("nan")}), 422, "invalid-value", "overrides.norm_offset", "finite"),
    (RUN, run(overrides={"placement": "before"}), 422, "invalid-value", "overrides.placement", "pre"),
    (RUN, run(overrides={"width": 113}), 422, "invalid-value", "overrides.width", "113"),
    (RUN, run(overrides={"dtype": "int8"}), 422, "invalid-value", "overrides.dtype", "float32"),
    (RUN, run(overrides={"epsilon": 1e-6}), 422, "invalid-value", "overrides.epsilon", "no such field"),
    (RUN, run(checkpoint="gpt2", overrides={"swap": True}), 422, "invalid-value", "overrides.swap", "plain"),
    (RUN, run(capture=["gates"]), 422, "invalid-value", "capture.0", "gate"),
    (RUN, run(x=[[0.0] * 48], overrides={"eps": 0}), 422, "invalid-value", "x", "zero"),
    (RUN, run(checkpoint="absent"), 404, "unknown-checkpoint", "checkpoint", "absent"),
    (RUN, run(checkpoint=""), 422, "invalid-value", "checkpoint", "1 character"),
    (RUN, run(checkpoint="../llama"), 403, "access-refused", "checkpoint", "roots"),
    (RUN, run(checkpoint="llama/../../llama"), 403, "access-refused", "checkpoint", "roots"),
    (RUN, run(checkpoint="/etc/passwd"), 403, "access-refused", "checkpoint", "roots"),
    (RUN, run(checkpoint="llama\x00"), 422, "invalid-value", "checkpoint", "control character"),
    (STATISTICS, {"x": [[1, 2]], "eps": -1}, 422, "invalid-value", "eps", "-1"),
    (STATISTICS, {"x": [[1, 2]], "eps": float("inf")}, 422, "invalid-value", "eps", "inf"),
    (STATISTICS, {"x": [[1, 2]]}, 422, "invalid-value", "eps", "missing"),
    (STATISTICS, {"x": [[3, 3, 3]], "eps": 0}, 422, "invalid-value", "x", "does not vary"),
    (STATISTICS, {"x": [[1, 2], [0, 0]], "eps": 0}, 422, "invalid-value", "x", "[1]"),
    (STATISTICS, {"x": [[1, 2]], "eps": 1e-5, "gain": [1, 1, 1]}, 422, "invalid-value", "gain", "3"),
    (STATISTICS, {"x": [[1, 2]], "eps": 1e-5, "offset": 1}, 422, "invalid-value", "offset", "gain"),
    (STATISTICS, {"x": [[1, 2]], "eps": 1e-5, "layer": 3}, 422, "invalid-value", "layer", "checkpoint"),
    (STATISTICS, {"checkpoint": "llama", "layer": 0, "x": X}, 422, "invalid-value", "norm", "missing"),
    (STATISTICS, {"checkpoint": "llama", "norm": "ffn_in", "x": X}, 422, "invalid-value", "layer", "missing"),
    (STATISTICS, {"checkpoint": "llama", "layer": 9, "norm": "final", "x": X}, 422, "invalid-value", "layer", "final"),
    (STATISTICS, {"checkpoint": "olmo2", "layer": 0, "norm": "ffn_in", "x": X}, 422, "invalid-value", "norm", "olmo2"),
    (COMPARE, {"x": [1, 2], "matrix": [[1, 0]], "eps": 1e-5}, 422, "invalid-value", "matrix", "[1, 2]"),
    (COMPARE, {"x": [1, 2], "eps": 1e-5}, 422, "invalid-value", "matrix", "missing"),
    (COMPARE, {"x": [0, 0], "matrix": [[1, 0], [0, 1]], "eps": 0}, 422, "invalid-value", "x", "zero"),
    ("/v1/budgets", {"d_model": 8}, 422, "invalid-value", "d_ff", "missing"),
    ("/v1/budgets", {"d_model": [8, 16], "d_ff": [8, 16], "kind": "plain"}, 422, "invalid-value", "d_ff", "both lists"),
    ("/v1/budgets", {"d_model": 8, "d_ff": 0, "kind": "plain"}, 422, "invalid-value", "d_ff", "too small"),
    ("/v1/audits", {"checkpoint": "absent"}, 404, "unknown-checkpoint", "checkpoint", "absent"),
    ("/v1/audits", {"checkpoint": "llama", "rules": ["nope"]}, 422, "invalid-value", "rules", "nope"),
    ("/v1/audits", {"checkpoint": "llama", "rules": []}, 422, "invalid-value", "rules", "at least 1"),
    ("/v1/audits", {"checkpoint": "llama", "family": "nope"}, 409, "unknown-family", None, "nope"),
    (
        STATISTICS,
        {"x": [[1, 2]], "gain": [1, 1], "eps": 1, "offset": float("nan")},
        422,
        "invalid-value",
        "offset",
        "finite",
    ),
    (COMPARE, {"x": [[1, 2]] * 257, "matrix": [[1, 0], [0, 1]], "eps": 1}, 413, "too-large", "x", "257"),
    ("/v1/audits", {"checkpoint": "../x"}, 403, "access-refused", "checkpoint", "roots"),
    ("/v1/audits", {"checkpoint": "llama", "rule": "x"}, 422, "invalid-value", "rule", "no such field"),
]


@pytest.mark.parametrize(("path", "body", "status", "code", "field", "words"), REFUSED)
def test_a_bad_value_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, code: str, field: str | None, words: str
) -> None:
    response = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert_problem(response, status, code, words)
    named = response.json().get("field") or ""
    assert field is None or named.startswith(field), response.json()
    assert_still_answers(http)


def test_nan_in_x_is_refused_where_it_is(http: httpx.Client) -> None:
    x = np.full((3, 48), 0.5, np.float32)
    x[1, 7] = np.nan
    response = post_tensors(http, {"x": x}, {"checkpoint": "llama", "layer": 0})
    assert_problem(response, 422, "invalid-value", "x[1, 7] is nan")
    body = json.dumps(run(x=[[float("nan")] * 48]))
    response = http.post(RUN, content=body, headers={"Content-Type": "application/json"})
    assert_problem(response, 422, "invalid-value", "x[0, 0] is nan")
    assert_still_answers(http)


def test_a_value_too_large_to_sum_is_no_nan(http: httpx.Client) -> None:
    x = np.full((3, 48), 3e38, np.float32)
    response = post_tensors(http, {"x": x}, {"checkpoint": "llama", "layer": 0, "capture": ["x"]})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("depth", [1_000, 10_000, 1_000_000])
def test_deep_json_is_refused(http: httpx.Client, depth: int) -> None:
    body = '{"checkpoint": "llama", "layer": 0, "x": ' + "[" * depth + "]" * depth + "}"
    response = http.post(RUN, content=body, headers={"Content-Type": "application/json"})
    assert_problem(response, 422, "invalid-value", "body")
    assert_still_answers(http)


@pytest.mark.parametrize("content_type", ["text/plain", "application/octet-stream", "multipart/form-data", ""])
def test_another_content_type_is_refused(http: httpx.Client, content_type: str) -> None:
    response = http.post(RUN, content=json.dumps(run()), headers={"Content-Type": content_type})
    assert_problem(response, 415, "unsupported-content", "content type")
    assert_still_answers(http)


def test_safetensors_where_no_tensor_is_read_is_another_content_type(http: httpx.Client) -> None:
    body = save({}, metadata={"request": "{}"})
    response = http.post("/v1/budgets", content=body, headers={"Content-Type": "application/x-safetensors"})
    assert_problem(response, 415, "unsupported-content", "content type")


BROKEN_BODIES: list[tuple[str, bytes, str]] = [
    ("short", b"\x01\x00", "too few"),
    ("header longer than the body", (2**40).to_bytes(8, "little") + b"{}", "claims"),
    ("no JSON", (2).to_bytes(8, "little") + b"{]", "JSON"),
    ("no object", (2).to_bytes(8, "little") + b"[]", "object"),
    ("no message", save({"x": np.ones((1, 48), np.float32)}), "request"),
    ("unread tensor", save({"y": np.ones((1, 48), np.float32)}, metadata={"request": "{}"}), "'y'"),
]


@pytest.mark.parametrize(("name", "body", "words"), BROKEN_BODIES, ids=[name for name, *_ in BROKEN_BODIES])
def test_a_broken_safetensors_body_is_refused(http: httpx.Client, name: str, body: bytes, words: str) -> None:
    response = http.post(RUN, content=body, headers={"Content-Type": "application/x-safetensors"})
    assert_problem(response, 422, "invalid-value", words)
    assert_still_answers(http)


def test_lying_offsets_in_a_body_are_refused(http: httpx.Client) -> None:
    for offsets in ([0, 1 << 40], [-8, 184], [8, 0], [0, 100]):
        header = {
            "__metadata__": {"request": json.dumps({"checkpoint": "llama", "layer": 0})},
            "x": {"dtype": "F32", "shape": [1, 48], "data_offsets": offsets},
        }
        raw = json.dumps(header).encode()
        body = len(raw).to_bytes(8, "little") + raw + b"\x00" * 192
        response = http.post(RUN, content=body, headers={"Content-Type": "application/x-safetensors"})
        assert_problem(response, 422, "invalid-value", "")
        assert response.json()["tensor"] == "x"
    assert_still_answers(http)


def test_a_body_over_the_limit_is_refused_unread(http: httpx.Client) -> None:
    response = http.post(RUN, content=b"", headers={"Content-Length": str(1 << 40), "Content-Type": "application/json"})
    assert_problem(response, 413, "too-large", "larger than")
    assert_still_answers(http)


def test_repeated_names_are_refused(http: httpx.Client) -> None:
    body = '{"checkpoint": "llama", "layer": 1, "layer": 0}'
    response = http.post(RUN, content=body, headers={"Content-Type": "application/json"})
    assert_problem(response, 422, "invalid-value", "twice")
    header = b'{"__metadata__":{"request":"{}"},"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},'
    header += b'"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'
    framed = len(header).to_bytes(8, "little") + header
    response = http.post(RUN, content=framed, headers={"Content-Type": "application/x-safetensors"})
    assert_problem(response, 422, "invalid-value", "twice")


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert_problem(http.post(RUN, content=b"x", headers=headers), 415, "unsupported-content", "gzip")


def test_no_such_path_and_no_such_method(http: httpx.Client) -> None:
    assert_problem(http.get("/v1/block/run"), 404, "unknown-route", "no such path")
    refused = http.get(RUN)
    assert_problem(refused, 405, "unknown-route", "no such method")
    assert refused.headers["allow"] == "POST"
    for path, methods in (
        ("/v1/audits", "GET, HEAD, POST"),
        ("/v1/audits/x", "DELETE, GET, HEAD"),
        ("/v1/checkpoints/x/residency", "DELETE, GET, HEAD, PUT"),  # the name of a checkpoint may end so
        ("/v1/checkpoints/x", "GET, HEAD"),
    ):
        refused = http.patch(path)
        assert_problem(refused, 405, "unknown-route", "no such method")
        assert refused.headers["allow"] == methods, path
    assert_problem(http.get("/v1/audits/nonesuch"), 404, "unknown-audit", "nonesuch")
    assert_problem(http.get("/v1/audits/nonesuch/report"), 404, "unknown-audit", "nonesuch")


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("..%2Fllama", 403), ("%2Fetc%2Fpasswd", 403), ("/etc/passwd", 403),
        ("llama%2F..%2F..%2Fllama", 403), ("%00", 422), ("a" * 5000, 422), ("absent", 404), ("LLAMA", 404),
        ("%2e%2e%2fllama", 403), ("llama%5C..%5C..", 422), ("llama%2F%2F", 422), ("%2e%2e", 403),
    ],
)  # fmt: skip
def test_a_name_cannot_leave_the_roots(http: httpx.Client, name: str, status: int) -> None:
    for path in (f"/v1/checkpoints/{name}", f"/v1/checkpoints/{name}/residency"):
        method = "DELETE" if path.endswith("residency") else "GET"
        request = httpx.Request(method, httpx.URL("http://glassblock", raw_path=path.encode()))
        assert http.send(request).status_code == status, path
    assert_still_answers(http)


def test_a_link_out_of_the_root_is_refused(http: httpx.Client, root: Path, tmp_path: Path) -> None:
    outside = tiny_checkpoint("llama", tmp_path / "outside")
    link = root / "escape"
    link.symlink_to(outside)
    inside = tiny_checkpoint("llama", root / "linked")
    shard = inside / "model.safetensors"
    shard.unlink()
    shard.symlink_to(outside / "model.safetensors")
    try:
        assert_problem(post(http, run(checkpoint="escape")), 403, "access-refused", "link")
        assert_problem(post(http, run(checkpoint="linked")), 403, "access-refused", "model.safetensors")
    finally:
        link.unlink()
    assert_still_answers(http)


def test_a_name_that_stands_twice_among_many_is_found_at_once(http: httpx.Client) -> None:
    names = ", ".join(f'"n{number}": 0' for number in range(30_000))
    since = time.monotonic()
    response = http.post(RUN, content=f'{{{names}, "n29999": 0}}', headers=JSON)
    assert time.monotonic() - since < 3.0
    assert_problem(response, 422, "invalid-value", "'n29999' stands twice")


@pytest.mark.parametrize(
    "body",
    [
        rb'{"checkpoint": "llama", "layer": 0, "x": ["\ud800"]}',
        rb'{"checkpoint": "llama", "layer": 0, "sample": {"rows": 1}, "family_row": {"like": "llama", "\udc00": 1}}',
        b'{"checkpoint": "llama", "layer": 0, "sample": {"rows": 1}, "family_row": {"\xed\xa0\x80": 1}}',
        '{"checkpoint": "llama"}'.encode("utf-16"),
    ],
    ids=["a value", "a name", "bytes", "another encoding"],
)
def test_what_is_no_unicode_is_refused(http: httpx.Client, body: bytes) -> None:
    assert_problem(http.post(RUN, content=body, headers=JSON), 422, "invalid-value", "body")
    assert_still_answers(http)


@pytest.mark.parametrize("text", ["\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"), "\ufeff"])
def test_whole_characters_are_taken_however_they_are_written(http: httpx.Client, text: str) -> None:
    for ascii_alone in (True, False):
        body = json.dumps(run(checkpoint=f"absent {text}"), ensure_ascii=ascii_alone).encode()
        assert http.post(RUN, content=body, headers=JSON).status_code in {404, 422}
    marked = json.dumps(run()).encode("utf-8-sig")
    assert http.post(RUN, content=marked, headers=JSON).status_code == 200


def broken_checkpoints(root: Path) -> dict[str, tuple[str, str]]:
    """Makes checkpoints broken each in one way; name -> (code, what must be named)."""
    good = tiny_checkpoint("llama", root / "good-for-breaking")
    weights = (good / "model.safetensors").read_bytes()
    header_length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + header_length])

    def broken(name: str, content: bytes) -> None:
        directory = tiny_checkpoint("llama", root / name)
        (directory / "model.safetensors").write_bytes(content)

    broken("truncated", weights[:-10])
    broken("long-header", (len(weights) * 2).to_bytes(8, "little") + weights[8:])
    names = [name for name in header if name != "__metadata__"]
    overlapping = json.loads(json.dumps(header))
    overlapping[names[1]]["data_offsets"] = overlapping[names[0]]["data_offsets"]
    overlapping[names[1]]["shape"] = overlapping[names[0]]["shape"]
    directory = tiny_checkpoint("llama", root / "overlapping")
    write_container(directory / "model.safetensors", overlapping, weights[8 + header_length :])
    broken("pickled", pickle.dumps({"model.embed_tokens.weight": [1.0] * 1000}))
    sharded = tiny_checkpoint("llama", root / "shard-missing", shards=3)
    (sharded / "model-00002-of-00003.safetensors").unlink()
    tiny_checkpoint("llama", root / "wrong-shape", config={"intermediate_size": 120})
    tiny_checkpoint("llama", root / "unknown-family", config={"model_type": "llamax", "architectures": ["Llamax"]})
    tiny_checkpoint("llama", root / "unknown-activation", config={"hidden_act": "silux"})
    tiny_checkpoint("llama", root / "eps-as-text", config={"rms_norm_eps": "1e-5"})
    (tiny_checkpoint("llama", root / "config-no-json") / "config.json").write_text("{")
    (tiny_checkpoint("llama", root / "config-deep") / "config.json").write_text('{"a":' * 10_000 + "1" + "}" * 10_000)
    return {
        "truncated": ("damaged-checkpoint", "model.safetensors"),
        "long-header": ("damaged-checkpoint", "model.safetensors"),
        "overlapping": ("damaged-checkpoint", names[1]),
        "pickled": ("damaged-checkpoint", "pickle"),
        "shard-missing": ("damaged-checkpoint", "model-00002-of-00003.safetensors"),
        "wrong-shape": ("family-mismatch", "intermediate_size"),
        "unknown-family": ("unknown-family", "llamax"),
        "unknown-activation": ("family-mismatch", "silux"),
        "eps-as-text": ("damaged-checkpoint", "rms_norm_eps"),
        "config-no-json": ("damaged-checkpoint", "config.json"),
        "config-deep": ("damaged-checkpoint", "config.json"),
    }


def test_a_broken_checkpoint_is_refused_by_name_and_its_audit_reports(http: httpx.Client, root: Path) -> None:
    for name, (code, culprit) in broken_checkpoints(root).items():
        response = post(http, run(checkpoint=name))
        assert_problem(response, 409, code, "")
        assert culprit in response.text, (name, response.text)
        assert str(root) not in response.text, "a path of the machine is nobody's business"
        assert http.get(f"/v1/checkpoints/{name}").status_code == 200
        assert_still_answers(http)


def test_a_file_that_holds_no_weights_is_no_checkpoint(http: httpx.Client, root: Path) -> None:
    directory = tiny_checkpoint("llama", root / "beside")
    (directory / "weights.bin").write_bytes((directory / "model.safetensors").read_bytes())
    (directory / "cut.safetensors").write_bytes(b"{}")
    found = {"model.safetensors": 200, "weights.bin": 200, "cut.safetensors": 200, "config.json": 404}
    for name, status in found.items():
        assert http.get(f"/v1/checkpoints/beside/{name}").status_code == status, name
    refused = http.get("/v1/checkpoints/beside/config.json")
    assert_problem(refused, 404, "unknown-checkpoint", "checkpoint")


def test_a_special_file_does_not_hang(http: httpx.Client, root: Path) -> None:
    directory = tiny_checkpoint("llama", root / "fifo")
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    assert post(http, run(checkpoint="fifo")).status_code in {403, 409}
    assert_still_answers(http)


def post(http: httpx.Client, body: dict[str, Any]) -> httpx.Response:
    return http.post(RUN, json=body)


def post_tensors(http: httpx.Client, tensors: dict[str, Any], message: dict[str, Any]) -> httpx.Response:
    body = save(tensors, metadata={"request": json.dumps(message)})
    return http.post(RUN, content=body, headers={"Content-Type": "application/x-safetensors"})


def assert_problem(response: httpx.Response, status: int, code: str, words: str) -> None:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["code"] == code, problem
    assert problem["status"] == status
    assert words in response.text, problem
    assert "Traceback" not in response.text


def assert_still_answers(http: httpx.Client) -> None:
    response = post(http, run())
    assert response.status_code == 200, response.text
