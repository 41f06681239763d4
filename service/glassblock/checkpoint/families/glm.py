"""The GLM families."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from glassblock.checkpoint.attention_row import INTERLEAVED, AttentionRow, RotaryRow
from glassblock.checkpoint.conditions import Declares, Every, Says, either, unless
from glassblock.checkpoint.families.attention_makers import ATTENTION_BIAS_ON, fused_heads, heads, rotary
from glassblock.checkpoint.families.makers import (
    AS_MANY_AS_HEADS,
    NEVER,
    PRE_NORMS,
    SILU,
    TRUNKS,
    UNTIED,
    Places,
    like,
    linear,
    norms,
    sizes,
    source,
    where,
)
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    FusedProjection,
    Setting,
    Size,
    SizeSetting,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

GLM = Architecture(
    name="glm",
    model_types=("glm",),
    architectures=("GlmForCausalLM", "GlmModel"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=sizes(4096, 13696, 40, 32, 151552, kv_heads=2, head_dim=128),
    feed_forward=FeedForwardRow(
        fused=FusedProjection("mlp.gate_up_proj.weight", "mlp.gate_up_proj.bias"),
        down=linear("mlp.down_proj"),
        activation=SILU,
        bias=NEVER,
    ),
    norms=norms("rms_llama", Setting(("rms_norm_eps",), 1.5625e-07), *PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("glm"),
    attention=heads(
        bias=ATTENTION_BIAS_ON, output_bias=NEVER, rotary=rotary(share=0.5, arrangement=INTERLEAVED, next_even=True)
    ),
    notes=("The default epsilon, 1.5625e-07, is meant.",),
)

GLM4 = like(
    GLM,
    "glm4",
    "Glm4ForCausalLM",
    "Glm4Model",
    norms=norms(
        "rms_llama",
        Setting(("rms_norm_eps",), 1.5625e-07),
        ("attn_in", "input_layernorm"),
        ("attn_out", "post_self_attn_layernorm"),
        ("ffn_in", "post_attention_layernorm"),
        ("ffn_out", "post_mlp_layernorm"),
        ("final", "norm"),
    ),
    placement=Placement.SANDWICH,
    attention=heads(
        bias=ATTENTION_BIAS_ON, output_bias=NEVER, rotary=rotary(share=0.5, arrangement=INTERLEAVED, next_even=True)
    ),
    notes=("post_self_attn_layernorm is on what attention returns, post_attention_layernorm in front of the network.",),
)

_CHATGLM_EPS = Setting(("layernorm_epsilon",), 1e-5)
_CHATGLM_PLACES: Places = (
    ("attn_in", "input_layernorm"),
    ("ffn_in", "post_attention_layernorm"),
    ("final", "encoder.final_layernorm"),
)
_CHATGLM_SIZES: Mapping[Size, SizeSetting] = MappingProxyType(
    {
        "hidden": SizeSetting(("hidden_size",), 4096),
        "intermediate": SizeSetting(("ffn_hidden_size",), 13696),
        "layers": SizeSetting(("num_layers",), 28),
        "heads": SizeSetting(("num_attention_heads",), 32),
        "kv_heads": SizeSetting(("multi_query_group_num",), 1),
        "head_dim": SizeSetting(("kv_channels",), 128),
        "vocab": SizeSetting(("padded_vocab_size",), 65024),
    }
)
_LAYER_NORMS = Declares(("rmsnorm",), (False,), default=True)
_WITHOUT_LAST = Declares(("post_layer_norm",), (False,), default=True)


def _chatglm_heads(arrangement: Literal["blocks", "groups"]) -> AttentionRow:
    """Neighbouring channels of the first half of every head are turned."""
    return fused_heads(
        "self_attention.query_key_value",
        "self_attention.dense",
        arrangement=arrangement,
        bias=Setting(("add_qkv_bias",), default=False),
        output_bias=NEVER,
        rotary=RotaryRow(
            theta=Setting((), 10000.0),
            forms=(),
            share=Setting((), 0.5),
            arrangement=INTERLEAVED,
            max_positions=Setting(("seq_length",), 2048.0),
        ),
    )


CHATGLM = like(
    GLM,
    "chatglm",
    "ChatGLMModel",
    "ChatGLMForConditionalGeneration",
    trunks=(Trunk("transformer.", "transformer.output_layer.weight"), Trunk("", "output_layer.weight")),
    layer="encoder.layers.{i}.",
    sizes=_CHATGLM_SIZES,
    feed_forward=FeedForwardRow(
        fused=FusedProjection("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias"),
        down=linear("mlp.dense_4h_to_h"),
        activation=Setting((), "silu"),
        bias=Setting(("add_bias_linear",), default=False),
    ),
    norms=norms("rms_chatglm", _CHATGLM_EPS, *_CHATGLM_PLACES),
    embedding="embedding.word_embeddings.weight",
    verified="source only",
    sources=(
        "THUDM/chatglm3-6b: modeling_chatglm.py, configuration_chatglm.py",
        "vllm-project/vllm: vllm/model_executor/models/chatglm.py",
    ),
    attention=_chatglm_heads("blocks"),
    config_variants=(
        where(
            "multi_query_attention",
            equals=False,
            default=False,
            sizes=MappingProxyType({**_CHATGLM_SIZES, "kv_heads": SizeSetting((), AS_MANY_AS_HEADS)}),
            attention=_chatglm_heads("groups"),
        ),
        where("add_bias_linear", equals=True, default=False, attention=None),
        Variant(
            either(Says(("rope_ratio",)), Declares(("original_rope",), (False,), default=True)),
            MappingProxyType({"attention": None}),
        ),
        where(
            "rmsnorm",
            equals=False,
            default=True,
            norms=norms("layernorm", _CHATGLM_EPS, *_CHATGLM_PLACES, has_bias=True),
        ),
        Variant(
            Every((_WITHOUT_LAST, unless(_LAYER_NORMS))),
            MappingProxyType({"norms": norms("rms_chatglm", _CHATGLM_EPS, *_CHATGLM_PLACES[:2])}),
        ),
        Variant(
            Every((_WITHOUT_LAST, _LAYER_NORMS)),
            MappingProxyType({"norms": norms("layernorm", _CHATGLM_EPS, *_CHATGLM_PLACES[:2], has_bias=True)}),
        ),
        where(
            "apply_residual_connection_post_layernorm",
            equals=True,
            default=False,
            not_run="the residual is taken after the norm (apply_residual_connection_post_layernorm)",
        ),
    ),
    notes=(
        "dense_h_to_4h holds the gate in its first half and the up projection in its second.",
        "query_key_value holds all queries, then keys, then values; without multi_query_attention head by head.",
        "rope_ratio multiplies theta in some releases and divides positions in others: attention is not read with it.",
    ),
)


ROWS = (
    GLM,
    GLM4,
    CHATGLM,
)
"""The rows of this module."""
