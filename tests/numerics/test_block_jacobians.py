"""Products of block Jacobians against the dense Jacobian that autograd gives, in float64."""

import dataclasses

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import ACTIVATIONS
from glassblock.numerics.block import Placement, run_block
from glassblock.numerics.block_jacobians import Part, block_jacobian
from glassblock.numerics.formed_jacobians import formed
from torch import Tensor

from numerics.makers import make_feed_forward, make_wiring, random_tensor

D, M, TOKENS = 7, 11, 3
KINDS = ["rms_plus1", "layernorm"]
NETWORKS = [
    {"activation": "silu"},
    {"activation": "gelu", "bias": True},
    {"activation": "identity", "bias": True},
    {"activation": "relu2", "gated": False, "bias": True},
    {"activation": "gelu_tanh", "gated": False},
    {"activation": "silu", "gating": "clamped_before", "limit": 0.8, "bias": True},
    {"activation": "silu", "gating": "clamped_after", "limit": 0.4},
    {"activation": "silu", "gating": "swiglu_oai", "limit": 0.8, "alpha": 1.702, "bias": True},
]
STAGE_OF = {Part.FEED_FORWARD: "down", Part.BRANCH: "contribution", Part.BLOCK: "output"}
# Sums of seven and eleven float64 products, through three matrices and two norms.
ROUNDING = 1e-13


def rows(*, dtype: torch.dtype = torch.float64) -> Tensor:
    return (random_tensor(TOKENS, D, seed=31) + 0.4).to(dtype)


def oracle(x: Tensor, network, wiring, part: Part) -> Tensor:
    """`[tokens, d, d]` by reverse mode in float64."""

    def function(row: Tensor) -> Tensor:
        return getattr(run_block(row, network, wiring), STAGE_OF[part])

    if part is Part.FEED_FORWARD:
        n = run_block(x, network, wiring, until="normed").normed
        x = x if n is None else n
        wiring = make_wiring(Placement.POST, x.shape[-1])  # in which the network reads x itself
    return torch.func.vmap(torch.func.jacrev(function))(x)


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("number", [2, 4, 6])
def test_products_are_those_of_the_dense_jacobian(number: int, placement: Placement, kind: str, part: Part) -> None:
    sublayer = make_feed_forward(D, M, **NETWORKS[number])
    wiring = make_wiring(placement, D, kind=kind, alpha=1.3, beta=0.6)
    x, v = rows(), random_tensor(TOKENS, D, seed=32)
    expected = oracle(x, sublayer, wiring, part)
    jacobian = block_jacobian(x, sublayer, wiring, part=part)
    close = {"rtol": 0.0, "atol": ROUNDING * float(expected.abs().max())}
    torch.testing.assert_close(jacobian.times(v), torch.einsum("tij,tj->ti", expected, v), **close)
    torch.testing.assert_close(jacobian.transposed_times(v), torch.einsum("tij,ti->tj", expected, v), **close)
    torch.testing.assert_close(formed(jacobian), expected, **close)
    point = jacobian.point
    direction = point / torch.linalg.vector_norm(point, dim=-1, keepdim=True)
    along = torch.einsum("tij,tj->ti", expected, direction)
    torch.testing.assert_close(jacobian.along_point().product, along, **close)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str, gated: bool) -> None:
    network = make_feed_forward(D, M, activation=activation, gated=gated, bias=True)
    wiring, x = make_wiring(Placement.PRE, D), rows()
    expected = oracle(x, network, wiring, Part.BLOCK)
    found = formed(block_jacobian(x, network, wiring))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=ROUNDING * float(expected.abs().max()))


def test_without_eps_nothing_is_left_along_the_row_exactly() -> None:
    network, x = make_feed_forward(D, M), rows()
    wiring = make_wiring(Placement.PRE, D)
    wiring = dataclasses.replace(wiring, input_norm=dataclasses.replace(wiring.input_norm, eps=0.0))
    assert (block_jacobian(x, network, wiring, part=Part.BRANCH).along_point().product == 0).all()


def test_a_parallel_branch_adds_its_jacobian() -> None:
    wiring, network = make_wiring(Placement.PARALLEL, D, alpha=0.9, beta=0.6), make_feed_forward(D, M)
    x, other, v = rows(), random_tensor(TOKENS, D, D, seed=33), random_tensor(TOKENS, D, seed=34)
    jacobian = block_jacobian(x, network, wiring, other=other)
    expected = oracle(x, network, wiring, Part.BLOCK) + other
    close = {"rtol": 0.0, "atol": ROUNDING * float(expected.abs().max())}
    torch.testing.assert_close(formed(jacobian), expected, **close)
    torch.testing.assert_close(jacobian.times(v), torch.einsum("tij,tj->ti", expected, v), **close)
    torch.testing.assert_close(jacobian.transposed_times(v), torch.einsum("tij,ti->tj", expected, v), **close)
    chosen = torch.tensor([2, 0])
    torch.testing.assert_close(formed(jacobian.of_tokens(chosen)), expected[chosen], **close)


@pytest.mark.parametrize(("placement", "part"), [(Placement.PRE, Part.BLOCK), (Placement.PARALLEL, Part.BRANCH)])
def test_another_branch_elsewhere_is_refused(placement: Placement, part: Part) -> None:
    with pytest.raises(InvalidValue) as caught:
        block_jacobian(
            rows(),
            make_feed_forward(D, M),
            make_wiring(placement, D),
            part=part,
            other=random_tensor(TOKENS, D, D),
        )
    assert caught.value.field == "other"


def test_tokens_can_be_taken_out() -> None:
    wiring, network = make_wiring(Placement.SANDWICH, D, kind="layernorm"), make_feed_forward(D, M, bias=True)
    x, v = rows(), random_tensor(TOKENS, D, seed=35)
    whole, one = block_jacobian(x, network, wiring), block_jacobian(x[1:2], network, wiring)
    part = whole.of_tokens(slice(1, 2))
    assert (part.tokens, part.width, part.product_flops) == (1, D, 2 * 3 * M * D)
    torch.testing.assert_close(part.times(v[1:2]), one.times(v[1:2]), rtol=0.0, atol=ROUNDING)
    torch.testing.assert_close(part.transposed_times(v[1:2]), one.transposed_times(v[1:2]), rtol=0.0, atol=ROUNDING)


def test_dtypes() -> None:
    network, wiring = make_feed_forward(D, M, dtype=torch.bfloat16), make_wiring(Placement.PRE, D).to(torch.bfloat16)
    x, v = rows(dtype=torch.bfloat16), random_tensor(TOKENS, D)
    assert block_jacobian(x, network, wiring).times(v.float()).dtype == torch.float32
    assert block_jacobian(x.double(), network, wiring).times(v).dtype == torch.float64
    assert block_jacobian(x, network, wiring, dtype=torch.float64).times(v).dtype == torch.float64
    with pytest.raises(InvalidValue) as caught:
        block_jacobian(x, network, wiring, dtype=torch.bfloat16)
    assert caught.value.field == "dtype"


def test_in_inference_mode_too() -> None:
    network, wiring, x, v = make_feed_forward(D, M), make_wiring(Placement.POST, D), rows(), random_tensor(TOKENS, D)
    expected = block_jacobian(x, network, wiring).times(v)
    with torch.inference_mode():
        inside = block_jacobian(x * 1.0, make_feed_forward(D, M), make_wiring(Placement.POST, D)).times(v)
    assert torch.equal(inside, expected)
    assert not expected.requires_grad


@pytest.mark.parametrize("wrong", ["x", "norm"])
def test_another_width_is_refused(wrong: str) -> None:
    wiring = make_wiring(Placement.PRE, D + 1 if wrong == "norm" else D)
    with pytest.raises(InvalidValue) as caught:
        block_jacobian(torch.ones(2, D + (wrong == "x")), make_feed_forward(D, M), wiring)
    assert caught.value.field == "x"
