"""Vision transformers, and the sound encoder of Phi-4-multimodal."""

from dataclasses import replace
from types import MappingProxyType

from glassblock.checkpoint.conditions import Declares, Every, unless
from glassblock.checkpoint.families.makers import (
    ALWAYS,
    EPS_LAYER_NORM,
    UNTIED,
    norms,
    plain,
    sizes,
    source,
    where,
)
from glassblock.checkpoint.families.mixture_makers import fused_network, network
from glassblock.checkpoint.family import Architecture, Ratio, Setting, Size, SizeSetting, Trunk, TwoThirds, Variant
from glassblock.numerics.wiring import Placement

_EPS_6 = Setting(("layer_norm_eps",), 1e-6)
_EPS_12 = Setting(("layer_norm_eps",), 1e-12)
_GELU = Setting(("hidden_act",), "gelu")
_NO_VOCABULARY = SizeSetting((), None)


def _sized(hidden: int, intermediate: int, layers: int, heads: int) -> dict[Size, SizeSetting]:
    return {**sizes(hidden, intermediate, layers, heads, 1), "vocab": _NO_VOCABULARY}


VIT = Architecture(
    name="vit",
    model_types=("vit",),
    architectures=("ViTForImageClassification", "ViTModel", "ViTForMaskedImageModeling"),
    trunks=(Trunk("vit.", None), Trunk("", None)),
    layer="encoder.layer.{i}.",
    sizes=_sized(768, 3072, 12, 12),
    feed_forward=plain(_GELU, ALWAYS, up="intermediate.dense", down="output.dense"),
    norms=norms(
        "layernorm",
        _EPS_12,
        ("attn_in", "layernorm_before"),
        ("ffn_in", "layernorm_after"),
        ("final", "layernorm"),
        has_bias=True,
    ),
    placement=Placement.PRE,
    embedding=None,
    tied=UNTIED,
    verified="executed",
    sources=source("vit"),
    notes=("layernorm_after stands in front of the network, after attention.",),
)


def _clip_stack(
    name: str, activation: str, eps: float, trunks: tuple[Trunk, ...], final: str, *, vocab: int | None = None
) -> Architecture:
    """One side of CLIP or SigLIP."""
    text = vocab is not None
    width, inner, heads = (512, 2048, 8) if text and name.startswith("clip") else (768, 3072, 12)
    made = sizes(width, inner, 12, heads, vocab or 1)
    return Architecture(
        name=name,
        model_types=(),
        architectures=(),
        trunks=trunks,
        layer="encoder.layers.{i}.",
        sizes=made if text else {**made, "vocab": _NO_VOCABULARY},
        feed_forward=plain(Setting(("hidden_act",), activation), ALWAYS, up="mlp.fc1", down="mlp.fc2"),
        norms=norms(
            "layernorm",
            Setting(("layer_norm_eps",), eps),
            ("attn_in", "layer_norm1"),
            ("ffn_in", "layer_norm2"),
            ("final", final),
            has_bias=True,
        ),
        placement=Placement.PRE,
        embedding="embeddings.token_embedding.weight" if text else None,
        tied=UNTIED,
        verified="executed",
        sources=source(name.split("_", maxsplit=1)[0]),
        nested=("text_config",) if text else ("vision_config",),
    )


_VISION_TRUNKS = (
    Trunk("vision_model.", None),
    Trunk("vision_tower.vision_model.", None),
    Trunk("model.vision_tower.vision_model.", None),
    Trunk("model.vision_tower.", None),
    Trunk("vision_tower.", None),
    Trunk("", None),
)
_TEXT_TRUNKS = (Trunk("text_model.", None), Trunk("", None))
_CLIP_IMAGES = _clip_stack("clip_vision", "quick_gelu", 1e-5, _VISION_TRUNKS, "post_layernorm")
_SIGLIP_IMAGES = _clip_stack("siglip_vision", "gelu_pytorch_tanh", 1e-6, _VISION_TRUNKS, "post_layernorm")

CLIP_VISION = replace(
    _CLIP_IMAGES,
    model_types=("clip_vision_model",),
    architectures=("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    notes=("The norm in front of the first layer is called pre_layrnorm.",),
)
SIGLIP_VISION = replace(_SIGLIP_IMAGES, model_types=("siglip_vision_model",), architectures=("SiglipVisionModel",))
CLIP = replace(
    _clip_stack("clip", "quick_gelu", 1e-5, _TEXT_TRUNKS, "final_layer_norm", vocab=49408),
    model_types=("clip", "clip_text_model"),
    architectures=("CLIPModel", "CLIPTextModel", "CLIPTextModelWithProjection"),
    towers=MappingProxyType({"vision": _CLIP_IMAGES}),
    notes=("The row is the text side; the images' side is its tower vision.",),
)
SIGLIP = replace(
    _clip_stack("siglip", "gelu_pytorch_tanh", 1e-6, _TEXT_TRUNKS, "final_layer_norm", vocab=32000),
    model_types=("siglip", "siglip_text_model"),
    architectures=("SiglipModel", "SiglipTextModel"),
    towers=MappingProxyType({"vision": _SIGLIP_IMAGES}),
    notes=("The row is the text side; the images' side is its tower vision.",),
)

_DINO_NORMS = norms(
    "layernorm", _EPS_6, ("attn_in", "norm1"), ("ffn_in", "norm2"), ("final", "layernorm"), has_bias=True
)
_GATED_WIDTH = SizeSetting((), TwoThirds("hidden", 4, multiple_of=Setting((), 8.0)))
_DINO_SIZES: dict[Size, SizeSetting] = {
    **_sized(768, 3072, 12, 12),
    "intermediate": SizeSetting((), Ratio("hidden", times=4)),
}

DINOV2 = Architecture(
    name="dinov2",
    model_types=("dinov2", "dinov2_with_registers"),
    architectures=("Dinov2Model", "Dinov2ForImageClassification", "Dinov2WithRegistersModel"),
    trunks=(
        Trunk("dinov2.", None),
        Trunk("dinov2_with_registers.", None),
        Trunk("", None),
    ),
    layer="encoder.layer.{i}.",
    sizes=_DINO_SIZES,
    feed_forward=plain(_GELU, ALWAYS, up="mlp.fc1", down="mlp.fc2"),
    norms=_DINO_NORMS,
    placement=Placement.PRE,
    embedding=None,
    tied=UNTIED,
    verified="executed",
    sources=(*source("dinov2"), *source("dinov2_with_registers")),
    branch_gain="layer_scale2.lambda1",
    config_variants=(
        Variant(
            unless(Declares(("mlp_ratio",), (4,), 4)),
            MappingProxyType({"sizes": {**_DINO_SIZES, "intermediate": SizeSetting((), None)}}),
        ),
        Variant(
            Declares(("use_swiglu_ffn",), (True,), default=False),
            MappingProxyType(
                {
                    "feed_forward": fused_network(
                        "mlp.weights_in", "mlp.weights_out", activation=Setting((), "silu"), bias=ALWAYS
                    ),
                    "sizes": {**_DINO_SIZES, "intermediate": _GATED_WIDTH},
                }
            ),
        ),
        Variant(
            Every((Declares(("use_swiglu_ffn",), (True,)), unless(Declares(("mlp_ratio",), (4,), 4)))),
            MappingProxyType({"sizes": {**_DINO_SIZES, "intermediate": SizeSetting((), None)}}),
        ),
    ),
    notes=("What a branch adds is multiplied channel by channel (LayerScale).", "The gated network uses silu always."),
)

_MLP_BIAS = Setting(("mlp_bias",), default=True)

DINOV3 = Architecture(
    name="dinov3_vit",
    model_types=("dinov3_vit",),
    architectures=("DINOv3ViTModel",),
    trunks=(Trunk("", None), Trunk("model.", None), Trunk("backbone.", None)),
    layer="layer.{i}.",
    sizes=_sized(384, 1536, 12, 6),
    feed_forward=plain(_GELU, _MLP_BIAS),
    norms=norms(
        "layernorm", EPS_LAYER_NORM, ("attn_in", "norm1"), ("ffn_in", "norm2"), ("final", "norm"), has_bias=True
    ),
    placement=Placement.PRE,
    embedding=None,
    tied=UNTIED,
    verified="executed",
    sources=source("dinov3_vit"),
    branch_gain="layer_scale2.lambda1",
    config_variants=(
        where(
            "use_gated_mlp",
            equals=True,
            default=False,
            feed_forward=network("mlp.", activation=_GELU, bias=_MLP_BIAS),
        ),
    ),
    notes=("The network without a gate keeps the names up_proj and down_proj.",),
)

EVA_VISION = Architecture(
    name="glm4v_eva_vision",
    model_types=(),
    architectures=(),
    trunks=(Trunk("transformer.vision.transformer.", None), Trunk("model.vision.transformer.", None)),
    layer="layers.{i}.",
    sizes={
        **_sized(1792, 15360, 63, 16),
        "heads": SizeSetting(("num_heads", "num_attention_heads"), 16),
    },
    feed_forward=plain(_GELU, ALWAYS, up="mlp.fc1", down="mlp.fc2"),
    norms=norms(
        "layernorm", _EPS_6, ("attn_out", "input_layernorm"), ("ffn_out", "post_attention_layernorm"), has_bias=True
    ),
    placement=Placement.BRANCH_OUTPUT,
    embedding=None,
    tied=UNTIED,
    verified="source only",
    sources=("InternLM/lmdeploy: lmdeploy/pytorch/models/chatglm2.py",),
    nested=("vision_config",),
    notes=("input_layernorm norms what attention returns, post_attention_layernorm what the network returns.",),
)


def _conformer(side: str) -> Architecture:
    """One of the two networks around a layer's attention and convolution."""
    prefix = f"feed_forward_{side}."
    return Architecture(
        name=f"phi4_multimodal_audio {side}",
        model_types=(),
        architectures=(),
        trunks=(Trunk("", None), Trunk("model.embed_tokens_extend.audio_embed.encoder.", None)),
        layer="encoders.{i}.",
        sizes={
            **_sized(1024, 1536, 24, 16),
            "layers": SizeSetting(("num_blocks",), 24),
        },
        feed_forward=fused_network(
            f"{prefix}gate_up_proj",
            f"{prefix}down_proj",
            activation=Setting(("activation",), "swish"),
            bias=ALWAYS,
            order=("up", "gate"),
        ),
        norms=norms(
            "layernorm",
            Setting((), 1e-5),
            ("attn_in", "layer_norm_att"),
            ("ffn_in", f"{prefix}layer_norm"),
            ("layer_out", "layer_norm"),
            has_bias=True,
        ),
        placement=Placement.PRE,
        embedding=None,
        tied=UNTIED,
        verified="executed",
        sources=source("phi4_multimodal"),
        branch_scale=Setting((), 0.5),
        nested=("audio_config",),
        notes=(
            "gate_up_proj holds the up projection first, unlike the tensor of that name in the language model.",
            "A layer has two networks, each added by half; its last norm, layer_norm, comes after the second.",
        ),
    )


PHI4_AUDIO = replace(
    _conformer("in"),
    name="phi4_multimodal_audio",
    model_types=("phi4_multimodal_audio",),
    architectures=("Phi4MultimodalAudioModel",),
    towers=MappingProxyType({"out": _conformer("out")}),
)

ROWS = (VIT, CLIP, CLIP_VISION, SIGLIP, SIGLIP_VISION, DINOV2, DINOV3, EVA_VISION, PHI4_AUDIO)
"""The rows of this module."""
