"""The OLMo families."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.attention_row import AttentionRow, RotaryRow
from glassblock.checkpoint.conditions import (
    Declares,
    Every,
    EveryLayer,
    Holds,
    LayerKind,
    Neither,
    Whole,
    either,
    unless,
)
from glassblock.checkpoint.families.attention_makers import (
    ATTENTION_BIAS,
    WINDOW_4096,
    fused_heads,
    heads,
    rotary,
    rotary_under,
    sliding,
)
from glassblock.checkpoint.families.makers import (
    AS_MANY_AS_HEADS,
    EPS_5,
    EPS_6,
    HIDDEN_OVER_HEADS,
    NEVER,
    PRE_NORMS,
    SILU,
    TRUNKS,
    UNTIED,
    Places,
    bare_norms,
    gated,
    like,
    linear,
    norms,
    plain,
    query_key_norms,
    sizes,
    source,
    where,
)
from glassblock.checkpoint.families.mixture_makers import A_CONFIG
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    FusedProjection,
    NormRow,
    Setting,
    Size,
    SizeSetting,
    Trunk,
    Variant,
)
from glassblock.numerics.rotary import RotaryPrecision
from glassblock.numerics.wiring import Placement

_WIDE = RotaryPrecision.WIDE

OLMO2 = Architecture(
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    architectures=("Olmo2ForCausalLM", "Olmo2Model", "Olmo3ForCausalLM", "Olmo3Model"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=sizes(4096, 11008, 32, 32, 50304),
    feed_forward=gated(SILU, NEVER),
    norms=(
        *norms(
            "rms_f32mul",
            EPS_5,
            ("attn_out", "post_attention_layernorm"),
            ("ffn_out", "post_feedforward_layernorm"),
            ("final", "norm"),
        ),
        *query_key_norms("rms_f32mul", EPS_5, ("heads", "head_dim"), ("kv_heads", "head_dim")),
    ),
    placement=Placement.BRANCH_OUTPUT,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=(*source("olmo2"), *source("olmo3")),
    attention=heads(bias=ATTENTION_BIAS, rotary=rotary(precision=_WIDE)),
    config_variants=(
        where(
            "model_type",
            equals="olmo3",
            default="olmo2",
            attention=heads(
                bias=ATTENTION_BIAS,
                window=WINDOW_4096,
                window_in=sliding(unless(EveryLayer(Whole((), 4), shift=1))),
                rotary=rotary_under("full_attention", 500000.0, "rope_theta", form="rope_scaling", precision=_WIDE),
                windowed_rotary=rotary_under("sliding_attention", 500000.0, "rope_theta", precision=_WIDE),
            ),
        ),
    ),
    notes=(
        "There is no norm in front of attention or of the network: both read the residual stream itself.",
        "The default epsilon is 1e-5; released OLMo 2 checkpoints have 1e-6.",
    ),
)

OLMO = like(
    OLMO2,
    "olmo",
    "OlmoForCausalLM",
    "OlmoModel",
    norms=bare_norms("layernorm_noparam", Setting((), 1e-5), *PRE_NORMS),
    placement=Placement.PRE,
    attention=heads(bias=ATTENTION_BIAS, clip=Setting(("clip_qkv",), None), rotary=rotary(precision=_WIDE)),
    config_variants=(),
    notes=("No norm has tensors, and epsilon is fixed.",),
)

_LINEAR = LayerKind(
    ("layer_types",),
    ("linear_attention",),
    either(
        Every((A_CONFIG, unless(EveryLayer(Whole((), 4), shift=1)))),
        Every((unless(A_CONFIG), Holds("attention_layer_norm.weight"))),
    ),
)
_HYBRID_QUERY_KEY = query_key_norms("rms_f32mul", EPS_6, ("heads", "head_dim"), ("kv_heads", "head_dim"))

OLMO_HYBRID = like(
    OLMO2,
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    "OlmoHybridModel",
    sizes=sizes(3840, 11008, 32, 30, 100352),
    norms=(
        *norms(
            "rms_f32mul",
            EPS_6,
            ("attn_out", "post_attention_layernorm"),
            ("ffn_out", "post_feedforward_layernorm"),
            ("final", "norm"),
        ),
        *_HYBRID_QUERY_KEY,
    ),
    layer_variants=(
        Variant(
            _LINEAR,
            MappingProxyType(
                {
                    "placement": Placement.PRE,
                    "norms": norms(
                        "rms_f32mul",
                        EPS_6,
                        ("attn_in", "attention_layer_norm"),
                        ("ffn_in", "feedforward_layer_norm"),
                        ("final", "norm"),
                    ),
                }
            ),
        ),
        Variant(
            Every((Neither((_LINEAR,)), Holds("feedforward_layer_norm.weight"))),
            MappingProxyType(
                {
                    "norms": (
                        *norms(
                            "rms_f32mul",
                            EPS_6,
                            ("attn_out", "feedforward_layer_norm"),
                            ("ffn_out", "post_feedforward_layernorm"),
                            ("final", "norm"),
                        ),
                        *_HYBRID_QUERY_KEY,
                    )
                }
            ),
        ),
    ),
    notes=(
        "Layers with linear attention are pre-norm; layers with full attention have norms on what they return.",
        "transformers 5.24 writes the attention norm of those as feedforward_layer_norm, the name of another's.",
    ),
)

_AI2_EPS = Setting(("layer_norm_eps",), 1e-5)
_AI2_PLACES: Places = (("attn_in", "attn_norm"), ("ffn_in", "ff_norm"), ("final", "ln_f"))
_AI2_PLACES_AFTER: Places = (("attn_out", "attn_norm"), ("ffn_out", "ff_norm"), ("final", "ln_f"))
_AI2_AFTER = norms("rms_llama", _AI2_EPS, *_AI2_PLACES_AFTER)
_AI2_QUERY_NORMS = (
    NormRow("q", "q_norm", "rms_llama", _AI2_EPS, width=("heads", "head_dim")),
    NormRow("k", "k_norm", "rms_llama", _AI2_EPS, width=("kv_heads", "head_dim")),
)
_AI2_BIAS = Setting(("include_bias",), default=True)
_AI2_SIZES: Mapping[Size, SizeSetting] = MappingProxyType(
    {
        "hidden": SizeSetting(("d_model",), 768),
        "intermediate": SizeSetting(("mlp_hidden_size",), None, over=2),
        "layers": SizeSetting(("n_layers",), 12),
        "heads": SizeSetting(("n_heads",), 12),
        "kv_heads": SizeSetting(("n_kv_heads",), AS_MANY_AS_HEADS),
        "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
        "vocab": SizeSetting(("embedding_size", "vocab_size"), 50304),
    }
)
_AI2_ROTARY = RotaryRow(theta=Setting(("rope_theta",), 10000.0), forms=(), share=Setting((), 1.0))


def _ai2_heads(turning: RotaryRow) -> AttentionRow:
    return fused_heads("att_proj", "attn_out", bias=_AI2_BIAS, clip=Setting(("clip_qkv",), None), rotary=turning)


OLMO_AI2 = like(
    OLMO2,
    "olmo_ai2",
    "OLMoForCausalLM",
    "OLMoModelForCausalLM",
    model_types=("hf_olmo",),
    trunks=(
        Trunk("model.transformer.", "model.transformer.ff_out.weight"),
        Trunk("transformer.", "transformer.ff_out.weight"),
    ),
    layer="blocks.{i}.",
    sizes=_AI2_SIZES,
    feed_forward=FeedForwardRow(
        fused=FusedProjection("ff_proj.weight", "ff_proj.bias", order=("up", "gate")),
        down=linear("ff_out"),
        activation=Setting(("activation_type",), "swiglu"),
        bias=_AI2_BIAS,
    ),
    norms=norms("layernorm", _AI2_EPS, *_AI2_PLACES, has_bias=True),
    placement=Placement.PRE,
    embedding="wte.weight",
    tied=Setting(("weight_tying",), default=True),
    verified="source only",
    sources=("allenai/OLMo: olmo/model.py, olmo/config.py",),
    config_variants=(
        where("include_bias", equals=False, default=True, norms=norms("layernorm", _AI2_EPS, *_AI2_PLACES)),
        where("bias_for_layer_norm", equals=False, default=None, norms=norms("layernorm", _AI2_EPS, *_AI2_PLACES)),
        where(
            "bias_for_layer_norm",
            equals=True,
            default=None,
            norms=norms("layernorm", _AI2_EPS, *_AI2_PLACES, has_bias=True),
        ),
        where(
            "layer_norm_with_affine",
            equals=False,
            default=True,
            norms=bare_norms("layernorm_noparam", _AI2_EPS, *_AI2_PLACES),
        ),
        where("layer_norm_type", equals="rms", default="default", norms=norms("rms_llama", _AI2_EPS, *_AI2_PLACES)),
        where(
            "norm_after",
            equals=True,
            default=False,
            placement=Placement.BRANCH_OUTPUT,
            norms=_AI2_AFTER,
        ),
        Variant(
            Every((Declares(("norm_after",), (True,)), Declares(("attention_layer_norm",), (True,)))),
            MappingProxyType({"placement": Placement.BRANCH_OUTPUT, "norms": (*_AI2_AFTER, *_AI2_QUERY_NORMS)}),
        ),
        where("rope", equals=True, default=False, attention=_ai2_heads(replace(_AI2_ROTARY, precision=_WIDE))),
        Variant(
            Every((Declares(("rope",), (True,)), Declares(("rope_full_precision",), (False,)))),
            MappingProxyType({"attention": _ai2_heads(_AI2_ROTARY)}),
        ),
        Variant(
            either(
                Declares(("block_type",), ("llama",)),
                Every((Declares(("attention_layer_norm",), (True,)), unless(Declares(("norm_after",), (True,))))),
            ),
            MappingProxyType({"attention": None}),
        ),
        where(
            "multi_query_attention",
            equals=True,
            default=None,
            sizes=MappingProxyType({**_AI2_SIZES, "kv_heads": SizeSetting(("n_kv_heads",), 1)}),
        ),
        Variant(
            Declares(("activation_type",), ("gelu", "relu"), "swiglu"),
            MappingProxyType(
                {
                    "feed_forward": plain(
                        Setting(("activation_type",), "swiglu"), _AI2_BIAS, up="ff_proj", down="ff_out"
                    ),
                    "sizes": MappingProxyType({**_AI2_SIZES, "intermediate": SizeSetting(("mlp_hidden_size",), None)}),
                }
            ),
        ),
    ),
    notes=(
        "The up projection is the first half of ff_proj, the gate the second.",
        "mlp_hidden_size counts both halves; with gelu or relu for activation_type there is one alone, and no gate.",
        "Attention is read with rope, not with ALiBi, and of blocks of the type sequential.",
        "ff_norm stands in front of the network, or, with norm_after, on what it returns.",
    ),
)


ROWS = (
    OLMO2,
    OLMO,
    OLMO_HYBRID,
    OLMO_AI2,
)
"""The rows of this module."""
