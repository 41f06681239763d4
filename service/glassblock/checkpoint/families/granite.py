"""Llama with multipliers: Granite and MiniCPM."""

from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, unless
from glassblock.checkpoint.families.attention_makers import ATTENTION_BIAS, MULTIPLIER, heads, latent_heads, rotary
from glassblock.checkpoint.families.llama import LLAMA
from glassblock.checkpoint.families.makers import (
    EPS_5,
    HEAD_OF_A_LARGER_MODEL,
    NEVER,
    PRE_NORMS,
    SILU,
    TIED,
    gated,
    like,
    norms,
    sizes,
)
from glassblock.checkpoint.families.mixture_makers import META, MIXTRAL_ROUTING, experts_of, network, with_experts
from glassblock.checkpoint.family import (
    LogitsRow,
    NormRow,
    OverRootDepth,
    Ratio,
    Setting,
    SizeSetting,
    Variant,
)
from glassblock.numerics.rotary import RotaryPrecision

GRANITE = like(
    LLAMA,
    "granite",
    "GraniteForCausalLM",
    "GraniteModel",
    sizes=sizes(4096, 11008, 32, 32, 32000, kv_heads=32),
    branch_scale=Setting(("residual_multiplier",), 1.0),
    embedding_scale=Setting(("embedding_multiplier",), 1.0),
    attention=heads(bias=ATTENTION_BIAS, scale=MULTIPLIER),
    logits=LogitsRow(divisor=Setting(("logits_scaling",), 1.0)),
    config_variants=(HEAD_OF_A_LARGER_MODEL,),
)

MINICPM3 = like(
    LLAMA,
    "minicpm3",
    "MiniCPM3ForCausalLM",
    "MiniCPM3Model",
    sizes=MappingProxyType(
        {
            **sizes(2560, 6400, 62, 40, 73448, kv_heads=40, head_dim=Ratio("rope_head_dim")),
            "q_rank": SizeSetting(("q_lora_rank",), 768),
            "kv_rank": SizeSetting(("kv_lora_rank",), 256),
            "nope_head_dim": SizeSetting(("qk_nope_head_dim",), 64),
            "rope_head_dim": SizeSetting(("qk_rope_head_dim",), 32),
            "v_head_dim": SizeSetting(("v_head_dim",), 64),
        }
    ),
    norms=(
        *norms("rms_llama", EPS_5, *PRE_NORMS),
        NormRow("q_latent", "self_attn.q_a_layernorm", "rms_llama", Setting((), 1e-6), width=("q_rank",)),
        NormRow("kv_latent", "self_attn.kv_a_layernorm", "rms_llama", Setting((), 1e-6), width=("kv_rank",)),
    ),
    tied=TIED,
    branch_scale=OverRootDepth(Setting(("scale_depth",), 1.4)),
    embedding_scale=Setting(("scale_emb",), 12.0),
    attention=latent_heads(rotary(of="rope_head_dim")),
    logits=LogitsRow(divisor=Setting(("dim_model_base",), 256.0), divided_by_size="hidden"),
    notes=("The norms inside attention have 1e-6 whatever rms_norm_eps says.",),
)

MINICPM = like(
    LLAMA,
    "minicpm",
    "MiniCPMForCausalLM",
    "MiniCPMModel",
    feed_forward=gated(SILU, NEVER),
    tied=TIED,
    branch_scale=OverRootDepth(Setting(("scale_depth",), 1.0)),
    embedding_scale=Setting(("scale_emb",), 1.0),
    verified="source only",
    sources=(
        "openbmb/MiniCPM-2B-sft-bf16: modeling_minicpm.py, configuration_minicpm.py",
        "vllm-project/vllm: vllm/model_executor/models/minicpm.py",
    ),
    config_variants=(
        Variant(
            unless(Declares(("num_experts",), (0,), default=0)),
            MappingProxyType(
                {
                    "feed_forward": None,
                    "mixture": experts_of("mlp.gate", network("mlp.experts.{j}.", META), routing=MIXTRAL_ROUTING),
                    "sizes": with_experts(LLAMA.sizes, (("num_experts",), 8), (("num_experts_per_tok",), 2)),
                }
            ),
        ),
    ),
    attention=heads(bias=ATTENTION_BIAS, rotary=rotary(precision=RotaryPrecision.WIDE)),
    logits=LogitsRow(divisor=Setting(("dim_model_base",), 1.0), divided_by_size="hidden"),
    notes=("With num_experts every layer is a mixture whose experts have Meta's names: w1 gates, w2 leads back.",),
)


ROWS = (
    GRANITE,
    MINICPM3,
    MINICPM,
)
"""The rows of this module."""
