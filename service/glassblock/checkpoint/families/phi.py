"""The Phi families."""

from types import MappingProxyType

from glassblock.checkpoint.attention_row import AttentionRow
from glassblock.checkpoint.families.attention_makers import (
    NO_WINDOW,
    fused_heads,
    heads,
    rotary,
)
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    EPS_5,
    EPS_GPT,
    EPS_LAYER_NORM,
    NEVER,
    PRE_NORMS,
    SILU,
    TIED,
    TRUNKS,
    UNTIED,
    like,
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
    LogitsRow,
    NormRow,
    Setting,
    SizeSetting,
)
from glassblock.numerics.wiring import Placement


def _attention(positions: float) -> AttentionRow:
    """That of Phi-3, whose long form of rotary positions reads how many a model had before and has by default."""
    return fused_heads(
        "self_attn.qkv_proj",
        "self_attn.o_proj",
        window=NO_WINDOW,
        rotary=rotary(
            share=1.0,
            next_even=True,
            original_key="original_max_position_embeddings",
            max_positions=Setting(("max_position_embeddings",), positions),
        ),
    )


PHI3 = Architecture(
    name="phi3",
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=sizes(3072, 8192, 32, 32, 32064),
    feed_forward=FeedForwardRow(
        fused=FusedProjection("mlp.gate_up_proj.weight", "mlp.gate_up_proj.bias"),
        down=linear("mlp.down_proj"),
        activation=SILU,
        bias=NEVER,
    ),
    norms=norms("rms_llama", EPS_5, *PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("phi3"),
    attention=_attention(4096.0),
    notes=("The first half of the rows of gate_up_proj is the gate.",),
)

PHI4_MULTIMODAL = like(
    PHI3,
    "phi4_multimodal",
    "Phi4MultimodalForCausalLM",
    "Phi4MultimodalModel",
    sizes=sizes(3072, 8192, 32, 32, 200064, kv_heads=8),
    attention=_attention(131072.0),
    notes=("Its language model; the audio encoder is phi4_multimodal_audio, whose gate_up_proj has the gate second.",),
)

_PHI_NORMS = norms(
    "layernorm",
    EPS_LAYER_NORM,
    ("attn_in", "input_layernorm"),
    ("ffn_in", "input_layernorm"),
    ("final", "final_layernorm"),
    has_bias=True,
)

PHI = like(
    PHI3,
    "phi",
    "PhiForCausalLM",
    "PhiModel",
    sizes=sizes(2048, 8192, 24, 32, 51200),
    feed_forward=plain(Setting(("hidden_act",), "gelu_new"), ALWAYS, up="mlp.fc1", down="mlp.fc2"),
    norms=_PHI_NORMS,
    placement=Placement.PARALLEL,
    branches_first=True,
    config_variants=(
        where(
            "qk_layernorm",
            equals=True,
            default=False,
            norms=(
                *_PHI_NORMS,
                NormRow("q", "self_attn.q_layernorm", "layernorm", EPS_LAYER_NORM, has_bias=True, width=("head_dim",)),
                NormRow("k", "self_attn.k_layernorm", "layernorm", EPS_LAYER_NORM, has_bias=True, width=("head_dim",)),
            ),
        ),
    ),
    attention=heads(bias=ALWAYS, output="dense", rotary=rotary(share=0.5)),
    logits=LogitsRow(bias=ALWAYS),
    notes=("One norm feeds attention and the network; the output head has a bias.",),
)

PHI3SMALL = like(
    PHI3,
    "phi3small",
    "Phi3SmallForCausalLM",
    "Phi3SmallModel",
    sizes=MappingProxyType(
        {
            **sizes(4096, 14336, 32, 32, 100352, kv_heads=8),
            "intermediate": SizeSetting(("ff_intermediate_size", "intermediate_size"), 14336),
        }
    ),
    feed_forward=FeedForwardRow(
        fused=FusedProjection("mlp.up_proj.weight", "mlp.up_proj.bias", arrangement="interleaved"),
        down=linear("mlp.down_proj"),
        activation=Setting((), "quick_gelu"),
        bias=ALWAYS,
        gating="swiglu_oai",
        gating_parameters=MappingProxyType({"alpha": Setting((), 1.702), "limit": Setting(("gegelu_limit",), 20.0)}),
    ),
    norms=norms(
        "layernorm",
        EPS_GPT,
        ("attn_in", "input_layernorm"),
        ("ffn_in", "post_attention_layernorm"),
        ("final", "final_layernorm"),
        has_bias=True,
    ),
    tied=TIED,
    embedding_scale=Setting(("mup_embedding_multiplier",), 10.0),
    verified="source only",
    sources=(
        "microsoft/Phi-3-small-8k-instruct: modeling_phi3_small.py, configuration_phi3_small.py",
        "vllm-project/vllm: vllm/model_executor/models/phi3_small.py",
    ),
    logits=LogitsRow(divisor=Setting(("mup_width_multiplier",), 8.0)),
    notes=(
        "up_proj holds gate and up, neuron by neuron; the up value counts plus one (GeGELU).",
        "Its attention is sparse by blocks in all but every second layer, and is not read.",
        "Infinite values pass the clamp there and not here.",
    ),
)


ROWS = (
    PHI3,
    PHI4_MULTIMODAL,
    PHI,
    PHI3SMALL,
)
"""The rows of this module."""
