"""What many rows have in common: Llama's names and keys, and the settings that recur.

Sizes, epsilons and flags of rows carry the defaults of the families' own configuration classes (transformers 5.24.0):
they are what a model is built with where its config.json is silent.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from glassblock.checkpoint.conditions import AtTop, Declares, Says, either
from glassblock.checkpoint.family import (
    Architecture,
    FeedForwardRow,
    LogitsRow,
    NormRow,
    Projection,
    Ratio,
    Role,
    Setting,
    Size,
    SizeSetting,
    Trunk,
    Variant,
)

Places = tuple[tuple[Role, str], ...]
"""Norms by role and template."""

AS_MANY_AS_HEADS = Ratio("heads")
HIDDEN_OVER_HEADS = Ratio("hidden", over="heads")


def linear(name: str) -> Projection:
    """A projection whose tensors are `name.weight` and `name.bias`."""
    return Projection(f"{name}.weight", f"{name}.bias")


def gated(activation: Setting[str], bias: Setting[bool]) -> FeedForwardRow:
    """The network of Llama, with its names."""
    return FeedForwardRow(
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
        activation=activation,
        bias=bias,
    )


def meta_network(place: str) -> FeedForwardRow:
    """The network of Llama with Meta's names: w1 is the gate, w3 the up projection, w2 the way back."""
    return FeedForwardRow(
        gate=linear(f"{place}.w1"),
        up=linear(f"{place}.w3"),
        down=linear(f"{place}.w2"),
        activation=Setting((), "silu"),
        bias=NEVER,
    )


def plain(
    activation: Setting[str], bias: Setting[bool], *, up: str = "mlp.up_proj", down: str = "mlp.down_proj"
) -> FeedForwardRow:
    """A network without a gate."""
    return FeedForwardRow(up=linear(up), down=linear(down), activation=activation, bias=bias)


def like(row: Architecture, name: str, *classes: str, **changes: Any) -> Architecture:
    """A family that is as another but for `changes`.

    Its `model_type` is its name where nothing else is said; sources, notes, attention, positions and what is made of
    logits are its own, never the other's: attention that was not read in its own code is not read.
    """
    own: dict[str, Any] = {
        "model_types": (name,),
        "sources": source(name),
        "notes": (),
        "attention": None,
        "positions": None,
        "logits": LogitsRow(),
    }
    return replace(row, name=name, architectures=classes, **(own | changes))


def where(key: str, *, equals: object, default: object, **changes: Any) -> Variant:
    """What is otherwise where the value at `key` of a config, or else `default`, equals another."""
    return Variant(Declares((key,), (equals,), default), MappingProxyType(changes))


def norms(kind: str, eps: Setting[float], *places: tuple[Role, str], has_bias: bool = False) -> tuple[NormRow, ...]:
    """Norms of one kind, by role and template."""
    return tuple(NormRow(role, template, kind, eps, has_bias=has_bias) for role, template in places)


def bare_norms(kind: str, eps: Setting[float], *places: tuple[Role, str]) -> tuple[NormRow, ...]:
    """Norms without any tensor: their templates name modules only."""
    return tuple(NormRow(role, template, kind, eps, has_gain=False) for role, template in places)


def query_key_norms(kind: str, eps: Setting[float], *widths: tuple[Size, ...]) -> tuple[NormRow, ...]:
    """Norms of queries and keys, with Llama's names."""
    query, key = widths
    return (
        NormRow("q", "self_attn.q_norm", kind, eps, width=query),
        NormRow("k", "self_attn.k_norm", kind, eps, width=key),
    )


def sizes(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    vocab: int,
    *,
    kv_heads: int | Ratio = AS_MANY_AS_HEADS,
    head_dim: int | Ratio = HIDDEN_OVER_HEADS,
) -> Mapping[Size, SizeSetting]:
    """Sizes under the keys of Llama's config, with a family's defaults."""
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


def gpt_sizes(
    hidden: int,
    layers: int,
    heads: int,
    vocab: int,
    *,
    inner: tuple[str, ...] = ("n_inner",),
    kv_heads: int | Ratio = AS_MANY_AS_HEADS,
) -> Mapping[Size, SizeSetting]:
    """Sizes under the keys of GPT-2's config, four times as wide inside where nothing else is said."""
    return MappingProxyType(
        {
            "hidden": SizeSetting(("n_embd", "hidden_size"), hidden),
            "intermediate": SizeSetting(inner, Ratio("hidden", times=4)),
            "layers": SizeSetting(("n_layer", "num_hidden_layers"), layers),
            "heads": SizeSetting(("n_head", "num_attention_heads"), heads),
            "kv_heads": SizeSetting((), kv_heads),
            "head_dim": SizeSetting((), HIDDEN_OVER_HEADS),
            "vocab": SizeSetting(("vocab_size",), vocab),
        }
    )


def source(family: str) -> tuple[str, ...]:
    """The files of `transformers` that a family was read in."""
    return tuple(
        f"huggingface/transformers: src/transformers/models/{family}/{kind}_{family}.py"
        for kind in ("modeling", "configuration")
    )


HEAD_OF_A_LARGER_MODEL = Variant(
    AtTop(either(Says(("text_config",)), Declares(("model_type",), ("gemma3",)))),
    MappingProxyType({"logits": LogitsRow()}),
)
"""Inside a larger model of transformers, whose own class has the head and neither scales nor caps the logits."""

NEVER = Setting[bool]((), default=False)
ALWAYS = Setting[bool]((), default=True)
UNTIED = Setting(("tie_word_embeddings",), default=False)
TIED = Setting(("tie_word_embeddings",), default=True)
SILU = Setting(("hidden_act",), "silu")
EPS_6 = Setting(("rms_norm_eps",), 1e-6)
EPS_5 = Setting(("rms_norm_eps",), 1e-5)
EPS_LAYER_NORM = Setting(("layer_norm_eps",), 1e-5)
EPS_GPT = Setting(("layer_norm_epsilon",), 1e-5)
RELU2 = Setting(("hidden_act",), "relu2")
GELU_TANH = Setting(("hidden_activation",), "gelu_pytorch_tanh")
MLP_BIAS = Setting(("mlp_bias",), default=False)

# The plain language model, the two spellings of multimodal wrappers, and a base model saved without its head.
TRUNKS = (
    Trunk("model.", "lm_head.weight"),
    Trunk("language_model.model.", "language_model.lm_head.weight"),
    Trunk("model.language_model.", "lm_head.weight"),
    Trunk("", "lm_head.weight"),
    Trunk("language_model.", "lm_head.weight"),
    Trunk("model.text_model.", "lm_head.weight"),
    Trunk("llm.model.", "llm.lm_head.weight"),
    Trunk("llm.", "llm.lm_head.weight"),
    Trunk("language.model.", "language.lm_head.weight"),
)
PRE_NORMS: Places = (
    ("attn_in", "input_layernorm"),
    ("ffn_in", "post_attention_layernorm"),
    ("final", "norm"),
)
SANDWICH_NORMS: Places = (
    ("attn_in", "input_layernorm"),
    ("attn_out", "post_attention_layernorm"),
    ("ffn_in", "pre_feedforward_layernorm"),
    ("ffn_out", "post_feedforward_layernorm"),
    ("final", "norm"),
)
GPT_TRUNKS = (Trunk("transformer.", "lm_head.weight"), Trunk("", "lm_head.weight"))
