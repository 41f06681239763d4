"""What an engine does, in a small JSON of ours, for engines whose configs are not read: docs/comparing.md."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast, get_args

from glassblock.audit.engine_settings import Settings, Value, dtype_name
from glassblock.checkpoint.config import as_epsilon, as_number
from glassblock.checkpoint.family import Architecture
from glassblock.checkpoint.row_settings import Size
from glassblock.errors import InvalidValue
from glassblock.numerics.activations import ACTIVATION_ALIASES, ACTIVATIONS, LEARNED_ACTIVATIONS
from glassblock.numerics.wiring import Placement

KEYS = (
    "norms",
    "activation",
    "gating",
    "fused_order",
    "fused_arrangement",
    "placement",
    "tied",
    "bias",
    "rope_theta",
    "sizes",
    "multipliers",
    "dtype",
)
NUMBERS = (
    "embedding_multiplier",
    "residual_multiplier",
    "branch_multiplier",
    "logits_multiplier",
    "logits_divisor",
    "logits_softcap",
    "attention_softcap",
    "attention_scale",
)
_OURS_ALONE = frozenset(KEYS) - {"activation", "rope_theta", "dtype"}


def is_own(config: Mapping[str, Any]) -> bool:
    """Whether a config is in our own words: by a key that nobody else has."""
    if "model_type" in config or _OURS_ALONE.isdisjoint(config):
        return False
    return isinstance(config.get("norms"), Mapping) or set(config) <= {*KEYS, "$schema", "comment"}


def read_own(config: Mapping[str, Any], name: str, row: Architecture, order_of: Callable[[object], str]) -> Settings:
    """What it tells.

    Raises:
        InvalidValue: A key that is none, or a value of another type; nothing is left out in silence.
    """
    settings = Settings()
    for key in config:
        _known(key, (*KEYS, "$schema", "comment"), "against")

    def put(setting: str, value: Value, path: str) -> None:
        settings.put(setting, value, f"{name}: {path}")

    for role, norm in _object(config.get("norms"), "norms").items():
        _known(role, ("*", *row.roles), "against.norms")
        for key, value in _object(norm, f"norms.{role}").items():
            setting, told = _norm(key, value, role)
            put(f"{setting}.{role}", told, f"norms.{role}.{key}")
    if "fused_order" in config:
        put("fused.order", order_of(config["fused_order"]), "fused_order")
    for key, (setting, read) in _SINGLE.items():
        if key in config:
            put(setting, read(config[key], key), key)
    bias = config.get("bias")
    groups = {**config, "bias": {"ffn": bias} if isinstance(bias, bool) else bias}
    for key, (setting, known, read) in _GROUPS.items():
        for inner, value in _object(groups.get(key), key).items():
            _known(inner, known, f"against.{key}")
            put(f"{setting}.{inner}", read(value, f"{key}.{inner}"), f"{key}.{inner}")
    return settings


def _norm(key: str, value: object, role: str) -> tuple[str, Value]:
    path = f"norms.{role}.{key}"
    _known(key, ("eps", "kind", "offset"), f"against.norms.{role}")
    if key == "kind":
        return "norm", _one_of(value, ("rms", "layer"), path)
    if key == "offset":
        return "offset", _number(value, path)
    epsilon = as_epsilon(value)
    if epsilon is None:
        raise _refused(path, value, "a finite number, not negative")
    return "eps", epsilon


def _number(value: object, path: str) -> float:
    number = as_number(value)
    if number is None:
        raise _refused(path, value, "a finite number")
    return number


def _number_or_none(value: object, path: str) -> float | None:
    return None if value is None else _number(value, path)


def _size(value: object, path: str) -> int:
    if type(value) is not int or value <= 0:
        raise _refused(path, value, "a positive whole number")
    return value


def _dtype(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _refused(path, value, "a text")
    return dtype_name(value)


def _object(value: object, path: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _refused(path, value, "an object")
    return cast("Mapping[str, Any]", value)


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _refused(path, value, "true or false")
    return value


def _one_of(value: object, known: tuple[str, ...], path: str) -> str:
    if not isinstance(value, str) or value not in known:
        raise InvalidValue(
            f"{path} of the config to compare with is {value!r:.60}",
            field=f"against.{path}",
            known=known,
            hint="Use one of the known ones.",
        )
    return value


def _arrangement(value: object, path: str) -> str:
    """`halves`, `interleaved`, or `blocks-4`: halves in each of so many blocks."""
    if isinstance(value, str) and re.fullmatch(r"blocks-[1-9]\d{0,4}", value):
        return "halves" if value == "blocks-1" else value
    return _one_of(value, ("halves", "interleaved", "blocks-4"), path)


def _known(key: object, known: tuple[str, ...], field: str) -> None:
    if key not in known:
        raise InvalidValue(
            f"{field} has a key {key!r:.60} that nothing reads",
            field=field,
            known=known,
            hint="Correct it, or drop it.",
        )


def _refused(path: str, value: object, wanted: str) -> InvalidValue:
    return InvalidValue(
        f"{path} of the config to compare with is {value!r:.60}, where {wanted} is expected",
        field=f"against.{path}",
        hint="Correct it.",
    )


_Read = Callable[[object, str], Value]
_SINGLE: Mapping[str, tuple[str, _Read]] = MappingProxyType(
    {
        "activation": (
            "activation",
            lambda value, path: _one_of(value, (*ACTIVATIONS, *ACTIVATION_ALIASES, *LEARNED_ACTIVATIONS), path),
        ),
        "fused_arrangement": (
            "fused.arrangement",
            _arrangement,
        ),
        "placement": (
            "placement",
            lambda value, path: _one_of(value, tuple(place.value for place in Placement), path),
        ),
        "tied": ("tied", _flag),
        "rope_theta": ("number.rope_theta", _number),
        "dtype": ("dtype", _dtype),
    }
)
_GROUPS: Mapping[str, tuple[str, tuple[str, ...], _Read]] = MappingProxyType(
    {
        "gating": ("gating", ("limit", "alpha"), _number_or_none),
        "bias": ("bias", ("ffn", "attention"), _flag),
        "sizes": ("size", get_args(Size), _size),
        "multipliers": ("number", NUMBERS, _number),
    }
)
