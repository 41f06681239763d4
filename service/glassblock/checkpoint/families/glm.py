"""The GLM families."""

from types import MappingProxyType

from glassblock.checkpoint.attention_row import INTERLEAVED
from glassblock.checkpoint.families.attention_makers import ATTENTION_BIAS_ON, heads, rotary
from glassblock.checkpoint.families.makers import (
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
    SizeSetting,
    Trunk,
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
    attention=heads(bias=ATTENTION_BIAS_ON, output_bias=NEVER, rotary=rotary(share=0.5, arrangement=INTERLEAVED)),
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
    attention=heads(bias=ATTENTION_BIAS_ON, output_bias=NEVER, rotary=rotary(share=0.5, arrangement=INTERLEAVED)),
    notes=("post_self_attn_layernorm is on what attention returns, post_attention_layernorm in front of the network.",),
)

_CHATGLM_EPS = Setting(("layernorm_epsilon",), 1e-5)
_CHATGLM_PLACES: Places = (
    ("attn_in", "input_layernorm"),
    ("ffn_in", "post_attention_layernorm"),
    ("final", "encoder.final_layernorm"),
)

CHATGLM = like(
    GLM,
    "chatglm",
    "ChatGLMModel",
    "ChatGLMForConditionalGeneration",
    trunks=(Trunk("transformer.", "transformer.output_layer.weight"), Trunk("", "output_layer.weight")),
    layer="encoder.layers.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("hidden_size",), 4096),
            "intermediate": SizeSetting(("ffn_hidden_size",), 13696),
            "layers": SizeSetting(("num_layers",), 28),
            "heads": SizeSetting(("num_attention_heads",), 32),
            "kv_heads": SizeSetting(("multi_query_group_num",), 1),
            "head_dim": SizeSetting(("kv_channels",), 128),
            "vocab": SizeSetting(("padded_vocab_size",), 65024),
        }
    ),
    feed_forward=FeedForwardRow(
        fused=FusedProjection("mlp.dense_h_to_4h.weight", "mlp.dense_h_to_4h.bias"),
        down=linear("mlp.dense_4h_to_h"),
        activation=Setting((), "silu"),
        bias=Setting(("add_bias_linear",), default=False),
    ),
    norms=norms("rms_chatglm", _CHATGLM_EPS, *_CHATGLM_PLACES),
    embedding="embedding.word_embeddings.weight",
    verified="source only",
    sources=("THUDM/chatglm3-6b: modeling_chatglm.py, configuration_chatglm.py",),
    config_variants=(
        where(
            "rmsnorm",
            equals=False,
            default=True,
            norms=norms("layernorm", _CHATGLM_EPS, *_CHATGLM_PLACES, has_bias=True),
        ),
        where(
            "apply_residual_connection_post_layernorm",
            equals=True,
            default=False,
            not_run="the residual is taken after the norm (apply_residual_connection_post_layernorm)",
        ),
    ),
    notes=("dense_h_to_4h holds the gate in its first half and the up projection in its second.",),
)


ROWS = (
    GLM,
    GLM4,
    CHATGLM,
)
"""The rows of this module."""
