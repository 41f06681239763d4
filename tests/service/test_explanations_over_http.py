"""blocks/explain over HTTP: what blocks/run computes under an override is named from its stages."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
from glassblock.errors import InvalidValue
from glassblock.wire.framing import MEDIA_TYPE, WireTensor
from glassblock_client import Client, Overrides
from glassblock_client.tensors import wire_from_array
from safetensors.numpy import save

Arrays = dict[str, np.ndarray]


def rows(count: int = 40, width: int = 48) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, width), dtype=np.float32)


def captured(client: Client, family: str = "llama", **overrides: Any) -> Arrays:
    run = client.run_block(family, 1, x=rows(), return_tensors=True, overrides=Overrides(**overrides))
    return dict(run.tensors)


# Every placement, both layouts of a fused and a plain network, every kind of norm arithmetic.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi3", "olmo2", "gpt2")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_stages_of_a_run_are_as_declared(client: Client, family: str) -> None:
    answer = client.explain_block(family, 1, captured(client, family))
    assert answer.verdict == "as-declared", answer.message
    assert answer.ranked[0].hypothesis == "as declared"
    assert (answer.tokens, answer.replayed_tokens, answer.capture_dtype) == (40, 40, "float32")
    assert all(stage.at_floor for stage in answer.ranked[0].stages)


MISTAKES = {
    "swap": ({"swap": True}, {"swap": "exchanged"}),
    "eps": ({"eps": 1e-3}, {"eps": "0.001"}),
    "activation": ({"activation": "relu"}, {"activation": "relu"}),
    "offset": ({"norm_offset": 1.0}, {"offset": "1"}),
    "post": ({"placement": "post"}, {"placement": "post"}),
    "two": ({"swap": True, "eps": 1e-3}, {"swap": "exchanged", "eps": "0.001"}),
}


@pytest.mark.parametrize(("overrides", "departures"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(client: Client, overrides: dict[str, Any], departures: dict[str, str]) -> None:
    answer = client.explain_block("llama", 1, captured(client, **overrides))
    assert (answer.verdict, answer.tied) == ("explained", 1)
    first = answer.ranked[0]
    assert {departure.factor: departure.replayed for departure in first.departures} == departures
    assert first.at_floor
    assert first.hypothesis in answer.message
    assert {departure.words for departure in first.departures} <= set(first.hypothesis.split(", and "))


def test_names_under_their_layer_are_read(client: Client) -> None:
    stages = captured(client, swap=True)
    layered = {f"layers.1.{name}": tensor for name, tensor in stages.items()}
    assert client.explain_block("llama", 1, layered).verdict == "explained"
    with pytest.raises(InvalidValue, match=r"of layer 1, and layer 0 is asked about"):
        client.explain_block("llama", 0, layered)
    with pytest.raises(InvalidValue, match="gate is captured twice"):
        client.explain_block("llama", 1, {**layered, "gate": stages["gate"]})


def test_what_is_left_open_says_what_would_decide(client: Client) -> None:
    stages = captured(client, placement="post")
    answer = client.explain_block("llama", 1, {name: stages[name] for name in ("x", "up")})
    assert answer.verdict == "indistinguishable"
    assert answer.tied == 2
    assert any(decider.by == "tensor" for decider in answer.would_decide)


def test_pairs_can_be_left_out(client: Client) -> None:
    stages = captured(client, swap=True, eps=1e-3)
    answer = client.explain_block("llama", 1, stages, pairs=False)
    assert (answer.verdict, answer.tied) == ("unexplained", 0)
    assert "the closest is" in answer.message
    assert not answer.ranked[0].at_floor


def test_an_unread_stage_is_noted(client: Client) -> None:
    stages = captured(client)
    answer = client.explain_block("llama", 1, {name: stages[name] for name in ("x", "normed", "hidden", "output")})
    assert answer.verdict == "as-declared"
    answer = client.explain_block("llama", 1, {name: stages[name] for name in ("x", "down", "contribution")})
    assert answer.notes == ()


BAD: dict[str, tuple[Arrays, str]] = {
    "nothing": ({}, "no tensor was captured"),
    "unknown": ({"z": rows()}, "'z' is not read here"),
    "another width": ({"x": rows(), "normed": rows(width=47)}, "its last axis should be 48"),
    "other tokens": ({"x": rows(), "normed": rows(3)}, "not of the same tokens"),
    "x alone": ({"x": rows()}, "no stage after x"),
    "whole numbers": ({"x": rows(), "normed": rows().astype(np.int32)}, "I32: floating point is needed"),
    "truth values": ({"x": rows(), "normed": rows() > 0}, "BOOL: floating point is needed"),
    "empty": ({"x": rows(0), "normed": rows(0)}, "x is empty"),
    "no axes": ({"x": rows(), "normed": np.array(1, np.float32)}, r"normed has shape \[\]"),
    "nan": ({"x": rows(), "normed": rows() * np.nan}, r"normed\[0, 0\] is nan.*x before it hold none"),
    "infinity": ({"x": rows() * np.inf, "normed": rows()}, "it is the first stage captured"),
    "nothing follows": ({"down": rows(), "activated": rows(width=112)}, "nothing can be compared"),
}


@pytest.mark.parametrize(("stages", "message"), BAD.values(), ids=BAD)
def test_bad_captures_are_refused_by_name(client: Client, stages: Arrays, message: str) -> None:
    with pytest.raises(InvalidValue, match=message) as refusal:
        client.explain_block("llama", 1, stages)
    assert refusal.value.field


def test_a_layer_out_of_range_is_refused(client: Client) -> None:
    with pytest.raises(InvalidValue, match="layer 7 is out of range"):
        client.explain_block("llama", 7, {"x": rows(), "normed": rows()})


def test_bare_http_takes_a_safetensors_body_and_no_json_tensors(http: httpx.Client, client: Client) -> None:
    message = {"checkpoint": "llama", "layer": 1}
    body = save(captured(client), metadata={"request": json.dumps(message)})
    answer = http.post("/v1/blocks/explain", content=body, headers={"Content-Type": MEDIA_TYPE})
    assert answer.json()["verdict"] == "as-declared"
    typo = http.post("/v1/blocks/explain", json={**message, "captures": {}})
    assert (typo.status_code, typo.json()["code"]) == (422, "invalid-value")


def test_dtypes_may_be_mixed_where_the_values_fit(client: Client) -> None:
    """float64 that holds float32 values is float32; a stream kept wider than the rest is usual."""
    stages: dict[str, np.ndarray | WireTensor] = dict(captured(client, swap=True).items())
    stages["gate"] = np.asarray(stages["gate"], np.float64)
    stages["x"] = wire_from_array(np.asarray(stages["x"], np.float64))
    answer = client.explain_block("llama", 1, stages)
    assert (answer.verdict, answer.capture_dtype) == ("explained", "float32")
