"""The gate that Gemma 3n cuts, against transformers' own network, and where else it counts."""

from dataclasses import replace

import pytest
import torch
import transformers
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.block import apply_sublayer, run_block
from glassblock.numerics.feed_forward import FeedForward, read_of_gate
from glassblock.numerics.residual_jacobians import feed_forward_jacobian, residual_jacobian
from glassblock.numerics.wiring import Placement
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nTextMLP

from numerics.makers import make_feed_forward, make_wiring, random_tensor

D, M = 24, 40
SHARE = 0.95


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_are_the_models(dtype: torch.dtype) -> None:
    config = transformers.Gemma3nTextConfig(
        hidden_size=64,
        intermediate_size=[256, 256],
        num_hidden_layers=2,
        activation_sparsity_pattern=[SHARE, 0.0],
    )
    torch.manual_seed(0)
    module = Gemma3nTextMLP(config, layer_idx=0).to(dtype)
    weights = (getattr(module, f"{name}_proj").weight.detach() for name in ("gate", "up", "down"))
    network = FeedForward(
        *weights,
        None,
        None,
        None,
        activation_named("gelu_pytorch_tanh"),
        gating_named("product"),
        gate_sparsity=SHARE,
    )
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        theirs = module(x)
    assert torch.equal(apply_sublayer(x, network), theirs)


def test_so_much_of_a_normal_gate_is_cut() -> None:
    network = replace(make_feed_forward(D, M), gate_sparsity=SHARE)
    gate = torch.randn(50, 20_000, generator=torch.Generator().manual_seed(2))
    cut = float((read_of_gate(gate, network) == 0).float().mean())
    assert abs(cut - SHARE) < 0.002  # of a million draws three deviations are 0.0007, and mean and spread are estimates
    assert torch.equal(read_of_gate(gate, replace(network, gate_sparsity=0.0)), gate)


def test_its_jacobian_goes_through_the_cut() -> None:
    network, wiring = replace(make_feed_forward(D, M), gate_sparsity=0.5), make_wiring(Placement.PRE, D)
    assert not network.neuronwise
    x = random_tensor(2, D)
    jacobian = residual_jacobian(x, network, wiring)
    step = 1e-6
    for row in range(2):
        for channel in (0, 7):
            moved = torch.zeros_like(x[row])
            moved[channel] = step
            ahead, behind = (run_block(x[row] + sign * moved, network, wiring).output for sign in (1, -1))
            difference = (ahead - behind) / (2 * step)
            # Central differences of float64: 1e-16 / 1e-6 of rounding, and 1e-12 of curvature.
            assert float((difference - jacobian[row, :, channel]).abs().max()) < 1e-7
    with pytest.raises(InvalidValue, match="closed form"):
        feed_forward_jacobian(x, network)


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_no_such_share(share: float) -> None:
    with pytest.raises(InvalidValue, match="of a gate cannot be cut away"):
        replace(make_feed_forward(D, M), gate_sparsity=share)


def test_fewer_hidden_units_are_another_network() -> None:
    network = replace(make_feed_forward(D, M), gate_sparsity=SHARE)
    assert network.narrowed(M).width == M
    with pytest.raises(InvalidValue, match="looks at all hidden units"):
        network.narrowed(M // 2)
