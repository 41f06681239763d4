"""Jacobians of residual blocks against central differences and autograd, in float64."""

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.block import Placement, apply_sublayer, residual_output, run_block
from glassblock.numerics.norm_jacobians import norm_jacobian
from glassblock.numerics.residual_jacobians import feed_forward_jacobian, residual_jacobian
from torch import Tensor

from numerics.makers import central_differences, make_feed_forward, make_wiring, random_tensor

D, M = 6, 10
MATRICES = {
    "zero": torch.zeros(D, D, dtype=torch.float64),
    "diagonal": torch.diag(torch.tensor([3.0, -1.0, 0.5, 0.0, 2.0, -0.2], dtype=torch.float64)),
    "non-symmetric": random_tensor(D, D, seed=21),
}
KINDS = ["rms_llama", "rms_plus1", "layernorm"]
# See test_norm_jacobians; the sublayer adds a factor of ten to the third derivatives.
DIFFERENCES = 5e-9
# Two or three products of matrices of six to ten float64 entries of the order of one.
ROUNDING = 2e-14


def rows() -> Tensor:
    return random_tensor(3, D, seed=22) + 0.5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.7, 0.3)])
def test_linear_sublayers(name: str, placement: Placement, kind: str, scales: tuple[float, float]) -> None:
    matrix, wiring = MATRICES[name], make_wiring(placement, D, kind=kind, alpha=scales[0], beta=scales[1])
    found = residual_jacobian(rows(), matrix, wiring)
    for row, jacobian in zip(rows(), found, strict=True):
        differences = central_differences(lambda x: residual_output(x, matrix, wiring), row)
        torch.testing.assert_close(jacobian, differences, rtol=0.0, atol=DIFFERENCES)
        exact = torch.func.jacrev(lambda x: residual_output(x, matrix, wiring))(row)
        torch.testing.assert_close(jacobian, exact, rtol=0.0, atol=ROUNDING)


NETWORKS = [
    {"activation": "silu"},
    {"activation": "sigmoid", "bias": True},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "bias": True},
    {"activation": "quick_gelu"},
    {"activation": "identity"},
    {"activation": "relu2", "gated": False, "bias": True},
    {"activation": "silu", "gated": False},
    {"activation": "gelu_new", "gated": False},
    {"activation": "silu", "gating": "clamped_before", "limit": 0.8, "bias": True},
    {"activation": "silu", "gating": "clamped_after", "limit": 0.4},
    {"activation": "silu", "gating": "swiglu_oai", "limit": 0.8, "alpha": 1.702},
]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: "-".join(map(str, network.values())))
@pytest.mark.parametrize("placement", Placement)
def test_feed_forward_networks(network: dict, placement: Placement) -> None:
    sublayer = make_feed_forward(D, M, **network)
    wiring = make_wiring(placement, D, kind="rms_plus1", alpha=1.3, beta=0.6)
    found = residual_jacobian(rows(), sublayer, wiring)
    for row, jacobian in zip(rows(), found, strict=True):
        differences = central_differences(lambda x: run_block(x, sublayer, wiring).output, row)
        torch.testing.assert_close(jacobian, differences, rtol=0.0, atol=DIFFERENCES)
        exact = torch.func.jacrev(lambda x: run_block(x, sublayer, wiring).output)(row)
        torch.testing.assert_close(jacobian, exact, rtol=0.0, atol=ROUNDING)


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_textbook_form_of_a_gated_network(activation: str) -> None:
    network, n = make_feed_forward(D, M, activation=activation), random_tensor(D, seed=23)
    gate, up = network.gate @ n, network.up @ n
    slope = (gate > 0).double() if activation == "relu" else gate.sigmoid() * (1 + gate * (1 - gate.sigmoid()))
    value = network.activation(gate)
    expected = network.down @ (torch.diag(slope * up) @ network.gate + torch.diag(value) @ network.up)
    torch.testing.assert_close(feed_forward_jacobian(n, network), expected, rtol=0.0, atol=1e-13)


def test_a_zero_sublayer_leaves_the_identity_before_a_norm_and_the_norm_after_it() -> None:
    zero = MATRICES["zero"]
    eye = torch.eye(D, dtype=torch.float64).expand(3, D, D)
    for placement in (Placement.PRE, Placement.PARALLEL):
        assert torch.equal(residual_jacobian(rows(), zero, make_wiring(placement, D)), eye)
    post = make_wiring(Placement.POST, D)
    assert torch.equal(residual_jacobian(rows(), zero, post), norm_jacobian(rows(), post.residual_norm) @ eye)


def test_the_order_of_the_factors_is_part_of_the_answer() -> None:
    wiring, x = make_wiring(Placement.PRE, D), rows()
    eye = torch.eye(D, dtype=torch.float64)
    norm, matrix = norm_jacobian(x, wiring.input_norm), MATRICES["diagonal"]
    found = residual_jacobian(x, matrix, wiring)
    torch.testing.assert_close(found, eye + matrix @ norm, rtol=0.0, atol=1e-13)
    assert (found - (eye + norm @ matrix)).abs().max() > 0.1


def test_a_parallel_branch_adds_its_jacobian() -> None:
    wiring, x = make_wiring(Placement.PARALLEL, D), rows()
    attention = random_tensor(3, D, D, seed=24)
    network = make_feed_forward(D, M)
    alone, both = residual_jacobian(x, network, wiring), residual_jacobian(x, network, wiring, other=attention)
    torch.testing.assert_close(both - alone, attention, rtol=0.0, atol=1e-14)
    with pytest.raises(InvalidValue) as caught:
        residual_jacobian(x, network, make_wiring(Placement.PRE, D), other=attention)
    assert caught.value.field == "other"


def test_batch_axes_are_kept() -> None:
    x, network = random_tensor(2, 3, D), make_feed_forward(D, M, bias=True)
    for placement in Placement:
        for sublayer in (network, MATRICES["non-symmetric"]):
            wiring = make_wiring(placement, D)
            found = residual_jacobian(x, sublayer, wiring)
            assert found.shape == (2, 3, D, D)
            torch.testing.assert_close(
                found[1, 2], residual_jacobian(x[1, 2], sublayer, wiring), rtol=0.0, atol=ROUNDING
            )


def test_half_tensors_are_widened_and_a_float64_one_widens_all() -> None:
    network = make_feed_forward(D, M, dtype=torch.bfloat16)
    wiring = make_wiring(Placement.SANDWICH, D).to(torch.bfloat16)
    x = rows().bfloat16()
    narrow, wide = residual_jacobian(x, network, wiring), residual_jacobian(x.double(), network, wiring)
    assert (narrow.dtype, wide.dtype) == (torch.float32, torch.float64)
    # float32 through two norms and three products, on entries of the order of one.
    torch.testing.assert_close(narrow.double(), wide, rtol=0.0, atol=1e-5)


def test_the_derivative_of_a_network_is_had_in_inference_mode_too() -> None:
    network, n = make_feed_forward(D, M), random_tensor(3, D)
    expected = feed_forward_jacobian(n, network)
    with torch.inference_mode():
        inside = feed_forward_jacobian(n * 1.0, make_feed_forward(D, M))
    assert torch.equal(inside, expected)
    assert not expected.requires_grad


def test_the_derivative_of_a_network_is_that_of_its_output() -> None:
    network, n = make_feed_forward(D, M, bias=True), random_tensor(D)
    exact = torch.func.jacrev(lambda row: apply_sublayer(row, network))(n)
    torch.testing.assert_close(feed_forward_jacobian(n, network), exact, rtol=0.0, atol=1e-13)


def test_a_sublayer_of_another_width_is_refused() -> None:
    for sublayer, field in ((torch.ones(D + 1, D + 1), "matrix"), (make_feed_forward(D + 1, M), "x")):
        with pytest.raises(InvalidValue) as caught:
            residual_jacobian(torch.ones(2, D), sublayer, make_wiring(Placement.PRE, D))
        assert caught.value.field == field
