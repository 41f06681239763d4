"""Plain networks with LayerNorm, each with names of its own: OPT, BLOOM, MPT, Persimmon, Falcon, PaLM."""

from collections.abc import Mapping
from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, Every, Neither, unless
from glassblock.checkpoint.families.attention_makers import fused_heads, heads, rotary
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    AS_MANY_AS_HEADS,
    EPS_GPT,
    EPS_LAYER_NORM,
    GPT_TRUNKS,
    HIDDEN_OVER_HEADS,
    NEVER,
    RELU2,
    TIED,
    TRUNKS,
    UNTIED,
    Places,
    bare_norms,
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
    NormRow,
    PositionsRow,
    Ratio,
    Setting,
    Size,
    SizeSetting,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

_OPT_EPS = Setting[float]((), 1e-5)


def _layer_norms(eps: Setting[float], attention: str, network: str, final: str) -> tuple[NormRow, ...]:
    """LayerNorms in front of attention and network, and after the last layer."""
    return norms("layernorm", eps, ("attn_in", attention), ("ffn_in", network), ("final", final), has_bias=True)


OPT = Architecture(
    name="opt",
    model_types=("opt",),
    architectures=("OPTForCausalLM", "OPTModel"),
    trunks=(
        Trunk("model.decoder.", "lm_head.weight"),
        Trunk("decoder.", "lm_head.weight"),
        Trunk("language_model.model.decoder.", "language_model.lm_head.weight"),
        Trunk("", "lm_head.weight"),
    ),
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("hidden_size",), 768),
            "intermediate": SizeSetting(("ffn_dim",), 3072),
            "layers": SizeSetting(("num_hidden_layers",), 12),
            "heads": SizeSetting(("num_attention_heads",), 12),
            "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 50272),
            "embedding_width": SizeSetting(("word_embed_proj_dim",), Ratio("hidden")),
        }
    ),
    feed_forward=plain(
        Setting(("activation_function",), "relu"), Setting(("enable_bias",), default=True), up="fc1", down="fc2"
    ),
    norms=_layer_norms(_OPT_EPS, "self_attn_layer_norm", "final_layer_norm", "final_layer_norm"),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    embedding_projections=("project_in.weight", "project_out.weight"),
    tied=TIED,
    verified="executed",
    sources=source("opt"),
    config_variants=(
        where(
            "layer_norm_elementwise_affine",
            equals=False,
            default=True,
            norms=bare_norms(
                "layernorm_noparam",
                _OPT_EPS,
                ("attn_in", "self_attn_layer_norm"),
                ("ffn_in", "final_layer_norm"),
                ("final", "final_layer_norm"),
            ),
        ),
        where(
            "_remove_final_layer_norm",
            equals=True,
            default=False,
            norms=norms(
                "layernorm",
                _OPT_EPS,
                ("attn_in", "self_attn_layer_norm"),
                ("ffn_in", "final_layer_norm"),
                has_bias=True,
            ),
        ),
        where(
            "do_layer_norm_before",
            equals=False,
            default=True,
            placement=Placement.POST,
            norms=norms(
                "layernorm",
                _OPT_EPS,
                ("resid_attn", "self_attn_layer_norm"),
                ("resid_ffn", "final_layer_norm"),
                has_bias=True,
            ),
        ),
    ),
    attention=heads(bias=Setting(("enable_bias",), default=True), output="out_proj", rotary=None),
    positions=PositionsRow("embed_positions.weight", offset=2),
    notes=(
        "final_layer_norm in a layer is the norm in front of its network; the last norm has the same name outside.",
        "The 350m model has its norms after the residual add and no last one, and an embedding half as wide as its "
        "layers, with a projection on either side of them.",
    ),
)

BLOOM = Architecture(
    name="bloom",
    model_types=("bloom",),
    architectures=("BloomForCausalLM", "BloomModel"),
    trunks=GPT_TRUNKS,
    layer="h.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("hidden_size", "n_embed"), 64),
            "intermediate": SizeSetting((), Ratio("hidden", times=4)),
            "layers": SizeSetting(("n_layer", "num_hidden_layers"), 2),
            "heads": SizeSetting(("n_head", "num_attention_heads"), 8),
            "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 250880),
        }
    ),
    feed_forward=plain(Setting((), "gelu_bloom"), ALWAYS, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    norms=_layer_norms(EPS_GPT, "input_layernorm", "post_attention_layernorm", "ln_f"),
    placement=Placement.PRE,
    embedding="word_embeddings.weight",
    embedding_norm=NormRow("embedding", "word_embeddings_layernorm", "layernorm", EPS_GPT, has_bias=True),
    tied=TIED,
    verified="executed",
    sources=source("bloom"),
    config_variants=(
        where(
            "apply_residual_connection_post_layernorm",
            equals=True,
            default=False,
            not_run="the residual is taken after the norm (apply_residual_connection_post_layernorm)",
        ),
    ),
    notes=("The embedding has a norm of its own; the activation is fixed.",),
)

MPT = Architecture(
    name="mpt",
    model_types=("mpt",),
    architectures=("MptForCausalLM", "MptModel", "MPTForCausalLM"),
    trunks=GPT_TRUNKS,
    layer="blocks.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("d_model",), 2048),
            "intermediate": SizeSetting((), Ratio("hidden", times=4)),
            "layers": SizeSetting(("n_layers",), 24),
            "heads": SizeSetting(("n_heads",), 16),
            "kv_heads": SizeSetting(("attn_config.kv_n_heads",), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 50368),
        }
    ),
    feed_forward=plain(Setting((), "gelu"), NEVER, up="ffn.up_proj", down="ffn.down_proj"),
    norms=norms("layernorm_nobias", EPS_GPT, ("attn_in", "norm_1"), ("ffn_in", "norm_2"), ("final", "norm_f")),
    placement=Placement.PRE,
    embedding="wte.weight",
    tied=TIED,
    verified="executed",
    sources=source("mpt"),
    notes=("LayerNorm without a bias: its tensors look like those of RMSNorm.",),
)

_PERSIMMON_NORMS = _layer_norms(EPS_LAYER_NORM, "input_layernorm", "post_attention_layernorm", "final_layernorm")

PERSIMMON = Architecture(
    name="persimmon",
    model_types=("persimmon", "fuyu"),
    architectures=("PersimmonForCausalLM", "PersimmonModel", "FuyuForCausalLM"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=MappingProxyType({**sizes(4096, 16384, 36, 64, 262144), "kv_heads": SizeSetting((), AS_MANY_AS_HEADS)}),
    feed_forward=plain(RELU2, ALWAYS, up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"),
    norms=(
        *_PERSIMMON_NORMS,
        NormRow("q", "self_attn.q_layernorm", "layernorm", EPS_LAYER_NORM, has_bias=True, width=("head_dim",)),
        NormRow("k", "self_attn.k_layernorm", "layernorm", EPS_LAYER_NORM, has_bias=True, width=("head_dim",)),
    ),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("persimmon"),
    config_variants=(
        where(
            "qk_layernorm",
            equals=False,
            default=True,
            norms=_PERSIMMON_NORMS,
        ),
    ),
    attention=fused_heads(
        "self_attn.query_key_value",
        "self_attn.dense",
        arrangement="groups",
        bias=ALWAYS,
        rotary=rotary(share=0.5),
    ),
)

_FALCON_SIZES: Mapping[Size, SizeSetting] = MappingProxyType(
    {
        "hidden": SizeSetting(("hidden_size",), 4544),
        "intermediate": SizeSetting(("ffn_hidden_size",), Ratio("hidden", times=4)),
        "layers": SizeSetting(("num_hidden_layers", "n_layer"), 32),
        "heads": SizeSetting(("num_attention_heads", "n_head"), 71),
        "kv_heads": SizeSetting(("num_kv_heads", "n_head_kv"), AS_MANY_AS_HEADS),
        "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
        "vocab": SizeSetting(("vocab_size",), 65024),
    }
)
_MULTI_QUERY = Declares(("multi_query",), (True,), default=True)
_NEW_DECODER = Declares(("new_decoder_architecture",), (True,), default=False)
_AS_MANY_KEYS = MappingProxyType({**_FALCON_SIZES, "kv_heads": SizeSetting((), AS_MANY_AS_HEADS)})
_ONE_KEY = MappingProxyType({**_FALCON_SIZES, "kv_heads": SizeSetting((), 1)})

FALCON = Architecture(
    name="falcon",
    model_types=("falcon", "RefinedWeb", "RefinedWebModel"),
    architectures=("FalconForCausalLM", "FalconModel", "RWForCausalLM"),
    trunks=GPT_TRUNKS,
    layer="h.{i}.",
    sizes=_FALCON_SIZES,
    feed_forward=plain(
        Setting(("activation",), "gelu"),
        Setting(("bias",), default=False),
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    ),
    norms=_layer_norms(EPS_GPT, "input_layernorm", "input_layernorm", "ln_f"),
    placement=Placement.PARALLEL,
    branches_first=True,
    embedding="word_embeddings.weight",
    tied=TIED,
    verified="executed",
    sources=source("falcon"),
    config_variants=(
        Variant(Every((_MULTI_QUERY, unless(_NEW_DECODER))), MappingProxyType({"sizes": _ONE_KEY})),
        Variant(Neither((_MULTI_QUERY, _NEW_DECODER)), MappingProxyType({"sizes": _AS_MANY_KEYS})),
        where("alibi", equals=True, default=False, attention=None),
        where(
            "parallel_attn",
            equals=False,
            default=True,
            placement=Placement.PRE,
            branches_first=False,
            norms=_layer_norms(EPS_GPT, "input_layernorm", "post_attention_layernorm", "ln_f"),
        ),
        Variant(
            Every((_NEW_DECODER, Declares(("num_ln_in_parallel_attn",), (2,), default=2))),
            MappingProxyType(
                {
                    "placement": Placement.PARALLEL,
                    "branches_first": True,
                    "norms": _layer_norms(EPS_GPT, "ln_attn", "ln_mlp", "ln_f"),
                }
            ),
        ),
    ),
    attention=fused_heads(
        "self_attention.query_key_value",
        "self_attention.dense",
        arrangement="groups",
        bias=Setting(("bias",), default=False),
    ),
    notes=("Its projections have no bias while its norms have one.",),
)

_PALM_PLACES: Places = (("attn_in", "fns.0.norm"), ("ffn_in", "fns.1.0"))

PALM = Architecture(
    name="palm",
    model_types=(),
    architectures=(),
    trunks=(Trunk("", None),),
    layer="{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting((), None),
            "intermediate": SizeSetting((), Ratio("hidden", times=4)),
            "vocab": SizeSetting((), None),
        }
    ),
    feed_forward=FeedForwardRow(
        fused=FusedProjection("fns.1.1.weight", "fns.1.1.bias", order=("up", "gate")),
        down=linear("fns.1.3"),
        activation=Setting((), "silu"),
        bias=NEVER,
    ),
    norms=tuple(
        NormRow(
            role,
            template,
            "layernorm",
            Setting((), 1e-5),
            has_bias=True,
            gain_suffix=".gamma",
            bias_suffix=".beta",
        )
        for role, template in _PALM_PLACES
    ),
    placement=Placement.PARALLEL,
    branches_first=True,
    embedding="0.weight",
    tied=Setting((), default=True),
    verified="source only",
    sources=("lucidrains/PaLM-pytorch: palm_pytorch/palm_pytorch.py",),
    notes=(
        "Layers are counted from 1: entry 0 of the sequence is the embedding, its last two are a norm and the head.",
        "The gate is the second half of the rows; the bias of every norm is a buffer of zeros.",
        "An older form of this code keeps queries, keys, values, gate and up in one matrix, and is not read.",
    ),
)


ROWS = (
    OPT,
    BLOOM,
    MPT,
    PERSIMMON,
    FALCON,
    PALM,
)
"""The rows of this module."""
