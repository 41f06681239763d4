"""Encoders of text and proteins, and decoders of speech."""

from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, Every, FromLayer, Holds, Says, Whole, either, unless
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    AS_MANY_AS_HEADS,
    HIDDEN_OVER_HEADS,
    MLP_BIAS,
    PRE_NORMS,
    SILU,
    TIED,
    UNTIED,
    gated,
    like,
    norms,
    plain,
    sizes,
    source,
)
from glassblock.checkpoint.families.mixture_makers import fused_network, network
from glassblock.checkpoint.family import (
    Architecture,
    NormRow,
    OverRootDepth,
    Role,
    Setting,
    SizeSetting,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

_TORCH_EPS = Setting((), 1e-5)
_EPS_12 = Setting(("layer_norm_eps",), 1e-12)


def _bert_norms(gain: str, bias: str) -> tuple[NormRow, ...]:
    places: tuple[tuple[Role, str], ...] = (
        ("resid_attn", "attention.output.LayerNorm"),
        ("resid_ffn", "output.LayerNorm"),
    )
    return tuple(
        NormRow(role, template, "layernorm", _EPS_12, has_bias=True, gain_suffix=gain, bias_suffix=bias)
        for role, template in places
    )


BERT = Architecture(
    name="bert",
    model_types=("bert", "xlm-roberta"),
    architectures=("BertForMaskedLM", "BertModel", "XLMRobertaForMaskedLM", "XLMRobertaModel"),
    trunks=(
        Trunk("bert.", "cls.predictions.decoder.weight"),
        Trunk("roberta.", "lm_head.decoder.weight"),
        Trunk("", None),
        Trunk("text_model.", None),  # VisionTextDualEncoder's
    ),
    layer="encoder.layer.{i}.",
    sizes=sizes(768, 3072, 12, 12, 30522),
    feed_forward=plain(Setting(("hidden_act",), "gelu"), ALWAYS, up="intermediate.dense", down="output.dense"),
    norms=_bert_norms(".weight", ".bias"),
    placement=Placement.POST,
    embedding="embeddings.word_embeddings.weight",
    tied=TIED,
    verified="executed",
    sources=(*source("bert"), *source("xlm_roberta")),
    logits=None,
    layer_variants=(
        Variant(Holds("output.LayerNorm.gamma"), MappingProxyType({"norms": _bert_norms(".gamma", ".beta")})),
    ),
    notes=(
        "Norms come after the residual add: there is none in front of a branch, and none after the last layer.",
        "Files from before 2020 call gain and bias of a norm gamma and beta.",
    ),
)

ROBERTA = like(
    BERT, "roberta", "RobertaForMaskedLM", "RobertaModel", sizes=sizes(768, 3072, 12, 12, 50265), logits=None
)

_MODERN_PLACES: tuple[tuple[Role, str], ...] = (
    ("attn_in", "attn_norm"),
    ("ffn_in", "mlp_norm"),
    ("final", "final_norm"),
)
_MODERN_EPS = Setting(("norm_eps",), 1e-5)
_MODERN_PLAIN = norms("layernorm_nobias", _MODERN_EPS, *_MODERN_PLACES)
_MODERN_BIASED = norms("layernorm", _MODERN_EPS, *_MODERN_PLACES, has_bias=True)
_MODERN_EMBEDDING = NormRow("embedding", "embeddings.norm", "layernorm_nobias", _MODERN_EPS)
_FIRST_LAYER = unless(FromLayer(Whole((), 1)))
_HAS_NORM_BIAS = Declares(("norm_bias",), (True,), default=False)
_SHOWS_NORM_BIAS = Every((unless(Says(("hidden_size",))), Holds("mlp_norm.bias")))

MODERNBERT = Architecture(
    name="modernbert",
    model_types=("modernbert", "modernbert-decoder"),
    architectures=(
        "ModernBertForMaskedLM",
        "ModernBertModel",
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderModel",
    ),
    trunks=(Trunk("model.", "decoder.weight"), Trunk("", None), Trunk("model.text_model.", "lm_head.weight")),
    layer="layers.{i}.",
    sizes=sizes(768, 1152, 22, 12, 50368),
    feed_forward=fused_network("mlp.Wi", "mlp.Wo", activation=Setting(("hidden_activation",), "gelu"), bias=MLP_BIAS),
    norms=_MODERN_PLAIN,
    placement=Placement.PRE,
    embedding="embeddings.tok_embeddings.weight",
    tied=TIED,
    verified="executed",
    sources=source("modernbert"),
    logits=None,
    embedding_norm=_MODERN_EMBEDDING,
    config_variants=(
        Variant(
            _HAS_NORM_BIAS,
            MappingProxyType(
                {
                    "norms": _MODERN_BIASED,
                    "embedding_norm": replace(_MODERN_EMBEDDING, kind="layernorm", has_bias=True),
                }
            ),
        ),
    ),
    layer_variants=(
        Variant(_FIRST_LAYER, MappingProxyType({"norms": _MODERN_PLAIN[1:]})),
        Variant(
            Every((_FIRST_LAYER, either(_HAS_NORM_BIAS, _SHOWS_NORM_BIAS))),
            MappingProxyType({"norms": _MODERN_BIASED[1:]}),
        ),
    ),
    notes=(
        "The half that the code calls gate is not the activated one: the activated half comes first.",
        "The first layer has no norm in front of attention.",
    ),
)

NOMIC_BERT = Architecture(
    name="nomic_bert",
    model_types=("nomic_bert",),
    architectures=("NomicBertForMaskedLM", "NomicBertModel", "NomicBertForPreTraining"),
    trunks=(Trunk("nomic_bert.", "cls.predictions.decoder.weight"), Trunk("bert.", None), Trunk("", None)),
    layer="encoder.layers.{i}.",
    sizes=MappingProxyType(
        {
            "hidden": SizeSetting(("hidden_size", "n_embd"), 768),
            "intermediate": SizeSetting(("intermediate_size", "n_inner"), 3072),
            "layers": SizeSetting(("num_hidden_layers", "n_layer"), 12),
            "heads": SizeSetting(("num_attention_heads", "n_head"), 12),
            "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting(("head_dim",), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), 30528),
        }
    ),
    feed_forward=network(
        "mlp.",
        ("fc12", "fc11", "fc2"),
        activation=Setting(("hidden_act", "activation_function"), "silu"),
        bias=Setting(("mlp_fc1_bias",), default=False),
        down_bias=Setting(("mlp_fc2_bias",), default=False),
    ),
    norms=norms(
        "layernorm",
        Setting(("layer_norm_eps", "layer_norm_epsilon"), 1e-12),
        ("resid_attn", "norm1"),
        ("resid_ffn", "norm2"),
        has_bias=True,
    ),
    placement=Placement.POST,
    embedding="embeddings.word_embeddings.weight",
    tied=TIED,
    verified="executed",
    sources=(*source("nomic_bert"), "nomic-ai/contrastors: src/contrastors/layers/mlp.py"),
    logits=None,
    notes=("fc11 is the up projection, fc12 the gate.", "norm1 and norm2 come after the residual add."),
)

_ESM_NORMS = (
    *norms(
        "layernorm", _TORCH_EPS, ("attn_in", "input_layernorm"), ("ffn_in", "post_attention_layernorm"), has_bias=True
    ),
    *norms(
        "layernorm_nobias",
        _TORCH_EPS,
        ("final", "norm"),
        ("q", "self_attn.q_norm"),
        ("k", "self_attn.k_norm"),
    ),
)

ESMC = Architecture(
    name="esmc",
    model_types=("esmc",),
    architectures=("EsmcForMaskedLM", "EsmcModel"),
    trunks=(Trunk("esmc.", "lm_head.decoder.weight"), Trunk("", None)),
    layer="layers.{i}.",
    sizes=sizes(2560, 6912, 80, 40, 64),
    feed_forward=gated(SILU, MLP_BIAS),
    norms=_ESM_NORMS,
    placement=Placement.PRE,
    embedding="embed_tokens.weight",
    tied=UNTIED,
    verified="executed",
    sources=source("esmc"),
    logits=None,
    branch_scale=OverRootDepth(Setting((), 1.0), over=36.0),
    notes=("What every branch adds is divided by the square root of layers / 36.",),
)

MOSHI = Architecture(
    name="moshi",
    model_types=("moshi",),
    architectures=("MoshiForCausalLM", "MoshiForConditionalGeneration"),
    trunks=(
        Trunk("decoder.model.", "decoder.lm_head.weight"),
        Trunk("model.", "lm_head.weight"),
        Trunk("", None),
    ),
    layer="layers.{i}.",
    sizes=MappingProxyType(
        {**sizes(4096, 11264, 32, 32, 32000), "intermediate": SizeSetting(("ffn_dim",), 11264, over=2)}
    ),
    feed_forward=fused_network("mlp.fc1", "mlp.fc2"),
    norms=norms("rms_f32mul", Setting(("rms_norm_eps",), 1e-8), *PRE_NORMS),
    placement=Placement.PRE,
    embedding=None,
    tied=UNTIED,
    verified="executed",
    sources=source("moshi"),
    notes=(
        "fc1 holds gate and up, the gate first; ffn_dim counts both.",
        "The input sums embeddings of text and sound.",
    ),
)

KYUTAI = like(
    MOSHI,
    "kyutai_speech_to_text",
    "KyutaiSpeechToTextForConditionalGeneration",
    "KyutaiSpeechToTextModel",
    sizes={**sizes(2048, 5632, 48, 32, 4001), "intermediate": SizeSetting(("ffn_dim",), 5632, over=2)},
    notes=MOSHI.notes,
)

ROWS = (BERT, ROBERTA, MODERNBERT, NOMIC_BERT, ESMC, MOSHI, KYUTAI)
"""The rows of this module."""
