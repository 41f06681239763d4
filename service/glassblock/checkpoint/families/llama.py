"""Families built as Llama is: separate projections with its names, mostly pre-norm and gated."""

from types import MappingProxyType

from glassblock.checkpoint.attention_row import INTERLEAVED
from glassblock.checkpoint.conditions import Declares, Every, FromLayer, LayerKind, Says, Whole, either, unless
from glassblock.checkpoint.families.attention_makers import (
    ATTENTION_BIAS,
    ATTENTION_BIAS_ON,
    IN_EVERY_LAYER,
    WINDOW_4096,
    all_but_every,
    heads,
    rotary,
    sliding,
)
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    EPS_5,
    EPS_6,
    EPS_LAYER_NORM,
    MLP_BIAS,
    NEVER,
    PRE_NORMS,
    SILU,
    TIED,
    TRUNKS,
    UNTIED,
    gated,
    like,
    norms,
    query_key_norms,
    sizes,
    source,
    where,
)
from glassblock.checkpoint.family import (
    Architecture,
    NormRow,
    Setting,
    Variant,
)
from glassblock.numerics.rotary import RotaryPrecision
from glassblock.numerics.wiring import Placement

_WINDOWED = Declares(("use_sliding_window",), (True,), default=False)
_EXAONE_SLIDING = sliding(all_but_every("sliding_window_pattern", 4))

LLAMA = Architecture(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LlamaModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=sizes(4096, 11008, 32, 32, 32000),
    feed_forward=gated(SILU, MLP_BIAS),
    norms=norms("rms_llama", EPS_6, *PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("llama"),
    attention=heads(bias=ATTENTION_BIAS),
    notes=(
        "The default epsilon, 1e-6, is not the 1e-5 of nearly every released Llama 2 and 3.",
        "post_attention_layernorm is the norm in front of the feed-forward network.",
    ),
)


MISTRAL = like(
    LLAMA,
    "mistral",
    "MistralForCausalLM",
    "MistralModel",
    "MinistralForCausalLM",
    "MinistralModel",
    model_types=("mistral", "ministral"),
    sizes=sizes(4096, 14336, 32, 32, 32000, kv_heads=8),
    feed_forward=gated(SILU, NEVER),
    sources=(*source("mistral"), *source("ministral")),
    attention=heads(window=WINDOW_4096, window_in=sliding(IN_EVERY_LAYER)),
    notes=("The default epsilon is 1e-6; released checkpoints have 1e-5.",),
)

MINISTRAL3 = like(
    LLAMA,
    "ministral3",
    "Ministral3ForCausalLM",
    "Ministral3Model",
    sizes=sizes(4096, 14336, 34, 32, 131072, kv_heads=8, head_dim=128),
    feed_forward=gated(SILU, NEVER),
    norms=norms("rms_llama", EPS_5, *PRE_NORMS),
)

QWEN2 = like(
    LLAMA,
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen2Model",
    sizes=sizes(4096, 22016, 32, 32, 151936, kv_heads=32),
    feed_forward=gated(SILU, NEVER),
    attention=heads(
        bias=ALWAYS,
        output_bias=NEVER,
        window=WINDOW_4096,
        window_in=Every((_WINDOWED, sliding(FromLayer(Whole(("max_window_layers",), 28))))),
    ),
    notes=("The epsilon differs within the family: 1e-6 up to 7B, 1e-5 above.",),
)

QWEN3 = like(
    LLAMA,
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3Model",
    sizes=sizes(4096, 22016, 32, 32, 151936, kv_heads=32, head_dim=128),
    feed_forward=gated(SILU, NEVER),
    norms=(
        *norms("rms_llama", EPS_6, *PRE_NORMS),
        *query_key_norms("rms_llama", EPS_6, ("head_dim",), ("head_dim",)),
    ),
    attention=heads(
        bias=ATTENTION_BIAS,
        window=WINDOW_4096,
        window_in=Every((_WINDOWED, sliding(FromLayer(Whole(("max_window_layers",), 28))))),
    ),
)

_SMOLLM3_TURNED = LayerKind(("no_rope_layers",), (1, True), all_but_every("no_rope_layer_interval", 4))

SMOLLM3 = like(
    LLAMA,
    "smollm3",
    "SmolLM3ForCausalLM",
    "SmolLM3Model",
    sizes=sizes(2048, 11008, 36, 16, 128256, kv_heads=4),
    tied=TIED,
    attention=heads(
        bias=ATTENTION_BIAS,
        window=Setting(("sliding_window",), None),
        window_in=Every((_WINDOWED, sliding(unless(_SMOLLM3_TURNED)))),
        rotary=rotary(2000000.0),
        turned_in=_SMOLLM3_TURNED,
    ),
)

SEED_OSS = like(
    LLAMA,
    "seed_oss",
    "SeedOssForCausalLM",
    "SeedOssModel",
    sizes=sizes(4096, 27648, 64, 80, 155136, kv_heads=8, head_dim=128),
    attention=heads(bias=ATTENTION_BIAS_ON, output_bias=Setting(("attention_out_bias",), default=False)),
)

ERNIE4_5 = like(
    LLAMA,
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    "Ernie4_5Model",
    sizes=sizes(1024, 3072, 18, 16, 103424, kv_heads=2, head_dim=128),
    feed_forward=gated(SILU, Setting(("use_bias",), default=False)),
    norms=norms("rms_llama", EPS_5, *PRE_NORMS),
    tied=TIED,
    attention=heads(
        bias=Setting(("use_bias",), default=False),
        rotary=rotary(500000.0, arrangement=INTERLEAVED, precision=RotaryPrecision.WIDE),
    ),
)

HUNYUAN_V1_DENSE = like(
    LLAMA,
    "hunyuan_v1_dense",
    "HunYuanDenseV1ForCausalLM",
    "HunYuanDenseV1Model",
    sizes=sizes(4096, 11008, 32, 32, 290943),
    feed_forward=gated(SILU, NEVER),
    norms=(
        *norms("rms_llama", EPS_5, *PRE_NORMS),
        NormRow("q", "self_attn.query_layernorm", "rms_llama", EPS_5, width=("head_dim",)),
        NormRow("k", "self_attn.key_layernorm", "rms_llama", EPS_5, width=("head_dim",)),
    ),
    attention=heads(bias=ATTENTION_BIAS, norms_after_rotary=True),
    notes=("The norms of queries and keys are called layernorm and are RMSNorm; they come after the rotation.",),
)

HELIUM = like(
    LLAMA,
    "helium",
    "HeliumForCausalLM",
    "HeliumModel",
    sizes=sizes(2560, 7040, 24, 20, 48000, kv_heads=20, head_dim=128),
    norms=norms("rms_f32mul", Setting(("rms_norm_eps",), 1e-8), *PRE_NORMS),
    attention=heads(bias=ATTENTION_BIAS, output_bias=NEVER, rotary=rotary(100000.0, arrangement=INTERLEAVED)),
)

INTERNLM3 = like(
    LLAMA,
    "internlm3",
    "InternLM3ForCausalLM",
    "InternLM3Model",
    "LlamaForCausalLM",
    "LlamaModel",
    sizes=sizes(4096, 10240, 48, 32, 128512, kv_heads=2, head_dim=128),
    feed_forward=gated(SILU, Setting(("mlp_bias", "bias"), default=False)),
    norms=norms("rms_llama", EPS_5, *PRE_NORMS),
    sources=(
        "huggingface/transformers: src/transformers/models/internlm3/configuration_internlm3.py",
        *source("llama"),
    ),
    attention=heads(bias=Setting(("qkv_bias", "attention_bias"), default=False)),
)

EXAONE4 = like(
    LLAMA,
    "exaone4",
    "Exaone4ForCausalLM",
    "Exaone4Model",
    sizes=sizes(4096, 16384, 32, 32, 102400, kv_heads=32),
    feed_forward=gated(SILU, NEVER),
    norms=(
        *norms(
            "rms_llama",
            EPS_5,
            ("attn_out", "post_attention_layernorm"),
            ("ffn_out", "post_feedforward_layernorm"),
            ("final", "norm"),
        ),
        *query_key_norms("rms_llama", EPS_5, ("head_dim",), ("head_dim",)),
    ),
    placement=Placement.BRANCH_OUTPUT,
    attention=heads(
        window=WINDOW_4096,
        window_in=_EXAONE_SLIDING,
        turned_in=either(_EXAONE_SLIDING, unless(Says(("sliding_window",)))),
    ),
    notes=("There is no input_layernorm; post_attention_layernorm is on what attention returns, not as in Llama.",),
)

_STABLE_NORMS = norms("layernorm", EPS_LAYER_NORM, *PRE_NORMS, has_bias=True)
_STABLE_SHARED = norms(
    "layernorm",
    EPS_LAYER_NORM,
    ("attn_in", "input_layernorm"),
    ("ffn_in", "input_layernorm"),
    ("final", "norm"),
    has_bias=True,
)
_STABLE_HEAD_NORMS = (
    NormRow(
        "q",
        "self_attn.q_layernorm.norms.{h}",
        "layernorm_nobias",
        EPS_LAYER_NORM,
        width=("heads", "head_dim"),
        per_head=True,
    ),
    NormRow(
        "k",
        "self_attn.k_layernorm.norms.{h}",
        "layernorm_nobias",
        EPS_LAYER_NORM,
        width=("kv_heads", "head_dim"),
        per_head=True,
    ),
)

STABLELM = like(
    LLAMA,
    "stablelm",
    "StableLmForCausalLM",
    "StableLmModel",
    "StableLMEpochForCausalLM",
    model_types=("stablelm", "stablelm_epoch"),
    sizes=sizes(2560, 6912, 32, 32, 50304, kv_heads=32),
    feed_forward=gated(SILU, NEVER),
    norms=_STABLE_NORMS,
    config_variants=(
        where(
            "use_parallel_residual",
            equals=True,
            default=False,
            placement=Placement.PARALLEL,
            norms=_STABLE_SHARED,
        ),
        where("qk_layernorm", equals=True, default=False, norms=(*_STABLE_NORMS, *_STABLE_HEAD_NORMS)),
        Variant(
            Every((Declares(("qk_layernorm",), (True,)), Declares(("use_parallel_residual",), (True,)))),
            MappingProxyType({"norms": (*_STABLE_SHARED, *_STABLE_HEAD_NORMS)}),
        ),
    ),
    attention=heads(bias=Setting(("use_qkv_bias",), default=False), output_bias=NEVER, rotary=rotary(share=0.25)),
    notes=(
        "Llama's names, and LayerNorm with a bias.",
        "With qk_layernorm each head has a norm of its own: self_attn.q_layernorm.norms.0 and on.",
    ),
)


ROWS = (
    LLAMA,
    MISTRAL,
    MINISTRAL3,
    QWEN2,
    QWEN3,
    SMOLLM3,
    SEED_OSS,
    ERNIE4_5,
    HUNYUAN_V1_DENSE,
    HELIUM,
    INTERNLM3,
    EXAONE4,
    STABLELM,
)
"""The rows of this module."""
