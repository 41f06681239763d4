"""residuals/compare: one sublayer wired three ways, against values by hand and derivatives of the answers."""

import json
from typing import Any

import httpx
import numpy as np
import pytest
from glassblock.errors import InvalidValue
from glassblock_client import Client, Sample
from makers import USUAL
from safetensors.numpy import load, save

from service.finite_differences import Array, assert_is_derivative

COMPARE = "/v1/residuals/compare"
WIRINGS = ("pre", "post", "sandwich")


def compare(http: httpx.Client, **message: Any) -> dict[str, Any]:
    answer = http.post(COMPARE, json=message)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rms(x: Array) -> Array:
    return x / np.sqrt(np.mean(x**2))


def rms_jacobian(x: Array) -> Array:
    s = np.sqrt(np.mean(x**2))
    return np.eye(x.size) / s - np.outer(x, x) / (x.size * s**3)


# F(n) = A n at x = [1, 3] with eps 0: N(x) = [0.447214, 1.341641], and J_N(x) = [[0.9, -0.3], [-0.3, 0.1]] / sqrt(5).
BY_HAND: dict[str, tuple[list[list[float]], dict[str, list[Any]]]] = {
    "diagonal": (
        [[2, 0], [0, 3]],
        {
            "pre": [1.894427, 7.024922],  # x + A N(x)
            "pre_jacobian": [[1.804984, -0.268328], [-0.402492, 1.134164]],  # I + A J_N(x)
            "post": [0.342997, 1.371989],  # x + A x = [3, 12], over sqrt(76.5)
            "post_jacobian": [[0.322821, -0.107607], [-0.080705, 0.026902]],  # J_N([3, 12]) (I + A)
            "sandwich": [1.306786, 4.380537],  # x + N(A N(x)), and N(A N(x)) = N([2, 9])
            "sandwich_jacobian": [[1.292349, -0.097450], [-0.064966, 1.021655]],
        },
    ),
    "not symmetric": (
        [[0, 1], [0, 0]],
        {
            "pre": [2.341641, 3],
            "pre_jacobian": [[0.865836, 0.044721], [0, 1]],
            "post": [1.131371, 0.848528],  # x + A x = [4, 3], over sqrt(12.5)
            "post_jacobian": [[0.101823, -0.033941], [-0.135765, 0.045255]],  # J_N([4, 3]) (I + A)
            "sandwich": [2.414214, 3],  # N([1.341641, 0]) = [sqrt(2), 0], wherever on that axis one stands
            "sandwich_jacobian": [[1, 0], [0, 1]],
        },
    ),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_values_by_hand(http: httpx.Client, case: str) -> None:
    matrix, expected = BY_HAND[case]
    answer = compare(http, x=[1, 3], matrix=matrix, eps=0)
    for field, value in expected.items():
        assert np.allclose(answer[field], value, rtol=0, atol=1e-6), (field, answer[field])
    assert answer["jacobians"] == "dense"
    assert answer["eps"] == {"value": 0, "source": "request"}


def test_a_sublayer_that_returns_nothing(http: httpx.Client) -> None:
    """Pre is the identity and post is the norm alone; the norm of nothing is nothing, as long as eps holds it."""
    x = np.array([1.0, -2.0, 0.5, 4.0])
    answer = compare(http, x=x.tolist(), matrix=np.zeros((4, 4)).tolist(), eps=1e-6)
    assert answer["pre"] == answer["sandwich"] == x.tolist()
    assert answer["pre_jacobian"] == answer["sandwich_jacobian"] == np.eye(4).tolist()
    s = np.sqrt(np.mean(x**2) + 1e-6)
    assert np.allclose(answer["post"], x / s, rtol=1e-14)
    assert np.allclose(answer["post_jacobian"], np.eye(4) / s - np.outer(x, x) / (4 * s**3), rtol=1e-13, atol=1e-15)
    assert not any("NaN" in note for note in answer["notes"])


def test_the_norm_of_nothing_without_an_epsilon_is_nan_and_a_note_says_why(http: httpx.Client) -> None:
    x = np.array([1.0, -2.0, 0.5, 4.0])
    answer = compare(http, x=x.tolist(), matrix=np.zeros((4, 4)).tolist(), eps=0)
    assert answer["pre"] == x.tolist()
    assert answer["pre_jacobian"] == np.eye(4).tolist()
    assert np.allclose(answer["post"], rms(x), rtol=1e-14)
    assert np.allclose(answer["post_jacobian"], rms_jacobian(x), rtol=1e-13, atol=1e-15)
    assert answer["sandwich"] == ["NaN"] * 4
    assert answer["sandwich_jacobian"] == [["NaN"] * 4] * 4
    assert_told_why(answer["notes"])


def assert_told_why(notes: list[str]) -> None:
    (note,) = (note for note in notes if "NaN" in note)
    assert note.startswith("sandwich: ")
    assert "eps is 0" in note


def test_one_row_whose_branch_vanishes_spoils_no_other(http: httpx.Client) -> None:
    answer = compare(http, x=[[1, 0], [0, 1], [2, 3]], matrix=[[0, 0], [0, 1]], eps=0)
    assert answer["sandwich"][0] == ["NaN", "NaN"]
    # N(A N(x)) = [0, sqrt(2)] for both others
    assert np.allclose(answer["sandwich"][1:], [[0, 1 + 2**0.5], [2, 3 + 2**0.5]], rtol=1e-14)
    assert np.isfinite(answer["sandwich_jacobian"][1:]).all()
    assert_told_why(answer["notes"])


def test_nan_and_its_note_in_a_safetensors_answer(http: httpx.Client) -> None:
    body = save({"x": np.ones((1, 3)), "matrix": np.zeros((3, 3))}, metadata={"request": json.dumps({"eps": 0})})
    kind = "application/x-safetensors"
    answer = http.post(COMPARE, content=body, headers={"Content-Type": kind, "Accept": kind})
    tensors = load(answer.content)
    assert np.isnan(tensors["sandwich"]).all()
    assert np.isnan(tensors["sandwich_jacobian"]).all()
    assert np.array_equal(tensors["pre"], np.ones((1, 3)))
    header = json.loads(answer.content[8 : 8 + int.from_bytes(answer.content[:8], "little")])
    assert_told_why(json.loads(header["__metadata__"]["response"])["notes"])


def test_the_order_of_the_factors(http: httpx.Client) -> None:
    """A J_N and J_N A differ where a diagonal A is no multiple of I: pre-norm is the first of the two."""
    x = np.array([1.0, 2.0, 3.0])
    for diagonal, commutes in (([2.0, 2.0, 2.0], True), ([1.0, 2.0, 4.0], False)):
        a = np.diag(diagonal)
        answer = compare(http, x=x.tolist(), matrix=a.tolist(), eps=0)
        found = np.array(answer["pre_jacobian"]) - np.eye(3)
        assert np.allclose(found, a @ rms_jacobian(x), rtol=1e-12, atol=1e-14)
        assert np.allclose(found, rms_jacobian(x) @ a, rtol=1e-12, atol=1e-14) == commutes


def test_a_sum_that_vanishes_is_refused(http: httpx.Client) -> None:
    """x + A x = 0 with A = -I: post-norm divides by zero although x does not vanish."""
    answer = http.post(COMPARE, json={"x": [1, 2], "matrix": [[-1, 0], [0, -1]], "eps": 0})
    assert answer.status_code == 422
    assert answer.json()["field"] == "x"
    assert "divides by zero" in answer.json()["detail"]
    assert compare(http, x=[1, 2], matrix=[[-1, 0], [0, -1]], eps=1e-6)["post"] == [0, 0]


MATRICES: dict[str, Array] = {
    "zero": np.zeros((12, 12)),
    "scalar": -0.7 * np.eye(12),
    "diagonal": np.diag(np.linspace(-1, 2, 12)),
    "not symmetric": np.random.default_rng(4).standard_normal((12, 12)),
    "of rank one": np.outer(np.arange(12.0), np.ones(12)) / 12,
}


@pytest.mark.parametrize("eps", [0, 1e-5, 0.5])
@pytest.mark.parametrize("matrix", MATRICES)
def test_jacobians_are_the_derivatives_of_the_outputs(client: Client, matrix: str, eps: float) -> None:
    # The norm of nothing without an epsilon is the one case that is no number; it has its own test above.
    wirings = ("pre", "post") if (matrix, eps) == ("zero", 0) else WIRINGS
    x = np.random.default_rng(5).standard_normal(12) + 0.2

    def outputs(rows: Array) -> Array:
        tensors = client.compare_residuals(x=rows, matrix=MATRICES[matrix], eps=eps).tensors
        return np.stack([tensors[wiring] for wiring in wirings], axis=1)

    tensors = client.compare_residuals(x=x, matrix=MATRICES[matrix], eps=eps).tensors
    assert_is_derivative([tensors[f"{wiring}_jacobian"] for wiring in wirings], outputs, x)


@pytest.mark.parametrize("family", USUAL)
def test_the_same_for_a_checkpoints_feed_forward_block(client: Client, family: str) -> None:
    x = np.random.default_rng(6).standard_normal(48)

    def outputs(rows: Array) -> Array:
        tensors = client.compare_residuals(checkpoint=family, layer=1, x=rows).tensors
        return np.stack([tensors[wiring] for wiring in WIRINGS], axis=1)

    reply = client.compare_residuals(checkpoint=family, layer=1, x=x)
    assert reply.answer.jacobians == "dense"
    assert {tensor.dtype.name for tensor in reply.tensors.values()} == {"float64"}
    assert_is_derivative([reply.tensors[f"{wiring}_jacobian"] for wiring in WIRINGS], outputs, x)


OWN_WIRING = {"pre": ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt2"), "sandwich": ("gemma3",)}


@pytest.mark.parametrize(
    ("family", "wiring"), [(family, wiring) for wiring, families in OWN_WIRING.items() for family in families]
)
def test_the_wiring_that_a_family_has_is_its_block(client: Client, family: str, wiring: str) -> None:
    x = np.random.default_rng(7).standard_normal((3, 48), dtype=np.float32)
    client.evict(family)
    block = client.run_block(family, 0, x=x, capture=("output",), return_tensors=True)
    client.evict(family)  # what was read stays on the device
    reply = client.compare_residuals(checkpoint=family, layer=0, x=x)
    assert np.array_equal(reply.tensors[wiring], block.tensors["output"])
    assert reply.answer.read == block.answer.read
    assert reply.answer.eps == block.answer.eps["input"]


def test_a_second_norm_that_a_block_lacks_is_told(client: Client) -> None:
    x = np.ones((1, 48))
    (note,) = client.compare_residuals(checkpoint="llama", layer=0, x=x).answer.notes
    assert note.startswith("sandwich: ")
    assert "multiplies by one" in note


def test_layers_and_epsilons_differ(client: Client) -> None:
    sample = Sample(rows=2, seed=1)
    first, second = (client.compare_residuals(checkpoint="llama", layer=layer, sample=sample) for layer in (0, 1))
    other = client.compare_residuals(checkpoint="llama", layer=0, sample=sample, eps=0.25)
    assert (other.answer.eps.value, other.answer.eps.source) == (0.25, "override")
    for wiring in WIRINGS:
        assert np.abs(first.tensors[wiring] - second.tensors[wiring]).max() > 1e-2
        assert np.abs(first.tensors[wiring] - other.tensors[wiring]).max() > 1e-2


def test_beyond_the_stated_width_norms_stand_for_the_jacobian(client: Client, http: httpx.Client) -> None:
    x = np.random.default_rng(8).standard_normal((2, 3, 12))
    matrix = MATRICES["not symmetric"]
    dense = client.compare_residuals(x=x, matrix=matrix, eps=1e-5, dense_up_to=12)
    answer = compare(http, x=x.tolist(), matrix=matrix.tolist(), eps=1e-5, dense_up_to=11)
    assert answer["jacobians"] == "norms"
    for wiring in WIRINGS:
        jacobians = dense.tensors[f"{wiring}_jacobian"]
        assert jacobians.shape == (2, 3, 12, 12)
        told = answer[f"{wiring}_jacobian"]
        assert np.allclose(told["frobenius"], np.linalg.norm(jacobians, axis=(-2, -1)), rtol=1e-12)
        assert np.allclose(told["trace"], np.trace(jacobians, axis1=-2, axis2=-1), rtol=1e-11)
        assert np.array_equal(answer[wiring], dense.tensors[wiring])


def test_posted_tensors_give_the_numbers_of_posted_lists(client: Client, http: httpx.Client) -> None:
    x, matrix = np.random.default_rng(9).standard_normal((4, 12)), MATRICES["diagonal"]
    framed = client.compare_residuals(x=x, matrix=matrix, eps=1e-5)
    listed = compare(http, x=x.tolist(), matrix=matrix.tolist(), eps=1e-5)
    assert set(framed.tensors) == {*WIRINGS, *(f"{wiring}_jacobian" for wiring in WIRINGS)}
    for name, tensor in framed.tensors.items():
        assert tensor.dtype == np.float64
        assert np.array_equal(tensor, listed[name]), name
        assert getattr(framed.answer, name) is None


@pytest.mark.parametrize(
    ("given", "field", "words"),
    [
        ({"matrix": [[1.0] * 48] * 48}, "matrix", "both given"),
        ({"layer": None}, "layer", "missing"),
        ({"layer": 2}, "layer", "2"),
        ({"x": [[1.0] * 47]}, "x", "47"),
    ],
)
def test_what_does_not_fit_a_checkpoint_is_named(client: Client, given: dict[str, Any], field: str, words: str) -> None:
    question: dict[str, Any] = {"checkpoint": "llama", "layer": 0, "x": [[1.0] * 48]}
    with pytest.raises(InvalidValue, match=words) as refused:
        client.compare_residuals(**question | given)
    assert refused.value.field == field
