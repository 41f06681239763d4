"""The self-check agrees with right Jacobians, and shows wrong ones."""

import dataclasses

import pytest
import torch
from glassblock.numerics import finite_difference_check
from glassblock.numerics.block import Placement
from glassblock.numerics.block_jacobians import BlockJacobian, Part, block_jacobian
from glassblock.numerics.finite_difference_check import check_block, check_norm

from numerics.makers import make_feed_forward, make_norm, make_wiring, random_tensor

D = 12
# Rounding of float64 over a step of 6e-6 is 4e-11 where |J v| is the size of the block's output. It is a hundred times
# smaller where a network with biases reads a raw row near zero.
AGREES = 5e-8


@pytest.mark.parametrize("part", Part)
@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("kind", ["rms_plus1", "layernorm"])
def test_it_agrees(placement: Placement, part: Part, kind: str) -> None:
    x = random_tensor(4, D, seed=3)
    x[1] *= 1e3
    x[2] *= 1e-6
    network = make_feed_forward(D, 20, bias=True)
    found = check_block(x, network, make_wiring(placement, D, kind=kind, alpha=1.5, beta=0.7), part=part)
    assert found.relative_difference.shape == (4,)
    assert (found.relative_difference < AGREES).all(), found.relative_difference
    assert (check_norm(x, make_norm(kind, D)).relative_difference < AGREES).all()


def test_it_shows_a_wrong_jacobian(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*given: object, **named: object) -> BlockJacobian:
        found = block_jacobian(*given, **named)  # pyright: ignore[reportArgumentType, reportCallIssue]
        return dataclasses.replace(found, slopes=found.slopes * 1.001)

    monkeypatch.setattr(finite_difference_check, "block_jacobian", wrong)
    x = random_tensor(4, D, seed=3)
    found = check_block(x, make_feed_forward(D, 20), make_wiring(Placement.PRE, D), part=Part.BRANCH)
    # A thousandth of every slope is a thousandth of the product.
    torch.testing.assert_close(found.relative_difference, torch.full((4,), 1e-3).double(), rtol=1e-3, atol=0.0)
