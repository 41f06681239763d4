"""What rows with mixtures of experts have in common: their networks' names, their sizes, and which layers are dense."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from glassblock.checkpoint.conditions import Condition, Declares, Every, EveryLayer, Holds, Says, Whole, either, unless
from glassblock.checkpoint.families.makers import NEVER, SILU, linear
from glassblock.checkpoint.family import (
    FeedForwardRow,
    FusedProjection,
    MixtureRow,
    Projection,
    RoutingRow,
    Setting,
    Size,
    SizeSetting,
    Variant,
)
from glassblock.numerics.routing import GroupScore, Scoring

A_CONFIG = Says(("model_type", "hidden_size"))
"""There is a config: its class's defaults then speak where it is silent."""

LLAMA = ("gate_proj", "up_proj", "down_proj")
META = ("w1", "w3", "w2")
"""Gate, up, down in Meta's numbering."""


def network(
    prefix: str,
    names: tuple[str, str, str] = LLAMA,
    *,
    activation: Setting[str] = SILU,
    bias: Setting[bool] = NEVER,
    width: tuple[Size, ...] = ("intermediate",),
    **more: Any,
) -> FeedForwardRow:
    """A gated network of separate projections; `names` are those of gate, up and down after the prefix."""
    gate, up, down = (linear(prefix + name) for name in names)
    return FeedForwardRow(gate=gate, up=up, down=down, activation=activation, bias=bias, width=width, **more)


def fused_network(
    fused: str,
    down: str,
    *,
    activation: Setting[str] = SILU,
    bias: Setting[bool] = NEVER,
    suffixes: tuple[str, str] = (".weight", ".bias"),
    order: tuple[Literal["gate", "up"], Literal["gate", "up"]] = ("gate", "up"),
    interleaved: bool = False,
    **more: Any,
) -> FeedForwardRow:
    """A gated network with gate and up in one tensor, the gate first where nothing else is said."""
    weight, bias_suffix = suffixes
    return FeedForwardRow(
        fused=FusedProjection(fused + weight, fused + bias_suffix, order, "interleaved" if interleaved else "halves"),
        down=Projection(down + weight, down + bias_suffix),
        activation=activation,
        bias=bias,
        **more,
    )


def experts_of(
    router: str, experts: FeedForwardRow, *, shared: FeedForwardRow | None = None, **more: Any
) -> MixtureRow:
    """A mixture whose router is `router.weight`."""
    return MixtureRow(linear(router), experts, shared=shared, **more)


def with_experts(
    sizes: Mapping[Size, SizeSetting],
    count: tuple[tuple[str, ...], int],
    chosen: tuple[tuple[str, ...], int],
    **more: tuple[tuple[str, ...], int],
) -> Mapping[Size, SizeSetting]:
    """Sizes with those of a mixture, each as keys and default: how many experts, how many per token, and `more`."""
    added: dict[Any, tuple[tuple[str, ...], int]] = {"experts": count, "experts_per_token": chosen, **more}
    return MappingProxyType({**sizes, **{size: SizeSetting(*setting) for size, setting in added.items()}})


def dense_unless(sparse: Condition, dense: FeedForwardRow) -> Variant:
    """Layers that are dense: where the config says so, or, without a config, where the dense tensors are."""
    by_config = Every((A_CONFIG, unless(sparse)))
    by_names = Every((unless(A_CONFIG), Holds(dense.down.weight)))
    return Variant(either(by_config, by_names), MappingProxyType({"feed_forward": dense, "mixture": None}))


def every(step: str, default: int) -> Condition:
    """Layers whose number, counted from 1, the config's `step` divides."""
    return EveryLayer(Whole((step,), default), shift=1)


def without_experts(keys: tuple[str, ...], dense: FeedForwardRow, sizes: Mapping[Size, SizeSetting]) -> Variant:
    """A config that counts no experts: a dense model of the same family."""
    kept = {size: setting for size, setting in sizes.items() if size not in _OF_MIXTURES}
    changes = {"feed_forward": dense, "mixture": None, "layer_variants": (), "sizes": MappingProxyType(kept)}
    return Variant(Declares(keys, (0,)), MappingProxyType(changes))


_OF_MIXTURES = frozenset[str]({"experts", "experts_per_token", "expert_width", "shared_experts", "shared_width"})


TOP_K_NORMALISED = Setting(("norm_topk_prob",), default=False)

MIXTRAL_ROUTING = RoutingRow(normalise=Setting((), default=True))
"""A softmax over all experts, and the weights of the chosen over their sum."""

QWEN_ROUTING = RoutingRow(normalise=TOP_K_NORMALISED, rounded_weights=True)
"""The same, normalised where the config says so, with weights in the dtype of the model."""

DEEPSEEK_ROUTING = RoutingRow(
    scoring=Setting((), Scoring.SIGMOID.value),
    normalise=Setting(("norm_topk_prob",), default=True),
    sum_epsilon=1e-20,
    groups=Setting(("n_group",), 1.0),
    kept_groups=Setting(("topk_group",), 1.0),
    group_score=GroupScore.TOP_TWO,
    scaling=Setting(("routed_scaling_factor",), 1.0),
    wide_logits=True,
)
"""DeepSeek-V3's: sigmoids, groups judged by their two best, and a factor at the end."""

CHOSEN_SOFTMAX = RoutingRow(chosen_first=True, rounded_weights=True)
"""Granite's: a softmax over the logits of the chosen."""
