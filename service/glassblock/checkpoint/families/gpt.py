"""GPT-2 and what descends from it."""

from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.attention_row import INTERLEAVED, RotaryRow, ScoreScale
from glassblock.checkpoint.families.attention_makers import (
    ATTENTION_BIAS_ON,
    NO_WINDOW,
    fused_heads,
    heads,
    rotary,
)
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    AS_MANY_AS_HEADS,
    EPS_GPT,
    EPS_LAYER_NORM,
    GPT_TRUNKS,
    HIDDEN_OVER_HEADS,
    NEVER,
    PRE_NORMS,
    TIED,
    TRUNKS,
    UNTIED,
    Places,
    gpt_sizes,
    like,
    linear,
    norms,
    plain,
    sizes,
    source,
    where,
)
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    FusedProjection,
    LogitsRow,
    PositionsRow,
    Ratio,
    Setting,
    SizeSetting,
    Trunk,
)
from glassblock.numerics.wiring import Placement

_GPT2_PLACES: Places = (("attn_in", "ln_1"), ("ffn_in", "ln_2"), ("final", "ln_f"))
_SHARED_PLACES: Places = (("attn_in", "ln_1"), ("ffn_in", "ln_1"), ("final", "ln_f"))

_BY_LAYER = Setting(("scale_attn_by_inverse_layer_idx",), default=False)
_GPT2_HEADS = fused_heads(
    "attn.c_attn", "attn.c_proj", bias=ALWAYS, layout="in_out", rotary=None, scale=ScoreScale(by_layer=_BY_LAYER)
)

GPT2 = Architecture(
    name="gpt2",
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    trunks=GPT_TRUNKS,
    layer="h.{i}.",
    sizes=gpt_sizes(768, 12, 12, 50257),
    feed_forward=FeedForwardRow(
        up=linear("mlp.c_fc"),
        down=linear("mlp.c_proj"),
        activation=Setting(("activation_function",), "gelu_new"),
        bias=ALWAYS,
        layout="in_out",
    ),
    norms=norms("layernorm", EPS_GPT, *_GPT2_PLACES, has_bias=True),
    placement=Placement.PRE,
    embedding="wte.weight",
    tied=TIED,
    verified="executed",
    sources=(*source("gpt2"), "huggingface/transformers: src/transformers/pytorch_utils.py (Conv1D)"),
    attention=_GPT2_HEADS,
    positions=PositionsRow("wpe.weight"),
    config_variants=(
        where(
            "scale_attn_weights",
            equals=False,
            default=True,
            attention=replace(_GPT2_HEADS, scale=ScoreScale(power=0.0, by_layer=_BY_LAYER)),
        ),
    ),
    notes=("Weights are stored [in, out]. n_inner null means four times n_embd.",),
)

GPT_BIGCODE = like(
    GPT2,
    "gpt_bigcode",
    "GPTBigCodeForCausalLM",
    "GPTBigCodeModel",
    sizes=gpt_sizes(768, 12, 12, 50257, kv_heads=1),
    feed_forward=plain(
        Setting(("activation_function",), "gelu_pytorch_tanh"), ALWAYS, up="mlp.c_fc", down="mlp.c_proj"
    ),
    attention=fused_heads("attn.c_attn", "attn.c_proj", bias=ALWAYS, rotary=None),
    positions=PositionsRow("wpe.weight"),
    config_variants=(
        where(
            "multi_query",
            equals=False,
            default=True,
            sizes=gpt_sizes(768, 12, 12, 50257),
            attention=fused_heads("attn.c_attn", "attn.c_proj", arrangement="groups", bias=ALWAYS, rotary=None),
        ),
        where("scale_attn_weights", equals=False, default=True, attention=None),
    ),
    notes=("Every name is GPT-2's, and weights are stored [out, in].",),
)

GPTJ = like(
    GPT2,
    "gptj",
    "GPTJForCausalLM",
    "GPTJModel",
    "CodeGenForCausalLM",
    "CodeGenModel",
    model_types=("gptj", "codegen"),
    sizes=gpt_sizes(4096, 28, 16, 50400),
    feed_forward=plain(Setting(("activation_function",), "gelu_new"), ALWAYS, up="mlp.fc_in", down="mlp.fc_out"),
    norms=norms("layernorm", EPS_GPT, *_SHARED_PLACES, has_bias=True),
    placement=Placement.PARALLEL,
    branches_first=True,
    tied=UNTIED,
    sources=(*source("gptj"), *source("codegen")),
    attention=heads(
        place="attn.",
        output="out_proj",
        rotary=rotary(
            arrangement=INTERLEAVED,
            dim=Setting(("rotary_dim",), 64.0),
            max_positions=Setting(("n_positions",), 2048.0),
        ),
    ),
    logits=LogitsRow(bias=ALWAYS),
    config_variants=(where("model_type", equals="codegen", default="gptj", attention=None),),
    notes=("There is no ln_2: ln_1 feeds attention and the network.",),
)

GPT_NEOX = Architecture(
    name="gpt_neox",
    model_types=("gpt_neox",),
    architectures=("GPTNeoXForCausalLM", "GPTNeoXModel"),
    trunks=(Trunk("gpt_neox.", "embed_out.weight"), Trunk("", "embed_out.weight")),
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {
            **sizes(6144, 24576, 44, 64, 50432),
            "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
        }
    ),
    feed_forward=plain(Setting(("hidden_act",), "gelu"), ALWAYS, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    norms=norms(
        "layernorm",
        EPS_LAYER_NORM,
        ("attn_in", "input_layernorm"),
        ("ffn_in", "post_attention_layernorm"),
        ("final", "final_layer_norm"),
        has_bias=True,
    ),
    placement=Placement.PARALLEL,
    branches_first=True,
    embedding="embed_in.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("gpt_neox"),
    config_variants=(
        where("use_parallel_residual", equals=False, default=True, placement=Placement.PRE, branches_first=False),
    ),
    attention=fused_heads(
        "attention.query_key_value",
        "attention.dense",
        arrangement="groups",
        bias=ATTENTION_BIAS_ON,
        rotary=RotaryRow(
            theta=Setting(("rope_parameters.rope_theta", "rope_theta", "rotary_emb_base"), 10000.0),
            share=Setting(("rope_parameters.partial_rotary_factor", "partial_rotary_factor", "rotary_pct"), 0.25),
            next_even=True,
        ),
    ),
    notes=("Where the branches are parallel, post_attention_layernorm reads the layer's input.",),
)

STARCODER2 = Architecture(
    name="starcoder2",
    model_types=("starcoder2",),
    architectures=("Starcoder2ForCausalLM", "Starcoder2Model"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=sizes(3072, 12288, 30, 24, 49152, kv_heads=2),
    feed_forward=plain(
        Setting(("hidden_act",), "gelu_pytorch_tanh"),
        Setting(("use_bias",), default=True),
        up="mlp.c_fc",
        down="mlp.c_proj",
    ),
    norms=norms("layernorm", Setting(("norm_epsilon",), 1e-5), *PRE_NORMS, has_bias=True),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=TIED,
    verified="executed",
    sources=source("starcoder2"),
    attention=heads(bias=Setting(("use_bias",), default=True), window=NO_WINDOW),
    notes=("The network has GPT-2's names and is stored [out, in].",),
)

NANOGPT = like(
    GPT2,
    "nanogpt",
    model_types=(),
    trunks=(
        Trunk("transformer.", "lm_head.weight"),
        Trunk("_orig_mod.transformer.", "_orig_mod.lm_head.weight"),
    ),
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("n_embd",), 768),
            "intermediate": SizeSetting((), Ratio("hidden", times=4)),
            "layers": SizeSetting(("n_layer",), 12),
            "heads": SizeSetting(("n_head",), 12),
            "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 50304),
        }
    ),
    feed_forward=plain(Setting((), "gelu"), Setting(("bias",), default=True), up="mlp.c_fc", down="mlp.c_proj"),
    norms=norms("layernorm", Setting((), 1e-5), *_GPT2_PLACES, has_bias=True),
    tied=Setting((), default=True),
    verified="source only",
    sources=("karpathy/nanoGPT: model.py",),
    config_variants=(
        where("bias", equals=False, default=True, norms=norms("layernorm_nobias", Setting((), 1e-5), *_GPT2_PLACES)),
    ),
    attention=fused_heads("attn.c_attn", "attn.c_proj", bias=Setting(("bias",), default=True), rotary=None),
    positions=PositionsRow("wpe.weight"),
    notes=(
        "Every name is GPT-2's, weights are stored [out, in], and GELU is the exact one; its older code had tanh's.",
        "A compiled model has _orig_mod. in front of its names. The arguments of the model, as config.json, are read.",
    ),
)

JAIS = like(
    GPT2,
    "jais",
    "JAISLMHeadModel",
    "JAISModel",
    feed_forward=FeedForwardRow(
        up=linear("mlp.c_fc"),
        down=linear("mlp.c_proj"),
        activation=Setting(("activation_function",), "gelu_new"),
        bias=ALWAYS,
        layout="in_out",
    ),
    embedding_scale=Setting(("mup_embeddings_scale", "embeddings_scale"), 1.0),
    verified="source only",
    sources=(
        "vllm-project/vllm: vllm/model_executor/models/jais.py",
        "ggml-org/llama.cpp: gguf-py/gguf/tensor_mapping.py",
    ),
    config_variants=(
        where(
            "activation_function",
            equals="swiglu",
            default="gelu_new",
            feed_forward=FeedForwardRow(
                gate=linear("mlp.c_fc2"),
                up=linear("mlp.c_fc"),
                down=linear("mlp.c_proj"),
                activation=Setting(("activation_function",), "swiglu"),
                bias=ALWAYS,
                layout="in_out",
            ),
        ),
    ),
    notes=(
        "c_fc2 is the gate and c_fc the up projection; there is a gate where activation_function is swiglu.",
        "The multiplier of the embedding also multiplies learned positions. Its attention has ALiBi, and is not read.",
    ),
)

REFACT = like(
    GPT2,
    "refact",
    "GPTRefactForCausalLM",
    model_types=("gpt_refact",),
    trunks=(Trunk("", "lm_head.weight"),),
    layer="transformer.h.{i}.",
    sizes=MappingProxyType({**gpt_sizes(2048, 32, 32, 49216, kv_heads=1), "intermediate": SizeSetting((), None)}),
    feed_forward=FeedForwardRow(
        fused=FusedProjection("mlp.gate_up_proj.weight", "mlp.gate_up_proj.bias"),
        down=linear("mlp.c_proj"),
        activation=Setting((), "silu"),
        bias=NEVER,
        width=None,
    ),
    norms=norms("layernorm_nobias", EPS_GPT, *_GPT2_PLACES),
    embedding="transformer.wte.weight",
    tied=UNTIED,
    verified="source only",
    sources=("smallcloudai/Refact-1_6B-fim: modeling_gpt_refact.py",),
    config_variants=(),
    notes=(
        "The width is two thirds of n_inner, rounded up to a multiple of 256. The last norm lies beside the trunk.",
        "Norms are LayerNorms without a bias; llama.cpp's graph takes them for RMSNorms. Attention has ALiBi.",
    ),
)


ROWS = (
    GPT2,
    GPT_BIGCODE,
    GPTJ,
    GPT_NEOX,
    STARCODER2,
    NANOGPT,
    JAIS,
    REFACT,
)
"""The rows of this module."""
