"""norms/statistics: values that follow by hand, derivatives of the service's own outputs, and checkpoints' norms."""

import math
from pathlib import Path
from typing import Any, get_args

import httpx
import numpy as np
import pytest
from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.errors import InvalidValue
from glassblock.wire.norms import NormRole
from glassblock_client import Client, Sample
from makers import USUAL, tiny_checkpoint
from safetensors import safe_open

from service.finite_differences import Array, assert_is_derivative

STATISTICS = "/v1/norms/statistics"
GENERATOR_SEED = 20


def statistics(http: httpx.Client, **message: Any) -> dict[str, Any]:
    """The answer as anybody would get it with curl."""
    answer = http.post(STATISTICS, json=message)
    assert answer.status_code == 200, answer.text
    return answer.json()


def some_rows(*shape: int) -> Array:
    return np.random.default_rng(GENERATOR_SEED).standard_normal(shape)


# x, and per field of the answer what a hand gets with eps 0, to six digits
BY_HAND: list[tuple[list[float], dict[str, Any]]] = [
    ([1, 3], {"mean": 2, "square_mean": 5, "variance": 1, "rmsnorm": [0.447214, 1.341641], "layernorm": [-1, 1]}),
    ([3, 5], {"mean": 4, "square_mean": 17, "variance": 1, "rmsnorm": [0.727607, 1.212678], "layernorm": [-1, 1]}),
    ([2, 4, 6, 8], {"mean": 5, "square_mean": 30, "variance": 5, "rms": 5.477226}),
    (
        [1, 2, 3, 4],
        {
            "mean": 2.5,
            "square_mean": 7.5,
            "variance": 1.25,
            "rms": 2.738613,
            "rmsnorm": [0.365148, 0.730297, 1.095445, 1.460593],
            "layernorm": [-1.341641, -0.447214, 0.447214, 1.341641],
        },
    ),
    (
        [101, 102, 103, 104],
        {
            "mean": 102.5,
            "square_mean": 10507.5,
            "variance": 1.25,
            "rmsnorm": [0.985307, 0.995063, 1.004818, 1.014574],
            "layernorm": [-1.341641, -0.447214, 0.447214, 1.341641],
        },
    ),
    ([-2, 2, -2, 2], {"mean": 0, "square_mean": 4, "variance": 4, "rmsnorm": [-1, 1, -1, 1], "rms": 2}),
]


@pytest.mark.parametrize(("x", "expected"), BY_HAND, ids=[str(x) for x, _ in BY_HAND])
def test_values_by_hand(http: httpx.Client, x: list[float], expected: dict[str, Any]) -> None:
    answer = statistics(http, x=x, eps=0)
    for field, value in expected.items():
        assert answer[field] == pytest.approx(value, abs=5e-7), field
    assert answer["eps"] == {"value": 0, "source": "request"}


def test_rows_keep_their_places(http: httpx.Client) -> None:
    rows = [x for x, _ in BY_HAND if len(x) == 4]
    together = statistics(http, x=[rows[:2], rows[2:]], eps=0)
    alone = [statistics(http, x=x, eps=0) for x in rows]
    for field in ("mean", "square_mean", "variance", "rms", "rmsnorm", "layernorm"):
        assert np.reshape(together[field], (4, -1)).tolist() == [np.ravel(one[field]).tolist() for one in alone], field


def test_gain_and_offset_multiply_the_output(http: httpx.Client) -> None:
    plain = statistics(http, x=[1, 2, 3, 4], eps=0.25)
    gained = statistics(http, x=[1, 2, 3, 4], eps=0.25, gain=[0, 1, -2, 0.5], offset=1)
    for norm in ("rmsnorm", "layernorm"):
        assert gained[norm] == pytest.approx(np.multiply(plain[norm], [1, 2, -1, 1.5]))
    assert plain["rmsnorm"] == pytest.approx(np.divide([1, 2, 3, 4], math.sqrt(7.75)))
    assert plain["layernorm"] == pytest.approx(np.divide([-1.5, -0.5, 0.5, 1.5], math.sqrt(1.5)))


def test_a_row_of_zeros(http: httpx.Client) -> None:
    answer = statistics(http, x=[[0, 0, 0]], eps=1e-6, jacobian=True)
    assert answer["rmsnorm"] == answer["layernorm"] == [[0, 0, 0]]
    # I/s and (I - 1 1^T/d)/s, with s = sqrt(eps)
    assert np.allclose(answer["jacobian"]["rmsnorm"], [1e3 * np.eye(3)], rtol=1e-12)
    assert np.allclose(answer["jacobian"]["layernorm"], [1e3 * (np.eye(3) - 1 / 3)], rtol=1e-12, atol=1e-9)
    refused = http.post(STATISTICS, json={"x": [[1, 2, 3], [0, 0, 0]], "eps": 0})
    assert refused.status_code == 422
    assert "[1]" in refused.json()["detail"]


def test_a_constant_row(http: httpx.Client) -> None:
    answer = statistics(http, x=[[7, 7, 7]], eps=1e-6)
    assert answer["layernorm"] == [[0, 0, 0]]
    assert answer["rmsnorm"] == [pytest.approx([1, 1, 1], abs=1e-6)]
    refused = http.post(STATISTICS, json={"x": [[7, 7, 7]], "eps": 0})
    assert refused.status_code == 422
    assert "does not vary" in refused.json()["detail"]


def test_what_is_an_invariance_and_what_is_none(http: httpx.Client) -> None:
    x = some_rows(5, 16)
    moved = statistics(http, x=x.tolist(), eps=0)["invariances"]
    still = {
        ("shift", "layernorm"),
        ("positive_scale", "rmsnorm"),
        ("positive_scale", "layernorm"),
        ("negative_scale_flipped", "rmsnorm"),
        ("negative_scale_flipped", "layernorm"),
    }
    for change, norms in moved.items():
        for norm, distances in norms.items():
            assert len(distances) == 5
            if (change, norm) in still:
                assert max(distances) < 1e-14, (change, norm)  # rounding of numbers of the order of one
            else:
                assert min(distances) > 1e-2, (change, norm)
    # N(-2x) is -N(x), so that the two differ by twice the largest output.
    answer = statistics(http, x=x.tolist(), eps=0)
    for norm in ("rmsnorm", "layernorm"):
        assert moved["negative_scale"][norm] == pytest.approx(2 * np.abs(answer[norm]).max(-1))


def test_an_epsilon_ends_the_invariance_under_scale(http: httpx.Client) -> None:
    moved = statistics(http, x=[1, 2, 3, 4], eps=0.1)["invariances"]
    # 4/sqrt(7.5 + 0.1) against 8/sqrt(30 + 0.1)
    assert moved["positive_scale"]["rmsnorm"] == pytest.approx(abs(4 / math.sqrt(7.6) - 8 / math.sqrt(30.1)))
    assert moved["shift"]["layernorm"] < 1e-14


JACOBIANS: list[tuple[list[float], float, list[float] | None, list[list[float]], list[list[float]]]] = [
    # I/s - x x^T/(d s^3) with s = sqrt(12.5); LayerNorm of two numbers is a sign and does not move
    ([3, 4], 0, None, [[0.181019, -0.135765], [-0.135765, 0.101823]], [[0, 0], [0, 0]]),
    # s = sqrt(5), then row by row times the gain
    ([1, 3], 0, [2, -1], [[0.804984, -0.268328], [0.134164, -0.044721]], [[0, 0], [0, 0]]),
    # eps 3: s = 4 and x = [0, 0, 0, sqrt(52)] has ms 13: 1/4 and eps/s^3 = 3/64 along x
    (
        [0, 0, 0, math.sqrt(52)],
        3,
        None,
        np.diag([0.25, 0.25, 0.25, 3 / 64]).tolist(),
        [],
    ),
]


@pytest.mark.parametrize(("x", "eps", "gain", "rms", "layer"), JACOBIANS, ids=[str(row[0]) for row in JACOBIANS])
def test_jacobians_by_hand(
    http: httpx.Client,
    x: list[float],
    eps: float,
    gain: list[float] | None,
    rms: list[list[float]],
    layer: list[list[float]],
) -> None:
    jacobian = statistics(http, x=x, eps=eps, gain=gain, jacobian=True)["jacobian"]
    assert np.allclose(jacobian["rmsnorm"], rms, rtol=0, atol=5e-7)
    if layer:
        assert np.allclose(jacobian["layernorm"], layer, rtol=0, atol=1e-9)


@pytest.mark.parametrize("eps", [0, 1e-5, 0.5])
def test_what_is_left_along_the_row(http: httpx.Client, eps: float) -> None:
    """J x = eps x / s^3 exactly, for a unit gain: nothing where eps is zero."""
    x = some_rows(12)
    jacobian = statistics(http, x=x.tolist(), eps=eps, jacobian=True)["jacobian"]
    s = math.sqrt(np.mean(x**2) + eps)
    assert np.allclose(np.array(jacobian["rmsnorm"]) @ x, eps * x / s**3, rtol=1e-10, atol=1e-14)
    centred = x - x.mean()
    s = math.sqrt(np.mean(centred**2) + eps)
    assert np.allclose(np.array(jacobian["layernorm"]) @ x, eps * centred / s**3, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
@pytest.mark.parametrize("gain", [None, "random"])
@pytest.mark.parametrize("eps", [0, 1e-5, 0.5])
def test_jacobians_are_the_derivatives_of_the_outputs(client: Client, eps: float, gain: str | None, norm: str) -> None:
    x = some_rows(24) + 0.3
    factors = None if gain is None else np.random.default_rng(1).standard_normal(24)
    offset = 0.0 if gain is None else 0.25

    def outputs(rows: Array) -> Array:
        return client.norm_statistics(x=rows, eps=eps, gain=factors, offset=offset).tensors[norm]

    answer = client.norm_statistics(x=x, eps=eps, gain=factors, offset=offset, jacobian=True).answer
    assert answer.jacobian is not None
    found = getattr(answer.jacobian, norm)
    assert_is_derivative(found, outputs, x)
    assert answer.jacobian_frobenius[norm] == pytest.approx(np.linalg.norm(found), rel=1e-12)


def test_a_wide_row_gets_the_norm_of_its_jacobian_alone(client: Client) -> None:
    x = some_rows(129)
    with pytest.raises(InvalidValue, match="129") as refused:
        client.norm_statistics(x=x, eps=1e-5, jacobian=True)
    assert refused.value.field == "jacobian"
    answer = client.norm_statistics(x=x, eps=1e-5).answer
    assert answer.jacobian is None
    s = math.sqrt(np.mean(x**2) + 1e-5)
    dense = np.eye(129) / s - np.outer(x, x) / (129 * s**3)
    assert answer.jacobian_frobenius["rmsnorm"] == pytest.approx(np.linalg.norm(dense), rel=1e-12)


# x, eps, dtype, and what that type loses. float16 ends at 65504 and, below 6e-8, at zero.
DTYPES: list[tuple[list[float], float, str, set[str]]] = [
    ([1, 2], 1e-5, "float16", {"eps_subnormal"}),
    ([1, 2], 1e-5, "bfloat16", set()),
    ([300, 1], 1e-3, "float16", {"square_overflow", "square_sum_overflow"}),
    ([200, 200], 1e-3, "float16", {"square_sum_overflow"}),
    ([70000, 1], 1e-3, "float16", {"value_overflow", "square_overflow", "square_sum_overflow"}),
    ([70000, 1], 1e-3, "bfloat16", set()),
    ([1e-4, -1e-4], 1e-8, "float16", {"square_underflow", "eps_zero"}),
    ([1e20, 1], 1e-5, "float32", {"square_overflow", "square_sum_overflow"}),
    ([1e20, 1], 1e-5, "bfloat16", {"square_overflow", "square_sum_overflow"}),
    ([1e-30, 1e-30], 1e-40, "float32", {"square_underflow", "eps_subnormal"}),
]


@pytest.mark.parametrize(("x", "eps", "dtype", "lost"), DTYPES)
def test_what_a_narrow_type_loses(http: httpx.Client, x: list[float], eps: float, dtype: str, lost: set[str]) -> None:
    report = statistics(http, x=x, eps=eps)["dtype_report"][dtype]
    assert {name for name, value in report.items() if value} == lost


def test_posted_tensors_give_the_numbers_of_posted_lists(client: Client, http: httpx.Client) -> None:
    x, gain = some_rows(3, 8), np.linspace(-1, 2, 8)
    listed = statistics(http, x=x.tolist(), eps=1e-5, gain=gain.tolist())
    framed = client.norm_statistics(x=x, eps=1e-5, gain=gain)
    for norm in ("rmsnorm", "layernorm"):
        assert framed.tensors[norm].dtype == np.float64
        assert np.array_equal(framed.tensors[norm], listed[norm])
    assert framed.answer.mean == listed["mean"]
    narrow = client.norm_statistics(x=x.astype(np.float32), eps=1e-5, gain=gain.astype(np.float32))
    assert np.abs(narrow.tensors["rmsnorm"] - framed.tensors["rmsnorm"]).max() < 1e-6


NORMS = [
    (family, role) for family in USUAL for role in get_args(NormRole) if ARCHITECTURES[family].norm(role) is not None
]
CENTRED, OFFSET = {"gpt2"}, {"gemma3": 1.0}


@pytest.mark.parametrize(("family", "role"), NORMS)
def test_a_checkpoints_norm(client: Client, root: Path, family: str, role: str) -> None:
    x = some_rows(4, 48)
    layer = None if role == "final" else 1
    reply = client.norm_statistics(checkpoint=family, layer=layer, norm=role, x=x)  # pyright: ignore[reportArgumentType]
    gain, bias = stored_norm(root / family, family, role)
    centred = x - x.mean(-1, keepdims=True) if family in CENTRED else x
    normed = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    expected = normed * (gain + OFFSET.get(family, 0.0)) + (0.0 if bias is None else bias)
    # Gains are stored in float32, and a family multiplies by them so: the sum is in float64, where x is.
    assert np.abs(reply.tensors["output"] - expected).max() < 1e-6
    plain = reply.tensors["layernorm" if family in CENTRED else "rmsnorm"]
    assert np.abs(plain - (expected if bias is None else expected - bias)).max() < 1e-12
    answer = reply.answer
    assert answer.norm_kind == {"gpt2": "layernorm", "gemma3": "rms_plus1", "olmo2": "rms_f32mul"}.get(
        family, "rms_llama"
    )
    assert answer.eps.value == 1e-5
    assert answer.eps.source.startswith("config.json")
    assert answer.read is not None
    assert answer.read.bytes == 4 * 48 * (1 if bias is None else 2)


def stored_norm(directory: Path, family: str, role: str) -> tuple[Array, Array | None]:
    row = ARCHITECTURES[family]
    norm = row.norm(role)
    assert norm is not None
    prefix = row.trunks[0].prefix + ("" if role == "final" else row.layer.format(i=1))
    with safe_open(directory / "model.safetensors", "np") as file:
        bias = file.get_tensor(prefix + norm.bias).astype(np.float64) if norm.has_bias else None
        return file.get_tensor(prefix + norm.gain).astype(np.float64), bias


@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "gpt2"])
def test_the_jacobian_of_a_checkpoints_norm_is_the_derivative_of_its_output(client: Client, family: str) -> None:
    x = some_rows(48)
    role: NormRole = "ffn_out" if family == "olmo2" else "ffn_in"

    def outputs(rows: Array) -> Array:
        return client.norm_statistics(checkpoint=family, layer=0, norm=role, x=rows).tensors["output"]

    answer = client.norm_statistics(checkpoint=family, layer=0, norm=role, x=x, jacobian=True).answer
    assert answer.jacobian is not None
    found = answer.jacobian.layernorm if family in CENTRED else answer.jacobian.rmsnorm
    assert_is_derivative(found, outputs, x)


def test_a_checkpoints_norm_sees_a_sample_of_its_own_embedding(client: Client, root: Path) -> None:
    reply = client.norm_statistics(checkpoint="llama", layer=0, norm="attn_in", sample=Sample(rows=5, seed=3))
    with safe_open(root / "llama" / "model.safetensors", "np") as file:
        embedding = file.get_tensor("model.embed_tokens.weight").astype(np.float64)
    drawn = (embedding**2).mean(-1)
    assert len(reply.answer.square_mean) == 5
    assert all(np.isclose(drawn, found, rtol=1e-12).any() for found in reply.answer.square_mean)
    assert reply.answer.read is not None
    assert reply.answer.read.bytes == 4 * 48 * (1 + 5)


def test_another_epsilon_takes_the_place_of_the_declared_one(client: Client) -> None:
    x = np.full((1, 48), 0.1)
    reply = client.norm_statistics(checkpoint="qwen3", layer=0, norm="ffn_in", x=x, eps=0.99)
    assert (reply.answer.eps.value, reply.answer.eps.source) == (0.99, "override")
    declared = client.norm_statistics(checkpoint="qwen3", layer=0, norm="ffn_in", x=x)
    # sqrt(0.01 + 0.99) is 1, sqrt(0.01 + 1e-5) a tenth
    ratio = declared.tensors["output"] / reply.tensors["output"]
    assert ratio == pytest.approx(1 / math.sqrt(0.01001), rel=1e-6)


def test_the_declared_epsilon_is_refused_where_it_is_zero_and_the_row_too(client: Client, root: Path) -> None:
    tiny_checkpoint("llama", root / "no-eps-left", config={"rms_norm_eps": 0.0})
    x = np.zeros((1, 48))
    with pytest.raises(InvalidValue, match="divides by zero") as refused:
        client.norm_statistics(checkpoint="no-eps-left", layer=0, norm="ffn_in", x=x)
    assert refused.value.field == "x"


@pytest.mark.parametrize("given", [{"gain": [1.0] * 48}, {"offset": 1.0}])
def test_a_checkpoint_brings_its_own_gain(client: Client, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="gain and offset come from the checkpoint"):
        client.norm_statistics(checkpoint="llama", layer=0, norm="ffn_in", x=some_rows(1, 48), **given)


def test_a_row_whose_squares_leave_float64(http: httpx.Client) -> None:
    answer = statistics(http, x=[[1e200, 1.0]], eps=1e-5)
    assert answer["rms"][0] == pytest.approx(1e200 / np.sqrt(2))
    assert answer["rmsnorm"][0] == pytest.approx([np.sqrt(2), 0.0])
