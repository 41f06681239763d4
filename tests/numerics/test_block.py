from dataclasses import replace
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.block import (
    STAGES,
    Placement,
    Stages,
    Wiring,
    apply_sublayer,
    common_dtype,
    residual_output,
    residual_stream,
    run_block,
)
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.norms import NORM_KINDS, Norm
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from numerics.makers import make_feed_forward, make_norm, make_wiring, random_tensor

D, M = 12, 20


# Against transformers


class LlamaBlock:
    """Norm and MLP of a random tiny Llama, and the stages that hooks would capture."""

    def __init__(self, dtype: torch.dtype, *, bias: bool, activation: str) -> None:
        config = LlamaConfig(hidden_size=64, intermediate_size=176, mlp_bias=bias, hidden_act=activation)
        torch.manual_seed(0)
        self.norm, self.mlp = LlamaRMSNorm(64, 1e-5), LlamaMLP(config)
        with torch.no_grad():
            self.norm.weight.copy_(random_tensor(64, seed=1, dtype=torch.float32))
        self.norm.to(dtype)
        self.mlp.to(dtype)

    def stages(self, x: Tensor) -> Stages:
        with torch.no_grad():
            normed = self.norm(x)
            gate, up = self.mlp.gate_proj(normed), self.mlp.up_proj(normed)
            activated = self.mlp.act_fn(gate)
            down = self.mlp(normed)
            return Stages(x, normed, gate, up, activated, activated * up, down, down, x + down)

    def feed_forward(self, activation: str) -> FeedForward:
        gate, up, down = (
            {"weight": layer.weight.detach(), "bias": None if layer.bias is None else layer.bias.detach()}
            for layer in (self.mlp.gate_proj, self.mlp.up_proj, self.mlp.down_proj)
        )
        return FeedForward(
            *(gate["weight"], up["weight"], down["weight"]),
            *(gate["bias"], up["bias"], down["bias"]),
            activation_named(activation),
            gating_named("product"),
        )

    def wiring(self) -> Wiring:
        return Wiring(Placement.PRE, input_norm=Norm(NORM_KINDS["rms_llama"], self.norm.weight.detach(), None, 1e-5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("activation", "bias"), [("silu", False), ("silu", True), ("gelu_pytorch_tanh", False), ("relu2", True)]
)
def test_every_stage_of_a_llama_block_bit_for_bit(dtype: torch.dtype, activation: str, bias: bool) -> None:
    block = LlamaBlock(dtype, bias=bias, activation=activation)
    x = random_tensor(2, 7, 64, seed=2, dtype=dtype)
    found = run_block(x, block.feed_forward(activation), block.wiring(), dtype=dtype)
    for name, ours, theirs in zip(STAGES, found, block.stages(x), strict=True):
        assert ours is not None
        assert ours.dtype == dtype, name
        assert torch.equal(ours, theirs), name


def test_half_weights_and_rows_are_computed_in_float32_unless_asked_otherwise() -> None:
    block = LlamaBlock(torch.bfloat16, bias=False, activation="silu")
    x = random_tensor(5, 64, seed=2, dtype=torch.bfloat16)
    found = run_block(x, block.feed_forward("silu"), block.wiring())
    block.norm.float()
    block.mlp.float()
    for name, ours, theirs in zip(STAGES, found, block.stages(x.float()), strict=True):
        assert ours is not None
        assert torch.equal(ours, theirs), name


# Against the definition, in float64


def defined(x: Tensor, network: FeedForward, wiring: Wiring, other: Tensor | float = 0.0) -> Tensor:
    """The formulas of the module's docstring, token by token and neuron by neuron."""

    def feed_forward(n: Tensor) -> Tensor:
        out = torch.zeros_like(n) if network.down_bias is None else network.down_bias.clone()
        for neuron in range(network.width):
            up = network.up[neuron] @ n + (0.0 if network.up_bias is None else network.up_bias[neuron])
            if network.gate is None:
                hidden = network.activation(up)
            else:
                gate = network.gate[neuron] @ n + (0.0 if network.gate_bias is None else network.gate_bias[neuron])
                hidden = network.activation(gate) * up
            out = out + hidden * network.down[:, neuron]
        return out

    alpha, beta = wiring.residual_scale, wiring.branch_scale
    before, after, last = (norm or (lambda row: row) for norm in wiring.norms)
    return last(alpha * x + other + beta * after(feed_forward(before(x))))


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("kind", ["rms_plus1", "layernorm"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (2.2, 0.22)])
def test_every_wiring_follows_its_formula(
    placement: Placement, kind: str, gated: bool, scales: tuple[float, float]
) -> None:
    wiring = make_wiring(placement, D, kind=kind, alpha=scales[0], beta=scales[1])
    network = make_feed_forward(D, M, gated=gated, bias=True)
    x = random_tensor(2, 3, D, seed=4)
    found = run_block(x, network, wiring).output
    assert found is not None
    expected = torch.stack([defined(row, network, wiring) for row in x.flatten(0, 1)]).reshape(x.shape)
    # Sums of 20 products of float64 numbers of the order of one.
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(residual_output(x, network, wiring), expected, rtol=1e-12, atol=1e-13)


def test_a_parallel_branch_is_added() -> None:
    wiring, network = make_wiring(Placement.PARALLEL, D), make_feed_forward(D, M)
    x, attention = random_tensor(3, D, seed=4), random_tensor(3, D, seed=5)
    found = run_block(x, network, wiring, other=attention).output
    assert found is not None
    expected = torch.stack([defined(row, network, wiring, beside) for row, beside in zip(x, attention, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_a_gain_of_the_branch_multiplies_it_last() -> None:
    wiring, network = make_wiring(Placement.SANDWICH, D, beta=0.22), make_feed_forward(D, M)
    gain, x = random_tensor(D, seed=6), random_tensor(3, D, seed=4)
    stages, plain = run_block(x, network, replace(wiring, branch_gain=gain)), run_block(x, network, wiring)
    assert torch.equal(stages.contribution, plain.contribution * gain)
    assert torch.equal(stages.output, x + stages.contribution)


def test_two_branches_may_be_summed_before_the_stream_is_added() -> None:
    wiring, network = make_wiring(Placement.PARALLEL, D), make_feed_forward(D, M)
    first = replace(wiring, branches_first=True)
    x, attention = (random_tensor(200, D, seed=seed, dtype=torch.bfloat16) for seed in (4, 5))
    for each, summed in (
        (wiring, lambda stages: (stages.x + attention) + stages.contribution),
        (first, lambda stages: (attention + stages.contribution) + stages.x),
    ):
        stages = run_block(x, network, each, other=attention, dtype=torch.bfloat16)
        assert torch.equal(stages.output, summed(stages))
    assert first.to(torch.bfloat16).branches_first
    with pytest.raises(InvalidValue) as caught:
        replace(make_wiring(Placement.PRE, D), branches_first=True)
    assert caught.value.field == "branches_first"


def test_the_stages_of_a_post_block_are_those_of_the_raw_stream() -> None:
    wiring, network = make_wiring(Placement.POST, D), make_feed_forward(D, M)
    x = random_tensor(3, D, seed=4)
    stages = run_block(x, network, wiring)
    assert stages.normed is None
    assert stages.gate is not None
    torch.testing.assert_close(stages.gate, x @ network.gate.T, rtol=1e-13, atol=1e-13)
    assert torch.equal(stages.contribution, stages.down)


def test_the_contribution_is_what_the_stream_receives() -> None:
    x, network = random_tensor(3, D, seed=4), make_feed_forward(D, M)
    for placement in (Placement.PRE, Placement.SANDWICH, Placement.PARALLEL, Placement.BRANCH_OUTPUT):
        wiring = make_wiring(placement, D, alpha=1.5, beta=0.22)
        stages = run_block(x, network, wiring)
        assert torch.equal(stages.output, 1.5 * x + stages.contribution)
        assert not torch.equal(stages.contribution, stages.down)


def test_a_plain_network_has_no_gate_stage_and_its_hidden_is_its_activated() -> None:
    network = make_feed_forward(D, M, gated=False, activation="relu2")
    stages = run_block(random_tensor(3, D), network, make_wiring(Placement.PRE, D))
    assert stages.gate is None
    assert torch.equal(stages.activated, stages.up.relu().square())
    assert stages.hidden is stages.activated


@pytest.mark.parametrize("gating", ["clamped_before", "clamped_after", "swiglu_oai"])
def test_gate_and_up_are_captured_before_a_clamp(gating: str) -> None:
    numbers = {"limit": 0.1} | ({"alpha": 1.702} if gating == "swiglu_oai" else {})
    network = make_feed_forward(D, M, gating=gating, **numbers)
    plain = replace(network, gating=gating_named("product"))
    x, wiring = random_tensor(3, D), make_wiring(Placement.PRE, D)
    clamped, free = run_block(x, network, wiring), run_block(x, plain, wiring)
    assert torch.equal(clamped.gate, free.gate)
    assert torch.equal(clamped.up, free.up)
    assert not torch.equal(clamped.hidden, free.hidden)


@pytest.mark.parametrize("shape", [(D,), (1, D), (2, 3, D), (2, 1, 3, D), (0, D)])
def test_any_number_of_batch_axes(shape: tuple[int, ...]) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.SANDWICH, D)
    stages = run_block(random_tensor(*shape), network, wiring)
    for name, stage in stages._asdict().items():
        width = M if name in {"gate", "up", "activated", "hidden"} else D
        assert stage.shape == (*shape[:-1], width), name


# Until, dtype, wiring


@pytest.mark.parametrize("until", STAGES)
def test_nothing_is_computed_beyond_until(until: str) -> None:
    network, wiring = make_feed_forward(D, M), make_wiring(Placement.PRE, D)
    x = random_tensor(3, D)
    stages, whole = run_block(x, network, wiring, until=until), run_block(x, network, wiring)
    last = STAGES.index(until)
    for index, name in enumerate(STAGES):
        found, expected = getattr(stages, name), getattr(whole, name)
        assert (found is None) == (index > last), name
        if found is not None:
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("until", ["x", "normed"])
def test_the_norm_needs_no_weights(until: str) -> None:
    x, wiring = random_tensor(3, D), make_wiring(Placement.PRE, D)
    stages = run_block(x, None, wiring, until=until)
    assert torch.equal(stages.x, x)
    assert (stages.normed is not None) == (until == "normed")


@pytest.mark.parametrize(
    ("row", "weight", "gain", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.bfloat16, torch.bfloat16, torch.float64),
        (torch.float32, torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float32, torch.float64, torch.float64),
    ],
)
def test_the_dtype_of_the_computation(
    row: torch.dtype, weight: torch.dtype, gain: torch.dtype, expected: torch.dtype
) -> None:
    wiring = make_wiring(Placement.PRE, D).to(gain)
    network = make_feed_forward(D, M, dtype=weight)
    x = random_tensor(2, D, dtype=row)
    assert common_dtype(x, network, wiring) == expected
    assert {stage.dtype for stage in run_block(x, network, wiring)} == {expected}
    assert {stage.dtype for stage in run_block(x, network, wiring, dtype=torch.float16)} == {torch.float16}


def test_float16_overflows_where_an_engine_would() -> None:
    network = make_feed_forward(D, M, gated=False, activation="relu2")
    x, wiring = random_tensor(3, D), Wiring(Placement.POST, residual_norm=make_norm("rms_llama", D))
    big = run_block(1000.0 * x, network, wiring, dtype=torch.float16)
    assert big.hidden.isinf().any()
    assert run_block(1000.0 * x, network, wiring).hidden.isfinite().all()


def test_a_wiring_cast_keeps_its_scales_and_roles() -> None:
    wiring = make_wiring(Placement.SANDWICH, D, alpha=1.5, beta=0.5)
    cast = wiring.to(torch.bfloat16)
    assert (cast.placement, cast.residual_scale, cast.branch_scale) == (Placement.SANDWICH, 1.5, 0.5)
    assert torch.equal(cast.input_norm.gain, wiring.input_norm.gain.bfloat16())
    assert torch.equal(cast.output_norm.gain, wiring.output_norm.gain.bfloat16())
    assert cast.residual_norm is None


def test_gradients_flow_through_a_block() -> None:
    weight = nn.Parameter(random_tensor(D, D))
    out = residual_output(random_tensor(3, D, seed=1), weight, make_wiring(Placement.POST, D))
    (gradient,) = torch.autograd.grad(out.sum(), (weight,))
    assert gradient.abs().max() > 0


def test_a_matrix_is_a_sublayer() -> None:
    matrix, x = random_tensor(D, D, seed=1), random_tensor(3, D, seed=2)
    wiring = make_wiring(Placement.POST, D, alpha=2.0, beta=0.5)
    stream = residual_stream(x, matrix, wiring)
    torch.testing.assert_close(stream, 2.0 * x + 0.5 * x @ matrix.T, rtol=1e-13, atol=1e-13)
    assert torch.equal(residual_output(x, matrix, wiring), wiring.residual_norm(stream))
    assert torch.equal(apply_sublayer(x, matrix), x @ matrix.T)


# What cannot be


ROLES = ("input_norm", "output_norm", "residual_norm")
NEEDED = {
    Placement.PRE: {"input_norm"},
    Placement.POST: {"residual_norm"},
    Placement.SANDWICH: {"input_norm", "output_norm"},
    Placement.PARALLEL: {"input_norm"},
    Placement.BRANCH_OUTPUT: {"output_norm"},
}


@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("given", range(8))
def test_a_placement_takes_exactly_its_norms(placement: Placement, given: int) -> None:
    roles = {role for bit, role in enumerate(ROLES) if given >> bit & 1}
    norms = {role: make_norm("rms_llama", D) for role in roles}
    if roles == NEEDED[placement]:
        assert Wiring(placement, **norms).placement is placement
        return
    with pytest.raises(InvalidValue) as caught:
        Wiring(placement, **norms)
    assert caught.value.field in roles ^ NEEDED[placement]


@pytest.mark.parametrize("field", ["residual_scale", "branch_scale"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_scale_that_is_not_finite_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidValue) as caught:
        replace(make_wiring(Placement.PRE, D), **{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"until": "logits"}, "until"),
        ({"dtype": torch.int8}, "dtype"),
        ({"feed_forward": None}, "feed_forward"),
        ({"feed_forward": None, "until": "gate"}, "feed_forward"),
        ({"other": torch.ones(3, D)}, "other"),
        ({"x": torch.ones(3, D + 1)}, "x"),
        ({"feed_forward": None, "until": "normed", "x": torch.ones(3, D + 1)}, "x"),
        ({"feed_forward": make_feed_forward(D + 1, M)}, "x"),
        ({"wiring": make_wiring(Placement.BRANCH_OUTPUT, D + 1)}, "x"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(arguments: dict[str, Any], field: str) -> None:
    request: dict[str, Any] = {
        "x": torch.ones(3, D),
        "feed_forward": make_feed_forward(D, M),
        "wiring": make_wiring(Placement.PRE, D),
    } | arguments
    with pytest.raises(InvalidValue) as caught:
        run_block(request.pop("x"), request.pop("feed_forward"), request.pop("wiring"), **request)
    assert caught.value.field == field


@pytest.mark.parametrize("matrix", [torch.ones(D, D + 1), torch.ones(D + 1, D + 1)])
def test_a_matrix_of_another_width_is_refused(matrix: Tensor) -> None:
    with pytest.raises(InvalidValue) as caught:
        residual_output(torch.ones(3, D), matrix, make_wiring(Placement.PRE, D))
    assert caught.value.field == "matrix"
