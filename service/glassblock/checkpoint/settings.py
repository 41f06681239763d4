"""What a family's settings are for one config: each value with its source, or refused by key."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from glassblock.checkpoint.config import ConfigFault, ConfigFile, as_epsilon, as_number, find
from glassblock.checkpoint.family import Architecture, Ratio, Setting, Size, SquareRoot
from glassblock.errors import DamagedCheckpoint

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Sourced(Generic[V]):
    """A value and where it comes from: `config.json: rms_norm_eps`, or `default of family llama`."""

    value: V
    source: str
    defaulted: bool = False


def size_of(config: ConfigFile, row: Architecture, size: Size) -> Sourced[int]:
    """A size of the model, from the config or the family.

    Raises:
        DamagedCheckpoint: The config holds something else than a positive whole number there.
    """
    setting = row.sizes[size]
    declared = _declared(config, row, setting.keys, _positive_integer, "a positive whole number")
    if declared is not None:
        return declared
    if not isinstance(setting.default, Ratio):
        return Sourced(setting.default, _default(row), defaulted=True)
    ratio = setting.default
    value = size_of(config, row, ratio.of).value * ratio.times
    words = f"{ratio.of} x {ratio.times}" if ratio.times != 1 else ratio.of
    if ratio.over is not None:
        value //= size_of(config, row, ratio.over).value
        words += f" / {ratio.over}"
    return Sourced(value, f"{_default(row)}: {words}", defaulted=True)


def number_of(config: ConfigFile | None, row: Architecture, setting: Setting[float]) -> Sourced[float]:
    """A finite number that a setting declares, or its default.

    Raises:
        DamagedCheckpoint: The config holds something else there.
    """
    return _setting(config, row, setting, as_number, "a finite number")


def eps_of(config: ConfigFile | None, row: Architecture, setting: Setting[float]) -> Sourced[float]:
    """An epsilon.

    Raises:
        DamagedCheckpoint: The config holds something else there than a finite number, or a negative one.
    """
    return _setting(config, row, setting, as_epsilon, "a finite number, not negative")


def text_of(config: ConfigFile | None, row: Architecture, setting: Setting[str]) -> Sourced[str]:
    """A name that a setting declares, or its default.

    Raises:
        DamagedCheckpoint: The config holds something else than a text there.
    """
    return _setting(config, row, setting, _text, "a text")


def flag_of(config: ConfigFile | None, row: Architecture, setting: Setting[bool]) -> Sourced[bool]:
    """A flag that a setting declares, or its default.

    Raises:
        DamagedCheckpoint: The config holds something else than true or false there.
    """
    return _setting(config, row, setting, _flag, "true or false")


def tied_of(config: ConfigFile | None, row: Architecture) -> Sourced[bool]:
    """Whether the output head is the embedding.

    The head belongs to the outermost model, so a flag at the top of a nested config comes before one inside it.

    Raises:
        DamagedCheckpoint: The config holds something else than true or false there.
    """
    if config is not None:
        outer = _declared(config, replace(row, nested=()), row.tied.keys, _flag, "true or false")
        if outer is not None:
            return outer
    return flag_of(config, row, row.tied)


def scale_of(
    config: ConfigFile | None, row: Architecture, scale: Setting[float] | SquareRoot, hidden: int
) -> Sourced[float]:
    """The multiplier of the embedding.

    Args:
        config: The config, where there is one.
        row: The family.
        scale: The row's `embedding_scale`.
        hidden: Width of the embedding as stored.

    Raises:
        DamagedCheckpoint: The config holds no finite number there.
    """
    if isinstance(scale, SquareRoot):
        return Sourced(math.sqrt(hidden), f"family {row.name}: square root of {scale.of}")
    return number_of(config, row, scale)


def config_faults(config: ConfigFile, row: Architecture) -> tuple[ConfigFault, ...]:
    """Every value that this family reads and that is of the wrong type."""
    checks: list[Callable[[], object]] = [
        lambda: tied_of(config, row),
        lambda: flag_of(config, row, row.feed_forward.bias),
        lambda: text_of(config, row, row.feed_forward.activation),
        lambda: number_of(config, row, row.residual_scale),
        lambda: number_of(config, row, row.branch_scale),
    ]
    checks.extend(lambda size=size: size_of(config, row, size) for size in row.sizes)
    checks.extend(lambda norm=norm: eps_of(config, row, norm.eps) for norm in row.norms)
    numbers = row.feed_forward.gating_parameters.values()
    checks.extend(lambda setting=setting: number_of(config, row, setting) for setting in numbers)
    if isinstance(row.embedding_scale, Setting):
        scale = row.embedding_scale
        checks.append(lambda: number_of(config, row, scale))
    faults: dict[str, ConfigFault] = {}
    for check in checks:
        try:
            check()
        except DamagedCheckpoint as error:
            fault = ConfigFault("value", config.path, error.message, error.hint or "", key=error.field)
            faults.setdefault(error.message, fault)
    return tuple(faults.values())


def _setting(
    config: ConfigFile | None,
    row: Architecture,
    setting: Setting[V],
    convert: Callable[[object], V | None],
    wanted: str,
) -> Sourced[V]:
    declared = None if config is None else _declared(config, row, setting.keys, convert, wanted)
    return Sourced(setting.default, _default(row), defaulted=True) if declared is None else declared


def _declared(
    config: ConfigFile, row: Architecture, keys: tuple[str, ...], convert: Callable[[object], V | None], wanted: str
) -> Sourced[V] | None:
    found = find(config, row, keys)
    if found is None:
        return None
    value = convert(found.value)
    if value is None:
        raise DamagedCheckpoint(
            f"{config.path.name}: {found.key} is {found.value!r:.80}, where the family {row.name} has {wanted}",
            file=config.path.name,
            field=found.key,
            hint="Correct the config.",
        )
    return Sourced(value, f"{config.path.name}: {found.key}")


def _default(row: Architecture) -> str:
    return f"default of family {row.name}"


def _positive_integer(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
