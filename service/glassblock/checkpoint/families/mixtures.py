"""Mixtures of experts with tensors of its own for each expert."""

from types import MappingProxyType

from glassblock.checkpoint.attention_row import INTERLEAVED
from glassblock.checkpoint.conditions import (
    Declares,
    Every,
    EveryLayer,
    FromLayer,
    Holds,
    LayerKind,
    LayerListed,
    Whole,
    either,
    unless,
)
from glassblock.checkpoint.families.attention_makers import (
    ATTENTION_BIAS,
    NO_WINDOW,
    WINDOW_4096,
    heads,
    rotary,
    sliding,
)
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    EPS_5,
    EPS_6,
    NEVER,
    PRE_NORMS,
    TIED,
    TRUNKS,
    UNTIED,
    like,
    norms,
    query_key_norms,
    sizes,
    source,
    where,
)
from glassblock.checkpoint.families.mixture_makers import (
    DEEPSEEK_ROUTING,
    META,
    MIXTRAL_ROUTING,
    QWEN_ROUTING,
    dense_unless,
    every,
    experts_of,
    network,
    with_experts,
    without_experts,
)
from glassblock.checkpoint.family import Architecture, LogitsRow, NormRow, RoutingRow, Setting, SquareRoot, Variant
from glassblock.numerics.rotary import RotaryPrecision
from glassblock.numerics.routing import Scoring
from glassblock.numerics.wiring import Placement

_PRE_6, _PRE_5 = norms("rms_llama", EPS_6, *PRE_NORMS), norms("rms_llama", EPS_5, *PRE_NORMS)
_LOCAL = ("num_local_experts",)
_EXPERTS = ("num_experts", "num_local_experts")
_CHOSEN = ("num_experts_per_tok",)
_MLP_EXPERTS = "mlp.experts.{j}."
_BLOCK_SPARSE = network("block_sparse_moe.experts.{j}.", META)

MIXTRAL = Architecture(
    name="mixtral",
    model_types=("mixtral",),
    architectures=("MixtralForCausalLM", "MixtralModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(sizes(4096, 14336, 32, 32, 32000, kv_heads=8), (_LOCAL, 8), (_CHOSEN, 2)),
    feed_forward=None,
    mixture=experts_of("block_sparse_moe.gate", _BLOCK_SPARSE, routing=MIXTRAL_ROUTING),
    norms=_PRE_5,
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("mixtral"),
    attention=heads(window=NO_WINDOW, rotary=rotary(1000000.0)),
    notes=("block_sparse_moe.gate is the router; the gate of an expert is its w1.",),
)

PHIMOE = like(
    MIXTRAL,
    "phimoe",
    "PhimoeForCausalLM",
    "PhimoeModel",
    sizes=with_experts(sizes(4096, 6400, 32, 32, 32064, kv_heads=8), (_LOCAL, 16), (_CHOSEN, 2)),
    norms=norms("layernorm", EPS_5, *PRE_NORMS, has_bias=True),
    mixture=experts_of(
        "block_sparse_moe.gate",
        _BLOCK_SPARSE,
        routing=RoutingRow(
            scoring=Setting((), Scoring.SPARSEMIXER.value),
            wide_scores=False,
            jitter=Setting(("router_jitter_noise",), 0.01),
        ),
    ),
    attention=heads(
        bias=ATTENTION_BIAS,
        window=NO_WINDOW,
        rotary=rotary(1000000.0, original_key="original_max_position_embeddings"),
    ),
    logits=LogitsRow(bias=Setting(("lm_head_bias",), default=False)),
    notes=("The key is rms_norm_eps, and the norms are LayerNorms with a bias.",),
)

MINIMAX_M2 = like(
    MIXTRAL,
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    "MiniMaxM2Model",
    sizes=with_experts(sizes(3072, 1536, 62, 48, 200064, kv_heads=8, head_dim=128), (_LOCAL, 256), (_CHOSEN, 8)),
    mixture=experts_of(
        "block_sparse_moe.gate",
        _BLOCK_SPARSE,
        correction="block_sparse_moe.e_score_correction_bias",
        routing=RoutingRow(scoring=Setting((), Scoring.SIGMOID.value), normalise=ALWAYS),
    ),
    norms=(*_PRE_6, *query_key_norms("rms_llama", EPS_6, ("heads", "head_dim"), ("kv_heads", "head_dim"))),
    attention=heads(rotary=rotary(5000000.0, share=1.0, dim=Setting(("rotary_dim",), None))),
)

_LINEAR_NORM = NormRow("attn_hidden", "self_attn.norm", "rms_llama", Setting((), 1e-6), width=("heads", "head_dim"))

MINIMAX = like(
    MIXTRAL,
    "minimax",
    "MiniMaxForCausalLM",
    "MiniMaxModel",
    layer_variants=(
        Variant(
            # Without such a list the tensors tell.
            LayerKind(("layer_types", "attn_type_list"), ("linear_attention", 0), Holds(_LINEAR_NORM.gain)),
            MappingProxyType({"norms": (*_PRE_5, _LINEAR_NORM)}),
        ),
    ),
    not_run="the residual stream is taken after the norm, and not before it: no wiring here does that",
)

_SPARSE_STEP = Every((unless(LayerListed(("mlp_only_layers",))), every("decoder_sparse_step", 1)))
_QWEN_DENSE = network("mlp.")
_QWEN2_SIZES = with_experts(
    sizes(2048, 5632, 24, 16, 151936, kv_heads=16),
    (_EXPERTS, 60),
    (_CHOSEN, 4),
    expert_width=(("moe_intermediate_size",), 1408),
    shared_width=(("shared_expert_intermediate_size",), 5632),
)
_QWEN_EXPERTS = network(_MLP_EXPERTS, width=("expert_width",))
_QWEN_SHARED = experts_of(
    "mlp.gate",
    _QWEN_EXPERTS,
    shared=network("mlp.shared_expert.", width=("shared_width",)),
    shared_gate="mlp.shared_expert_gate.weight",
    routing=QWEN_ROUTING,
)

_WINDOWED = Declares(("use_sliding_window",), (True,), default=False)
_QWEN2_SLIDING = Every((EveryLayer(Whole((), 2)), unless(FromLayer(Whole(("max_window_layers",), 28)))))

QWEN2_MOE = like(
    MIXTRAL,
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeModel",
    sizes=_QWEN2_SIZES,
    mixture=_QWEN_SHARED,
    norms=_PRE_6,
    config_variants=(without_experts(_EXPERTS, _QWEN_DENSE, _QWEN2_SIZES),),
    layer_variants=(dense_unless(_SPARSE_STEP, _QWEN_DENSE),),
    attention=heads(
        bias=Setting(("qkv_bias",), default=True),
        output_bias=NEVER,
        window=WINDOW_4096,
        window_in=Every((_WINDOWED, sliding(_QWEN2_SLIDING))),
    ),
    notes=(
        "mlp.gate is the router; mlp.shared_expert_gate gives one number, through a sigmoid, on the shared output.",
    ),
)

_QWEN3_SIZES = with_experts(
    sizes(2048, 6144, 24, 32, 151936, kv_heads=4),
    (_EXPERTS, 128),
    (_CHOSEN, 8),
    expert_width=(("moe_intermediate_size",), 768),
)

QWEN3_MOE = like(
    QWEN2_MOE,
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3MoeModel",
    sizes=_QWEN3_SIZES,
    mixture=experts_of("mlp.gate", _QWEN_EXPERTS, routing=QWEN_ROUTING),
    norms=(*_PRE_6, *query_key_norms("rms_llama", EPS_6, ("head_dim",), ("head_dim",))),
    config_variants=(without_experts(_EXPERTS, _QWEN_DENSE, _QWEN3_SIZES),),
    attention=heads(bias=ATTENTION_BIAS, window=WINDOW_4096, window_in=_WINDOWED),
)

OLMOE = like(
    MIXTRAL,
    "olmoe",
    "OlmoeForCausalLM",
    "OlmoeModel",
    sizes=with_experts(sizes(2048, 2048, 16, 16, 50304, kv_heads=16), (_EXPERTS, 64), (_CHOSEN, 8)),
    mixture=experts_of("mlp.gate", network(_MLP_EXPERTS), routing=QWEN_ROUTING),
    norms=(*_PRE_5, *query_key_norms("rms_llama", EPS_5, ("heads", "head_dim"), ("kv_heads", "head_dim"))),
    attention=heads(bias=ATTENTION_BIAS, clip=Setting(("clip_qkv",), None), clip_after_norms=True),
    notes=("Pre-norm, where OLMo 2 norms the branches' outputs.",),
)

FLEX_OLMO = like(
    OLMOE,
    "flex_olmo",
    "FlexOlmoForCausalLM",
    "FlexOlmoModel",
    sizes=with_experts(sizes(4096, 11008, 32, 32, 100352), (_EXPERTS, 7), (_CHOSEN, 5)),
    norms=(
        *norms(
            "rms_f32mul",
            EPS_6,
            ("attn_out", "post_attention_layernorm"),
            ("ffn_out", "post_feedforward_layernorm"),
            ("final", "norm"),
        ),
        *query_key_norms("rms_f32mul", EPS_6, ("heads", "head_dim"), ("kv_heads", "head_dim")),
    ),
    placement=Placement.BRANCH_OUTPUT,
    attention=heads(bias=ATTENTION_BIAS, rotary=rotary(500000.0, precision=RotaryPrecision.WIDE)),
)

GLM4_MOE = Architecture(
    name="glm4_moe",
    model_types=("glm4_moe",),
    architectures=("Glm4MoeForCausalLM", "Glm4MoeModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(
        sizes(4096, 10944, 46, 96, 151552, kv_heads=8),
        (("n_routed_experts",), 128),
        (_CHOSEN, 8),
        expert_width=(("moe_intermediate_size",), 1408),
        shared_experts=(("n_shared_experts",), 1),
    ),
    feed_forward=None,
    mixture=experts_of(
        "mlp.gate",
        network(_MLP_EXPERTS, width=("expert_width",)),
        shared=network("mlp.shared_experts.", width=("expert_width", "shared_experts")),
        correction="mlp.gate.e_score_correction_bias",
        routing=DEEPSEEK_ROUTING,
    ),
    norms=_PRE_5,
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("glm4_moe"),
    config_variants=(
        where(
            "use_qk_norm",
            equals=True,
            default=False,
            norms=(*_PRE_5, *query_key_norms("rms_llama", EPS_5, ("head_dim",), ("head_dim",))),
        ),
    ),
    layer_variants=(dense_unless(FromLayer(Whole(("first_k_dense_replace",), 1)), network("mlp.")),),
    extra_layers=Setting(("num_nextn_predict_layers",), 1.0),
    attention=heads(bias=ATTENTION_BIAS, output_bias=NEVER, rotary=rotary(share=0.5, next_even=True)),
    notes=("Gate and up are separate, where the dense GLM-4 fuses them.",),
)

_HUNYUAN_KEYS = ("num_experts.0", "num_experts")

HUNYUAN_V1_MOE = like(
    MIXTRAL,
    "hunyuan_v1_moe",
    "HunYuanMoEV1ForCausalLM",
    "HunYuanMoEV1Model",
    sizes=with_experts(sizes(4096, 11008, 32, 32, 290943), (_HUNYUAN_KEYS, 1), (("moe_topk.0", "moe_topk"), 1)),
    mixture=experts_of(
        "mlp.gate.wg",
        network(_MLP_EXPERTS),
        shared=network("mlp.shared_mlp."),
        routing=RoutingRow(normalise=ALWAYS, wide_logits=True, rounded_weights=True),
    ),
    norms=(
        *_PRE_5,
        NormRow("q", "self_attn.query_layernorm", "rms_llama", EPS_5, width=("head_dim",)),
        NormRow("k", "self_attn.key_layernorm", "rms_llama", EPS_5, width=("head_dim",)),
    ),
    attention=heads(bias=ATTENTION_BIAS, norms_after_rotary=True),
    notes=("The number of experts may be a list, one for each layer; its first entry is taken.",),
)

_AFMOE_NORMS = (
    *norms(
        "rms_f32mul",
        EPS_5,
        ("attn_in", "input_layernorm"),
        ("attn_out", "post_attention_layernorm"),
        ("ffn_in", "pre_mlp_layernorm"),
        ("ffn_out", "post_mlp_layernorm"),
        ("final", "norm"),
    ),
    *query_key_norms("rms_f32mul", EPS_5, ("head_dim",), ("head_dim",)),
)

AFMOE = like(
    GLM4_MOE,
    "afmoe",
    "AfmoeForCausalLM",
    "AfmoeModel",
    sizes=with_experts(
        sizes(2048, 6144, 32, 16, 200192, kv_heads=16, head_dim=128),
        (("num_experts", "num_local_experts"), 64),
        (_CHOSEN, 6),
        expert_width=(("moe_intermediate_size",), 1408),
        shared_experts=(("num_shared_experts",), 2),
    ),
    mixture=experts_of(
        "mlp.router.gate",
        network(_MLP_EXPERTS, width=("expert_width",)),
        shared=network("mlp.shared_experts.", width=("expert_width", "shared_experts")),
        correction="mlp.expert_bias",
    ),
    norms=_AFMOE_NORMS,
    placement=Placement.SANDWICH,
    config_variants=(
        where("mup_enabled", equals=True, default=False, embedding_scale=SquareRoot("hidden", rounded=False)),
    ),
    layer_variants=(dense_unless(FromLayer(Whole(("num_dense_layers",), 1)), network("mlp.")),),
    extra_layers=Setting((), 0.0),
    notes=("self_attn.gate_proj gates the attention's output; it is no part of the network.",),
)

_USE_BIAS = Setting(("use_bias",), default=False)
_ERNIE_SPARSE = Every(
    (
        every("moe_layer_interval", 1),
        FromLayer(Whole(("moe_layer_start_index",), 1)),
        either(
            Declares(("moe_layer_end_index",), (-1,), -1),
            unless(FromLayer(Whole(("moe_layer_end_index",), 0), shift=-1)),
        ),
    )
)

ERNIE4_5_MOE = like(
    GLM4_MOE,
    "ernie4_5_moe",
    "Ernie4_5_MoeForCausalLM",
    "Ernie4_5_MoeModel",
    sizes=with_experts(
        sizes(2560, 12288, 28, 20, 103424, kv_heads=4),
        (("moe_num_experts",), 64),
        (("moe_k",), 6),
        expert_width=(("moe_intermediate_size",), 1536),
        shared_experts=(("moe_num_shared_experts",), 2),
    ),
    mixture=experts_of(
        "mlp.gate",
        network(_MLP_EXPERTS, width=("expert_width",)),
        shared=network("mlp.shared_experts.", bias=_USE_BIAS, width=("expert_width", "shared_experts")),
        correction="mlp.moe_statics.e_score_correction_bias",
        routing=RoutingRow(
            normalise=ALWAYS,
            sum_floor=Setting(("moe_norm_min",), 1e-12),
            wide_logits=True,
            rounded_weights=True,
        ),
    ),
    config_variants=(),
    layer_variants=(dense_unless(_ERNIE_SPARSE, network("mlp.", bias=_USE_BIAS)),),
    extra_layers=Setting((), 0.0),
    tied=TIED,
    attention=heads(bias=_USE_BIAS, rotary=rotary(500000.0, arrangement=INTERLEAVED, precision=RotaryPrecision.WIDE)),
    logits=LogitsRow(bias=_USE_BIAS),
    notes=("use_bias gives biases to dense and shared networks, not to routed experts.",),
)

ROWS = (
    MIXTRAL,
    PHIMOE,
    MINIMAX_M2,
    MINIMAX,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    FLEX_OLMO,
    GLM4_MOE,
    HUNYUAN_V1_MOE,
    AFMOE,
    ERNIE4_5_MOE,
)
"""The rows of this module."""
