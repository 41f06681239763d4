"""llama.cpp's metadata (GGUF) as JSON: flat keys, or the output of `gguf-dump --json`."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

from glassblock.audit.engine_settings import Settings
from glassblock.checkpoint.config import as_epsilon, as_number
from glassblock.checkpoint.family import Architecture, Size
from glassblock.numerics.norms import norm_kind_named

_ARCHITECTURE = "general.architecture"
_OWN = re.compile(r"[a-z0-9_-]+\.(?:attention\.\w+|block_count|embedding_length|feed_forward_length|rope\.\w+)")

_SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "embedding_length": "hidden",
        "block_count": "layers",
        "feed_forward_length": "intermediate",
        "attention.head_count": "heads",
        "attention.head_count_kv": "kv_heads",
        "attention.key_length": "head_dim",
        "vocab_size": "vocab",
        "expert_count": "experts",
        "expert_used_count": "experts_per_token",
        "expert_feed_forward_length": "expert_width",
    }
)
_NUMBERS: Mapping[str, str] = MappingProxyType(
    {
        "rope.freq_base": "rope_theta",
        "final_logit_softcapping": "logits_softcap",
        "attn_logit_softcapping": "attention_softcap",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_divisor",
        "attention.scale": "attention_scale",
    }
)
# What llama.cpp's graphs of these architectures apply (src/llama-model.cpp). Its GELU is the tanh form.
_ACTIVATIONS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                "llama", "qwen2", "qwen3", "qwen2moe", "qwen3moe", "phi3", "olmo", "olmo2", "smollm3", "deepseek2",
                "granite", "stablelm", "internlm2", "exaone", "command-r", "cohere2", "baichuan", "minicpm", "ernie4_5",
            ),
            "silu",
        ),
        **dict.fromkeys(
            ("gemma", "gemma2", "gemma3", "gemma3n", "gpt2", "phi2", "starcoder2", "bloom", "falcon", "mpt"),
            "gelu_pytorch_tanh",
        ),
        **dict.fromkeys(("nemotron",), "relu2"),
    }
)  # fmt: skip


def is_gguf(config: Mapping[str, Any]) -> bool:
    """Whether the keys are those of GGUF."""
    flat = _flat(config)
    return _ARCHITECTURE in flat or any(_OWN.fullmatch(key) for key in flat)


def read_gguf(config: Mapping[str, Any], name: str, row: Architecture) -> tuple[Settings, str | None, tuple[str, ...]]:
    """What the metadata tell, the architecture they name, and what is to be known of GGUF.

    Gains lie in GGUF as they multiply: what a family stores as w and uses as 1 + w was folded by the conversion. So
    the offset is no setting that could disagree, and is not told.
    """
    flat, settings = _flat(config), Settings()
    stated = flat.get(_ARCHITECTURE)
    prefix = (
        stated if isinstance(stated, str) else next((key.partition(".")[0] for key in flat if _OWN.fullmatch(key)), "")
    )

    def source(key: str) -> str:
        return f"{name}: {prefix}.{key}"

    _norms(flat, settings, prefix, source)
    _sizes(flat, settings, prefix, source)
    for key, setting in _NUMBERS.items():
        number = as_number(flat.get(f"{prefix}.{key}"))
        if number is not None:
            settings.put(f"number.{setting}", number, source(key))
    activation = _ACTIVATIONS.get(prefix)
    if activation is not None and stated is not None:
        settings.put("activation", activation, f"llama.cpp's graph of {prefix}", defaulted=True)
    tensors = _tensor_names(config.get("tensors"))
    if tensors is not None:
        settings.put("tied", "output.weight" not in tensors, f"{name}: tensors")
    adds = any(norm_kind_named(norm.kind).offset for norm in row.norms)
    remark = (
        f"gains of {row.name} are stored as w and used as 1 + w; GGUF holds 1 + w already and llama.cpp adds nothing: "
        "a change of convention by the conversion, no damage",
    )
    return settings, prefix or None, remark if adds else ()


def _norms(flat: Mapping[str, Any], settings: Settings, prefix: str, source: Callable[[str], str]) -> None:
    for key, kind in (("attention.layer_norm_rms_epsilon", "rms"), ("attention.layer_norm_epsilon", "layer")):
        value = flat.get(f"{prefix}.{key}")
        if value is None:
            continue
        epsilon = as_epsilon(value)
        if epsilon is None:
            settings.unusable["eps.*"] = f"{source(key)} is {value!r:.60}, which is no epsilon"
        else:
            settings.put("eps.*", epsilon, source(key))
            settings.put("norm.*", kind, source(key))


def _sizes(flat: Mapping[str, Any], settings: Settings, prefix: str, source: Callable[[str], str]) -> None:
    for key, size in _SIZES.items():
        value = flat.get(f"{prefix}.{key}")
        if type(value) is int and value > 0:
            settings.put(f"size.{size}", value, source(key))
    tokens = flat.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and "size.vocab" not in settings.told:
        count = len(cast("list[object]", tokens))
        if count > 1:  # gguf-dump shortens long lists
            settings.put("size.vocab", count, "tokenizer.ggml.tokens")


def _tensor_names(tensors: object) -> set[str] | None:
    """Names of the tensors that gguf-dump lists, by name or one after the other; None where it lists none."""
    if isinstance(tensors, Mapping):
        return set(map(str, cast("Mapping[object, object]", tensors)))
    if not isinstance(tensors, list):
        return None
    return {
        str(cast("Mapping[str, object]", tensor).get("name")) if isinstance(tensor, Mapping) else str(tensor)
        for tensor in cast("list[object]", tensors)
    }


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys and values; of gguf-dump, whose values are objects with a `value`, those."""
    metadata = config.get("metadata")
    inner = cast("Mapping[str, Any]", metadata) if isinstance(metadata, Mapping) else config
    return {
        str(key): cast("Mapping[str, Any]", value)["value"]
        if isinstance(value, Mapping) and "value" in value
        else value
        for key, value in inner.items()
    }
