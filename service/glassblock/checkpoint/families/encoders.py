"""Encoders of text, speech and proteins, and encoder-decoders: the decoder is the row, the encoder its tower."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, Every, FromLayer, Holds, Says, Whole, unless
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    AS_MANY_AS_HEADS,
    EPS_6,
    GELU_TANH,
    HIDDEN_OVER_HEADS,
    MLP_BIAS,
    NEVER,
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
    Size,
    SizeSetting,
    SquareRoot,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

_TORCH_EPS = Setting((), 1e-5)
_EPS_12 = Setting(("layer_norm_eps",), 1e-12)

_GATED_T5 = ("gated-gelu", "gated-silu", "gated-relu")
_T5_ACTIVATIONS: Mapping[str | bool, str] = MappingProxyType(
    {"gated-gelu": "gelu_new", "gated-silu": "silu", "gated-relu": "relu", "relu": "relu", "gelu": "gelu"}
)


def _t5_sizes(
    layers: tuple[str, ...], *, inner: int = 2048, vocab: int = 32128, depth: int = 6, heads: int = 8
) -> Mapping[Size, SizeSetting]:
    return MappingProxyType(
        {
            "hidden": SizeSetting(("d_model",), 512),
            "intermediate": SizeSetting(("d_ff",), inner),
            "layers": SizeSetting(layers, depth),
            "heads": SizeSetting(("num_heads",), heads),
            "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
            "head_dim": SizeSetting(("d_kv",), 64),
            "vocab": SizeSetting(("vocab_size",), vocab),
        }
    )


def _t5_stack(side: str, sublayer: int, layers: tuple[str, ...], default: str) -> Architecture:
    """One side of T5. Its network is the last sublayer of a layer, after attention and, in a decoder, the second."""
    prefix = f"layer.{sublayer}.DenseReluDense."
    activation = Setting(("feed_forward_proj",), default, _T5_ACTIVATIONS)
    gated_network = network(prefix, ("wi_0", "wi_1", "wo"), activation=activation)
    eps = Setting(("layer_norm_epsilon",), 1e-6)
    return Architecture(
        name=f"t5 {side}",
        model_types=(),
        architectures=(),
        trunks=(Trunk(f"{side}.", "lm_head.weight", "shared.weight"),),
        layer="block.{i}.",
        sizes=_t5_sizes(layers),
        feed_forward=plain(activation, NEVER, up=f"{prefix}wi", down=f"{prefix}wo"),
        norms=norms(
            "rms_t5",
            eps,
            ("attn_in", "layer.0.layer_norm"),
            ("ffn_in", f"layer.{sublayer}.layer_norm"),
            ("final", "final_layer_norm"),
        ),
        placement=Placement.PRE,
        embedding="embed_tokens.weight",
        tied=TIED,
        verified="executed",
        sources=source("t5"),
        config_variants=(
            Variant(
                Declares(("feed_forward_proj",), _GATED_T5, "gated-gelu" if default == "gelu_new" else "relu"),
                MappingProxyType({"feed_forward": gated_network}),
            ),
        ),
        layer_variants=(
            Variant(
                Every((unless(Says(("d_model",))), Holds(f"{prefix}wi_0.weight"))),
                MappingProxyType({"feed_forward": gated_network}),
            ),
        ),
        notes=(
            "DenseReluDense is the module's name even where it is a gated GELU; gated-gelu means the tanh form.",
            "T5LayerNorm is an RMSNorm. The projection wo is kept in float32 by the models' own code.",
        ),
    )


T5 = replace(
    _t5_stack("decoder", 2, ("num_decoder_layers", "num_layers"), "relu"),
    name="t5",
    model_types=("t5",),
    architectures=("T5ForConditionalGeneration", "T5Model", "T5EncoderModel"),
    towers=MappingProxyType({"encoder": _t5_stack("encoder", 1, ("num_layers",), "relu")}),
)

MT5 = replace(
    _t5_stack("decoder", 2, ("num_decoder_layers", "num_layers"), "gelu_new"),
    name="mt5",
    model_types=("mt5", "umt5"),
    architectures=(
        "MT5ForConditionalGeneration",
        "MT5Model",
        "MT5EncoderModel",
        "UMT5ForConditionalGeneration",
        "UMT5Model",
        "UMT5EncoderModel",
    ),
    sizes=_t5_sizes(("num_decoder_layers", "num_layers"), inner=1024, vocab=250112, depth=8, heads=6),
    sources=(*source("mt5"), *source("umt5")),
    towers=MappingProxyType(
        {
            "encoder": replace(
                _t5_stack("encoder", 1, ("num_layers",), "gelu_new"),
                sizes=_t5_sizes(("num_layers",), inner=1024, vocab=250112, depth=8, heads=6),
            )
        }
    ),
)


def _t5gemma_stack(side: str) -> Architecture:
    return Architecture(
        name=f"t5gemma {side}",
        model_types=(),
        architectures=(),
        trunks=(Trunk(f"model.{side}.", "lm_head.out_proj.weight"), Trunk(f"{side}.", None)),
        layer="layers.{i}.",
        sizes=sizes(2304, 9216, 26, 8, 256000, kv_heads=4, head_dim=256),
        feed_forward=gated(GELU_TANH, NEVER),
        norms=norms(
            "rms_plus1",
            EPS_6,
            ("attn_in", "pre_self_attn_layernorm"),
            ("attn_out", "post_self_attn_layernorm"),
            ("ffn_in", "pre_feedforward_layernorm"),
            ("ffn_out", "post_feedforward_layernorm"),
            ("final", "norm"),
        ),
        placement=Placement.SANDWICH,
        embedding="embed_tokens.weight",
        tied=TIED,
        verified="executed",
        sources=source("t5gemma"),
        embedding_scale=SquareRoot("hidden"),
        nested=(side,),
        notes=("Gains are stored as w and used as 1 + w.",),
    )


T5GEMMA = replace(
    _t5gemma_stack("decoder"),
    name="t5gemma",
    model_types=("t5gemma",),
    architectures=("T5GemmaForConditionalGeneration", "T5GemmaModel", "T5GemmaEncoderModel"),
    towers=MappingProxyType({"encoder": _t5gemma_stack("encoder")}),
)


def _whisper_stack(side: str) -> Architecture:
    return Architecture(
        name=f"whisper {side}",
        model_types=(),
        architectures=(),
        trunks=(Trunk(f"model.{side}.", "proj_out.weight"), Trunk(f"{side}.", None)),
        layer="layers.{i}.",
        sizes=MappingProxyType(
            {
                "hidden": SizeSetting(("d_model",), 384),
                "intermediate": SizeSetting((f"{side}_ffn_dim",), 1536),
                "layers": SizeSetting((f"{side}_layers",), 4),
                "heads": SizeSetting((f"{side}_attention_heads",), 6),
                "kv_heads": SizeSetting((), AS_MANY_AS_HEADS),
                "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
                "vocab": SizeSetting(("vocab_size",), 51865),
            }
        ),
        feed_forward=plain(Setting(("activation_function",), "gelu"), ALWAYS, up="fc1", down="fc2"),
        norms=norms(
            "layernorm",
            _TORCH_EPS,
            ("attn_in", "self_attn_layer_norm"),
            ("ffn_in", "final_layer_norm"),
            ("final", "layer_norm"),
            has_bias=True,
        ),
        placement=Placement.PRE,
        embedding="embed_tokens.weight" if side == "decoder" else None,
        tied=TIED,
        verified="executed",
        sources=source("whisper"),
        notes=("A layer's final_layer_norm stands in front of its network; the stack's last norm is layer_norm.",),
    )


WHISPER = replace(
    _whisper_stack("decoder"),
    name="whisper",
    model_types=("whisper",),
    architectures=("WhisperForConditionalGeneration", "WhisperModel"),
    towers=MappingProxyType({"encoder": _whisper_stack("encoder")}),
)


def _moonshine_stack(side: str, activation: str, final: str) -> Architecture:
    decoder = side == "decoder"
    act = Setting((f"{side}_hidden_act",), activation)
    return Architecture(
        name=f"moonshine {side}",
        model_types=(),
        architectures=(),
        trunks=(Trunk(f"model.{side}.", "proj_out.weight"), Trunk(f"{side}.", None)),
        layer="layers.{i}.",
        sizes=MappingProxyType(
            {
                "hidden": SizeSetting(("hidden_size",), 288),
                "intermediate": SizeSetting(("intermediate_size",), 1152),
                "layers": SizeSetting((f"{side}_num_hidden_layers",), 6),
                "heads": SizeSetting((f"{side}_num_attention_heads",), 8),
                "kv_heads": SizeSetting((f"{side}_num_key_value_heads",), AS_MANY_AS_HEADS),
                "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
                "vocab": SizeSetting(("vocab_size",), 32768),
            }
        ),
        feed_forward=fused_network("mlp.fc1", "mlp.fc2", activation=act, bias=ALWAYS, order=("up", "gate"))
        if decoder
        else plain(act, ALWAYS, up="mlp.fc1", down="mlp.fc2"),
        norms=norms(
            "layernorm_nobias",
            _TORCH_EPS,
            ("attn_in", "input_layernorm"),
            ("ffn_in", "final_layernorm" if decoder else "post_attention_layernorm"),
            ("final", final),
        ),
        placement=Placement.PRE,
        embedding="embed_tokens.weight" if decoder else None,
        tied=TIED,
        verified="executed",
        sources=source("moonshine"),
        notes=(
            "fc1 of the decoder holds up and gate, the gate in the second half; that of the encoder holds no gate.",
            "The decoder's post_attention_layernorm stands in front of the attention to the encoder.",
        ),
    )


MOONSHINE = replace(
    _moonshine_stack("decoder", "silu", "norm"),
    name="moonshine",
    model_types=("moonshine",),
    architectures=("MoonshineForConditionalGeneration", "MoonshineModel"),
    towers=MappingProxyType({"encoder": _moonshine_stack("encoder", "gelu", "layer_norm")}),
)


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
    layer_variants=(
        Variant(Holds("output.LayerNorm.gamma"), MappingProxyType({"norms": _bert_norms(".gamma", ".beta")})),
    ),
    notes=(
        "Norms come after the residual add: there is none in front of a branch, and none after the last layer.",
        "Files from before 2020 call gain and bias of a norm gamma and beta.",
    ),
)

ROBERTA = like(BERT, "roberta", "RobertaForMaskedLM", "RobertaModel", sizes=sizes(768, 3072, 12, 12, 50265))

_MODERN_PLACES: tuple[tuple[Role, str], ...] = (
    ("attn_in", "attn_norm"),
    ("ffn_in", "mlp_norm"),
    ("final", "final_norm"),
)
_MODERN_EPS = Setting(("norm_eps",), 1e-5)
_MODERN_PLAIN = norms("layernorm_nobias", _MODERN_EPS, *_MODERN_PLACES)
_MODERN_BIASED = norms("layernorm", _MODERN_EPS, *_MODERN_PLACES, has_bias=True)
_FIRST_LAYER = unless(FromLayer(Whole((), 1)))
_HAS_NORM_BIAS = Declares(("norm_bias",), (True,), default=False)

MODERNBERT = Architecture(
    name="modernbert",
    model_types=("modernbert", "modernbert-decoder"),
    architectures=(
        "ModernBertForMaskedLM",
        "ModernBertModel",
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderModel",
    ),
    trunks=(Trunk("model.", "decoder.weight"), Trunk("", None)),
    layer="layers.{i}.",
    sizes=sizes(768, 1152, 22, 12, 50368),
    feed_forward=fused_network("mlp.Wi", "mlp.Wo", activation=Setting(("hidden_activation",), "gelu"), bias=MLP_BIAS),
    norms=_MODERN_PLAIN,
    placement=Placement.PRE,
    embedding="embeddings.tok_embeddings.weight",
    tied=TIED,
    verified="executed",
    sources=source("modernbert"),
    config_variants=(Variant(_HAS_NORM_BIAS, MappingProxyType({"norms": _MODERN_BIASED})),),
    layer_variants=(
        Variant(_FIRST_LAYER, MappingProxyType({"norms": _MODERN_PLAIN[1:]})),
        Variant(Every((_FIRST_LAYER, _HAS_NORM_BIAS)), MappingProxyType({"norms": _MODERN_BIASED[1:]})),
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

ROWS = (T5, MT5, T5GEMMA, WHISPER, MOONSHINE, BERT, ROBERTA, MODERNBERT, NOMIC_BERT, ESMC, MOSHI, KYUTAI)
"""The rows of this module."""
