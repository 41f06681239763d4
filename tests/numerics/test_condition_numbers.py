"""Smallest singular values and condition numbers against dense decompositions of autograd's Jacobian in float64."""

import dataclasses

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.block import Placement
from glassblock.numerics.block_jacobians import Part
from glassblock.numerics.condition_numbers import METHODS, condition_numbers
from glassblock.numerics.spectral_request import SpectralRequest
from glassblock.numerics.watching import ComputationCancelled, Watch
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics.makers import make_feed_forward, make_wiring, random_tensor
from numerics.test_block_jacobians import oracle
from numerics.test_block_norms import widened

D, M, TOKENS = 12, 20, 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("placement", Placement)
def test_both_ways(placement: Placement, method: str) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(placement, D, alpha=1.2)
    x = random_tensor(TOKENS, D, seed=71)
    found = condition_numbers(x, network, wiring, method=method, request=SpectralRequest(tolerance=1e-6))
    values = torch.linalg.svdvals(oracle(x, network, wiring, Part.BLOCK))
    assert (found.method, found.exactness) == (method, "exact" if method == "dense" else "bracketed")
    assert found.converged.all()
    assert (found.smallest_lower <= values[:, -1]).all()
    assert (values[:, -1] <= found.smallest_upper).all()
    condition = values[:, 0] / values[:, -1]
    assert (found.condition_lower <= condition).all()
    assert (condition <= found.condition_upper).all()
    assert (found.condition_upper <= found.condition_lower * (1 + 1e-6) ** 2).all()


@settings(max_examples=20, deadline=None)
@given(
    method=st.sampled_from(METHODS),
    placement=st.sampled_from(list(Placement)),
    kind=st.sampled_from(["rms_llama", "layernorm"]),
    alpha=st.sampled_from([0.0, 1e-9, 1.0]),
    beta=st.sampled_from([1e-9, 1.0]),
    steps=st.sampled_from([2, 200]),
    seed=st.integers(0, 1000),
)
def test_the_brackets_hold(
    method: str, placement: Placement, kind: str, alpha: float, beta: float, steps: int, seed: int
) -> None:
    """Ill-conditioned Jacobians included: with alpha = 0 the norm leaves a direction to eps, or to nothing."""
    network, wiring = make_feed_forward(D, M, seed=seed), make_wiring(placement, D, kind=kind, alpha=alpha, beta=beta)
    x = random_tensor(TOKENS, D, seed=seed)
    request = SpectralRequest(steps=steps, seed=seed)
    found = condition_numbers(x, network, wiring, method=method, request=request)
    dense = oracle(x, network, wiring, Part.BLOCK)
    values = torch.linalg.svdvals(dense)
    # What the oracle itself is off by.
    slack = 1e-15 * values[:, 0]
    assert (found.smallest_lower <= values[:, -1] + slack).all()
    assert (values[:, -1] <= found.smallest_upper + slack).all()


@pytest.mark.parametrize("method", METHODS)
def test_behind_a_layer_norm_nothing_is_known_of_the_smallest_but_that_it_is_small(method: str) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.POST, D, kind="layernorm")
    found = condition_numbers(random_tensor(TOKENS, D, seed=72), network, wiring, method=method)
    assert (found.smallest_lower == 0).all()
    assert (found.smallest_upper < 1e-11).all()
    assert found.condition_upper.isinf().all()
    assert not found.converged.any()


@pytest.mark.parametrize("method", METHODS)
def test_a_zero_jacobian(method: str) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D, alpha=0.0)
    network = dataclasses.replace(network, down=torch.zeros(D, M, dtype=torch.float64))
    found = condition_numbers(random_tensor(1, D), network, wiring, method=method)
    assert (found.smallest_lower.item(), found.smallest_upper.item()) == (0.0, 0.0)
    assert found.condition_lower.isnan().all()
    assert found.condition_upper.isnan().all()


@pytest.mark.parametrize("method", METHODS)
def test_a_condition_number_is_one_at_least(method: str) -> None:
    """Of one channel it is one, or, where the channel cancels, nothing is known of it."""
    network, wiring = make_feed_forward(1, M), make_wiring(Placement.PRE, 1)
    bare = dataclasses.replace(wiring, input_norm=dataclasses.replace(wiring.input_norm, eps=0.0))
    for each, known in ((wiring, True), (bare, False)):
        found = condition_numbers(torch.tensor([[2.0]]).double(), network, each, part=Part.BRANCH, method=method)
        assert found.condition_lower.item() == 1.0
        assert (found.condition_upper.item() < 1.1) == known


def test_float32_inputs_are_taken_to_float64() -> None:
    network, wiring = make_feed_forward(D, M, dtype=torch.float32), make_wiring(Placement.PRE, D).to(torch.float32)
    x = random_tensor(TOKENS, D).float()
    found = condition_numbers(x, network, wiring)
    values = torch.linalg.svdvals(oracle(x.double(), *widened(network, wiring), Part.BLOCK))
    assert found.accumulation == torch.float64
    # Rounding that the bracket allows for: some hundred eps.
    torch.testing.assert_close(found.smallest_lower, values[:, -1], rtol=1e-12, atol=0.0)


def test_another_branch_and_no_tokens() -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PARALLEL, D)
    x, other = random_tensor(TOKENS, D), random_tensor(TOKENS, D, D, seed=73)
    found = condition_numbers(x, network, wiring, other=other)
    values = torch.linalg.svdvals(oracle(x, network, wiring, Part.BLOCK) + other)
    assert (found.smallest_lower <= values[:, -1]).all()
    assert (values[:, -1] <= found.smallest_upper).all()
    assert found.converged.all()
    assert condition_numbers(x[:0], network, wiring).smallest_lower.shape == (0,)


def test_it_can_be_stopped_and_refuses_unknown_methods() -> None:
    network, wiring, x = make_feed_forward(D, M), make_wiring(Placement.PRE, D), random_tensor(TOKENS, D)
    with pytest.raises(ComputationCancelled):
        condition_numbers(x, network, wiring, watch=Watch(cancelled=lambda: True))
    with pytest.raises(InvalidValue) as caught:
        condition_numbers(x, network, wiring, method="magic")
    assert (caught.value.field, caught.value.known) == ("method", METHODS)
