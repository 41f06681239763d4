"""Routers against those of transformers, and mixtures against their definition."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from glassblock.errors import InvalidValue
from glassblock.numerics.block import apply_sublayer
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.mixture import Mixture, run_mixture
from glassblock.numerics.routing import GroupScore, Routing, Scoring, route
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.dbrx.modeling_dbrx import DbrxFFN
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.dots1.modeling_dots1 import Dots1TopkRouter
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
from transformers.models.jamba.modeling_jamba import JambaTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from numerics.makers import make_feed_forward, random_tensor

D, EXPERTS, TOP_K, TOKENS = 24, 8, 3, 50


def config(**options: Any) -> SimpleNamespace:
    given = {
        "hidden_size": D,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "moe_topk": TOP_K,
        "norm_topk_prob": True,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "topk_method": "greedy",
        "router_jitter_noise": 0.3,
        "input_jitter_noise": 0.0,
        "moe_norm_min": 1e-12,
        "use_expert_bias": True,
    }
    return SimpleNamespace(**(given | options))


def dbrx(order: float | None) -> nn.Module:
    ffn = SimpleNamespace(
        hidden_size=D,
        ffn_hidden_size=8,
        moe_num_experts=EXPERTS,
        moe_top_k=TOP_K,
        moe_jitter_eps=None,
        moe_normalize_expert_weights=order,
        ffn_act_fn={"name": "silu"},
    )
    return DbrxFFN(SimpleNamespace(ffn_config=ffn))


def routed_by_dbrx(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = module.router(x)
    return (logits, *module.route_tokens_to_experts(logits))


SIGMOID_IN_GROUPS = Routing(
    TOP_K,
    scoring=Scoring.SIGMOID,
    normalise=True,
    sum_epsilon=1e-20,
    groups=4,
    kept_groups=2,
    group_score=GroupScore.TOP_TWO,
    scaling=2.5,
    wide_logits=True,
)
CAST_SOFTMAX = Routing(TOP_K, normalise=True, rounded_weights=True)

# Family: the module, what it is told, how it is called where not as module(x), and the same as data.
Call = Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]]
ROUTERS: dict[str, tuple[Callable[[], nn.Module], Routing, Call | None]] = {
    "mixtral": (lambda: MixtralTopKRouter(config()), Routing(TOP_K, normalise=True), None),
    "qwen2_moe": (
        lambda: Qwen2MoeTopKRouter(config(norm_topk_prob=False)),
        Routing(TOP_K, rounded_weights=True),
        None,
    ),
    "qwen3_moe": (lambda: Qwen3MoeTopKRouter(config()), CAST_SOFTMAX, None),
    "olmoe": (lambda: OlmoeTopKRouter(config()), CAST_SOFTMAX, None),
    "jamba": (lambda: JambaTopKRouter(config()), Routing(TOP_K, rounded_weights=True), None),
    "hunyuan_v1_moe": (
        lambda: HunYuanMoEV1Gate(config()),
        Routing(TOP_K, normalise=True, wide_logits=True),
        None,
    ),
    "deepseek_v2": (
        lambda: DeepseekV2TopkRouter(config()),
        Routing(TOP_K, scaling=2.5, wide_logits=True),
        None,
    ),
    "deepseek_v2-groups": (
        lambda: DeepseekV2TopkRouter(config(topk_method="group_limited_greedy")),
        Routing(TOP_K, scaling=2.5, wide_logits=True, groups=4, kept_groups=2),
        None,
    ),
    "deepseek_v3": (lambda: DeepseekV3TopkRouter(config()), SIGMOID_IN_GROUPS, None),
    "glm4_moe": (lambda: Glm4MoeTopkRouter(config()), SIGMOID_IN_GROUPS, None),
    "dots1": (lambda: Dots1TopkRouter(config()), SIGMOID_IN_GROUPS, None),
    "minimax_m2": (
        lambda: MiniMaxM2TopKRouter(config()),
        Routing(TOP_K, scoring=Scoring.SIGMOID, normalise=True),
        lambda module, x: module(x, module.correction),
    ),
    "lfm2_moe": (
        lambda: Lfm2MoeTopKRouter(config()),
        Routing(TOP_K, scoring=Scoring.SIGMOID, normalise=True, sum_epsilon=1e-6, scaling=2.5, wide_scores=False),
        lambda module, x: module(x, module.correction),
    ),
    "ernie4_5_moe": (
        lambda: Ernie4_5_MoeTopKRouter(config(moe_norm_min=0.9)),
        Routing(TOP_K, normalise=True, sum_floor=0.9, wide_logits=True, rounded_weights=True),
        None,
    ),
    "gpt_oss": (lambda: GptOssTopKRouter(config()), Routing(TOP_K, chosen_first=True, wide_scores=False), None),
    "granitemoe": (
        lambda: GraniteMoeTopKRouter(config()),
        Routing(TOP_K, chosen_first=True, rounded_weights=True),
        None,
    ),
    "phimoe": (
        lambda: PhimoeTopKRouter(config(num_experts_per_tok=2)),
        Routing(2, scoring=Scoring.SPARSEMIXER, jitter=0.3, wide_scores=False),
        None,
    ),
    "dbrx": (lambda: dbrx(1.0), Routing(TOP_K, normalise=True, wide_scores=False), routed_by_dbrx),
    "dbrx-order": (
        lambda: dbrx(2.0),
        Routing(TOP_K, normalise=True, normalise_order=2.0, wide_scores=False),
        routed_by_dbrx,
    ),
    "dbrx-plain": (lambda: dbrx(None), Routing(TOP_K, wide_scores=False), routed_by_dbrx),
}


def dense(chosen: Tensor, weights: Tensor) -> Tensor:
    """The weight of every expert, zero where it is not chosen: whatever the order of the choice."""
    return torch.zeros(len(chosen), EXPERTS, dtype=weights.dtype).scatter(-1, chosen, weights)


@pytest.mark.parametrize("family", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_router_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    build, routing, call = ROUTERS[family]
    module = build().eval()
    tensors = dict((*module.named_parameters(), *module.named_buffers()))
    for seed, tensor in enumerate(tensors.values()):
        tensor.detach().copy_(random_tensor(*tensor.shape, seed=seed, dtype=torch.float32, scale=0.3))
    correction = next((tensor for name, tensor in tensors.items() if "correction" in name), None)
    if family in {"minimax_m2", "lfm2_moe"}:  # these are handed theirs
        correction = module.correction = random_tensor(EXPERTS, seed=77, dtype=torch.float32, scale=0.3)
    elif family != "hunyuan_v1_moe":  # which holds its router in float32 and decides by that
        for name, parameter in module.named_parameters():
            if "correction" not in name:
                parameter.data = parameter.data.to(dtype)
    if family in {"minimax_m2", "lfm2_moe"}:
        module.weight.data = module.weight.data.to(dtype)
    router = next(tensor for name, tensor in module.named_parameters() if name.endswith("weight"))
    x = random_tensor(TOKENS, D, seed=5, dtype=dtype)
    with torch.no_grad():
        logits, weights, chosen = (call or (lambda module, x: module(x)))(module, x)
        found = route(
            x,
            router,
            routing,
            bias=getattr(module, "bias", None),
            correction=None if correction is None else correction.detach().flatten(),
        )
    assert torch.equal(found.router_logits.to(logits.dtype), logits)
    assert torch.equal(found.chosen.sort(-1).values, chosen.sort(-1).values)
    assert found.weights.dtype == weights.dtype
    if routing.normalise and routing.scoring is Scoring.SIGMOID:
        # Theirs are summed in the arbitrary order of an unsorted top-k: the last bit of the sum is not fixed.
        ulp = torch.finfo(weights.dtype).eps
        torch.testing.assert_close(dense(found.chosen, found.weights), dense(chosen, weights), rtol=2 * ulp, atol=0)
    else:
        assert torch.equal(dense(found.chosen, found.weights), dense(chosen, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_llama4_weighs_what_its_experts_read(dtype: torch.dtype) -> None:
    settings = Llama4TextConfig(
        hidden_size=D, intermediate_size=20, num_local_experts=EXPERTS, num_experts_per_tok=2, vocab_size=99
    )
    module = Llama4TextMoe(settings).eval()
    for seed, tensor in enumerate(module.parameters()):
        tensor.detach().copy_(random_tensor(*tensor.shape, seed=seed, dtype=torch.float32, scale=0.3))
    module.to(dtype)
    experts = tuple(
        network(*both.T.chunk(2), down.T)
        for both, down in zip(module.experts.gate_up_proj, module.experts.down_proj, strict=True)
    )
    own = module.shared_expert
    mixture = Mixture(
        module.router.weight,
        experts,
        Routing(2, scoring=Scoring.SIGMOID, chosen_first=True, rounded_weights=True, weigh_input=True),
        shared=network(own.gate_proj.weight, own.up_proj.weight, own.down_proj.weight),
    )
    x = random_tensor(TOKENS, D, seed=5, dtype=dtype)
    with torch.no_grad():
        expected, logits = module(x)
        found = run_mixture(x, mixture, dtype=dtype)
    assert torch.equal(found.router_logits, logits)
    # It sums the experts at once, in another order: each of the sums rounds once more.
    scale = expected.abs().max() * torch.finfo(dtype).eps
    torch.testing.assert_close(found.down, expected, rtol=0, atol=float(4 * scale))


def network(gate: Tensor, up: Tensor, down: Tensor) -> FeedForward:
    plain = make_feed_forward(2, 2)
    return FeedForward(gate, up, down, None, None, None, plain.activation, plain.gating)


def make_mixture(**changes: Any) -> Mixture:
    given: dict[str, Any] = {
        "router": random_tensor(EXPERTS, D, seed=1),
        "experts": tuple(make_feed_forward(D, 10, seed=10 * j, bias=True) for j in range(EXPERTS)),
        "routing": Routing(TOP_K, normalise=True),
    }
    return Mixture(**(given | changes))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weigh_input", [False, True])
def test_a_mixture_follows_its_definition(shared: bool, weigh_input: bool) -> None:
    routing = Routing(TOP_K, normalise=True, weigh_input=weigh_input)
    extra = {"shared": make_feed_forward(D, 7, seed=99), "shared_gate": random_tensor(1, D, seed=98)}
    mixture = make_mixture(routing=routing, **(extra if shared else {}))
    n = random_tensor(2, 6, D, seed=3)
    found = run_mixture(n, mixture)
    for place in [(i, j) for i in range(2) for j in range(6)]:
        row = n[place]
        scores = (mixture.router @ row).softmax(-1)
        best = sorted(range(EXPERTS), key=lambda j: -float(scores[j]))[:TOP_K]
        total = sum(float(scores[j]) for j in best)
        expected = torch.zeros(D, dtype=torch.float64)
        for j in best:
            weight = float(scores[j]) / total
            expert = mixture.experts[j]
            expected += apply_sublayer(weight * row, expert) if weigh_input else weight * apply_sublayer(row, expert)
        assert found.chosen[place].tolist() == best
        torch.testing.assert_close(found.routed[place], expected, rtol=1e-12, atol=1e-13)
        if shared:
            beside = torch.sigmoid(extra["shared_gate"] @ row) * apply_sublayer(row, extra["shared"])
            torch.testing.assert_close(found.shared[place], beside, rtol=1e-12, atol=1e-13)
            expected = expected + beside
        torch.testing.assert_close(found.down[place], expected, rtol=1e-12, atol=1e-13)
    assert (found.shared is None) == (not shared)


def test_a_stream_is_asked_once_for_each_expert_that_has_tokens_in_order() -> None:
    held = make_mixture()
    asked: list[int] = []

    def stream(number: int) -> FeedForward:
        asked.append(number)
        return held.experts[number]

    n = random_tensor(2, D, seed=3)
    found = run_mixture(n, make_mixture(experts=stream))
    assert asked == sorted(set(found.chosen.flatten().tolist()))
    assert len(asked) < EXPERTS
    assert torch.equal(found.down, run_mixture(n, held).down)


def test_each_expert_sees_its_own_tokens_only() -> None:
    rows: list[int] = []

    mixture = make_mixture()
    n = random_tensor(7, D, seed=3)

    def activation(values: Tensor) -> Tensor:
        rows.append(len(values))
        return functional.silu(values)

    experts = tuple(replace(e, activation=replace(e.activation, function=activation)) for e in mixture.experts)
    found = run_mixture(n, make_mixture(experts=experts))
    assert rows == [count for count in found.chosen.flatten().bincount().tolist() if count]
    assert sum(rows) == 7 * TOP_K


def test_sqrtsoftplus_scores() -> None:
    x, router = random_tensor(4, D, seed=3), random_tensor(EXPERTS, D, seed=1)
    found = route(x, router, Routing(EXPERTS, scoring=Scoring.SQRTSOFTPLUS))
    expected = (x @ router.T).exp().log1p().sqrt()
    torch.testing.assert_close(dense(found.chosen, found.weights), expected, rtol=1e-12, atol=1e-13)


def test_a_correction_moves_the_choice_and_not_the_weights() -> None:
    x, router = random_tensor(4, D, seed=3), random_tensor(EXPERTS, D, seed=1)
    routing = Routing(1, scoring=Scoring.SIGMOID)
    correction = torch.zeros(EXPERTS)
    correction[5] = 2.0
    found = route(x, router, routing, correction=correction)
    assert found.chosen.flatten().tolist() == [5] * 4
    torch.testing.assert_close(found.weights[:, 0], (x @ router[5]).sigmoid(), rtol=1e-12, atol=0)


# What cannot be


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2, "kept_groups": 2}, "kept_groups"),
        ({"top_k": 2, "scaling": float("nan")}, "scaling"),
        ({"top_k": 2, "sum_epsilon": -1.0}, "sum_epsilon"),
        ({"top_k": 2, "jitter": 0.1}, "jitter"),
        ({"top_k": 2, "scoring": Scoring.SPARSEMIXER}, "jitter"),
        ({"top_k": 2, "groups": 2, "chosen_first": True}, "groups"),
    ],
)
def test_a_routing_that_cannot_be_is_refused(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        Routing(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"router": torch.ones(EXPERTS)}, "router"),
        ({"router": torch.ones(EXPERTS + 1, D)}, "experts"),
        ({"router_bias": torch.ones(EXPERTS + 1)}, "router_bias"),
        ({"correction": torch.ones(1, EXPERTS)}, "correction"),
        ({"shared_gate": torch.ones(1, D)}, "shared_gate"),
        ({"shared": make_feed_forward(D, 5), "shared_gate": torch.ones(D)}, "shared_gate"),
        ({"shared": make_feed_forward(D + 1, 5)}, "shared"),
        ({"routing": Routing(EXPERTS + 1)}, "top_k"),
        ({"routing": Routing(2, groups=3)}, "groups"),
        ({"routing": Routing(3, groups=8, kept_groups=2)}, "groups"),
        ({"routing": Routing(1, groups=8, kept_groups=2, group_score=GroupScore.TOP_TWO)}, "groups"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        make_mixture(**changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("mixture", "x", "dtype", "field"),
    [
        (make_mixture(), torch.ones(2, D + 1), None, "x"),
        (make_mixture(), torch.ones(2, D), torch.int8, "dtype"),
        (make_mixture(experts=lambda number: make_feed_forward(D + 1, 4)), torch.ones(2, D), None, "experts"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(
    mixture: Mixture, x: Tensor, dtype: torch.dtype | None, field: str
) -> None:
    with pytest.raises(InvalidValue) as caught:
        run_mixture(x, mixture, dtype=dtype)
    assert caught.value.field == field
