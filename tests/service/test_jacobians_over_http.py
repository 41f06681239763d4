"""jacobians: norms against derivatives of what blocks/run itself answers, and the proof beside them."""

import json
import threading
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from glassblock.api.app import create_app
from glassblock.api.settings import Settings
from glassblock.errors import TooLarge
from glassblock.numerics.watching import ComputationCancelled, Watch
from glassblock.numerics.wiring import Placement, Wiring
from glassblock.operations import coupled_jacobians, jacobians
from glassblock.operations.layer_functions import LayerPart
from glassblock.operations.store import CheckpointStore
from glassblock.wire.jacobians import CHEAP_NORMS, JacobiansRequest, LayerJacobians
from glassblock_client import Client, Overrides, Sample
from makers import USUAL, Tiny
from numerics.makers import make_norm
from safetensors.numpy import load, save

from service.finite_differences import TOLERANCE, Array, derivative

D = Tiny().hidden
LLAMA_EPS = 1e-5
ALL = (*CHEAP_NORMS, "smallest", "condition_number")
ROWS = np.random.default_rng(5).standard_normal((3, D))


def dense_by_differences(client: Client, checkpoint: str, stage: str, placement: Any = None) -> Array:
    """`[rows, d, d]` from the service's own answers in float64."""

    def outputs(moved: Array) -> Array:
        run = client.run_block(
            checkpoint,
            1,
            x=moved,
            capture=[stage],  # pyright: ignore[reportArgumentType]
            overrides=Overrides(dtype="float64", placement=placement),
            return_tensors=True,
            dtype="native",
        )
        return run.tensors[stage]

    return np.stack([derivative(outputs, row) for row in ROWS])


STAGE_OF = {"norm": "normed", "branch": "contribution", "block": "output"}


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "gpt2"])
@pytest.mark.parametrize("part", STAGE_OF)
def test_every_norm_is_that_of_what_the_service_runs(client: Client, family: str, part: Any) -> None:
    if part == "norm" and family == "olmo2":
        return  # its norm reads the branch's output; the next test has it
    dense = dense_by_differences(client, family, STAGE_OF[part])
    reply = client.jacobians(family, [1], part=part, x=ROWS, norms=ALL, tolerance=1e-6)
    layer = reply.answer.layers[0]
    values = np.linalg.svd(dense, compute_uv=False)
    along = np.linalg.norm(np.einsum("tij,tj->ti", dense, ROWS), axis=1) / np.linalg.norm(ROWS, axis=1)
    scale = TOLERANCE * np.linalg.norm(dense, axis=(1, 2))
    for token, row in enumerate(layer.tokens):
        assert row.frobenius == pytest.approx(np.linalg.norm(dense[token]), rel=TOLERANCE)
        assert row.trace == pytest.approx(np.trace(dense[token]), abs=scale[token])
        assert row.radial_gain == pytest.approx(along[token], abs=scale[token])
        assert row.spectral is not None
        assert row.spectral.converged
        assert row.spectral.lower - scale[token] <= values[token, 0] <= row.spectral.upper + scale[token]
        assert row.smallest is not None
        assert row.smallest.lower - scale[token] <= values[token, -1] <= row.smallest.upper + scale[token]
        assert row.condition_number is not None
        if values[token, -1] > 1e4 * scale[token]:
            condition = values[token, 0] / values[token, -1]
            assert row.condition_number.lower * 0.999 <= condition <= row.condition_number.upper * 1.001
    assert layer.exactness == "exact"
    assert layer.accumulation == "float64"
    assert layer.self_check is not None
    assert layer.self_check.relative_difference < TOLERANCE


@pytest.mark.parametrize("family", USUAL)
def test_every_family_proves_itself(client: Client, family: str) -> None:
    for part in ("norm", "ffn", "branch", "block"):
        answer = client.jacobians(family, [0], part=part, sample=Sample(rows=3)).answer  # pyright: ignore[reportArgumentType]
        check = answer.layers[0].self_check
        assert check is not None
        # tiny checkpoints hold embedding rows of the order of one and smooth activations
        assert check.relative_difference < 1e-7, (part, check)
        assert answer.token_ids is not None
        assert len(answer.token_ids) == len(answer.layers[0].tokens) == 3


def test_placements_stand_side_by_side(client: Client) -> None:
    answer = client.jacobians("llama", [1], x=ROWS, placement=("pre", "post", "sandwich"), tolerance=1e-6).answer
    assert [layer.placement for layer in answer.layers] == ["pre", "post", "sandwich"]
    for layer in answer.layers:
        dense = dense_by_differences(client, "llama", "output", layer.placement)
        found = [token.frobenius for token in layer.tokens]
        np.testing.assert_allclose(found, np.linalg.norm(dense, axis=(1, 2)), rtol=TOLERANCE)
    assert any("multiplies by one" in note for note in answer.notes)


def test_vectors_travel_as_tensors(client: Client, http: httpx.Client) -> None:
    reply = client.jacobians("llama", [0, 1], x=ROWS, vectors=True, tolerance=1e-8)
    assert set(reply.tensors) == {f"layers.{layer}.pre.{side}" for layer in (0, 1) for side in ("left", "right")}
    dense = dense_by_differences(client, "llama", "output")
    left, right = reply.tensors["layers.1.pre.left"], reply.tensors["layers.1.pre.right"]
    for token, row in enumerate(reply.answer.layers[1].tokens):
        assert row.spectral is not None
        # Ritz vectors are known to the root of their value's error.
        np.testing.assert_allclose(dense[token] @ right[token], row.spectral.lower * left[token], atol=1e-3)
    nested = http.post(
        "/v1/jacobians", json={"checkpoint": "llama", "layers": [1], "x": ROWS.tolist(), "vectors": True}
    )
    assert np.shape(nested.json()["tensors"]["layers.1.pre.left"]) == ROWS.shape


def test_a_safetensors_body_keeps_its_dtype(http: httpx.Client) -> None:
    message = json.dumps({"checkpoint": "llama", "layers": [0]})
    sums: dict[type, str] = {}
    for dtype in (np.float64, np.float32):
        body = save({"x": ROWS.astype(dtype)}, metadata={"request": message})
        answer = http.post("/v1/jacobians", content=body, headers={"Content-Type": "application/x-safetensors"})
        assert answer.status_code == 200, answer.text
        sums[dtype] = answer.json()["layers"][0]["accumulation"]
    assert sums == {np.float64: "float64", np.float32: "float32"}
    framed = http.post(
        "/v1/jacobians",
        content=body,
        headers={"Content-Type": "application/x-safetensors", "Accept": "application/x-safetensors"},
    )
    assert load(framed.content) == {}


def test_a_certain_certificate_is_certain(client: Client) -> None:
    layer = client.jacobians("llama", [0], x=ROWS, certificate="certain").answer.layers[0]
    assert layer.spectral is not None
    assert (layer.spectral.certificate, layer.spectral.failure_probability) == ("certain", 0.0)
    assert all(token.spectral is not None and token.spectral.certain for token in layer.tokens)
    probable = client.jacobians("llama", [0], x=ROWS, failure_probability=1e-6, norms=["spectral"]).answer.layers[0]
    assert probable.spectral is not None
    assert (probable.spectral.certificate, probable.spectral.failure_probability) == ("probabilistic", 1e-6)
    assert probable.method == "none"
    assert {token.frobenius for token in probable.tokens} == {None}


def test_rows_near_zero_and_near_overflow_and_what_float32_cannot_hold(client: Client) -> None:
    x = np.concatenate([ROWS, 1e-30 * ROWS[:1], 1e30 * ROWS[:1]]).astype(np.float32)
    layer = client.jacobians("llama", [1], x=x, part="branch").answer.layers[0]
    wide = client.jacobians("llama", [1], x=x.astype(np.float64), part="branch").answer.layers[0]
    np.testing.assert_allclose(frobenius_of(layer), frobenius_of(wide), rtol=1e-5)
    assert layer.redone == tuple(number for number, token in enumerate(layer.tokens) if token.redone)
    fine = client.jacobians("llama", [1], x=x[:1], tolerance=1e-7).answer.layers[0]
    # Seven digits are not to be had in float32, so the bracket was done again, and says so.
    assert fine.redone == (0,)
    assert fine.spectral is not None
    assert fine.spectral.accumulation == "float32"
    assert fine.spectral.not_converged == 0


def frobenius_of(layer: LayerJacobians) -> Array:
    return np.array([token.frobenius for token in layer.tokens], np.float64)


def test_depth_is_that_of_the_blocks_themselves(client: Client) -> None:
    answer = client.jacobians("llama", [0, 1], x=ROWS, depth=True, probes=64, norms=["frobenius"]).answer
    depth = answer.depth
    assert depth is not None
    assert (depth.layers, depth.coupled, depth.exactness) == ((0, 1), False, "estimated")
    assert np.shape(depth.residual_rms) == (3, len(ROWS))
    np.testing.assert_allclose(depth.residual_rms[0], np.sqrt((ROWS**2).mean(1)), rtol=1e-6)
    exact = np.array([token.frobenius for token in answer.layers[0].tokens])
    estimate, error = np.array(depth.from_start.frobenius), np.array(depth.from_start.standard_error)
    assert (np.abs(estimate[0] - exact) < 6 * error[0]).all()
    assert (np.array(depth.from_start.spectral_lower) <= np.array(depth.from_start.product_upper)).all()
    last = [token.frobenius for token in answer.layers[1].tokens]
    assert np.shape(last) == np.shape(depth.to_end.frobenius[1])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layers": []}, "layers"),
    ({"layers": [0, 9]}, "layer"),
    ({"layers": [0, 0]}, "layers"),
    ({"part": "everything"}, "part"),
    ({"norms": []}, "norms"),
    ({"norms": ["nuclear"]}, "norms"),
    ({"tolerance": 0}, "tolerance"),
    ({"tolerance": "small"}, "tolerance"),
    ({"failure_probability": 1}, "failure_probability"),
    ({"placement": "between"}, "placement"),
    ({"placement": ["pre", "pre"]}, "placement"),
    ({"placement": []}, "placement"),
    ({"seed": -1}, "seed"),
    ({"certificate": "notarised"}, "certificate"),
    ({"x": None}, "x"),
    ({"x": [[1.0]]}, "x"),
    ({"x": [["NaN"] * D]}, "x"),
    ({"token_ids": [0]}, "token_ids"),
    ({"x": None, "token_ids": [10**6]}, "token_ids"),
    ({"x": None, "sample": {"rows": 10**4}}, "sample"),
    ({"vectors": True, "norms": ["frobenius"]}, "vectors"),
    ({"vectors": True, "part": "norm"}, "vectors"),
    ({"depth": True, "part": "branch"}, "part"),
    ({"depth": True, "layers": [1, 0]}, "layers"),
    ({"input_positions": [0]}, "input_positions"),
    ({"probes": 1}, "probes"),
    ({"unheard": 1}, "unheard"),
]


@pytest.mark.parametrize(
    ("change", "field"), REFUSED, ids=lambda value: json.dumps(value) if isinstance(value, dict) else value
)
def test_what_cannot_be_used_is_named(http: httpx.Client, change: dict[str, Any], field: str) -> None:
    message = {"checkpoint": "llama", "layers": [0], "x": ROWS.tolist()} | change
    answer = http.post("/v1/jacobians", json={name: value for name, value in message.items() if value is not None})
    assert answer.status_code == 422, answer.text
    problem = answer.json()
    assert problem["field"].startswith(field), problem
    assert "Traceback" not in answer.text


def test_more_tokens_than_one_answer_holds(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobians, "MAX_TOKENS", 5)
    with pytest.raises(TooLarge, match="6 tokens"):
        client.jacobians("llama", [0, 1], x=ROWS)
    assert client.jacobians("llama", [0], x=ROWS).answer.layers


def test_a_part_that_couples_tokens_is_one_row_of_a_table(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = torch.from_numpy(np.random.default_rng(0).standard_normal((len(ROWS), len(ROWS))))
    wiring = Wiring(Placement.PRE, make_norm("rms_llama", D, eps=LLAMA_EPS))
    part_of = LayerPart(lambda x: mixer.to(x) @ x.tanh(), (wiring,), D, torch.float32)
    monkeypatch.setitem(coupled_jacobians.LOADERS, "attention", lambda *_: part_of)
    layer = client.jacobians("llama", [0], part="attention", x=ROWS, probes=64, tolerance=1e-6).answer.layers[0]
    slopes = 1 - np.tanh(ROWS) ** 2
    blocks = mixer.numpy()[:, :, None] * slopes[None]  # J couples each channel with itself alone
    assert layer.whole is not None
    assert layer.whole.frobenius is not None
    assert layer.whole.spectral is not None
    error = layer.whole.frobenius.standard_error
    assert layer.whole.frobenius.frobenius == pytest.approx(np.sqrt((blocks**2).sum()), abs=6 * error)
    largest = max(np.linalg.norm(blocks[:, :, channel], 2) for channel in range(D))
    assert layer.whole.spectral.lower <= largest <= layer.whole.spectral.upper
    assert layer.tokens == ()
    part = client.jacobians("llama", [0], part="attention", x=ROWS, input_positions=[1], output_positions=[0, 2])
    assert part.answer.layers[0].whole is not None
    assert part.answer.layers[0].whole.spectral is not None
    assert part.answer.layers[0].whole.spectral.outputs == (0, 2)


def test_progress_runs_forward_and_a_cancel_stops_the_work(root: Any) -> None:
    store = CheckpointStore([root], device="cpu")
    request = JacobiansRequest(checkpoint="llama", layers=(0, 1), sample=Sample(rows=3), depth=True, norms=ALL)  # pyright: ignore[reportArgumentType]
    seen: list[tuple[int, int, str]] = []
    jacobians.jacobians(store, request, {}, watch=Watch(lambda *told: seen.append(told)))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert {total for _, total, _ in seen} == {3000}
    assert seen[0][2].startswith("layer 0: ")
    assert seen[-1][2].startswith("depth: ")
    for asked in (1, 5, len(seen) // 2):
        left = iter(range(asked))
        with pytest.raises(ComputationCancelled):
            jacobians.jacobians(store, request, {}, watch=Watch(cancelled=lambda left=left: next(left, None) is None))


def test_a_caller_who_hangs_up_stops_the_work(root: Any) -> None:
    """Over a real socket: the work asks for its caller, and ends when there is none."""
    import uvicorn  # noqa: PLC0415

    started, ended = threading.Event(), threading.Event()

    def slow(_store: Any, _request: Any, _tensors: Any, *, watch: Watch) -> Any:
        started.set()
        try:
            while not ended.wait(0.01):
                watch.at(0, 1, "for ever")
        finally:
            ended.set()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jacobians, "jacobians", slow)
        server = uvicorn.Server(
            uvicorn.Config(create_app(Settings(roots=(root,), device="cpu")), port=0, log_level="error")
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            while not server.started:
                started.wait(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            with (
                httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=1.0) as hasty,
                pytest.raises(httpx.ReadTimeout),
            ):
                hasty.post("/v1/jacobians", json={"checkpoint": "llama", "layers": [0], "sample": {"rows": 1}})
            assert started.is_set()
            assert ended.wait(10)
        finally:
            ended.set()
            server.should_exit = True
            thread.join()
