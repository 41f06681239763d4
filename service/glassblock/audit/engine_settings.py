"""What a config makes an engine do, as values under one set of names, whoever wrote the config.

A setting is called `group.name`: `eps.ffn_in`, `norm.final`, `size.hidden`, `number.rope_theta`. `eps.*` is of every
norm. So the checkpoint's own config and another engine's are told in the same words, and compared name by name.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import cast

from glassblock.checkpoint.attention_row import AttentionRow, LatentAttentionRow, RotaryRow
from glassblock.checkpoint.config import ConfigFile, as_number, find
from glassblock.checkpoint.family import Architecture, FusedProjection, Setting, Size, SquareRoot
from glassblock.checkpoint.settings import (
    Sourced,
    blocks_of,
    eps_of,
    flag_of,
    number_of,
    optional_number_of,
    size_of,
    text_of,
    tied_of,
)
from glassblock.errors import DamagedCheckpoint
from glassblock.numerics.norms import norm_kind_named

Value = float | int | bool | str | None


@dataclass(frozen=True)
class Told:
    """A value, who tells it, whether it is a default and no declaration, and whether no config could say it."""

    value: Value
    source: str
    defaulted: bool = False
    fixed: bool = False


@dataclass
class Settings:
    """What one side tells.

    Attributes:
        told: The values by name.
        unusable: Values that are there and cannot be used: why, by name.
    """

    told: dict[str, Told] = field(default_factory=dict[str, Told])
    unusable: dict[str, str] = field(default_factory=dict[str, str])

    def get(self, name: str) -> Told | None:
        """The value of that name, or of its whole group (`eps.*`)."""
        group = name.partition(".")[0]
        return self.told.get(name) or self.told.get(f"{group}.*")

    def why_not(self, name: str) -> str | None:
        """Why a value that is there cannot be used."""
        return self.unusable.get(name) or self.unusable.get(f"{name.partition('.')[0]}.*")

    def put(self, name: str, value: Value, source: str, *, defaulted: bool = False) -> None:
        """Note a value."""
        self.told[name] = Told(value, source, defaulted)


DTYPE_KEYS = ("dtype", "torch_dtype")
_LIMIT_KEYS = ("swiglu_limit", "swiglu_limits")


def settings_of(config: ConfigFile | None, row: Architecture, *, defaults: bool = True, fixed: bool = True) -> Settings:
    """What a config of the family `row` makes of a model.

    Args:
        config: The config; None for none, so that everything is a default.
        row: The family, under this config.
        defaults: Whether what the config does not say is the family's default. Without, it is not told: of a config of
            a few keys nobody knows whether the others were left out of it, or of the model.
        fixed: Whether what follows from the family alone is told even so: it is where the config names the family.
    """
    settings = Settings()
    for name, read in _readers(config, row):
        try:
            value = read()
        except DamagedCheckpoint as error:
            settings.unusable[name] = error.message
            continue
        if value is not None and (defaults or not value.defaulted or (fixed and value.fixed)):
            settings.told[name] = value
    return settings


def _readers(config: ConfigFile | None, row: Architecture) -> Iterator[tuple[str, Callable[[], Told | None]]]:
    for norm in row.norms:
        kind = norm_kind_named(norm.kind)
        yield f"eps.{norm.role}", lambda norm=norm: _told(eps_of(config, row, norm.eps))
        yield f"norm.{norm.role}", lambda kind=kind: _fixed(row, "layer" if kind.centred else "rms")
        if norm.has_gain:
            yield f"offset.{norm.role}", lambda kind=kind: _fixed(row, kind.offset)
    network = row.network
    yield "activation", lambda: _told(text_of(config, row, network.activation))
    yield "gating.limit", lambda: _limit(config, row)
    if "alpha" in network.gating_parameters:
        yield "gating.alpha", lambda: _told(number_of(config, row, network.gating_parameters["alpha"]))
    fused = network.fused
    if fused is not None:
        yield "fused.order", lambda: _fixed(row, "|".join(fused.order))
        yield "fused.arrangement", lambda: _arrangement(config, row, fused)
    yield "bias.ffn", lambda: _told(flag_of(config, row, network.bias))
    attention = row.attention
    if attention is not None:
        yield "bias.attention", lambda: _told(flag_of(config, row, attention.bias))
    yield "tied", lambda: _told(tied_of(config, row))
    yield "placement", lambda: _fixed(row, row.placement.value)
    if config is not None:
        for size in row.sizes:
            yield f"size.{size}", partial(_size, config, row, size)
        yield "dtype", lambda: _dtype(config, row)
    yield from _numbers(config, row)


def _numbers(config: ConfigFile | None, row: Architecture) -> Iterator[tuple[str, Callable[[], Told | None]]]:
    plain: dict[str, object] = {
        "embedding_multiplier": row.embedding_scale,
        "residual_multiplier": row.residual_scale,
        "branch_multiplier": row.branch_scale,
    }
    if row.logits is not None:
        plain |= {"logits_multiplier": row.logits.scale, "logits_divisor": row.logits.divisor}
    for name, setting in plain.items():
        if isinstance(setting, Setting):
            numbered = cast("Setting[float]", setting)
            yield f"number.{name}", lambda setting=numbered: _told(number_of(config, row, setting))
    if isinstance(row.embedding_scale, SquareRoot) or row.embedding_scale is None:
        words = "none" if row.embedding_scale is None else f"square root of {row.embedding_scale.of}"
        yield "number.embedding_rule", lambda: _fixed(row, words)
    if row.logits is not None:
        softcap = row.logits.softcap
        yield "number.logits_softcap", lambda: _optional(config, row, softcap)
    attention = row.attention
    if isinstance(attention, AttentionRow):
        yield "number.attention_softcap", lambda: _optional(config, row, attention.softcap)
        scale = attention.scale.of
        if scale is not None:
            yield "number.attention_scale", lambda: _told(number_of(config, row, scale))
    rotary = _rotary(attention)
    if rotary is not None:
        yield "number.rope_theta", lambda: _told(number_of(config, row, rotary.theta))
        yield "number.rope_form", lambda: _rope_form(config, row, rotary)


def _rotary(attention: AttentionRow | LatentAttentionRow | None) -> RotaryRow | None:
    return None if attention is None else attention.rotary


def _told(value: Sourced[float] | Sourced[str] | Sourced[bool]) -> Told:
    return Told(value.value, value.source, value.defaulted)


def _fixed(row: Architecture, value: Value) -> Told:
    """What no config can say: it follows from the family alone, and counts as its default."""
    return Told(value, f"family {row.name}", defaulted=True, fixed=True)


def _optional(config: ConfigFile | None, row: Architecture, setting: Setting[float | None]) -> Told:
    found = optional_number_of(config, row, setting)
    return Told(None, "not declared", defaulted=True) if found is None else _told(found)


def _limit(config: ConfigFile | None, row: Architecture) -> Told:
    """The clamp where gate and up meet. None for none: a key that is absent is no clamp."""
    setting = row.network.gating_parameters.get("limit")
    if setting is not None:
        return _told(number_of(config, row, setting))
    found = None if config is None else find(config, row, _LIMIT_KEYS)
    number = None if found is None else as_number(found.value)
    if config is None or found is None or number is None:
        return Told(None, "no swiglu_limit", defaulted=True)
    return Told(number, f"{config.path.name}: {found.key}")


def _arrangement(config: ConfigFile | None, row: Architecture, fused: FusedProjection) -> Told:
    """The row's word; of blocks `blocks-4`, or `halves` where there is one."""
    if fused.blocks is None:
        return _fixed(row, fused.arrangement)
    found = blocks_of(config, row, fused.blocks)
    return Told("halves" if found.value == 1 else f"blocks-{found.value}", found.source, found.defaulted)


def _size(config: ConfigFile, row: Architecture, size: Size) -> Told | None:
    found = size_of(config, row, size)
    # A number that the family has for models of its own, not for this one, tells nothing.
    if found is None or (found.defaulted and isinstance(row.sizes[size].default, int)):
        return None
    return Told(found.value, found.source, found.defaulted)


def _dtype(config: ConfigFile, row: Architecture) -> Told | None:
    # A nested config may leave it to the outermost one.
    found = find(config, row, DTYPE_KEYS) or find(config, replace(row, nested=()), DTYPE_KEYS)
    if found is None or not isinstance(found.value, str):
        return None
    return Told(dtype_name(found.value), f"{config.path.name}: {found.key}")


def dtype_name(text: str) -> str:
    """`bfloat16` for `torch.bfloat16`, `bf16` and the like; the text itself where it is none of those."""
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
    name = text.removeprefix("torch.")
    return short.get(name, name)


def _rope_form(config: ConfigFile | None, row: Architecture, rotary: RotaryRow) -> Told:
    found = None if config is None else find(config, row, rotary.forms)
    lies = found is not None and isinstance(found.value, Mapping)
    named = cast("Mapping[str, object]", found.value if found is not None and lies else MappingProxyType({}))
    name = next((named[key] for key in ("rope_type", "type") if isinstance(named.get(key), str)), "default")
    factor = as_number(named.get("factor"))
    words = str(name) if factor is None or name == "default" else f"{name} x {factor:g}"
    if config is None or found is None:
        return Told(words, "not declared", defaulted=True)
    return Told(words, f"{config.path.name}: {found.key}")
