"""Decoders of their own making: plain networks, learned activations, norms inside the network, multipliers."""

from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, Holds, unless
from glassblock.checkpoint.families.attention_makers import ATTENTION_BIAS, heads, rotary
from glassblock.checkpoint.families.llama import LLAMA
from glassblock.checkpoint.families.makers import (
    EPS_5,
    EPS_6,
    MLP_BIAS,
    NEVER,
    PRE_NORMS,
    RELU2,
    SILU,
    TIED,
    bare_norms,
    gated,
    like,
    linear,
    meta_network,
    norms,
    plain,
    query_key_norms,
    sizes,
    where,
)
from glassblock.checkpoint.family import (
    FeedForwardRow,
    LogitsRow,
    NormRow,
    Setting,
    SizeSetting,
    Variant,
)

ARCEE = like(
    LLAMA,
    "arcee",
    "ArceeForCausalLM",
    "ArceeModel",
    sizes=sizes(2560, 18432, 32, 32, 32000),
    feed_forward=plain(RELU2, MLP_BIAS),
    norms=norms("rms_llama", EPS_5, *PRE_NORMS),
    attention=heads(bias=ATTENTION_BIAS),
    notes=("Llama's names without a gate.",),
)

NEMOTRON = like(
    LLAMA,
    "nemotron",
    "NemotronForCausalLM",
    "NemotronModel",
    sizes=sizes(6144, 24576, 32, 48, 256000),
    feed_forward=plain(RELU2, MLP_BIAS),
    norms=norms("layernorm_1p", Setting(("norm_eps",), 1e-5), *PRE_NORMS, has_bias=True),
    attention=heads(bias=ATTENTION_BIAS, rotary=rotary(share=0.5)),
    notes=("Gains of its LayerNorm are stored as w and used as 1 + w; its networks have no gate.",),
)

APERTUS = like(
    LLAMA,
    "apertus",
    "ApertusForCausalLM",
    "ApertusModel",
    sizes=sizes(4096, 14336, 32, 32, 131072),
    feed_forward=replace(
        plain(Setting(("hidden_act",), "xielu"), NEVER),
        activation_tensors=MappingProxyType(
            {parameter: f"mlp.act_fn.{parameter}" for parameter in ("alpha_p", "alpha_n", "beta", "eps")}
        ),
    ),
    config_variants=(
        # Of the activations xIELU alone has tensors; here the config names another.
        Variant(
            unless(Declares(("hidden_act",), ("xielu",), "xielu")),
            MappingProxyType({"feed_forward": plain(RELU2, NEVER)}),
        ),
    ),
    norms=(
        *norms(
            "rms_llama",
            EPS_5,
            ("attn_in", "attention_layernorm"),
            ("ffn_in", "feedforward_layernorm"),
            ("final", "norm"),
        ),
        *query_key_norms("rms_llama", EPS_5, ("head_dim",), ("head_dim",)),
    ),
    attention=heads(
        bias=ATTENTION_BIAS,
        rotary=rotary(
            12000000.0,
            form=(
                ("rope_type", "llama3"),
                ("factor", 8.0),
                ("original_max_position_embeddings", 8192),
                ("low_freq_factor", 1.0),
                ("high_freq_factor", 4.0),
            ),
        ),
    ),
    notes=("The activation, xIELU, has learned numbers in every layer.",),
)

BITNET = like(
    LLAMA,
    "bitnet",
    "BitNetForCausalLM",
    "BitNetModel",
    sizes=sizes(2560, 6912, 30, 20, 128256, kv_heads=5),
    feed_forward=gated(RELU2, NEVER),
    norms=(
        *norms("rms_llama", EPS_5, *PRE_NORMS),
        NormRow("ffn_hidden", "mlp.ffn_sub_norm", "rms_llama", EPS_5, width=("intermediate",)),
        NormRow("attn_hidden", "self_attn.attn_sub_norm", "rms_llama", EPS_5, width=("heads", "head_dim")),
    ),
    notes=("A norm stands between the product of gate and up and the down projection.",),
)

NANOCHAT = like(
    LLAMA,
    "nanochat",
    "NanoChatForCausalLM",
    "NanoChatModel",
    sizes=sizes(768, 8192, 12, 6, 50304),
    feed_forward=plain(RELU2, NEVER, up="mlp.fc1", down="mlp.fc2"),
    norms=bare_norms("rms_noweight", EPS_6, *PRE_NORMS),
    embedding_norm=NormRow("embedding", "norm", "rms_noweight", EPS_6, has_gain=False),
    logits=LogitsRow(softcap=Setting(("final_logit_softcapping",), 15.0)),
    notes=("No norm has tensors. The embedding is normalised too.",),
)

FALCON_H1 = like(
    LLAMA,
    "falcon_h1",
    "FalconH1ForCausalLM",
    "FalconH1Model",
    sizes=sizes(4096, 14336, 32, 32, 128000, kv_heads=8),
    feed_forward=FeedForwardRow(
        gate=linear("feed_forward.gate_proj"),
        up=linear("feed_forward.up_proj"),
        down=linear("feed_forward.down_proj"),
        activation=SILU,
        bias=MLP_BIAS,
        gate_scale=Setting(("mlp_multipliers.0",), 1.0),
        down_scale=Setting(("mlp_multipliers.1",), 1.0),
    ),
    norms=norms(
        "rms_llama",
        EPS_5,
        ("attn_in", "input_layernorm"),
        ("ffn_in", "pre_ff_layernorm"),
        ("final", "final_layernorm"),
    ),
    embedding_scale=Setting(("embedding_multiplier",), 1.0),
    logits=LogitsRow(scale=Setting(("lm_head_multiplier",), 1.0)),
    notes=("The gate is multiplied inside the activation; attention and Mamba share input_layernorm.",),
)

_LFM2_EPS = Setting(("norm_eps",), 1e-5)
_LFM2_NORMS = norms(
    "rms_llama", _LFM2_EPS, ("attn_in", "operator_norm"), ("ffn_in", "ffn_norm"), ("final", "embedding_norm")
)
_LFM2_ATTENTION_NORMS = (
    *_LFM2_NORMS,
    NormRow("q", "self_attn.q_layernorm", "rms_llama", _LFM2_EPS, width=("head_dim",)),
    NormRow("k", "self_attn.k_layernorm", "rms_llama", _LFM2_EPS, width=("head_dim",)),
)

LFM2 = like(
    LLAMA,
    "lfm2",
    "Lfm2ForCausalLM",
    "Lfm2Model",
    sizes=MappingProxyType(
        {
            **sizes(2560, 12288, 32, 32, 65536, kv_heads=8),
            "intermediate": SizeSetting(("block_ff_dim", "intermediate_size"), 12288),
        }
    ),
    feed_forward=meta_network("feed_forward"),
    norms=_LFM2_NORMS,
    tied=TIED,
    config_variants=(
        where(
            "block_auto_adjust_ff_dim",
            equals=True,
            default=True,
            feed_forward=replace(meta_network("feed_forward"), width=None),
        ),
    ),
    layer_variants=(
        Variant(Holds("self_attn.q_layernorm.weight"), MappingProxyType({"norms": _LFM2_ATTENTION_NORMS})),
    ),
    notes=(
        "embedding_norm is the norm after the last layer.",
        "intermediate_size is not the width unless block_auto_adjust_ff_dim is false: two thirds of it, rounded.",
    ),
)


ROWS = (
    ARCEE,
    NEMOTRON,
    APERTUS,
    BITNET,
    NANOCHAT,
    FALCON_H1,
    LFM2,
)
"""The rows of this module."""
