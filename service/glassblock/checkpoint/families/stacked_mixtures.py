"""Mixtures whose experts lie in one tensor, and layers that mix attention with something else."""

from types import MappingProxyType
from typing import Any

from glassblock.checkpoint.attention_row import THETA_KEYS, RotaryRow
from glassblock.checkpoint.conditions import AxisIs, Every, EveryLayer, LayerListed, Says, Whole, either, unless
from glassblock.checkpoint.families.attention_makers import (
    ATTENTION_BIAS,
    ATTENTION_BIAS_ON,
    fused_heads,
    heads,
    rotary,
    sliding,
)
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    EPS_5,
    EPS_6,
    HIDDEN_OVER_HEADS,
    MLP_BIAS,
    PRE_NORMS,
    TIED,
    TRUNKS,
    UNTIED,
    like,
    linear,
    norms,
    query_key_norms,
    sizes,
    source,
)
from glassblock.checkpoint.families.mixture_makers import (
    dense_unless,
    every,
    experts_of,
    fused_network,
    network,
    with_experts,
)
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    MixtureRow,
    Projection,
    RoutingRow,
    Setting,
    SizeSetting,
    Trunk,
    Variant,
)
from glassblock.numerics.routing import Scoring
from glassblock.numerics.wiring import Placement

_PRE_6, _PRE_5 = norms("rms_llama", EPS_6, *PRE_NORMS), norms("rms_llama", EPS_5, *PRE_NORMS)
_LOCAL, _CHOSEN = ("num_local_experts",), ("num_experts_per_tok",)
_PARAMETERS = ("", "_bias")
_LINEARS = ("input_linear", "output_linear")

DBRX = Architecture(
    name="dbrx",
    model_types=("dbrx",),
    architectures=("DbrxForCausalLM", "DbrxModel"),
    trunks=(Trunk("transformer.", "lm_head.weight"), Trunk("", "lm_head.weight")),
    layer="blocks.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("d_model",), 2048),
            "intermediate": SizeSetting(("ffn_config.ffn_hidden_size",), 3584),
            "layers": SizeSetting(("n_layers",), 24),
            "heads": SizeSetting(("n_heads",), 16),
            "kv_heads": SizeSetting(("attn_config.kv_n_heads",), 1),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 32000),
            "experts": SizeSetting(("ffn_config.moe_num_experts",), 4),
            "experts_per_token": SizeSetting(("ffn_config.moe_top_k",), 1),
        }
    ),
    feed_forward=None,
    mixture=MixtureRow(
        linear("ffn.router.layer"),
        FeedForwardRow(
            gate=Projection("ffn.experts.mlp.w1", "ffn.experts.mlp.w1_bias"),
            up=Projection("ffn.experts.mlp.v1", "ffn.experts.mlp.v1_bias"),
            down=Projection("ffn.experts.mlp.w2", "ffn.experts.mlp.w2_bias"),
            activation=Setting(("ffn_config.ffn_act_fn.name",), "silu"),
            bias=Setting((), default=False),
            down_layout="in_out",
        ),
        arrangement="concatenated",
        routing=RoutingRow(
            normalise_order=Setting(("ffn_config.moe_normalize_expert_weights",), 1.0), wide_scores=False
        ),
    ),
    norms=norms(
        "layernorm_nobias",
        Setting((), 1e-5),
        ("attn_in", "norm_attn_norm.norm_1"),
        ("ffn_in", "norm_attn_norm.norm_2"),
        ("final", "norm_f"),
    ),
    placement=Placement.PRE,
    embedding="wte.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("dbrx"),
    attention=fused_heads(
        "norm_attn_norm.attn.Wqkv",
        "norm_attn_norm.attn.out_proj",
        clip=Setting(("attn_config.clip_qkv",), None),
        rotary=RotaryRow(
            theta=Setting((*THETA_KEYS, "attn_config.rope_theta"), 10000.0),
            max_positions=Setting(("max_seq_len",), 2048.0),
        ),
    ),
    notes=(
        "w1, v1 and w2 have one shape, experts one after the other; w2 is stored [in, out], the others [out, in].",
        "The norm in front of the network lies in the attention's module.",
        "transformers 5 reads rope_parameters; attn_config.rope_theta, of older configs, counts where that is absent.",
    ),
)

GPT_OSS = Architecture(
    name="gpt_oss",
    model_types=("gpt_oss",),
    architectures=("GptOssForCausalLM", "GptOssModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(sizes(2880, 2880, 36, 64, 201088, kv_heads=8, head_dim=64), (_LOCAL, 128), (_CHOSEN, 4)),
    feed_forward=None,
    mixture=experts_of(
        "mlp.router",
        fused_network(
            "mlp.experts.gate_up_proj",
            "mlp.experts.down_proj",
            activation=Setting((), "silu"),
            bias=ALWAYS,
            suffixes=_PARAMETERS,
            interleaved=True,
            layout="in_out",
            gating="swiglu_oai",
            gating_parameters=MappingProxyType(
                {"limit": Setting(("swiglu_limit",), 7.0), "alpha": Setting(("swiglu_alpha",), 1.702)}
            ),
        ),
        arrangement="stacked",
        router_bias=ALWAYS,
        routing=RoutingRow(chosen_first=True, wide_scores=False),
    ),
    norms=norms("rms_f32mul", EPS_5, *PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=(*source("gpt_oss"), "openai/gpt-oss: gpt_oss/torch/model.py"),
    attention=heads(
        bias=ATTENTION_BIAS_ON,
        sinks="self_attn.sinks",
        window=Setting(("sliding_window",), 128.0),
        window_in=sliding(unless(EveryLayer(Whole((), 2), shift=1))),
        rotary=rotary(
            150000.0,
            form=(
                ("rope_type", "yarn"),
                ("factor", 32.0),
                ("beta_fast", 32.0),
                ("beta_slow", 1.0),
                ("truncate", False),
                ("original_max_position_embeddings", 4096),
            ),
            max_positions=Setting(("max_position_embeddings",), 131072.0),
        ),
    ),
    notes=(
        "hidden_act is not used: hidden = (clip(up) + 1) * gate * sigmoid(alpha * gate), the gate clamped from above.",
        "Gate and up alternate, gate first. Weights are stored [expert, in, out].",
    ),
)

_LLAMA4_DENSE = network("feed_forward.")

LLAMA4 = Architecture(
    name="llama4",
    model_types=("llama4_text", "llama4"),
    architectures=("Llama4ForCausalLM", "Llama4TextModel", "Llama4ForConditionalGeneration"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {
            **with_experts(
                sizes(5120, 16384, 48, 40, 202048, kv_heads=8, head_dim=128),
                (_LOCAL, 16),
                (_CHOSEN, 1),
                expert_width=(("intermediate_size",), 8192),
            ),
            "intermediate": SizeSetting(("intermediate_size_mlp",), 16384),
        }
    ),
    feed_forward=None,
    mixture=experts_of(
        "feed_forward.router",
        fused_network(
            "feed_forward.experts.gate_up_proj",
            "feed_forward.experts.down_proj",
            suffixes=_PARAMETERS,
            width=("expert_width",),
            layout="in_out",
        ),
        arrangement="stacked",
        shared=network("feed_forward.shared_expert.", width=("expert_width",)),
        routing=RoutingRow(
            scoring=Setting((), Scoring.SIGMOID.value), chosen_first=True, rounded_weights=True, weigh_input=True
        ),
    ),
    norms=_PRE_5,
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("llama4"),
    layer_variants=(
        dense_unless(
            either(
                LayerListed(("moe_layers",)),
                Every((unless(Says(("moe_layers",))), every("interleave_moe_layer_step", 1))),
            ),
            _LLAMA4_DENSE,
        ),
    ),
    notes=(
        "intermediate_size is the experts' width; dense layers have intermediate_size_mlp.",
        "The router's score multiplies an expert's input, not its output.",
    ),
)

JETMOE = Architecture(
    name="jetmoe",
    model_types=("jetmoe",),
    architectures=("JetMoeForCausalLM", "JetMoeModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {
            **with_experts(sizes(2048, 5632, 12, 32, 32000, kv_heads=16), (_LOCAL, 8), (_CHOSEN, 2)),
            "head_dim": SizeSetting(("kv_channels",), 128),
        }
    ),
    feed_forward=None,
    mixture=experts_of(
        "mlp.router.layer",
        fused_network(*(f"mlp.{name}" for name in _LINEARS), activation=Setting(("activation_function",), "silu")),
        arrangement="stacked",
        output_bias="mlp.bias",
    ),
    norms=(
        *norms("rms_llama", Setting((), 1e-6), ("attn_in", "input_layernorm"), ("ffn_in", "post_attention_layernorm")),
        *norms("rms_llama", EPS_6, ("final", "norm")),
    ),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=TIED,
    verified="executed",
    sources=source("jetmoe"),
    notes=("The layers' norms ignore rms_norm_eps, which only the last one reads.", "Attention has experts as well."),
)

ARIA = Architecture(
    name="aria",
    model_types=("aria_text", "aria"),
    architectures=("AriaTextForCausalLM", "AriaTextModel", "AriaForConditionalGeneration"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(
        sizes(4096, 4096, 32, 32, 32000),
        (("moe_num_experts",), 8),
        (("moe_topk",), 2),
        shared_experts=(("moe_num_shared_experts",), 2),
    ),
    feed_forward=None,
    mixture=experts_of(
        "mlp.router",
        fused_network("mlp.experts.fc1", "mlp.experts.fc2", activation=Setting((), "silu"), layout="in_out"),
        arrangement="stacked",
        shared=network("mlp.shared_experts.", bias=MLP_BIAS, width=("intermediate", "shared_experts")),
        routing=RoutingRow(chosen_first=True, wide_scores=False),
    ),
    norms=_PRE_6,
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("aria"),
    attention=heads(bias=ATTENTION_BIAS),
    notes=("The half that the code calls gate is not the activated one: the activated half comes first.",),
)

_QWEN_STEP = Every((unless(LayerListed(("mlp_only_layers",))), every("decoder_sparse_step", 1)))
_QWEN_STACK: dict[str, Any] = {"suffixes": _PARAMETERS, "width": ("expert_width",)}
_QWEN_STACKED: dict[str, Any] = {
    "arrangement": "stacked",
    "routing": RoutingRow(normalise=ALWAYS, rounded_weights=True),
}
_QWEN_NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

QWEN3_VL_MOE = Architecture(
    name="qwen3_vl_moe",
    model_types=("qwen3_vl_moe",),
    architectures=("Qwen3VLMoeForConditionalGeneration", "Qwen3VLMoeModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(
        sizes(2048, 5632, 24, 16, 151936, kv_heads=16, head_dim=128),
        (("num_experts", "num_local_experts"), 60),
        (_CHOSEN, 4),
        expert_width=(("moe_intermediate_size",), 1408),
    ),
    feed_forward=None,
    mixture=experts_of("mlp.gate", fused_network(*_QWEN_NAMES, layout="in_out", **_QWEN_STACK), **_QWEN_STACKED),
    norms=(*_PRE_6, *query_key_norms("rms_llama", EPS_6, ("head_dim",), ("head_dim",))),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("qwen3_vl_moe"),
    layer_variants=(
        # Released files have [expert, in, out]; transformers 5 writes [expert, out, in] and reads both by shape.
        Variant(
            AxisIs("mlp.experts.down_proj", -2, "input_layernorm.weight"),
            MappingProxyType(
                {"mixture": experts_of("mlp.gate", fused_network(*_QWEN_NAMES, **_QWEN_STACK), **_QWEN_STACKED)}
            ),
        ),
        dense_unless(_QWEN_STEP, network("mlp.")),
    ),
    attention=heads(bias=ATTENTION_BIAS, rotary=rotary(500000.0)),
    notes=("Experts are stored [expert, in, out] in released files, [expert, out, in] in files of transformers 5.",),
)

QWEN3_VL_MOE_TEXT = like(
    QWEN3_VL_MOE,
    "qwen3_vl_moe_text",
    "Qwen3VLMoeTextModel",
    tied=TIED,
    sources=QWEN3_VL_MOE.sources,
    notes=QWEN3_VL_MOE.notes,
)

ROWS = (
    DBRX,
    GPT_OSS,
    LLAMA4,
    JETMOE,
    ARIA,
    QWEN3_VL_MOE,
    QWEN3_VL_MOE_TEXT,
)
"""The rows of this module."""
