"""The family table: one row for each family of models. Adding a family means adding a row, nothing else.

Sizes, epsilons and flags carry the defaults of the families' own configuration classes (transformers 5.24.0):
they are what a model is built with where its config.json is silent.
"""

from collections.abc import Mapping
from types import MappingProxyType

from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    FusedProjection,
    NormRow,
    Projection,
    Ratio,
    Role,
    Setting,
    Size,
    SizeSetting,
    SquareRoot,
    Trunk,
)
from glassblock.numerics.wiring import Placement

_AS_MANY_AS_HEADS = Ratio("heads")
_HIDDEN_OVER_HEADS = Ratio("hidden", over="heads")


def _linear(name: str) -> Projection:
    return Projection(f"{name}.weight", f"{name}.bias")


def _gated(activation: Setting[str], bias: Setting[bool]) -> FeedForwardRow:
    return FeedForwardRow(
        gate=_linear("mlp.gate_proj"),
        up=_linear("mlp.up_proj"),
        down=_linear("mlp.down_proj"),
        activation=activation,
        bias=bias,
    )


def _norms(kind: str, eps: Setting[float], *places: tuple[Role, str], has_bias: bool = False) -> tuple[NormRow, ...]:
    return tuple(NormRow(role, template, kind, eps, has_bias=has_bias) for role, template in places)


def _query_key_norms(kind: str, eps: Setting[float], *widths: tuple[Size, ...]) -> tuple[NormRow, ...]:
    query, key = widths
    return (
        NormRow("q", "self_attn.q_norm", kind, eps, width=query),
        NormRow("k", "self_attn.k_norm", kind, eps, width=key),
    )


def _sizes(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    vocab: int,
    *,
    kv_heads: int | Ratio = _AS_MANY_AS_HEADS,
    head_dim: int | Ratio = _HIDDEN_OVER_HEADS,
) -> Mapping[Size, SizeSetting]:
    return MappingProxyType(
        {
            "hidden": SizeSetting(("hidden_size",), hidden),
            "intermediate": SizeSetting(("intermediate_size",), intermediate),
            "layers": SizeSetting(("num_hidden_layers",), layers),
            "heads": SizeSetting(("num_attention_heads",), heads),
            "kv_heads": SizeSetting(("num_key_value_heads",), kv_heads),
            "head_dim": SizeSetting(("head_dim",), head_dim),
            "vocab": SizeSetting(("vocab_size",), vocab),
        }
    )


def _source(family: str) -> tuple[str, ...]:
    return tuple(
        f"huggingface/transformers: src/transformers/models/{family}/{kind}_{family}.py"
        for kind in ("modeling", "configuration")
    )


_NEVER = Setting[bool]((), default=False)
_ALWAYS = Setting[bool]((), default=True)
_UNTIED = Setting(("tie_word_embeddings",), default=False)
_TIED = Setting(("tie_word_embeddings",), default=True)
_SILU = Setting(("hidden_act",), "silu")
_EPS_6 = Setting(("rms_norm_eps",), 1e-6)
_EPS_5 = Setting(("rms_norm_eps",), 1e-5)

# The plain language model, the two spellings of multimodal wrappers, and a base model saved without its head.
_TRUNKS = (
    Trunk("model.", "lm_head.weight"),
    Trunk("language_model.model.", "language_model.lm_head.weight"),
    Trunk("model.language_model.", "lm_head.weight"),
    Trunk("", "lm_head.weight"),
)
_PRE_NORMS: tuple[tuple[Role, str], ...] = (
    ("attn_in", "input_layernorm"),
    ("ffn_in", "post_attention_layernorm"),
    ("final", "norm"),
)

LLAMA = Architecture(
    name="llama",
    model_types=("llama",),
    architectures=("LlamaForCausalLM", "LlamaModel"),
    trunks=_TRUNKS,
    layer="layers.{i}.",
    sizes=_sizes(4096, 11008, 32, 32, 32000),
    feed_forward=_gated(_SILU, Setting(("mlp_bias",), default=False)),
    norms=_norms("rms_llama", _EPS_6, *_PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=_UNTIED,
    verified="executed",
    sources=_source("llama"),
    notes=(
        "The default epsilon, 1e-6, is not the 1e-5 of nearly every released Llama 2 and 3.",
        "post_attention_layernorm is the norm in front of the feed-forward network.",
    ),
)

MISTRAL = Architecture(
    name="mistral",
    model_types=("mistral", "ministral"),
    architectures=("MistralForCausalLM", "MistralModel", "MinistralForCausalLM", "MinistralModel"),
    trunks=_TRUNKS,
    layer="layers.{i}.",
    sizes=_sizes(4096, 14336, 32, 32, 32000, kv_heads=8),
    feed_forward=_gated(_SILU, _NEVER),
    norms=_norms("rms_llama", _EPS_6, *_PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=_UNTIED,
    verified="executed",
    sources=(*_source("mistral"), *_source("ministral")),
    notes=("The default epsilon is 1e-6; released checkpoints have 1e-5.",),
)

QWEN2 = Architecture(
    name="qwen2",
    model_types=("qwen2",),
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    trunks=_TRUNKS,
    layer="layers.{i}.",
    sizes=_sizes(4096, 22016, 32, 32, 151936, kv_heads=32),
    feed_forward=_gated(_SILU, _NEVER),
    norms=_norms("rms_llama", _EPS_6, *_PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=_UNTIED,
    verified="executed",
    sources=_source("qwen2"),
    notes=("The epsilon differs within the family: 1e-6 up to 7B, 1e-5 above.",),
)

QWEN3 = Architecture(
    name="qwen3",
    model_types=("qwen3",),
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    trunks=_TRUNKS,
    layer="layers.{i}.",
    sizes=_sizes(4096, 22016, 32, 32, 151936, kv_heads=32, head_dim=128),
    feed_forward=_gated(_SILU, _NEVER),
    norms=(
        *_norms("rms_llama", _EPS_6, *_PRE_NORMS),
        *_query_key_norms("rms_llama", _EPS_6, ("head_dim",), ("head_dim",)),
    ),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=_UNTIED,
    verified="executed",
    sources=_source("qwen3"),
)

GEMMA3 = Architecture(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    architectures=("Gemma3ForCausalLM", "Gemma3TextModel", "Gemma3ForConditionalGeneration", "Gemma3Model"),
    trunks=_TRUNKS,
    layer="layers.{i}.",
    sizes=_sizes(2304, 9216, 26, 8, 262208, kv_heads=4, head_dim=256),
    feed_forward=_gated(Setting(("hidden_activation",), "gelu_pytorch_tanh"), _NEVER),
    norms=(
        *_norms(
            "rms_plus1",
            _EPS_6,
            ("attn_in", "input_layernorm"),
            ("attn_out", "post_attention_layernorm"),
            ("ffn_in", "pre_feedforward_layernorm"),
            ("ffn_out", "post_feedforward_layernorm"),
            ("final", "norm"),
        ),
        *_query_key_norms("rms_plus1", _EPS_6, ("head_dim",), ("head_dim",)),
    ),
    placement=Placement.SANDWICH,
    embedding="embed_tokens.weight",
    tied=_TIED,
    embedding_scale=SquareRoot("hidden"),
    verified="executed",
    sources=_source("gemma3"),
    notes=(
        "Gains are stored as w and used as 1 + w. GGUF files hold 1 + w already.",
        "post_attention_layernorm is the norm on the attention output, not the one in front of the network.",
    ),
)

PHI3 = Architecture(
    name="phi3",
    model_types=("phi3",),
    architectures=("Phi3ForCausalLM", "Phi3Model"),
    trunks=_TRUNKS,
    layer="layers.{i}.",
    sizes=_sizes(3072, 8192, 32, 32, 32064),
    feed_forward=FeedForwardRow(
        fused=FusedProjection("mlp.gate_up_proj.weight", "mlp.gate_up_proj.bias"),
        down=_linear("mlp.down_proj"),
        activation=_SILU,
        bias=_NEVER,
    ),
    norms=_norms("rms_llama", _EPS_5, *_PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=_UNTIED,
    verified="executed",
    sources=_source("phi3"),
    notes=("The first half of the rows of gate_up_proj is the gate.",),
)

OLMO2 = Architecture(
    name="olmo2",
    model_types=("olmo2", "olmo3"),
    architectures=("Olmo2ForCausalLM", "Olmo2Model", "Olmo3ForCausalLM", "Olmo3Model"),
    trunks=_TRUNKS,
    layer="layers.{i}.",
    sizes=_sizes(4096, 11008, 32, 32, 50304),
    feed_forward=_gated(_SILU, _NEVER),
    norms=(
        *_norms(
            "rms_f32mul",
            _EPS_5,
            ("attn_out", "post_attention_layernorm"),
            ("ffn_out", "post_feedforward_layernorm"),
            ("final", "norm"),
        ),
        *_query_key_norms("rms_f32mul", _EPS_5, ("heads", "head_dim"), ("kv_heads", "head_dim")),
    ),
    placement=Placement.BRANCH_OUTPUT,
    embedding="embed_tokens.weight",
    tied=_UNTIED,
    verified="executed",
    sources=(*_source("olmo2"), *_source("olmo3")),
    notes=(
        "There is no norm in front of attention or of the network: both read the residual stream itself.",
        "The default epsilon is 1e-5; released OLMo 2 checkpoints have 1e-6.",
    ),
)

GPT2 = Architecture(
    name="gpt2",
    model_types=("gpt2",),
    architectures=("GPT2LMHeadModel", "GPT2Model"),
    trunks=(Trunk("transformer.", "lm_head.weight"), Trunk("", "lm_head.weight")),
    layer="h.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("n_embd", "hidden_size"), 768),
            "intermediate": SizeSetting(("n_inner",), Ratio("hidden", times=4)),
            "layers": SizeSetting(("n_layer", "num_hidden_layers"), 12),
            "heads": SizeSetting(("n_head", "num_attention_heads"), 12),
            "kv_heads": SizeSetting((), _AS_MANY_AS_HEADS),
            "head_dim": SizeSetting((), _HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 50257),
        }
    ),
    feed_forward=FeedForwardRow(
        up=_linear("mlp.c_fc"),
        down=_linear("mlp.c_proj"),
        activation=Setting(("activation_function",), "gelu_new"),
        bias=_ALWAYS,
        layout="in_out",
    ),
    norms=_norms(
        "layernorm",
        Setting(("layer_norm_epsilon",), 1e-5),
        ("attn_in", "ln_1"),
        ("ffn_in", "ln_2"),
        ("final", "ln_f"),
        has_bias=True,
    ),
    placement=Placement.PRE,
    embedding="wte.weight",
    tied=_TIED,
    verified="executed",
    sources=(*_source("gpt2"), "huggingface/transformers: src/transformers/pytorch_utils.py (Conv1D)"),
    notes=("Weights are stored [in, out]. n_inner null means four times n_embd.",),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {row.name: row for row in (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA3, PHI3, OLMO2, GPT2)}
)
"""The families by name."""

BY_MODEL_TYPE: Mapping[str, Architecture] = MappingProxyType(
    {model_type: row for row in ARCHITECTURES.values() for model_type in row.model_types}
)
"""The families by a config's `model_type`."""

BY_ARCHITECTURE: Mapping[str, Architecture] = MappingProxyType(
    {name: row for row in ARCHITECTURES.values() for name in row.architectures}
)
"""The families by an entry of a config's `architectures`."""
