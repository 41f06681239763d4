"""Families whose layers are of several kinds: attention, state spaces, networks, mixtures."""

from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.conditions import (
    Declares,
    Every,
    EveryLayer,
    Holds,
    LayerKind,
    LayerListed,
    Neither,
    Says,
    Whole,
    either,
    unless,
)
from glassblock.checkpoint.families.makers import (
    EPS_6,
    EPS_GPT,
    MLP_BIAS,
    NEVER,
    PRE_NORMS,
    TRUNKS,
    UNTIED,
    like,
    norms,
    plain,
    query_key_norms,
    sizes,
    source,
)
from glassblock.checkpoint.families.mixture_makers import (
    A_CONFIG,
    dense_unless,
    every,
    experts_of,
    network,
    with_experts,
    without_experts,
)
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    MixtureRow,
    Setting,
    Size,
    SizeSetting,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

_CHOSEN = ("num_experts_per_tok",)

JAMBA = Architecture(
    name="jamba",
    model_types=("jamba",),
    architectures=("JambaForCausalLM", "JambaModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=with_experts(
        sizes(4096, 14336, 32, 32, 65536, kv_heads=8), (("num_experts", "num_local_experts"), 16), (_CHOSEN, 2)
    ),
    feed_forward=None,
    mixture=experts_of("feed_forward.router", network("feed_forward.experts.{j}.")),
    norms=norms(
        "rms_llama",
        EPS_6,
        ("attn_in", "input_layernorm"),
        ("ffn_in", "pre_ff_layernorm"),
        ("final", "final_layernorm"),
    ),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("jamba"),
    layer_variants=(
        dense_unless(
            Every(
                (
                    EveryLayer(Whole(("expert_layer_period",), 2), Whole(("expert_layer_offset",), 1)),
                    unless(Declares(("num_experts", "num_local_experts"), (1,), 16)),
                )
            ),
            network("feed_forward."),
        ),
    ),
    notes=("input_layernorm stands in front of attention or of Mamba, whichever the layer has.",),
)

_LAYER_KINDS = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_IS_NETWORK = LayerKind(_LAYER_KINDS, ("mlp", "-"), Holds("mixer.up_proj.weight"))
_IS_MIXTURE = LayerKind(_LAYER_KINDS, ("moe", "E"), Holds("mixer.gate.weight"))
_NEMOTRON_ACTIVATION = Setting(("mlp_hidden_act",), "relu2")
_FINAL = norms("rms_f32mul", EPS_GPT, ("final", "norm_f"))
_BEFORE_ATTENTION = (*norms("rms_f32mul", EPS_GPT, ("attn_in", "norm")), *_FINAL)
_BEFORE_NETWORK = (*norms("rms_f32mul", EPS_GPT, ("ffn_in", "norm")), *_FINAL)


def _squared(prefix: str, width: Size = "intermediate", bias: Setting[bool] = MLP_BIAS) -> FeedForwardRow:
    """A network of Nemotron: squared ReLU, no gate."""
    row = plain(_NEMOTRON_ACTIVATION, bias, up=f"{prefix}up_proj", down=f"{prefix}down_proj")
    return replace(row, width=(width,))


def _nemotron_mixture(outer: Size) -> MixtureRow:
    """Its experts, and the size of what they read and return."""
    return experts_of(
        "mixer.gate",
        replace(_squared("mixer.experts.{j}.", width="expert_width", bias=NEVER), outer=outer),
        shared=_squared("mixer.shared_experts.", width="shared_width"),
        correction="mixer.gate.e_score_correction_bias",
    )


NEMOTRON_H = Architecture(
    name="nemotron_h",
    model_types=("nemotron_h",),
    architectures=("NemotronHForCausalLM", "NemotronHModel"),
    trunks=(Trunk("backbone.", "lm_head.weight"), Trunk("model.", "lm_head.weight"), Trunk("", "lm_head.weight")),
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {
            **with_experts(
                sizes(4096, 21504, 52, 32, 131072, kv_heads=8),
                (("n_routed_experts",), 8),
                (_CHOSEN, 2),
                expert_width=(("moe_intermediate_size",), 7688),
                shared_width=(("moe_shared_expert_intermediate_size",), 7688),
            ),
            "layers": SizeSetting(("num_hidden_layers",), None),
            "head_dim": SizeSetting(("head_dim", "attention_head_dim"), 128),
            "latent": SizeSetting(("moe_latent_size",), None),
        }
    ),
    feed_forward=None,
    norms=(*norms("rms_f32mul", EPS_GPT, ("attn_in", "norm"), ("ffn_in", "norm")), *_FINAL),
    placement=Placement.PRE,
    embedding="embeddings.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("nemotron_h"),
    layer_variants=(
        Variant(_IS_NETWORK, MappingProxyType({"feed_forward": _squared("mixer."), "norms": _BEFORE_NETWORK})),
        Variant(
            _IS_MIXTURE,
            MappingProxyType({"mixture": _nemotron_mixture("hidden"), "norms": _BEFORE_NETWORK}),
        ),
        Variant(
            Every((_IS_MIXTURE, Says(("moe_latent_size",)))),
            MappingProxyType({"mixture": _nemotron_mixture("latent")}),
        ),
        Variant(Neither((_IS_NETWORK, _IS_MIXTURE)), MappingProxyType({"norms": _BEFORE_ATTENTION})),
    ),
    notes=(
        "With moe_latent_size experts read mixer.fc1_latent_proj's output, and fc2_latent_proj leads back from theirs.",
        "Every layer has one branch, called mixer, and one norm: attention, Mamba, a network or a mixture.",
        "The key is layer_norm_epsilon, and the norms are RMSNorms.",
    ),
)

_STEP = Every((unless(LayerListed(("mlp_only_layers",))), every("decoder_sparse_step", 1)))
_EXPERTS = ("num_experts", "num_local_experts")
_NEXT_SIZES = with_experts(
    sizes(2048, 5632, 48, 16, 151936, kv_heads=2, head_dim=256),
    (_EXPERTS, 512),
    (_CHOSEN, 10),
    expert_width=(("moe_intermediate_size",), 512),
    shared_width=(("shared_expert_intermediate_size",), 512),
)
_NEXT_NORMS = norms("rms_plus1", EPS_6, *PRE_NORMS)
_ATTENTION = LayerKind(
    ("layer_types",),
    ("full_attention",),
    either(
        Every((A_CONFIG, every("full_attention_interval", 4))),
        Every((unless(A_CONFIG), Holds("self_attn.q_proj.weight"))),
    ),
)
_WITH_QUERY_NORMS = Variant(
    _ATTENTION,
    MappingProxyType({"norms": (*_NEXT_NORMS, *query_key_norms("rms_plus1", EPS_6, ("head_dim",), ("head_dim",)))}),
)
_NEXT_NOTES = (
    "Gains are stored as w and used as 1 + w, unlike those of Qwen 2 and 3; files for MLX and GGUF hold 1 + w already.",
    "Most layers have linear attention, whose own norm takes w as it is.",
)

QWEN3_NEXT = Architecture(
    name="qwen3_next",
    model_types=("qwen3_next",),
    architectures=("Qwen3NextForCausalLM", "Qwen3NextModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=_NEXT_SIZES,
    feed_forward=None,
    mixture=experts_of(
        "mlp.gate",
        network("mlp.experts.{j}.", width=("expert_width",)),
        shared=network("mlp.shared_expert.", width=("shared_width",)),
        shared_gate="mlp.shared_expert_gate.weight",
    ),
    norms=_NEXT_NORMS,
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("qwen3_next"),
    config_variants=(without_experts(_EXPERTS, network("mlp."), _NEXT_SIZES),),
    layer_variants=(dense_unless(_STEP, network("mlp.")), _WITH_QUERY_NORMS),
    notes=_NEXT_NOTES,
)

QWEN3_5_MOE = like(
    QWEN3_NEXT,
    "qwen3_5_moe",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    model_types=("qwen3_5_moe_text", "qwen3_5_moe"),
    sizes=with_experts(
        {
            **sizes(2048, 5632, 40, 16, 248320, kv_heads=2, head_dim=256),
            "intermediate": SizeSetting(("intermediate_size",), None),
        },
        (_EXPERTS, 256),
        (_CHOSEN, 8),
        expert_width=(("moe_intermediate_size",), 512),
        shared_width=(("shared_expert_intermediate_size",), 512),
    ),
    config_variants=(),
    layer_variants=(_WITH_QUERY_NORMS,),
    notes=_NEXT_NOTES,
)

QWEN3_5 = like(
    QWEN3_NEXT,
    "qwen3_5",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    model_types=("qwen3_5_text", "qwen3_5"),
    sizes=sizes(4096, 12288, 32, 16, 248320, kv_heads=4, head_dim=256),
    feed_forward=network("mlp."),
    mixture=None,
    config_variants=(),
    layer_variants=(_WITH_QUERY_NORMS,),
    notes=_NEXT_NOTES,
)

ROWS = (JAMBA, NEMOTRON_H, QWEN3_NEXT, QWEN3_5_MOE, QWEN3_5)
"""The rows of this module."""
