"""GGUF's names in a safetensors file; a GGUF file itself is not read.

A name says what a norm stands at, and which of them a layer has says how it is wired. What the file's metadata would
say of a family, such as its activation, the names do not: those are rows to choose from.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from glassblock.checkpoint.conditions import Every, Holds, either, unless
from glassblock.checkpoint.families.makers import ALWAYS, Places, linear, norms, plain
from glassblock.checkpoint.families.mixture_makers import fused_network, network
from glassblock.checkpoint.families.natives import unsized
from glassblock.checkpoint.families.wirings import Wiring, wired_by_norms, wirings
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    MixtureRow,
    Role,
    Setting,
    SizeSetting,
    SquareRoot,
    Trunk,
    Variant,
)
from glassblock.numerics.wiring import Placement

_NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
_WIRINGS: tuple[Wiring, ...] = (
    (
        Every(
            (
                Holds("post_attention_norm.weight"),
                unless(Holds("ffn_norm.weight")),
                unless(Holds("post_ffw_norm.weight")),
            )
        ),
        Placement.PRE,
        (("attn_in", "attn_norm"), ("ffn_in", "post_attention_norm")),
    ),
    *wirings(*_NORMS),
)


# Norms of Falcon, Grok, DBRX, BERT and its kin, BitNet, Arctic, and Gemma 3n and 4, by name; others by their biases.
_FOREIGN = (
    *("attn_norm_2", "attn_output_norm", "layer_output_norm", "ffn_sub_norm", "ffn_norm_exps", "post_norm"),
    *("laurel_post_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2", "layer_output_scale"),
)
_NOT_WIRED_HERE = Variant(
    either(*(Holds(f"{name}.weight") for name in _FOREIGN)),
    MappingProxyType({"not_run": f"they have norms whose place no name tells ({', '.join(_FOREIGN[:4])} or another)"}),
)


# GPT-2, Falcon, StarCoder2, BERT and their like: LayerNorms, most of them around networks without a gate. The place of
# their norms is known by name; what the activation is, no name tells.
_BERTS = Every((Holds("layer_output_norm.weight"), unless(Holds("attn_norm.weight"))))  # Grok has both
_LAYER_NORMED = either(_BERTS, *(Holds(f"{name}.bias") for name in _NORMS))
_PLAIN = plain(Setting((), "gelu"), ALWAYS, up="ffn_up", down="ffn_down")


def _layer_normed(eps: Setting[float], *, dense: FeedForwardRow) -> Iterator[Variant]:
    """Layers with LayerNorms: their norms, and a network without a gate where they have none."""
    final: tuple[Role, str] = ("final", "output_norm")
    into: tuple[Role, str] = ("attn_in", "attn_norm")
    read: tuple[Role, str] = ("ffn_in", "ffn_norm")
    ended: Places = (("resid_attn", "attn_output_norm"), ("resid_ffn", "layer_output_norm"))
    for when, placement, places in (
        (_LAYER_NORMED, Placement.PARALLEL, (into, final)),
        (Every((_LAYER_NORMED, Holds("ffn_norm.weight"))), Placement.PRE, (into, read, final)),
        (_BERTS, Placement.POST, ended),
    ):
        changes = {
            "norms": norms("layernorm", eps, *places, has_bias=True),
            "placement": placement,
            "not_run": "their norms are LayerNorms: of models with them no name tells the activation",
        }
        yield Variant(when, MappingProxyType(changes))
    if dense.gate is not None:
        ungated = Every((_LAYER_NORMED, Holds("ffn_up.weight"), unless(Holds("ffn_gate.weight"))))
        yield Variant(ungated, MappingProxyType({"feed_forward": replace(_PLAIN, bias_in_files=True)}))


def _gguf(
    name: str,
    dense: FeedForwardRow,
    kind: str,
    eps: Setting[float],
    *more_variants: Variant,
    sandwich: str | None = None,
    **more: Any,
) -> Architecture:
    """A family under GGUF's names. `sandwich` says why layers with four norms are not run, where that is so."""
    return Architecture(
        name=name,
        model_types=(),
        architectures=(),
        trunks=(Trunk("", "output.weight"),),
        layer="blk.{i}.",
        sizes=unsized(**dict.fromkeys(("expert_width", "shared_width"), SizeSetting((), None))),
        feed_forward=dense,
        norms=norms(kind, eps, ("attn_in", "attn_norm"), ("ffn_in", "ffn_norm"), ("final", "output_norm")),
        placement=Placement.PRE,
        embedding="token_embd.weight",
        verified="source only",
        sources=("ggml-org/llama.cpp: gguf-py/gguf/tensor_mapping.py, gguf-py/gguf/constants.py",),
        layer_variants=(
            *wired_by_norms(
                _WIRINGS,
                kind,
                eps,
                query="attn_q_norm",
                key="attn_k_norm",
                final="output_norm",
                sandwich=sandwich,
            ),
            *more_variants,
            _NOT_WIRED_HERE,
            *_layer_normed(eps, dense=dense),
        ),
        **more,
    )


def _mixtures(activation: Setting[str]) -> Iterator[Variant]:
    """Layers with experts: gate and up apart or in one tensor, without and with a network that every token passes."""
    wide: dict[str, Any] = {"activation": activation, "width": ("expert_width",), "bias_in_files": True}
    names = [f"ffn_{part}_exps" for part in ("gate", "up", "down")]
    apart = network("", (names[0], names[1], names[2]), **wide)
    fused = fused_network("ffn_gate_up_exps", "ffn_down_exps", **wide)
    shared_names = ("ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")
    shared = network("", shared_names, activation=activation, width=("shared_width",), bias_in_files=True)
    for held, experts in (("ffn_gate_exps.weight", apart), ("ffn_gate_up_exps.weight", fused)):
        mixture = MixtureRow(linear("ffn_gate_inp"), experts, arrangement="stacked", correction="exp_probs_b.bias")
        yield Variant(Holds(held), MappingProxyType({"feed_forward": None, "mixture": mixture}))
        yield Variant(
            Every((Holds(held), Holds(shared.down.weight))),
            MappingProxyType({"feed_forward": None, "mixture": replace(mixture, shared=shared)}),
        )


_SILU = Setting((), "silu")
_FIXED_EPS_5 = Setting((), 1e-5)
_NAMES = ("ffn_gate", "ffn_up", "ffn_down")
_UNTIED = Setting((), default=False)
_TIED = Setting((), default=True)

GGUF = _gguf(
    "gguf",
    network("", _NAMES, activation=_SILU, bias_in_files=True),
    "rms_llama",
    _FIXED_EPS_5,
    *_mixtures(_SILU),
    sandwich="norms in front of both branches and after them are Gemma's: take the family gguf_gemma",
    tied=_UNTIED,
    notes=(
        "For models built as Llama is, OLMo 2 and Qwen 3 among them. ffn_gate_inp is the router.",
        "Layers with LayerNorms are audited and not run: BERT's kin, GPT-2's and Falcon's.",
        "post_attention_norm is the norm in front of the network where there is no ffn_norm (gpt-oss).",
        "phi3, glm4 and chatglm put gate and up into ffn_up and have no ffn_gate: they are gguf_fused.",
        "Networks without a gate between RMSNorms, as Arcee's, are gguf_plain.",
    ),
)

GGUF_FUSED = _gguf(
    "gguf_fused",
    fused_network("ffn_up", "ffn_down", activation=_SILU, bias_in_files=True),
    "rms_llama",
    _FIXED_EPS_5,
    tied=_UNTIED,
    notes=("What phi3 and glm4 become: ffn_up holds gate and up, the gate first.",),
)

GGUF_PLAIN = _gguf(
    "gguf_plain",
    replace(_PLAIN, activation=Setting((), "relu2"), bias_in_files=True),
    "rms_llama",
    _FIXED_EPS_5,
    Variant(
        Holds("attn_q_norm.weight"),
        MappingProxyType({"not_run": "the numbers of Apertus' activation are no tensors of its file"}),
    ),
    tied=_UNTIED,
    notes=("What Arcee becomes: RMSNorms and a network without a gate. Apertus is audited and not run.",),
)

GGUF_GEMMA = _gguf(
    "gguf_gemma",
    network("", _NAMES, activation=Setting((), "gelu_tanh"), bias_in_files=True),
    "rms_f32mul",
    Setting((), 1e-6),
    tied=_TIED,
    embedding_scale=SquareRoot("hidden"),
    notes=(
        "Gains hold 1 + w already, where transformers stores w: they are plain multipliers.",
        "Gemma 1 has two norms in a layer, Gemma 2 and 3 have four.",
    ),
)

ROWS = (GGUF, GGUF_FUSED, GGUF_PLAIN, GGUF_GEMMA)
"""The rows of this module."""
