"""Encoder-decoders of text and speech: the decoder is the row, the encoder its tower."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, Every, Holds, Says, unless
from glassblock.checkpoint.families.gemma import CAPPED_AT_30
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    AS_MANY_AS_HEADS,
    EPS_6,
    GELU_TANH,
    HIDDEN_OVER_HEADS,
    NEVER,
    TIED,
    Places,
    gated,
    norms,
    plain,
    sizes,
    source,
)
from glassblock.checkpoint.families.mixture_makers import fused_network, network
from glassblock.checkpoint.family import (
    Architecture,
    LogitsRow,
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


def _of_decoder(side: str, *places: tuple[Role, str]) -> Places:
    """Norms around the attention to an encoder, which only decoders have."""
    return places if side == "decoder" else ()


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
            *_of_decoder(side, ("cross_in", "layer.1.layer_norm")),
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


_SCALED_LOGITS = LogitsRow(divisor=SquareRoot("hidden", rounded=False))
_UNSCALED = Declares(("scale_decoder_outputs", "tie_word_embeddings"), (False,), default=True)

_T5_DECODER = _t5_stack("decoder", 2, ("num_decoder_layers", "num_layers"), "relu")
_MT5_DECODER = _t5_stack("decoder", 2, ("num_decoder_layers", "num_layers"), "gelu_new")

T5 = replace(
    _T5_DECODER,
    name="t5",
    model_types=("t5",),
    architectures=("T5ForConditionalGeneration", "T5Model", "T5EncoderModel"),
    towers=MappingProxyType({"encoder": _t5_stack("encoder", 1, ("num_layers",), "relu")}),
    logits=_SCALED_LOGITS,
    config_variants=(*_T5_DECODER.config_variants, Variant(_UNSCALED, MappingProxyType({"logits": LogitsRow()}))),
    notes=(
        *_T5_DECODER.notes,
        "Logits are divided by the root of d_model, unless tie_word_embeddings is false, as T5 1.1 has it.",
        "transformers 5 writes tie_word_embeddings true for every T5, and scale_decoder_outputs for what it was.",
    ),
)

MT5 = replace(
    _MT5_DECODER,
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
    config_variants=(
        *_MT5_DECODER.config_variants,
        Variant(
            Every((Declares(("model_type",), ("umt5",)), unless(_UNSCALED))),
            MappingProxyType({"logits": _SCALED_LOGITS}),
        ),
    ),
    notes=(*_MT5_DECODER.notes, "Of the two UMT5 alone divides logits, as T5 does; mT5 never does in transformers 5."),
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
            *_of_decoder(side, ("cross_in", "pre_cross_attn_layernorm"), ("cross_out", "post_cross_attn_layernorm")),
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
        logits=CAPPED_AT_30,
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
            *_of_decoder(side, ("cross_in", "encoder_attn_layer_norm")),
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
            *_of_decoder(side, ("cross_in", "post_attention_layernorm")),
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


ROWS = (T5, MT5, T5GEMMA, WHISPER, MOONSHINE)
"""The rows of this module."""
