"""Checkpoints under the names of other code than transformers: Meta, Mistral, Megatron, litgpt, torchtune and more.

Most of it writes no config that is read here, so that sizes are the tensors' and the rest is as the row says; such a
family is taken when it is asked for by name. Rows say what their code does for models built as Llama is; what a
configuration of that code could change is in their notes.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from glassblock.checkpoint.attention_row import INTERLEAVED, AttentionRow, ScoreScale
from glassblock.checkpoint.conditions import AxisIs, Every, Holds, Says, unless
from glassblock.checkpoint.families.attention_makers import meta_heads, rotary
from glassblock.checkpoint.families.makers import (
    AS_MANY_AS_HEADS,
    HIDDEN_OVER_HEADS,
    PRE_NORMS,
    TRUNKS,
    linear,
    norms,
    where,
)
from glassblock.checkpoint.families.mixture_makers import CHOSEN_SOFTMAX, META, experts_of, fused_network, network
from glassblock.checkpoint.families.wirings import wired_by_norms, wirings
from glassblock.checkpoint.family import (
    Architecture,
    Layout,
    LogitsRow,
    MixtureRow,
    NormRow,
    Role,
    Setting,
    Size,
    SizeSetting,
    SquareRoot,
    Trunk,
    TwoThirds,
    Variant,
)
from glassblock.numerics.rotary import RotaryPrecision
from glassblock.numerics.wiring import Placement

_SILU = Setting((), "silu")
_EPS_5 = Setting(("norm_eps",), 1e-5)
_FIXED_EPS_5 = Setting((), 1e-5)
_UNTIED = Setting((), default=False)


def unsized(**known: SizeSetting) -> Mapping[Size, SizeSetting]:
    """Sizes that only the tensors show, but for the `known` ones."""
    names: tuple[Size, ...] = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")
    told: dict[Any, SizeSetting] = {**{name: SizeSetting((), None) for name in names}, **known}
    return MappingProxyType(told)


_META_EXPERTS = network("feed_forward.experts.{j}.", META, activation=_SILU)

_META_MIXTURE = experts_of("feed_forward.gate", _META_EXPERTS, routing=CHOSEN_SOFTMAX)

LLAMA_META = Architecture(
    name="llama_meta",
    model_types=(),
    architectures=(),
    trunks=(Trunk("", "output.weight"),),
    layer="layers.{i}.",
    sizes=unsized(
        hidden=SizeSetting(("dim",), None),
        intermediate=SizeSetting(
            ("hidden_dim",),
            TwoThirds(
                "hidden", factor=Setting(("ffn_dim_multiplier",), 1.0), multiple_of=Setting(("multiple_of",), 256.0)
            ),
        ),
        layers=SizeSetting(("n_layers",), None),
        heads=SizeSetting(("n_heads",), None),
        kv_heads=SizeSetting(("n_kv_heads",), AS_MANY_AS_HEADS),
        head_dim=SizeSetting(("head_dim",), HIDDEN_OVER_HEADS),
        experts=SizeSetting(("moe.num_experts",), None),
        experts_per_token=SizeSetting(("moe.num_experts_per_tok",), 2),
    ),
    feed_forward=network("feed_forward.", META, activation=_SILU),
    norms=norms("rms_llama", _EPS_5, ("attn_in", "attention_norm"), ("ffn_in", "ffn_norm"), ("final", "norm")),
    placement=Placement.PRE,
    embedding="tok_embeddings.weight",
    tied=_UNTIED,
    verified="source only",
    sources=("meta-llama/llama: llama/model.py", "mistralai/mistral-inference: src/mistral_inference"),
    config_file="params.json",
    config_variants=(
        Variant(
            Says(("moe",)),
            MappingProxyType({"feed_forward": None, "mixture": _META_MIXTURE}),
        ),
        where("use_scaled_rope", equals=True, default=False, attention=None),
    ),
    layer_variants=(
        Variant(
            Every((unless(Says(("dim",))), Holds("feed_forward.gate.weight"))),
            MappingProxyType({"feed_forward": None, "mixture": _META_MIXTURE}),
        ),
    ),
    attention=meta_heads("attention.", rotary(arrangement=INTERLEAVED, precision=RotaryPrecision.COMPLEX)),
    notes=(
        "w1 is the gate, w2 the down projection, w3 the up projection.",
        "The files of Llama, of Mistral and Mixtral (consolidated.safetensors) and of llama2.c.",
        "vocab_size is -1 in params.json of Llama 2, and is not read.",
        "Neighbouring channels of queries and keys are turned together; conversions to other names reorder their rows.",
        "The scaling of use_scaled_rope is not in params.json, and attention with it is not read.",
    ),
)

_TORCHTUNE_PLACES: tuple[tuple[Role, str], ...] = (("attn_in", "sa_norm"), ("ffn_in", "mlp_norm"), ("final", "norm"))

TORCHTUNE = Architecture(
    name="torchtune",
    model_types=(),
    architectures=(),
    trunks=(Trunk("", "output.weight"), Trunk("decoder.", "decoder.output.weight")),
    layer="layers.{i}.",
    sizes=unsized(),
    feed_forward=network("mlp.", META, activation=_SILU),
    norms=tuple(
        NormRow(role, name, "rms_llama", _FIXED_EPS_5, gain_suffix=".scale") for role, name in _TORCHTUNE_PLACES
    ),
    placement=Placement.PRE,
    embedding="tok_embeddings.weight",
    tied=_UNTIED,
    verified="source only",
    sources=("pytorch/torchtune: torchtune/modules/feed_forward.py, torchtune/models/llama3/_component_builders.py",),
    notes=(
        "A norm's gain is called scale. The epsilon is that of the Llama builders; other models are built with others.",
        "Gemma's norms use 1 + scale: such a file is of another family.",
    ),
)

_FUSED_NORM_PLACES: tuple[tuple[Role, str], ...] = (
    ("attn_in", "self_attention.linear_qkv"),
    ("ffn_in", "mlp.linear_fc1"),
)


def _megatron(name: str, *trunks: Trunk) -> Architecture:
    experts = fused_network(
        "mlp.experts.local_experts.{j}.linear_fc1",
        "mlp.experts.local_experts.{j}.linear_fc2",
        activation=_SILU,
        width=("expert_width",),
        bias_in_files=True,
    )
    final = norms("rms_llama", _MEGATRON_EPS, ("final", "final_layernorm"))
    return Architecture(
        name=name,
        model_types=(),
        architectures=(),
        trunks=trunks,
        layer="layers.{i}.",
        sizes=unsized(expert_width=SizeSetting((), None)),
        feed_forward=fused_network("mlp.linear_fc1", "mlp.linear_fc2", activation=_SILU, bias_in_files=True),
        norms=(
            *(
                NormRow(
                    role,
                    module,
                    "rms_llama",
                    _MEGATRON_EPS,
                    gain_suffix=".layer_norm_weight",
                    bias_suffix=".layer_norm_bias",
                )
                for role, module in _FUSED_NORM_PLACES
            ),
            *final,
        ),
        placement=Placement.PRE,
        embedding=None,
        tied=_UNTIED,
        verified="source only",
        sources=("NVIDIA/Megatron-LM: megatron/core/transformer/mlp.py",),
        layer_variants=(
            Variant(
                Holds("pre_mlp_layernorm.weight"),
                MappingProxyType(
                    {
                        "norms": (
                            *norms(
                                "rms_llama",
                                _MEGATRON_EPS,
                                ("attn_in", "input_layernorm"),
                                ("ffn_in", "pre_mlp_layernorm"),
                            ),
                            *final,
                        )
                    }
                ),
            ),
            Variant(
                Holds("mlp.router.weight"),
                MappingProxyType({"feed_forward": None, "mixture": experts_of("mlp.router", experts)}),
            ),
        ),
        notes=(
            "The norms' gains lie in the linear modules (Transformer Engine) or in modules of their own.",
            "The row says what a gated model with RMSNorm does (swiglu, normalization RMSNorm).",
            "Files joined from tensor-parallel ranks one after the other hold g0 u0 g1 u1, not gate and up.",
            "With layernorm_zero_centered_gamma gains are used as 1 + w: such a file is of another family.",
        ),
    )


_MEGATRON_EPS = Setting(("layernorm_epsilon",), 1e-5)
MEGATRON_CORE = _megatron("megatron_core", Trunk("decoder.", "output_layer.weight", "embedding.word_embeddings.weight"))
NEMO_LEGACY = _megatron(
    "nemo_legacy",
    Trunk(
        "language_model.decoder.",
        "language_model.output_layer.weight",
        "language_model.embedding.word_embeddings.weight",
    ),
)

_LITGPT = ("fc_1", "fc_2", "proj")


def _litgpt(
    name: str, activation: Setting[str], kind: str, *, sandwich: str | None = None, **more: Any
) -> Architecture:
    """litgpt's names. `sandwich` says why layers with four norms are not run, where another row is theirs."""

    return Architecture(
        name=name,
        model_types=(),
        architectures=(),
        trunks=(Trunk("transformer.", "lm_head.weight"),),
        layer="h.{i}.",
        sizes=unsized(),
        feed_forward=network("mlp.", _LITGPT, activation=activation, bias_in_files=True),
        norms=norms(kind, _EPS_5, ("attn_in", "norm_1"), ("ffn_in", "norm_2"), ("final", "ln_f")),
        placement=Placement.PRE,
        embedding="wte.weight",
        tied=_UNTIED,
        verified="source only",
        sources=("Lightning-AI/litgpt: litgpt/model.py, litgpt/config.py",),
        layer_variants=(
            *wired_by_norms(
                wirings("norm_1", "post_attention_norm", "norm_2", "post_mlp_norm"),
                kind,
                _EPS_5,
                query="attn.norm_q",
                key="attn.norm_k",
                final="ln_f",
                sandwich=sandwich,
            ),
        ),
        **more,
    )


LITGPT = _litgpt(
    "litgpt",
    _SILU,
    "rms_f32mul",
    sandwich="norms in front of both branches and after them are Gemma's: take the family litgpt_gemma",
    notes=(
        "fc_1 is the gate, fc_2 the up projection. The gain multiplies in float32, unlike in transformers' Llama.",
        "The row says what LLaMAMLP does. OLMo 2's layers have norms after the branches alone, under the same names.",
    ),
)

LITGPT_GEMMA = _litgpt(
    "litgpt_gemma",
    Setting((), "gelu_tanh"),
    "rms_plus1",
    embedding_scale=SquareRoot("hidden"),
    notes=(
        "What GemmaMLP does, with norms that have add_unit_offset: gains are stored as w and used as 1 + w.",
        "litgpt's configurations of Gemma leave norm_eps at 1e-5, where Google's models have 1e-6.",
        "It adds the 1 in the dtype of the weights, which rounds otherwise in half precision.",
    ),
)

MLX_LM = Architecture(
    name="mlx_lm",
    model_types=(),
    architectures=(),
    trunks=TRUNKS,
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("hidden_size",), None),
            "intermediate": SizeSetting(("intermediate_size",), None),
            "layers": SizeSetting(("num_hidden_layers",), None),
            "heads": SizeSetting(("num_attention_heads",), None),
            "kv_heads": SizeSetting(("num_key_value_heads",), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting(("head_dim",), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), None),
            "expert_width": SizeSetting(("moe_intermediate_size",), None),
        }
    ),
    feed_forward=network("mlp.", activation=_SILU, bias_in_files=True),
    norms=norms("rms_llama", Setting(("rms_norm_eps",), 1e-5), *PRE_NORMS),
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=Setting(("tie_word_embeddings",), default=False),
    verified="source only",
    sources=("ml-explore/mlx-lm: mlx_lm/models",),
    layer_variants=(
        Variant(
            Holds("mlp.switch_mlp.down_proj.weight"),
            MappingProxyType(
                {
                    "feed_forward": None,
                    "mixture": MixtureRow(
                        linear("mlp.gate"),
                        network("mlp.switch_mlp.", activation=_SILU, width=("expert_width",), bias_in_files=True),
                        arrangement="stacked",
                    ),
                }
            ),
        ),
    ),
    notes=(
        "Experts are stacked, gate and up separate. Dense models keep transformers' names: take their own family.",
        "Norms of Qwen3-Next hold 1 + w already; Gemma's hold w. This row adds nothing.",
    ),
)


def _grok(layout: Layout) -> Mapping[str, Any]:
    """Experts and attention of Grok-1: torch's modules hold weights [out, in], Haiku's [in, out]."""
    names = ("linear", "linear_v", "linear_1")
    place = "multi_head_attention."
    return {
        "mixture": MixtureRow(
            linear("router"),
            network("moe.{j}.", names, activation=Setting((), "gelu_tanh"), layout=layout),
            router_layout=layout,
        ),
        "attention": AttentionRow(
            query=linear(f"{place}query"),
            key=linear(f"{place}key"),
            value=linear(f"{place}value"),
            output=linear(f"{place}linear"),
            layout=layout,
            scale=ScoreScale(Setting(("attn_output_multiplier",), 0.08838834764831845), power=1.0),
            softcap=Setting(("max_attn_value",), 30.0),
        ),
    }


GROK1 = Architecture(
    name="grok1",
    model_types=("grok-1",),
    architectures=("Grok1ModelForCausalLM",),
    trunks=(Trunk("transformer.", "lm_head.weight", "transformer.in_out_embed.weight"),),
    layer="decoder_layer.{i}.",
    sizes=unsized(
        hidden=SizeSetting(("hidden_size", "emb_size"), None),
        intermediate=SizeSetting(("intermediate_size",), None),
        layers=SizeSetting(("num_hidden_layers", "num_layers"), None),
        heads=SizeSetting(("num_attention_heads", "num_q_heads"), None),
        kv_heads=SizeSetting(("num_key_value_heads", "num_kv_heads"), None),
        head_dim=SizeSetting(("head_dim", "key_size"), HIDDEN_OVER_HEADS),
        vocab=SizeSetting(("vocab_size",), None),
        experts=SizeSetting(("num_experts", "num_local_experts"), None),
        experts_per_token=SizeSetting(("num_experts_per_tok", "num_selected_experts"), 2),
    ),
    feed_forward=None,
    norms=norms(
        "rms_f32mul",
        Setting(("rms_norm_eps",), 1e-5),
        ("attn_in", "rms_norm"),
        ("attn_out", "rms_norm_1"),
        ("ffn_in", "rms_norm_2"),
        ("ffn_out", "rms_norm_3"),
        ("final", "rms_norm"),
    ),
    placement=Placement.SANDWICH,
    embedding=None,
    tied=Setting((), default=True),
    verified="source only",
    sources=(
        "xai-org/grok-1: model.py, run.py",
        "ggml-org/llama.cpp: convert_hf_to_gguf.py, gguf-py/gguf/tensor_mapping.py",
    ),
    embedding_scale=Setting(("embedding_multiplier_scale",), 78.38367176906169),
    logits=LogitsRow(scale=Setting(("output_multiplier_scale",), 0.5773502691896257)),
    layer_variants=(
        Variant(
            AxisIs("router.weight", 0, "rms_norm.weight"),
            MappingProxyType(_grok("in_out")),
        ),
    ),
    **_grok("out_in"),
    notes=(
        "linear is the gate, linear_v the up, linear_1 the down projection.",
        "Names are those of the JAX checkpoint written with dots; other conversions have others. Weights are stored "
        "[out, in], as torch's modules hold them, or [in, out], as the JAX checkpoint does: their shapes tell.",
        "Scores are multiplied by attn_output_multiplier in the place of the root of a head's width, and capped at 30.",
    ),
)

ROWS = (LLAMA_META, TORCHTUNE, MEGATRON_CORE, NEMO_LEGACY, LITGPT, LITGPT_GEMMA, MLX_LM, GROK1)
"""The rows of this module."""
