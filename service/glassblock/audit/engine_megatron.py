"""Arguments of Megatron-LM (or of a TransformerConfig of its core) as JSON."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

from glassblock.audit.engine_settings import Settings
from glassblock.checkpoint.config import as_epsilon, as_number
from glassblock.checkpoint.family import Size

_TELLING = frozenset(
    {
        "layernorm_epsilon",
        "normalization",
        "layernorm_zero_centered_gamma",
        "apply_layernorm_1p",
        "swiglu",
        "add_bias_linear",
        "ffn_hidden_size",
        "num_query_groups",
        "kv_channels",
        "untie_embeddings_and_output_weights",
    }
)
_SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "num_layers": "layers",
        "hidden_size": "hidden",
        "ffn_hidden_size": "intermediate",
        "num_attention_heads": "heads",
        "kv_channels": "head_dim",
        "num_moe_experts": "experts",
        "num_experts": "experts",
        "moe_router_topk": "experts_per_token",
        "moe_ffn_hidden_size": "expert_width",
    }
)
_KINDS = MappingProxyType({"RMSNorm": "rms", "LayerNorm": "layer"})


def is_megatron(config: Mapping[str, Any]) -> bool:
    """Whether the keys are those of Megatron: `args` may hold them. A model_type is transformers' word."""
    return "model_type" not in config and not _TELLING.isdisjoint(_arguments(config))


def read_megatron(config: Mapping[str, Any], name: str) -> Settings:
    """What the arguments tell. A dump has all of them: what is not there is not told."""
    values, settings = _arguments(config), Settings()
    _norms(values, settings, name)
    _activation(values, settings, name)
    for key, size in _SIZES.items():
        value = values.get(key)
        if type(value) is int and value > 0:
            settings.put(f"size.{size}", value, f"{name}: {key}")
    groups = values.get("num_query_groups")
    if type(groups) is int and groups > 0 and values.get("group_query_attention") is not False:
        settings.put("size.kv_heads", groups, f"{name}: num_query_groups")
    for key, setting in (("add_bias_linear", "bias.ffn"), ("untie_embeddings_and_output_weights", "tied")):
        value = values.get(key)
        if isinstance(value, bool):
            settings.put(setting, value != (setting == "tied"), f"{name}: {key}")
        elif value is not None:
            settings.unusable[setting] = f"{name}: {key} is {value!r:.60}, where true or false is expected"
    base = as_number(values.get("rotary_base"))
    if base is not None:
        settings.put("number.rope_theta", base, f"{name}: rotary_base")
    for key, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if values.get(key) is True:
            settings.put("dtype", dtype, f"{name}: {key}")
    return settings


def _norms(values: Mapping[str, Any], settings: Settings, name: str) -> None:
    stated = values.get("layernorm_epsilon")
    epsilon = as_epsilon(stated)
    if epsilon is not None:
        settings.put("eps.*", epsilon, f"{name}: layernorm_epsilon")
    elif stated is not None:
        settings.unusable["eps.*"] = f"{name}: layernorm_epsilon is {stated!r:.60}, which is no epsilon"
    kind = values.get("normalization")
    if isinstance(kind, str) and kind in _KINDS:
        settings.put("norm.*", _KINDS[kind], f"{name}: normalization")
    elif kind is not None:
        settings.unusable["norm.*"] = f"{name}: normalization is {kind!r:.60}; known are {', '.join(_KINDS)}"
    for key in ("layernorm_zero_centered_gamma", "apply_layernorm_1p"):
        centred, told = values.get(key), settings.get("offset.*")
        if isinstance(centred, bool) and (told is None or centred):
            settings.put("offset.*", float(centred), f"{name}: {key}")


def _activation(values: Mapping[str, Any], settings: Settings, name: str) -> None:
    """Megatron tells it by flags: swiglu, squared_relu, quick_geglu; where all are false it is GELU."""
    flags = {"swiglu": "silu", "squared_relu": "relu2", "quick_geglu": "quick_gelu"}
    for key, activation in flags.items():
        if values.get(key) is True:
            settings.put("activation", activation, f"{name}: {key}")
            return
    function = values.get("activation_func")
    if isinstance(function, str):
        settings.put("activation", function.rpartition(".")[2], f"{name}: activation_func")
    elif values.get("swiglu") is False:
        settings.put("activation", "gelu", f"{name}: swiglu is false", defaulted=True)
    limit = as_number(values.get("activation_func_clamp_value"))
    if limit is not None:
        settings.put("gating.limit", limit, f"{name}: activation_func_clamp_value")


def _arguments(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("args")
    return cast("Mapping[str, Any]", inner) if isinstance(inner, Mapping) else config
