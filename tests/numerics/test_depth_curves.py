"""Depth curves of short chains against the dense Jacobians of autograd."""

from collections.abc import Callable

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.block import Placement, residual_output
from glassblock.numerics.depth_curves import Curve, DepthCurves, depth_curves
from glassblock.numerics.watching import ComputationCancelled, Watch
from torch import Tensor

from numerics.makers import make_feed_forward, make_wiring, random_tensor

TOKENS, D, LAYERS = 3, 8, 4
X = random_tensor(TOKENS, D, seed=20)


def chain(placement: Placement) -> list[Callable[[Tensor], Tensor]]:
    def link(number: int) -> Callable[[Tensor], Tensor]:
        network = make_feed_forward(D, 12, seed=10 * number)
        wiring = make_wiring(placement, D)
        return lambda x: residual_output(x, network, wiring)

    return [link(number) for number in range(LAYERS)]


def shifting(x: Tensor) -> Tensor:
    """Couples the tokens."""
    return x + 0.5 * torch.roll(x, 1, 0).tanh()


def between(functions: list[Callable[[Tensor], Tensor]], start: int, stop: int, *, coupled: bool) -> Tensor:
    """J of functions start..stop-1, `[groups, n, n]`."""
    x = X
    for function in functions[:start]:
        x = function(x)

    def run(state: Tensor) -> Tensor:
        for function in functions[start:stop]:
            state = function(state)
        return state

    dense = torch.func.jacrev(run)(x)
    if coupled:
        return dense.reshape(1, TOKENS * D, TOKENS * D)
    return torch.stack([dense[token, :, token] for token in range(TOKENS)])


def check(curve: Curve, dense: list[Tensor]) -> None:
    frobenius = torch.stack([torch.linalg.matrix_norm(matrix) for matrix in dense])
    spectral = torch.stack([torch.linalg.matrix_norm(matrix, 2) for matrix in dense])
    # 64 probes; one of some twenty numbers reaches five standard errors once in 10^5 seeds.
    assert ((curve.frobenius - frobenius).abs() <= 5 * curve.standard_error).all()
    assert (curve.standard_error < 0.15 * frobenius).all()
    assert (curve.spectral_lower <= spectral).all()
    # A few steps from a good start: within a tenth on matrices of 8 to 24 rows.
    assert (curve.spectral_lower >= 0.9 * spectral).all()
    assert (spectral <= curve.product_upper).all()


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("placement", [Placement.PRE, Placement.POST, Placement.SANDWICH])
def test_curves_of_chains(placement: Placement, coupled: bool) -> None:
    functions = chain(placement)
    if coupled:
        functions[2] = shifting
    found = depth_curves(functions, X, coupled=coupled, probes=64, steps=4, seed=3)
    check(found.to_end, [between(functions, number, LAYERS, coupled=coupled) for number in range(LAYERS)])
    check(found.from_start, [between(functions, 0, number + 1, coupled=coupled) for number in range(LAYERS)])
    for number in range(LAYERS):
        alone = torch.linalg.matrix_norm(between(functions, number, number + 1, coupled=coupled), 2)
        assert (found.layer_lower[number] <= alone).all()
        assert (alone <= found.layer_upper[number]).all()
        assert (found.layer_upper[number] <= 1.011 * found.layer_lower[number]).all()
    check_states(found, functions)


def check_states(found: DepthCurves, functions: list[Callable[[Tensor], Tensor]]) -> None:
    state = X
    for number, function in enumerate(functions):
        after = function(state)
        torch.testing.assert_close(found.rms[number], state.square().mean(-1).sqrt())
        size = torch.linalg.vector_norm(state, dim=-1)
        torch.testing.assert_close(found.added[number], torch.linalg.vector_norm(after - state, dim=-1) / size)
        state = after
    torch.testing.assert_close(found.rms[LAYERS], state.square().mean(-1).sqrt())


def test_one_layer_alone_is_measured_from_both_ends() -> None:
    found = depth_curves(chain(Placement.PRE)[:1], X, coupled=False, probes=8)
    assert found.to_end.frobenius.shape == found.from_start.frobenius.shape == (1, TOKENS)
    torch.testing.assert_close(found.to_end.product_upper, found.layer_upper)


def test_the_identity_has_no_error() -> None:
    found = depth_curves([lambda x: 2.0 * x, lambda x: 3.0 * x], X, coupled=False)
    torch.testing.assert_close(found.to_end.frobenius[:, 0], torch.tensor([6.0, 3.0]).double() * D**0.5)
    assert (found.to_end.standard_error < 1e-12).all()
    torch.testing.assert_close(found.from_start.spectral_lower[:, 0], torch.tensor([2.0, 6.0]).double())


def test_progress_reaches_no_further_than_planned_and_it_stops_when_asked() -> None:
    seen: list[tuple[int, int]] = []
    depth_curves(chain(Placement.PRE), X, coupled=False, watch=Watch(lambda done, total, _: seen.append((done, total))))
    assert all(0 <= done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    with pytest.raises(ComputationCancelled):
        depth_curves(chain(Placement.PRE), X, watch=Watch(cancelled=lambda: True))


def test_what_is_no_chain_is_refused() -> None:
    with pytest.raises(InvalidValue, match="no function"):
        depth_curves([], X)
    with pytest.raises(InvalidValue, match=r"function 1 makes \[3, 2\]"):
        depth_curves([lambda x: x, lambda x: x[:, :2]], X)
    for field, least in (("probes", 2), ("steps", 1)):
        with pytest.raises(InvalidValue, match=f"{field} is {least - 1}") as caught:
            depth_curves([lambda x: x], X, **{field: least - 1})
        assert caught.value.field == field
