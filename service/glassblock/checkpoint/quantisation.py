"""What a config says about how the weights are stored."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from glassblock.checkpoint.config import ConfigFile

_KEYS = ("quantization_config", "compression_config", "quantization")


@dataclass(frozen=True, slots=True)
class DeclaredQuantisation:
    """The part of a config about stored weights.

    Attributes:
        key: Its dotted key.
        method: Its `quant_method`; `mlx` and `bitsandbytes` where their own keys stand in for that. None where it
            names none.
        values: What it holds.
    """

    key: str
    method: str | None
    values: Mapping[str, object]

    def whole(self, *keys: str) -> int | None:
        """The whole number under the first of these keys that is present and no null; None for anything else."""
        value = self._first(keys)
        return value if type(value) is int else None

    def text(self, *keys: str) -> str | None:
        """The text under the first of these keys that is present, in lower case; None for anything else."""
        value = self._first(keys)
        return value.lower() if isinstance(value, str) else None

    def pair(self, key: str) -> tuple[int, int] | None:
        """Two positive whole numbers."""
        return as_pair(self.values.get(key))

    def weight_schemes(self) -> tuple[Mapping[str, object], ...]:
        """What each group of modules says of its weights (`config_groups.*.weights` of compressed-tensors)."""
        groups = as_object(self.values.get("config_groups"))
        schemes = (as_object(as_object(group).get("weights")) for group in groups.values())
        return tuple(scheme for scheme in schemes if scheme)

    def _first(self, keys: tuple[str, ...]) -> object:
        return next((value for key in keys if (value := self.values.get(key)) is not None), None)


def declared_quantisation(config: ConfigFile | None) -> DeclaredQuantisation | None:
    """What the config declares, at its top or inside the config of a part; None where it declares nothing."""
    if config is None:
        return None
    for prefix, level in _levels(config.values):
        for key in _KEYS:
            values = as_object(level.get(key))
            if values:
                return DeclaredQuantisation(prefix + key, _method(key, values), values)
    return None


def as_object(value: object) -> Mapping[str, object]:
    """A JSON object; empty for anything else."""
    return cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}


def as_pair(value: object) -> tuple[int, int] | None:
    """Two positive whole numbers out of a JSON list, or None."""
    items = cast("list[object]", value) if isinstance(value, list) else []
    numbers = [item for item in items if type(item) is int and item > 0]
    return (numbers[0], numbers[1]) if len(numbers) == len(items) == 2 else None


def _levels(values: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    yield "", values
    for key, inner in values.items():
        if isinstance(inner, Mapping) and key not in _KEYS:
            yield f"{key}.", as_object(cast("object", inner))


def _method(key: str, values: Mapping[str, object]) -> str | None:
    method = values.get("quant_method")
    if isinstance(method, str):
        return method.lower()
    if values.get("load_in_4bit") is True or values.get("load_in_8bit") is True:
        return "bitsandbytes"
    # MLX writes its settings under both names, without a method in either.
    return "mlx" if key != "compression_config" and {"group_size", "bits"} <= values.keys() else None
