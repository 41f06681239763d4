"""The norm in front of the down projection (BitNet) runs in the dtype of the computation, like all else."""

import torch
from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.block import common_dtype, run_block
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import NORM_KINDS, Norm
from glassblock.numerics.wiring import Placement, Wiring


def network(gain_dtype: torch.dtype) -> FeedForward:
    generator = torch.Generator().manual_seed(0)
    gate, up, down = (torch.randn(*shape, generator=generator) for shape in ((12, 8), (12, 8), (8, 12)))
    gain = (1 + 0.1 * torch.randn(12, generator=generator)).to(gain_dtype)
    norm = Norm(NORM_KINDS["rms_llama"], gain, None, 1e-5)
    biases = (None, None, None)
    return FeedForward(gate, up, down, *biases, activation_named("relu2"), gating_named("product"), hidden_norm=norm)


WIRING = Wiring(Placement.PRE, input_norm=Norm(NORM_KINDS["rms_llama"], torch.ones(8), None, 1e-5))
X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


def test_its_gain_is_cast_to_the_dtype_of_the_run() -> None:
    wide, narrow = network(torch.float32), network(torch.bfloat16)
    stages = run_block(X, wide, WIRING, dtype=torch.bfloat16)
    assert all(stage.dtype is torch.bfloat16 for stage in stages if stage is not None)
    cast = run_block(X, narrow, WIRING, dtype=torch.bfloat16)
    assert torch.equal(stages.output, cast.output)


def test_a_wider_gain_widens_the_run() -> None:
    assert common_dtype(X, network(torch.float64), WIRING) is torch.float64
    assert run_block(X, network(torch.float64), WIRING).output.dtype is torch.float64


def test_its_gain_is_among_the_stored_numbers() -> None:
    assert network(torch.float32).parameters == 3 * 12 * 8 + 12
