"""Llama's network under other names: InternLM2, Baichuan, Qwen 1, EXAONE, llama2.c."""

from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.attention_row import INTERLEAVED
from glassblock.checkpoint.families.attention_makers import ATTENTION_BIAS, fused_heads, heads, meta_heads, rotary
from glassblock.checkpoint.families.llama import LLAMA
from glassblock.checkpoint.families.makers import (
    AS_MANY_AS_HEADS,
    EPS_6,
    GPT_TRUNKS,
    HIDDEN_OVER_HEADS,
    MLP_BIAS,
    NEVER,
    PRE_NORMS,
    SILU,
    gated,
    like,
    linear,
    meta_network,
    norms,
    sizes,
    where,
)
from glassblock.checkpoint.family import (
    FeedForwardRow,
    LogitsRow,
    Setting,
    SizeSetting,
    Trunk,
    TwoThirds,
)
from glassblock.numerics.rotary import RotaryPrecision

INTERNLM2 = like(
    LLAMA,
    "internlm2",
    "InternLM2ForCausalLM",
    "InternLM2Model",
    trunks=(Trunk("model.", "output.weight"), Trunk("", "output.weight")),
    sizes=sizes(4096, 11008, 32, 32, 103168),
    feed_forward=replace(meta_network("feed_forward"), activation=SILU),
    norms=norms("rms_llama", EPS_6, ("attn_in", "attention_norm"), ("ffn_in", "ffn_norm"), ("final", "norm")),
    embedding="tok_embeddings.weight",
    verified="source only",
    sources=(
        "internlm/internlm2-7b: modeling_internlm2.py",
        "sgl-project/sglang: python/sglang/srt/configs/internvl.py (InternLM2Config)",
        "vllm-project/vllm: vllm/model_executor/models/internlm2.py",
    ),
    attention=fused_heads(
        "attention.wqkv", "attention.wo", arrangement="groups", bias=Setting(("bias",), default=True)
    ),
    notes=("w1 is the gate, w3 the up projection, w2 the way back.",),
)

_BAICHUAN_7B_HEADS = fused_heads("self_attn.W_pack", "self_attn.o_proj", rotary=rotary(precision=RotaryPrecision.WIDE))

BAICHUAN = like(
    LLAMA,
    "baichuan",
    "BaichuanForCausalLM",
    "BaiChuanForCausalLM",
    sizes=sizes(4096, 11008, 32, 32, 125696),
    feed_forward=gated(SILU, NEVER),
    norms=norms("rms_t5", EPS_6, *PRE_NORMS),
    verified="source only",
    sources=(
        "baichuan-inc/Baichuan2-13B-Chat: modeling_baichuan.py",
        "baichuan-inc/Baichuan2-7B-Base: modeling_baichuan.py",
        "vllm-project/vllm: vllm/model_executor/models/baichuan.py",
    ),
    config_variants=(
        where("hidden_size", equals=4096, default=4096, attention=_BAICHUAN_7B_HEADS),
        where("vocab_size", equals=125696, default=125696, logits=LogitsRow(unit_rows=True)),
    ),
    notes=(
        "W_pack holds queries, keys and values in turn. Models of 7B have rotary positions, those of 13B ALiBi.",
        "Baichuan 2 scales the rows of lm_head to unit length, Baichuan 1 does not: the vocabulary tells which it is.",
    ),
)

QWEN = like(
    LLAMA,
    "qwen",
    "QWenLMHeadModel",
    "QWenModel",
    trunks=GPT_TRUNKS,
    layer="h.{i}.",
    sizes=MappingProxyType(
        {
            **sizes(4096, 22016, 32, 32, 151936),
            "intermediate": SizeSetting(("intermediate_size",), 11008, over=2),
            "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting(("kv_channels",), 128),
        }
    ),
    feed_forward=FeedForwardRow(
        gate=linear("mlp.w2"),
        up=linear("mlp.w1"),
        down=linear("mlp.c_proj"),
        activation=Setting((), "silu"),
        bias=Setting(("no_bias",), default=False, meanings=MappingProxyType({True: False, False: True})),
    ),
    norms=norms(
        "rms_llama", Setting(("layer_norm_epsilon",), 1e-6), ("attn_in", "ln_1"), ("ffn_in", "ln_2"), ("final", "ln_f")
    ),
    embedding="wte.weight",
    verified="source only",
    sources=(
        "Qwen/Qwen-7B: modeling_qwen.py, configuration_qwen.py",
        "vllm-project/vllm: vllm/model_executor/models/qwen.py",
    ),
    notes=(
        "w2 is the gate and w1 the up projection: the other way round than in Meta's files.",
        "intermediate_size counts gate and up together, and no_bias says that there is none.",
        "layer_norm_epsilon is the epsilon of an RMSNorm. attn.c_attn has a bias whatever no_bias says.",
        "Attention changes with the length of the text (use_dynamic_ntk, use_logn_attn), and is not read.",
    ),
)

EXAONE = like(
    LLAMA,
    "exaone",
    "ExaoneForCausalLM",
    "ExaoneModel",
    "LlamaForCausalLM",
    "LlamaModel",
    trunks=GPT_TRUNKS,
    layer="h.{i}.",
    sizes=MappingProxyType(
        {
            **sizes(4096, 14336, 32, 32, 102400, kv_heads=8),
            "layers": SizeSetting(("num_hidden_layers", "num_layers"), 32),
        }
    ),
    feed_forward=FeedForwardRow(
        gate=linear("mlp.c_fc_0"),
        up=linear("mlp.c_fc_1"),
        down=linear("mlp.c_proj"),
        activation=Setting(("hidden_act", "activation_function"), "silu"),
        bias=MLP_BIAS,
    ),
    norms=norms(
        "rms_llama",
        Setting(("rms_norm_eps", "layer_norm_epsilon"), 1e-5),
        ("attn_in", "ln_1"),
        ("ffn_in", "ln_2"),
        ("final", "ln_f"),
    ),
    embedding="wte.weight",
    sources=(
        "huggingface/transformers: src/transformers/models/exaone/configuration_exaone.py",
        "huggingface/transformers: src/transformers/conversion_mapping.py (exaone)",
    ),
    attention=heads(bias=ATTENTION_BIAS, place="attn.attention.", output="out_proj", rotary=rotary(500000.0)),
    notes=("c_fc_0 is the gate; GPT-2's names, and RMSNorm, and weights stored [out, in].",),
)

LLAMA2_C = like(
    LLAMA,
    "llama2_c",
    model_types=(),
    trunks=(Trunk("", "output.weight"), Trunk("_orig_mod.", "_orig_mod.output.weight")),
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("dim",), 4096),
            "intermediate": SizeSetting(
                ("hidden_dim",), TwoThirds("hidden", multiple_of=Setting(("multiple_of",), 256.0))
            ),
            "layers": SizeSetting(("n_layers",), 32),
            "heads": SizeSetting(("n_heads",), 32),
            "kv_heads": SizeSetting(("n_kv_heads",), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 32000),
        }
    ),
    feed_forward=meta_network("feed_forward"),
    norms=norms(
        "rms_llama",
        Setting(("norm_eps",), 1e-5),
        ("attn_in", "attention_norm"),
        ("ffn_in", "ffn_norm"),
        ("final", "norm"),
    ),
    embedding="tok_embeddings.weight",
    tied=Setting((), default=True),
    verified="source only",
    sources=("karpathy/llama2.c: model.py",),
    attention=meta_heads("attention.", rotary(arrangement=INTERLEAVED, precision=RotaryPrecision.COMPLEX)),
    notes=("Its binary export writes w1, w2, w3 in that order: gate, the way back, up.",),
)


ROWS = (
    INTERNLM2,
    BAICHUAN,
    QWEN,
    EXAONE,
    LLAMA2_C,
)
"""The rows of this module."""
