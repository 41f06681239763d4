"""Blocks under the names of flash-attn, xformers, timm, diffusers, and the own code of DINOv2 and ESM C."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from glassblock.checkpoint.conditions import Holds
from glassblock.checkpoint.families.makers import ALWAYS, norms, plain
from glassblock.checkpoint.families.mixture_makers import fused_network, network
from glassblock.checkpoint.families.natives import unsized
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    NormRow,
    OverRootDepth,
    Setting,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

_SILU = Setting((), "silu")
_FIXED_EPS_5 = Setting((), 1e-5)
_UNTIED = Setting((), default=False)
_TIMM = "huggingface/pytorch-image-models: timm/layers/mlp.py"
_OPTIONAL: dict[str, Any] = {"bias_in_files": True}
"""Biases are an argument of the network's class, true where nothing is said."""

_BLOCK_NORMS = norms(
    "layernorm", Setting((), 1e-6), ("attn_in", "norm1"), ("ffn_in", "norm2"), ("final", "norm"), has_bias=True
)


def _blocks(name: str, network: FeedForwardRow, *sources: str, **more: Any) -> Architecture:
    """Blocks that no config describes, in a vision transformer's modules where nothing else is said."""
    own: dict[str, Any] = {"trunks": (Trunk("", None),), "layer": "blocks.{i}.", "norms": _BLOCK_NORMS}
    return Architecture(
        name=name,
        model_types=(),
        architectures=(),
        sizes=unsized(),
        feed_forward=network,
        placement=Placement.PRE,
        embedding=None,
        tied=_UNTIED,
        verified="source only",
        sources=sources,
        **(own | more),
    )


FLASH_ATTN = _blocks(
    "flash_attn",
    fused_network("mlp.fc1", "mlp.fc2", activation=_SILU, bias=ALWAYS, order=("up", "gate"), **_OPTIONAL),
    "Dao-AILab/flash-attention: flash_attn/modules/mlp.py",
    trunks=(Trunk("transformer.", "lm_head.weight", "transformer.embeddings.word_embeddings.weight"),),
    layer="layers.{i}.",
    norms=norms("rms_f32mul", _FIXED_EPS_5, ("attn_in", "norm1"), ("ffn_in", "norm2"), ("final", "ln_f")),
    notes=("fc1 of GatedMlp holds the up projection first, the gate in the second half.",),
)

DINOV2_NATIVE = _blocks(
    "dinov2_native",
    fused_network("mlp.w12", "mlp.w3", activation=_SILU, bias=ALWAYS, **_OPTIONAL),
    "facebookresearch/dinov2: dinov2/layers/swiglu_ffn.py, dinov2/models/vision_transformer.py",
    trunks=(Trunk("", None), Trunk("backbone.", None)),
    branch_gain="ls2.gamma",
    layer_variants=(
        Variant(
            Holds("mlp.fc1.weight"),
            MappingProxyType(
                {"feed_forward": replace(plain(Setting((), "gelu"), ALWAYS, up="mlp.fc1", down="mlp.fc2"), **_OPTIONAL)}
            ),
        ),
    ),
    notes=("w12 holds gate and up, the gate first; w3 is the down projection, where Llama's w3 is the up projection.",),
)

XFORMERS = _blocks(
    "xformers",
    network("mlp.", ("w1", "w2", "w3"), activation=_SILU, bias=ALWAYS, **_OPTIONAL),
    "facebookresearch/xformers: xformers/ops/swiglu_op.py",
    layer_variants=(Variant(Holds("ls2.gamma"), MappingProxyType({"branch_gain": "ls2.gamma"})),),
    notes=("SwiGLU unpacked, in the blocks of a vision transformer: w1 is the gate, w2 up, w3 down.",),
)

TIMM_SWIGLU = _blocks(
    "timm_swiglu",
    network("mlp.", ("fc1_g", "fc1_x", "fc2"), activation=_SILU, bias=ALWAYS, **_OPTIONAL),
    _TIMM,
    layer_variants=(
        Variant(Holds("gamma_2"), MappingProxyType({"branch_gain": "gamma_2"})),
        Variant(
            Holds("mlp.norm.weight"),
            MappingProxyType(
                {
                    "norms": (
                        *_BLOCK_NORMS,
                        NormRow(
                            "ffn_hidden",
                            "mlp.norm",
                            "layernorm",
                            Setting((), 1e-6),
                            has_bias=True,
                            width=("intermediate",),
                        ),
                    )
                }
            ),
        ),
    ),
    notes=("fc1_g is the gate, fc1_x the up projection; EVA-02 has a norm in front of fc2.",),
)

TIMM_GLU = _blocks(
    "timm_glu",
    fused_network(
        "mlp.fc1", "mlp.fc2", activation=Setting((), "sigmoid"), bias=ALWAYS, order=("up", "gate"), **_OPTIONAL
    ),
    _TIMM,
    not_run="fc1 holds the gate first in SwiGLUPacked and last in GluMlp, under one name: the file does not say which",
    notes=("GluMlp gates with the sigmoid unless the model says otherwise, SwiGLUPacked with silu.",),
)

DIFFUSERS_GLU = _blocks(
    "diffusers_glu",
    fused_network(
        "ff.net.0.proj", "ff.net.2", activation=Setting((), "gelu"), bias=ALWAYS, order=("up", "gate"), **_OPTIONAL
    ),
    "huggingface/diffusers: src/diffusers/models/activations.py",
    trunks=(Trunk("", None), Trunk("transformer.", None)),
    layer="transformer_blocks.{i}.",
    norms=norms("layernorm", _FIXED_EPS_5, ("attn_in", "norm1"), ("ffn_in", "norm3"), has_bias=True),
    notes=(
        "GEGLU holds the up projection first, the gate in the second half.",
        "Blocks whose norms depend on the time step have other norms: such a file does not fit.",
    ),
)

ESMC_NATIVE = _blocks(
    "esmc_native",
    fused_network("ffn.1", "ffn.3", activation=_SILU),
    "evolutionaryscale/esm: esm/layers/blocks.py, esm/layers/attention.py",
    trunks=(Trunk("transformer.", None, "embed.weight"),),
    norms=(
        *norms("layernorm", _FIXED_EPS_5, ("attn_in", "attn.layernorm_qkv.0"), ("ffn_in", "ffn.0"), has_bias=True),
        *norms("layernorm_nobias", _FIXED_EPS_5, ("final", "norm"), ("q", "attn.q_ln"), ("k", "attn.k_ln")),
    ),
    branch_scale=OverRootDepth(Setting((), 1.0), over=36.0),
    notes=("attn.layernorm_qkv is norm and projection in one; what a branch adds is divided by sqrt(layers / 36).",),
)


ROWS = (FLASH_ATTN, DINOV2_NATIVE, XFORMERS, TIMM_SWIGLU, TIMM_GLU, DIFFUSERS_GLU, ESMC_NATIVE)
"""The rows of this module."""
