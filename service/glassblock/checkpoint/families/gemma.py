"""The Gemma families."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.conditions import (
    Declares,
    Every,
    EveryLayer,
    FromLayer,
    Holds,
    LayerKind,
    Whole,
    either,
    unless,
)
from glassblock.checkpoint.families.attention_makers import (
    ATTENTION_BIAS,
    BY_QUERY_SCALAR,
    WINDOW_4096,
    all_but_every,
    heads,
    rotary_under,
    sliding,
)
from glassblock.checkpoint.families.makers import (
    EPS_6,
    GELU_TANH,
    HEAD_OF_A_LARGER_MODEL,
    NEVER,
    PRE_NORMS,
    SANDWICH_NORMS,
    TIED,
    TRUNKS,
    gated,
    like,
    norms,
    query_key_norms,
    sizes,
    source,
    where,
)
from glassblock.checkpoint.families.mixture_makers import A_CONFIG, experts_of, fused_network, with_experts
from glassblock.checkpoint.family import (
    Architecture,
    LogitsRow,
    NormRow,
    Setting,
    Size,
    SizeSetting,
    SquareRoot,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

# Only the first Gemma's own code reads it so: in the others hidden_activation is what it says.
_LEGACY_GELU: Mapping[str | bool, str] = MappingProxyType({"gelu": "gelu_pytorch_tanh"})

CAPPED_AT_30 = LogitsRow(softcap=Setting(("final_logit_softcapping",), 30.0))
"""The logits of Gemma 2, 3n and T5Gemma."""

_CAPPED_IF_SAID = LogitsRow(softcap=Setting(("final_logit_softcapping",), None))

GEMMA = Architecture(
    name="gemma",
    model_types=("gemma",),
    architectures=("GemmaForCausalLM", "GemmaModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=sizes(3072, 24576, 28, 16, 256000, kv_heads=16, head_dim=256),
    feed_forward=gated(Setting(("hidden_act",), "gelu_pytorch_tanh", meanings=_LEGACY_GELU), NEVER),
    norms=norms("rms_plus1", EPS_6, *PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=TIED,
    embedding_scale=SquareRoot("hidden"),
    verified="executed",
    sources=source("gemma"),
    attention=heads(bias=ATTENTION_BIAS),
    notes=(
        "Gains are stored as w and used as 1 + w. GGUF files hold 1 + w already.",
        "Early configs say hidden_act gelu and mean the tanh form, which the models were trained with: that is run.",
    ),
)

GEMMA2 = like(
    GEMMA,
    "gemma2",
    "Gemma2ForCausalLM",
    "Gemma2Model",
    sizes=sizes(2304, 9216, 26, 8, 256000, kv_heads=4, head_dim=256),
    feed_forward=gated(GELU_TANH, NEVER),
    norms=norms("rms_plus1", EPS_6, *SANDWICH_NORMS),
    placement=Placement.SANDWICH,
    attention=heads(
        bias=ATTENTION_BIAS,
        scale=BY_QUERY_SCALAR,
        softcap=Setting(("attn_logit_softcapping",), 50.0),
        window=WINDOW_4096,
        window_in=sliding(unless(EveryLayer(Whole((), 2), shift=1))),
    ),
    logits=CAPPED_AT_30,
    notes=("post_attention_layernorm is the norm on the attention output, not the one in front of the network.",),
)

PALIGEMMA = like(
    GEMMA,
    "paligemma",
    "PaliGemmaForConditionalGeneration",
    "PaliGemmaModel",
    trunks=TRUNKS[1:],
    sizes=sizes(2048, 16384, 18, 8, 257152, kv_heads=1, head_dim=256),
    sources=(*source("paligemma"), *source("gemma"), *source("gemma2")),
    config_variants=(
        where(
            "model_type",
            equals="gemma2",
            default="gemma",
            feed_forward=gated(GELU_TANH, NEVER),
            norms=norms("rms_plus1", EPS_6, *SANDWICH_NORMS),
            placement=Placement.SANDWICH,
        ),
    ),
    notes=("Its language model is Gemma or Gemma 2, as text_config says.",),
)

GEMMA3 = like(
    GEMMA2,
    "gemma3",
    "Gemma3ForCausalLM",
    "Gemma3TextModel",
    "Gemma3ForConditionalGeneration",
    "Gemma3Model",
    model_types=("gemma3_text", "gemma3"),
    trunks=(*TRUNKS, Trunk("model.language_model.model.", "model.language_model.lm_head.weight")),  # ShieldGemma 2's
    sizes=sizes(2304, 9216, 26, 8, 262208, kv_heads=4, head_dim=256),
    norms=(
        *norms("rms_plus1", EPS_6, *SANDWICH_NORMS),
        *query_key_norms("rms_plus1", EPS_6, ("head_dim",), ("head_dim",)),
    ),
    attention=heads(
        bias=ATTENTION_BIAS,
        scale=BY_QUERY_SCALAR,
        window=WINDOW_4096,
        window_in=sliding(all_but_every("sliding_window_pattern", 6)),
        rotary=rotary_under("full_attention", 1000000.0, "rope_theta", form="rope_scaling"),
        windowed_rotary=rotary_under("sliding_attention", 10000.0, "rope_local_base_freq"),
    ),
    logits=_CAPPED_IF_SAID,
    config_variants=(
        HEAD_OF_A_LARGER_MODEL,
        where("use_bidirectional_attention", equals=True, default=False, attention=None),
    ),
    notes=(
        "Gains are stored as w and used as 1 + w. GGUF files hold 1 + w already.",
        "post_attention_layernorm is the norm on the attention output, not the one in front of the network.",
        "No code reads attn_logit_softcapping, nor that with images final_logit_softcapping.",
    ),
)

_POWER = "rms_f32mul_pow"
_LAYER_INPUT = norms(_POWER, EPS_6, ("layer_input", "post_per_layer_input_norm"))


def _attention_norms(width: tuple[Size, ...] | None) -> tuple[NormRow, ...]:
    """Norms of queries and keys, and of values, which has no gain."""
    query, key = NormRow("q", "self_attn.q_norm", _POWER, EPS_6), NormRow("k", "self_attn.k_norm", _POWER, EPS_6)
    value = NormRow("v", "self_attn.v_norm", "rms_noweight", EPS_6, has_gain=False)
    return tuple(replace(norm, width=width) for norm in (query, key, value))


def _reusing(layers: int, reused: int, found: tuple[NormRow, ...]) -> Variant:
    """The last layers where they reuse keys and values: with norms of neither, though some files still hold them."""
    last = FromLayer(Whole(("num_hidden_layers",), layers), back=Whole(("num_kv_shared_layers",), reused))
    kept = tuple(norm for norm in found if norm.role not in {"k", "v"})
    without = unless(Holds("self_attn.k_norm.weight"))
    return Variant(Every((either(unless(A_CONFIG), last), without)), MappingProxyType({"norms": kept}))


_SPARSITIES = ("activation_sparsity_pattern",)
_GEMMA3N_NETWORK = replace(gated(GELU_TANH, NEVER), width=None)
_GEMMA3N_NORMS = (
    *norms(_POWER, EPS_6, *SANDWICH_NORMS),
    *_attention_norms(("head_dim",)),
    *norms(_POWER, EPS_6, ("low_rank_out", "laurel.post_laurel_norm"), ("streams_in", "altup.router_norm")),
    *_LAYER_INPUT,
)

GEMMA3N = like(
    GEMMA2,
    "gemma3n",
    "Gemma3nForCausalLM",
    "Gemma3nTextModel",
    "Gemma3nForConditionalGeneration",
    "Gemma3nModel",
    model_types=("gemma3n_text", "gemma3n"),
    sizes=MappingProxyType(
        {
            **sizes(2048, 16384, 35, 8, 262400, kv_heads=2, head_dim=256),
            "intermediate": SizeSetting(("intermediate_size.0", "intermediate_size"), 16384),
        }
    ),
    feed_forward=_GEMMA3N_NETWORK,
    norms=_GEMMA3N_NORMS,
    logits=CAPPED_AT_30,
    layer_variants=(
        _reusing(35, 15, _GEMMA3N_NORMS),
        Variant(
            LayerKind(_SPARSITIES, (0.95,), unless(FromLayer(Whole((), 10)))),
            MappingProxyType({"feed_forward": replace(_GEMMA3N_NETWORK, gate_sparsity=0.95)}),
        ),
        Variant(
            unless(LayerKind(_SPARSITIES, (0, 0.0, 0.95), Every(()))),
            MappingProxyType(
                {"not_run": "another share of its gate is cut away than 0.95 (activation_sparsity_pattern)"}
            ),
        ),
    ),
    notes=(
        "Gains are used as stored: no 1 is added, unlike in Gemma 1 to 3.",
        "Of the first ten layers' gates all but the largest twentieth is cut away (activation_sparsity_pattern).",
        "What comes after the network's residual add, AltUp and the input of each layer, is no part of the block.",
    ),
)

_GEMMA4_SIZES = sizes(2304, 9216, 30, 8, 262144, kv_heads=4, head_dim=256)
_GEMMA4_EXPERTS = MappingProxyType(
    {
        "not_run": "its experts and its dense network run side by side (enable_moe_block)",
        "mixture": experts_of(
            "router.proj",
            fused_network(
                "experts.gate_up_proj",
                "experts.down_proj",
                activation=GELU_TANH,
                suffixes=("", "_bias"),
                width=("expert_width",),
            ),
            arrangement="stacked",
        ),
        "sizes": with_experts(
            _GEMMA4_SIZES,
            (("num_experts",), 128),
            (("top_k_experts",), 8),
            expert_width=(("moe_intermediate_size",), 704),
        ),
    }
)
_GEMMA4_EXPERT_NORMS = norms(
    _POWER,
    EPS_6,
    ("dense_out", "post_feedforward_layernorm_1"),
    ("experts_in", "pre_feedforward_layernorm_2"),
    ("experts_out", "post_feedforward_layernorm_2"),
)
_GEMMA4_NORMS = (*norms(_POWER, EPS_6, *SANDWICH_NORMS), *_attention_norms(None))


def _gemma4_norms(*more: NormRow) -> Mapping[str, object]:
    """The norms of every layer with `more`, and what the last layers have of them."""
    found = (*_GEMMA4_NORMS, *more)
    return {"norms": found, "layer_variants": (_reusing(30, 0, found),)}


_WITH_EXPERTS = Declares(("enable_moe_block",), (True,), default=False)
_NO_INPUTS = Declares(("hidden_size_per_layer_input",), (0,), default=256)

GEMMA4 = like(
    GEMMA2,
    "gemma4",
    "Gemma4ForCausalLM",
    "Gemma4TextModel",
    "Gemma4ForConditionalGeneration",
    "Gemma4Model",
    model_types=("gemma4_text", "gemma4"),
    sizes=_GEMMA4_SIZES,
    feed_forward=replace(gated(GELU_TANH, NEVER), width=None),
    norms=(*_GEMMA4_NORMS, *_LAYER_INPUT),
    logits=_CAPPED_IF_SAID,
    layer_variants=(_reusing(30, 0, (*_GEMMA4_NORMS, *_LAYER_INPUT)),),
    config_variants=(
        Variant(
            _WITH_EXPERTS,
            MappingProxyType({**_GEMMA4_EXPERTS, **_gemma4_norms(*_GEMMA4_EXPERT_NORMS, *_LAYER_INPUT)}),
        ),
        Variant(_NO_INPUTS, MappingProxyType(_gemma4_norms())),
        Variant(
            Every((_WITH_EXPERTS, _NO_INPUTS)),
            MappingProxyType({**_GEMMA4_EXPERTS, **_gemma4_norms(*_GEMMA4_EXPERT_NORMS)}),
        ),
    ),
    notes=(
        "Gains are used as stored: no 1 is added, unlike in Gemma 1 to 3.",
        "Where enable_moe_block is set, experts run beside the dense network, each with norms of its own.",
        "Layers that reuse keys and values may be twice as wide (use_double_wide_mlp), and have norms of neither.",
        "Heads of layers with full attention are wider (global_head_dim), and their norms with them.",
        "What comes after the network's residual add, layer inputs and layer_scalar, is no part of the block.",
    ),
)


ROWS = (
    GEMMA,
    GEMMA2,
    PALIGEMMA,
    GEMMA3,
    GEMMA3N,
    GEMMA4,
)
"""The rows of this module."""
