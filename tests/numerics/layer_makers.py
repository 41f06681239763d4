"""Tiny random decoders of transformers, and their layers in the numerics' own terms, mapped by hand.

One row of `DECODERS` is one family: how to configure it, how its attention is computed there, and a function that reads
layer i out of the model's state.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from glassblock.numerics.activations import activation_named, gating_named
from glassblock.numerics.attention import Attention, NormScope
from glassblock.numerics.feed_forward import FeedForward
from glassblock.numerics.latent_attention import LatentAttention, latent_score_scale
from glassblock.numerics.layer import Layer
from glassblock.numerics.mixture import Mixture
from glassblock.numerics.norms import NORM_KINDS, Norm
from glassblock.numerics.rotary import Arrangement, Rotary, RotaryPrecision
from glassblock.numerics.rotary_forms import rotary_form_named
from glassblock.numerics.routing import GroupScore, Routing, Scoring
from glassblock.numerics.wiring import Placement, Wiring
from torch import Tensor, nn

TINY = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class State:
    """The tensors under a prefix, by the rest of their names; None where there is none."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix

    def __call__(self, name: str) -> Tensor | None:
        return self.tensors.get(self.prefix + name)

    def under(self, name: str) -> "State":
        return State(self.tensors, self.prefix + name)


Maker = Callable[[State, Any, int], Layer]


@dataclass(frozen=True)
class Decoder:
    """A family: `implementation` is the attention path of transformers that ours repeats."""

    config: str
    make: Maker
    settings: dict[str, Any] = field(default_factory=dict)
    implementation: str = "sdpa"
    prefix: str = "model.layers.{i}."
    layers: str = "model.layers"
    attention: str = "self_attn"
    final_norm: str = "model.norm"
    # Why bits in bfloat16 cannot agree, where they cannot.
    rounds_otherwise: str | None = None
    final_kind: str = "rms_llama"
    logit_scale: Callable[[Any], float] = lambda config: 1.0


def tiny_model(decoder: Decoder, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A random model whose every tensor matters: no gain is one, no bias and no router zero."""
    config = getattr(transformers, decoder.config)(**(TINY | decoder.settings))
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation=decoder.implementation, experts_implementation="eager"
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name or not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(noise * 0.2 + (1.0 if "norm" in name and name.endswith("weight") else 0.0))
    # What stays in float32 when a checkpoint is loaded in another dtype: rotary frequencies and DeepSeek's corrections.
    wide = {
        name: tensor.clone() for name, tensor in model.named_buffers() if "inv_freq" in name or "correction" in name
    }
    model.to(dtype)
    for name, tensor in wide.items():
        owner, _, own = name.rpartition(".")
        model.get_submodule(owner).register_buffer(own, tensor, persistent="correction" in name)
    return model.eval()


# Parts


def norm(kind: str, state: State, name: str, eps: float) -> Norm:
    return Norm(NORM_KINDS[kind], state(f"{name}.weight"), state(f"{name}.bias"), eps)


def pre(kind: str, state: State, name: str, eps: float, *, branch_scale: float = 1.0) -> Wiring:
    return Wiring(Placement.PRE, input_norm=norm(kind, state, name, eps), branch_scale=branch_scale)


def sandwich(kind: str, state: State, before: str, after: str, eps: float) -> Wiring:
    return Wiring(
        Placement.SANDWICH, input_norm=norm(kind, state, before, eps), output_norm=norm(kind, state, after, eps)
    )


def rotary(config: Any, dim: int, *, parameters: Mapping[str, Any] | None = None, **options: Any) -> Rotary:
    given = dict(config.rope_parameters if parameters is None else parameters)
    form = rotary_form_named(given["rope_type"], given, max_positions=config.max_position_embeddings)
    return Rotary(dim, given["rope_theta"], form, **options)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def attention(state: State, config: Any, **options: Any) -> Attention:
    """Separate projections, `q_proj` and so on."""
    width = head_dim(config)
    return Attention(
        **{role: state(f"{role[0]}_proj.weight") for role in ROLES},
        **{f"{role}_bias": state(f"{role[0]}_proj.bias") for role in ROLES},
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=width,
        **({"scale": width**-0.5} | ({} if "rotary" in options else {"rotary": rotary(config, width)}) | options),
    )


ROLES = ("query", "key", "value", "output")


def head_norms(kind: str, state: State, eps: float, scope: NormScope = NormScope.HEAD) -> dict[str, Any]:
    def flat(name: str) -> Norm:
        return Norm(NORM_KINDS[kind], state(f"{name}.weight").flatten(), None, eps)

    return {"query_norm": flat("q_norm"), "key_norm": flat("k_norm"), "norm_scope": scope}


def gated(
    gate: Tensor, up: Tensor, down: Tensor, activation: str, *, biases: tuple[Tensor | None, ...] = (None, None, None)
) -> FeedForward:
    return FeedForward(gate, up, down, *biases, activation_named(activation), gating_named("product"))


def mlp(state: State, activation: str) -> FeedForward:
    return gated(state("gate_proj.weight"), state("up_proj.weight"), state("down_proj.weight"), activation)


def plain(state: State, up: str, down: str, activation: str, *, transposed: bool = False) -> FeedForward:
    def weight(name: str) -> Tensor:
        return state(f"{name}.weight").T if transposed else state(f"{name}.weight")

    biases = (None, state(f"{up}.bias"), state(f"{down}.bias"))
    return FeedForward(None, weight(up), weight(down), *biases, activation_named(activation), gating_named("product"))


def stacked_experts(state: State, activation: str) -> tuple[FeedForward, ...]:
    both, down = state("gate_up_proj"), state("down_proj")
    return tuple(gated(*pair.chunk(2), last, activation) for pair, last in zip(both, down, strict=True))


# Families


def llama_like(
    state: State,
    config: Any,
    i: int,
    *,
    kind: str = "rms_llama",
    activation: str | None = None,
    second: Callable[[State, Any], FeedForward | Mixture] | None = None,
    options: Callable[[State, Any, int], dict[str, Any]] = lambda state, config, i: {},
    eps: str = "rms_norm_eps",
    branch_scale: Callable[[Any], float] = lambda config: 1.0,
) -> Layer:
    scale = branch_scale(config)
    own = state.under("self_attn.")
    return Layer(
        attention(own, config, **options(own, config, i)),
        pre(kind, state, "input_layernorm", getattr(config, eps), branch_scale=scale),
        second(state, config) if second else mlp(state.under("mlp."), activation or config.hidden_act),
        pre(kind, state, "post_attention_layernorm", getattr(config, eps), branch_scale=scale),
    )


def window(state: State, config: Any, i: int) -> dict[str, Any]:
    return {"window": config.sliding_window}


def local_window(config: Any, i: int) -> int | None:
    return config.sliding_window if config.layer_types[i] == "sliding_attention" else None


def qwen2_options(state: State, config: Any, i: int) -> dict[str, Any]:
    return {"window": local_window(config, i)}


def qwen3_options(state: State, config: Any, i: int) -> dict[str, Any]:
    return head_norms("rms_llama", state, config.rms_norm_eps)


def smollm3_options(state: State, config: Any, i: int) -> dict[str, Any]:
    return {} if config.no_rope_layers[i] else {"rotary": None}


def granite_options(state: State, config: Any, i: int) -> dict[str, Any]:
    return {"scale": config.attention_multiplier}


def gemma2(state: State, config: Any, i: int) -> Layer:
    own, wired = state.under("self_attn."), partial(sandwich, "rms_plus1", state, eps=config.rms_norm_eps)
    return Layer(
        attention(
            own,
            config,
            scale=config.query_pre_attn_scalar**-0.5,
            softcap=config.attn_logit_softcapping,
            window=local_window(config, i),
        ),
        wired("input_layernorm", "post_attention_layernorm"),
        mlp(state.under("mlp."), "gelu_pytorch_tanh"),
        wired("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )


def gemma3(state: State, config: Any, i: int) -> Layer:
    own, wired = state.under("self_attn."), partial(sandwich, "rms_plus1", state, eps=config.rms_norm_eps)
    turning = rotary(config, head_dim(config), parameters=config.rope_parameters[config.layer_types[i]])
    return Layer(
        attention(
            own,
            config,
            scale=config.query_pre_attn_scalar**-0.5,
            window=local_window(config, i),
            rotary=turning,
            **head_norms("rms_plus1", own, config.rms_norm_eps),
        ),
        wired("input_layernorm", "post_attention_layernorm"),
        mlp(state.under("mlp."), "gelu_pytorch_tanh"),
        wired("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    )


def glm4(state: State, config: Any, i: int) -> Layer:
    wired = partial(sandwich, "rms_llama", state, eps=config.rms_norm_eps)
    dim = int(head_dim(config) * config.rope_parameters["partial_rotary_factor"])
    gate_up = state("mlp.gate_up_proj.weight")
    return Layer(
        attention(state.under("self_attn."), config, rotary=rotary(config, dim, arrangement=Arrangement.PAIRS)),
        wired("input_layernorm", "post_self_attn_layernorm"),
        gated(*gate_up.chunk(2), state("mlp.down_proj.weight"), "silu"),
        wired("post_attention_layernorm", "post_mlp_layernorm"),
    )


def phi3(state: State, config: Any, i: int) -> Layer:
    width = head_dim(config)
    rows = [config.num_attention_heads * width, *(2 * [config.num_key_value_heads * width])]
    query, key, value = state("self_attn.qkv_proj.weight").split(rows)
    dim = int(width * config.rope_parameters.get("partial_rotary_factor", 1.0))
    gate_up = state("mlp.gate_up_proj.weight")
    return Layer(
        Attention(
            *(query, key, value, state("self_attn.o_proj.weight")),
            *(config.num_attention_heads, config.num_key_value_heads, width, width**-0.5),
            rotary=rotary(config, dim),
            window=config.sliding_window,
        ),
        pre("rms_llama", state, "input_layernorm", config.rms_norm_eps),
        gated(*gate_up.chunk(2), state("mlp.down_proj.weight"), "silu"),
        pre("rms_llama", state, "post_attention_layernorm", config.rms_norm_eps),
    )


def olmo2(state: State, config: Any, i: int) -> Layer:
    own, eps = state.under("self_attn."), config.rms_norm_eps

    def after(name: str) -> Wiring:
        return Wiring(Placement.BRANCH_OUTPUT, output_norm=norm("rms_f32mul", state, name, eps))

    return Layer(
        attention(
            own,
            config,
            rotary=rotary(config, head_dim(config), precision=RotaryPrecision.WIDE),
            **head_norms("rms_f32mul", own, eps, NormScope.WIDTH),
        ),
        after("post_attention_layernorm"),
        mlp(state.under("mlp."), "silu"),
        after("post_feedforward_layernorm"),
    )


def cohere(state: State, config: Any, i: int) -> Layer:
    own, eps = state.under("self_attn."), config.layer_norm_eps
    norms = head_norms("layernorm_cohere", own, eps, NormScope.EACH_HEAD) if config.use_qk_norm else {}
    turning = rotary(config, head_dim(config), arrangement=Arrangement.PAIRS, precision=RotaryPrecision.ROUNDED_TABLE)
    wiring = Wiring(Placement.PARALLEL, input_norm=norm("layernorm_cohere", state, "input_layernorm", eps))
    return Layer(attention(own, config, rotary=turning, **norms), wiring, mlp(state.under("mlp."), "silu"), wiring)


def gpt_neox(state: State, config: Any, i: int) -> Layer:
    heads, width, eps = config.num_attention_heads, config.hidden_size // config.num_attention_heads, 1e-5

    def split(tensor: Tensor) -> tuple[Tensor, ...]:
        """Stored head by head: query, key, value."""
        return tuple(part.flatten(0, 1) for part in tensor.unflatten(0, (heads, 3, width)).unbind(1))

    fused = state.under("attention.query_key_value.")
    parallel = config.use_parallel_residual

    def wiring(name: str) -> Wiring:
        placement = Placement.PARALLEL if parallel else Placement.PRE
        return Wiring(placement, input_norm=norm("layernorm", state, name, eps), branches_first=parallel)

    query, key, value = split(fused("weight"))
    query_bias, key_bias, value_bias = split(fused("bias"))
    return Layer(
        Attention(
            *(query, key, value, state("attention.dense.weight"), heads, heads, width, width**-0.5),
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=state("attention.dense.bias"),
            rotary=rotary(config, int(width * config.rope_parameters["partial_rotary_factor"])),
        ),
        wiring("input_layernorm"),
        plain(state.under("mlp."), "dense_h_to_4h", "dense_4h_to_h", "gelu"),
        wiring("post_attention_layernorm"),
    )


def gpt2(state: State, config: Any, i: int) -> Layer:
    heads, width = config.n_head, config.n_embd // config.n_head
    query, key, value = state("attn.c_attn.weight").T.chunk(3)
    query_bias, key_bias, value_bias = state("attn.c_attn.bias").chunk(3)
    scale = width**-0.5 / (i + 1 if config.scale_attn_by_inverse_layer_idx else 1)
    return Layer(
        Attention(
            *(query, key, value, state("attn.c_proj.weight").T, heads, heads, width, scale),
            query_bias=query_bias,
            key_bias=key_bias,
            value_bias=value_bias,
            output_bias=state("attn.c_proj.bias"),
        ),
        pre("layernorm", state, "ln_1", config.layer_norm_epsilon),
        plain(state.under("mlp."), "c_fc", "c_proj", "gelu_new", transposed=True),
        pre("layernorm", state, "ln_2", config.layer_norm_epsilon),
    )


def starcoder2_mlp(state: State, config: Any) -> FeedForward:
    return plain(state.under("mlp."), "c_fc", "c_proj", "gelu_pytorch_tanh")


def mixtral_experts(state: State, config: Any) -> Mixture:
    return Mixture(
        state("mlp.gate.weight"),
        stacked_experts(state.under("mlp.experts."), "silu"),
        Routing(config.num_experts_per_tok, normalise=True),
    )


def qwen_experts(state: State, config: Any) -> FeedForward | Mixture:
    routing = Routing(config.num_experts_per_tok, normalise=config.norm_topk_prob, rounded_weights=True)
    shared = state.under("mlp.shared_expert.")
    return Mixture(
        state("mlp.gate.weight"),
        stacked_experts(state.under("mlp.experts."), "silu"),
        routing,
        shared=mlp(shared, "silu") if shared("up_proj.weight") is not None else None,
        shared_gate=state("mlp.shared_expert_gate.weight"),
    )


def latent(state: State, config: Any, arrangement: Arrangement, precision: RotaryPrecision) -> LatentAttention:
    scaled = config.rope_parameters["rope_type"] != "default"
    factors = {
        "factor": config.rope_parameters.get("factor"),
        "mscale_all_dim": config.rope_parameters.get("mscale_all_dim", 0.0),
    }
    narrow = config.q_lora_rank is not None
    return LatentAttention(
        key_value_down=state("kv_a_proj_with_mqa.weight"),
        key_value_norm=norm("rms_llama", state, "kv_a_layernorm", 1e-6),
        key_value_up=state("kv_b_proj.weight"),
        output=state("o_proj.weight"),
        heads=config.num_attention_heads,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        scale=latent_score_scale(config.qk_nope_head_dim + config.qk_rope_head_dim, **(factors if scaled else {})),
        rotary=rotary(config, config.qk_rope_head_dim, arrangement=arrangement, precision=precision),
        query=state("q_proj.weight"),
        query_down=state("q_a_proj.weight"),
        query_norm=norm("rms_llama", state, "q_a_layernorm", 1e-6) if narrow else None,
        query_up=state("q_b_proj.weight"),
        query_down_bias=state("q_a_proj.bias"),
        key_value_down_bias=state("kv_a_proj_with_mqa.bias"),
        output_bias=state("o_proj.bias"),
    )


def deepseek(state: State, config: Any, i: int, *, version: int) -> Layer:
    if version == 2:
        turned = Arrangement.PAIRS, RotaryPrecision.COMPLEX
        routing = Routing(
            config.num_experts_per_tok,
            groups=config.n_group if config.topk_method == "group_limited_greedy" else 1,
            kept_groups=config.topk_group if config.topk_method == "group_limited_greedy" else 1,
            scaling=config.routed_scaling_factor,
            wide_logits=True,
        )
    else:
        interleaved = Arrangement.PAIRS_TO_HALVES if config.rope_interleave else Arrangement.HALVES
        turned = interleaved, RotaryPrecision.ROUNDED
        routing = Routing(
            config.num_experts_per_tok,
            scoring=Scoring.SIGMOID,
            normalise=config.norm_topk_prob,
            sum_epsilon=1e-20,
            groups=config.n_group,
            kept_groups=config.topk_group,
            group_score=GroupScore.TOP_TWO,
            scaling=config.routed_scaling_factor,
            wide_logits=True,
        )
    second: FeedForward | Mixture
    if i < config.first_k_dense_replace:
        second = mlp(state.under("mlp."), "silu")
    else:
        second = Mixture(
            state("mlp.gate.weight"),
            stacked_experts(state.under("mlp.experts."), "silu"),
            routing,
            correction=state("mlp.gate.e_score_correction_bias"),
            shared=mlp(state.under("mlp.shared_experts."), "silu"),
        )
    return Layer(
        latent(state.under("self_attn."), config, *turned),
        pre("rms_llama", state, "input_layernorm", config.rms_norm_eps),
        second,
        pre("rms_llama", state, "post_attention_layernorm", config.rms_norm_eps),
    )


def gpt_oss_experts(state: State, config: Any) -> Mixture:
    own = state.under("mlp.experts.")
    gating = gating_named("swiglu_oai", alpha=config.swiglu_alpha, limit=config.swiglu_limit)
    experts = tuple(
        FeedForward(both.T[::2], both.T[1::2], down.T, bias[::2], bias[1::2], last, activation_named("silu"), gating)
        for both, down, bias, last in zip(
            own("gate_up_proj"), own("down_proj"), own("gate_up_proj_bias"), own("down_proj_bias"), strict=True
        )
    )
    routing = Routing(config.num_experts_per_tok, chosen_first=True, wide_scores=False)
    return Mixture(state("mlp.router.weight"), experts, routing, router_bias=state("mlp.router.bias"))


def gpt_oss_options(state: State, config: Any, i: int) -> dict[str, Any]:
    return {"sinks": state("sinks"), "window": local_window(config, i)}


def olmo(state: State, config: Any, i: int) -> Layer:
    wiring = Wiring(Placement.PRE, input_norm=Norm(NORM_KINDS["layernorm_noparam"], None, None, 1e-5))
    turning = rotary(config, head_dim(config), precision=RotaryPrecision.WIDE)
    return Layer(
        attention(state.under("self_attn."), config, clip_qkv=config.clip_qkv, rotary=turning),
        wiring,
        mlp(state.under("mlp."), "silu"),
        wiring,
    )


def olmoe_options(state: State, config: Any, i: int) -> dict[str, Any]:
    norms = head_norms("rms_llama", state, config.rms_norm_eps, NormScope.WIDTH)
    return {"clip_qkv": config.clip_qkv, "clip_after_norms": True, **norms}


def hunyuan_options(state: State, config: Any, i: int) -> dict[str, Any]:
    eps = config.rms_norm_eps
    return {
        "query_norm": norm("rms_llama", state, "query_layernorm", eps),
        "key_norm": norm("rms_llama", state, "key_layernorm", eps),
        "norms_after_rotary": True,
    }


def phi(state: State, config: Any, i: int) -> Layer:
    wiring = Wiring(
        Placement.PARALLEL,
        input_norm=norm("layernorm", state, "input_layernorm", config.layer_norm_eps),
        branches_first=True,
    )
    own, dim = state.under("self_attn."), int(head_dim(config) * config.rope_parameters["partial_rotary_factor"])
    renamed = State({key.replace(".dense.", ".o_proj."): value for key, value in own.tensors.items()}, own.prefix)
    return Layer(
        attention(renamed, config, rotary=rotary(config, dim)),
        wiring,
        plain(state.under("mlp."), "fc1", "fc2", "gelu_new"),
        wiring,
    )


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 8.0],
    "original_max_position_embeddings": 8,
    "partial_rotary_factor": 0.75,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LOCAL_GLOBAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
MOE = {"moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3}
NEOX = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}}
IN_NEOX = {
    "prefix": "gpt_neox.layers.{i}.",
    "layers": "gpt_neox.layers",
    "attention": "attention",
    "final_norm": "gpt_neox.final_layer_norm",
    "final_kind": "layernorm",
}

DECODERS: dict[str, Decoder] = {
    "llama": Decoder("LlamaConfig", llama_like, {"attention_bias": True}),
    "llama3": Decoder("LlamaConfig", llama_like, {"rope_parameters": LLAMA3}),
    "mistral": Decoder("MistralConfig", partial(llama_like, options=window), {"sliding_window": 5}),
    "qwen2": Decoder(
        "Qwen2Config", partial(llama_like, options=qwen2_options), LOCAL_GLOBAL | {"use_sliding_window": True}
    ),
    "qwen3": Decoder("Qwen3Config", partial(llama_like, options=qwen3_options), {"head_dim": 24}),
    "gemma": Decoder(
        "GemmaConfig",
        partial(llama_like, kind="rms_plus1", activation="gelu_pytorch_tanh"),
        {"head_dim": 24, "num_key_value_heads": 1},
        final_kind="rms_plus1",
    ),
    "gemma2": Decoder(
        "Gemma2Config",
        gemma2,
        LOCAL_GLOBAL | {"head_dim": 16, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0},
        implementation="eager",
        final_kind="rms_plus1",
    ),
    "gemma3": Decoder(
        "Gemma3TextConfig",
        gemma3,
        LOCAL_GLOBAL | {"head_dim": 16, "query_pre_attn_scalar": 32},
        final_kind="rms_plus1",
    ),
    "phi3": Decoder("Phi3Config", phi3, {"sliding_window": 5}),
    "phi3-longrope": Decoder("Phi3Config", phi3, {"rope_parameters": LONGROPE}),
    "olmo2": Decoder("Olmo2Config", olmo2, final_kind="rms_f32mul"),
    "olmo": Decoder("OlmoConfig", olmo, {"clip_qkv": 0.5}, final_kind="layernorm_noparam"),
    "olmoe": Decoder(
        "OlmoeConfig",
        partial(llama_like, second=qwen_experts, options=olmoe_options),
        {"clip_qkv": 0.8, "num_experts": 8, "num_experts_per_tok": 3},
    ),
    "hunyuan_v1_dense": Decoder("HunYuanDenseV1Config", partial(llama_like, options=hunyuan_options), {"head_dim": 16}),
    "phi": Decoder("PhiConfig", phi, final_norm="model.final_layernorm", final_kind="layernorm"),
    "smollm3": Decoder("SmolLM3Config", partial(llama_like, options=smollm3_options), {"no_rope_layers": [1, 0]}),
    "granite": Decoder(
        "GraniteConfig",
        partial(llama_like, options=granite_options, branch_scale=lambda config: config.residual_multiplier),
        {"attention_multiplier": 0.11, "residual_multiplier": 0.22, "embedding_multiplier": 3.0, "logits_scaling": 8.0},
        logit_scale=lambda config: 1 / config.logits_scaling,
    ),
    "glm4": Decoder("Glm4Config", glm4, {"head_dim": 16, "attention_bias": True}),
    "cohere": Decoder(
        "CohereConfig",
        cohere,
        {"logit_scale": 0.25},
        final_kind="layernorm_cohere",
        logit_scale=lambda config: config.logit_scale,
    ),
    "cohere-norms": Decoder(
        "CohereConfig",
        cohere,
        {"use_qk_norm": True, "logit_scale": 0.25},
        final_kind="layernorm_cohere",
        logit_scale=lambda config: config.logit_scale,
    ),
    "starcoder2": Decoder(
        "Starcoder2Config",
        partial(llama_like, kind="layernorm", second=starcoder2_mlp, options=window, eps="norm_epsilon"),
        {"sliding_window": 5},
        final_kind="layernorm",
    ),
    "gpt_neox": Decoder("GPTNeoXConfig", gpt_neox, NEOX, **IN_NEOX),
    "gpt_neox-sequential": Decoder("GPTNeoXConfig", gpt_neox, NEOX | {"use_parallel_residual": False}, **IN_NEOX),
    "gpt2": Decoder(
        "GPT2Config",
        gpt2,
        {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
        prefix="transformer.h.{i}.",
        layers="transformer.h",
        attention="attn",
        final_norm="transformer.ln_f",
        final_kind="layernorm",
    ),
    "mixtral": Decoder(
        "MixtralConfig",
        partial(llama_like, second=mixtral_experts),
        {"num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": Decoder(
        "Qwen2MoeConfig", partial(llama_like, second=qwen_experts), MOE | {"shared_expert_intermediate_size": 40}
    ),
    "qwen3_moe": Decoder(
        "Qwen3MoeConfig",
        partial(llama_like, second=qwen_experts, options=qwen3_options),
        MOE | {"norm_topk_prob": True, "head_dim": 24},
    ),
    "deepseek_v2": Decoder(
        "DeepseekV2Config",
        partial(deepseek, version=2),
        LATENT | {"topk_method": "group_limited_greedy", "rope_parameters": YARN},
    ),
    "deepseek_v2-greedy": Decoder(
        "DeepseekV2Config", partial(deepseek, version=2), LATENT | {"topk_method": "greedy", "q_lora_rank": None}
    ),
    "deepseek_v3": Decoder("DeepseekV3Config", partial(deepseek, version=3), LATENT | {"rope_parameters": YARN}),
    "deepseek_v3-halves": Decoder(
        "DeepseekV3Config", partial(deepseek, version=3), LATENT | {"rope_interleave": False, "attention_bias": True}
    ),
    "gpt_oss": Decoder(
        "GptOssConfig",
        partial(llama_like, kind="rms_f32mul", second=gpt_oss_experts, options=gpt_oss_options),
        LOCAL_GLOBAL | {"head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2},
        implementation="eager",
        final_kind="rms_f32mul",
        rounds_otherwise="its experts add the bias after rounding the product, a linear map before",
    ),
}
