"""What rows of attention have in common: Llama's names, which layers have a window, and the settings that recur."""

from typing import Any, Literal

from glassblock.checkpoint.attention_row import (
    SHARE_KEYS,
    AttentionRow,
    FusedHeads,
    LatentAttentionRow,
    RotaryRow,
    ScoreScale,
)
from glassblock.checkpoint.conditions import Condition, EveryLayer, LayerKind, Neither, Whole, unless
from glassblock.checkpoint.families.makers import NEVER, linear
from glassblock.checkpoint.row_settings import Setting

ATTENTION_BIAS = Setting(("attention_bias",), default=False)
ATTENTION_BIAS_ON = Setting(("attention_bias",), default=True)
IN_EVERY_LAYER: Condition = Neither(())

NO_WINDOW = Setting[float | None](("sliding_window",), None)
WINDOW_4096 = Setting[float | None](("sliding_window",), 4096.0)

MULTIPLIER = ScoreScale(Setting(("attention_multiplier",), 1.0), power=1.0)
"""Granite's own number in the place of the root of a head's width."""

BY_QUERY_SCALAR = ScoreScale(Setting(("query_pre_attn_scalar",), 256.0))
"""Gemma's."""


def heads(
    *, bias: Setting[bool] = NEVER, place: str = "self_attn.", output: str = "o_proj", **more: Any
) -> AttentionRow:
    """Attention with Llama's names: three projections, and the one back."""
    query, key, value = (linear(f"{place}{name}_proj") for name in "qkv")
    return AttentionRow(query=query, key=key, value=value, output=linear(place + output), bias=bias, **more)


def meta_heads(place: str, turning: RotaryRow) -> AttentionRow:
    """Attention with Meta's names, wq, wk, wv and wo, without biases."""
    query, key, value, output = (linear(f"{place}w{name}") for name in "qkvo")
    return AttentionRow(query=query, key=key, value=value, output=output, rotary=turning)


def fused_heads(
    fused: str, output: str, *, arrangement: Literal["blocks", "groups"] = "blocks", **more: Any
) -> AttentionRow:
    """Attention with queries, keys and values in one tensor."""
    return AttentionRow(fused=FusedHeads(linear(fused), arrangement), output=linear(output), **more)


def latent_heads(rotary: RotaryRow, *, scaled: bool = True, bias: Setting[bool] = ATTENTION_BIAS) -> LatentAttentionRow:
    """Latent attention with DeepSeek's names."""
    return LatentAttentionRow(
        query=linear("self_attn.q_proj"),
        query_down=linear("self_attn.q_a_proj"),
        query_up=linear("self_attn.q_b_proj"),
        key_value_down=linear("self_attn.kv_a_proj_with_mqa"),
        key_value_up=linear("self_attn.kv_b_proj"),
        output=linear("self_attn.o_proj"),
        rotary=rotary,
        bias=bias,
        scaled=scaled,
    )


def rotary(theta: float = 10000.0, *, share: float | None = None, **more: Any) -> RotaryRow:
    """Rotary positions with a family's own defaults; a share where its code reads one."""
    plain = RotaryRow()
    part = plain.share if share is None else Setting(SHARE_KEYS, share)
    return RotaryRow(theta=Setting(plain.theta.keys, theta), share=part, **more)


def rotary_under(kind: str, theta: float, *older: str, form: str | None = None, **more: Any) -> RotaryRow:
    """Rotary positions of one kind of layer, whose parameters lie under its name.

    Args:
        kind: The kind of layer, as in `layer_types`.
        theta: The family's default.
        older: Keys of theta in configs before transformers 5.
        form: The key of the form in those.
        more: Further fields.
    """
    place = f"rope_parameters.{kind}"
    forms = (place, form) if form is not None else (place,)
    return RotaryRow(theta=Setting((f"{place}.rope_theta", *older), theta), forms=forms, **more)


def sliding(otherwise: Condition | None = None) -> Condition:
    """Layers that the config calls `sliding_attention`; without such a list those of `otherwise`."""
    return LayerKind(("layer_types",), ("sliding_attention",), otherwise)


def all_but_every(key: str, step: int) -> Condition:
    """Layers whose number, counted from 1, the config's step does not divide."""
    return unless(EveryLayer(Whole((key,), step), shift=1))
