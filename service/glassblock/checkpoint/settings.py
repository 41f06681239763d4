"""What a family's settings are for one config: each value with its source, or refused by key."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

from glassblock.checkpoint.config import ConfigFault, ConfigFile, as_epsilon, as_number, find, find_or_null
from glassblock.checkpoint.family import Architecture, OverRootDepth, Ratio, Scale, Setting, Size, SquareRoot, TwoThirds
from glassblock.errors import DamagedCheckpoint

V = TypeVar("V")
E = TypeVar("E", bound=StrEnum)

BEYOND = 2**63
"""No size, count or length reaches it; what does overflows what is computed with it."""


@dataclass(frozen=True, slots=True)
class Sourced(Generic[V]):
    """A value and where it comes from: `config.json: rms_norm_eps`, or `default of family llama`."""

    value: V
    source: str
    defaulted: bool = False


def size_of(config: ConfigFile, row: Architecture, size: Size) -> Sourced[int] | None:
    """A size of the model, from the config or the family; None where neither tells it.

    Raises:
        DamagedCheckpoint: The config holds something else than a positive whole number there.
    """
    setting = row.sizes.get(size)
    if setting is None:
        return None
    wanted = "a positive whole number" if setting.over == 1 else f"a whole number from {setting.over}"
    declared = _declared(config, row, setting.keys, lambda value: _whole_from(setting.over, value), wanted)
    if declared is not None:
        if setting.over == 1:
            return declared
        return Sourced(declared.value // setting.over, f"{declared.source} / {setting.over}")
    if isinstance(setting.default, TwoThirds):
        return _two_thirds(config, row, setting.default)
    if isinstance(setting.default, Ratio):
        return _ratio(config, row, setting.default)
    return None if setting.default is None else Sourced(setting.default, _default(row), defaulted=True)


def _ratio(config: ConfigFile, row: Architecture, ratio: Ratio) -> Sourced[int] | None:
    of = size_of(config, row, ratio.of)
    over = None if ratio.over is None else size_of(config, row, ratio.over)
    if of is None or (ratio.over is not None and (over is None or over.value == 0)):
        return None
    words = f"{ratio.of} x {ratio.times}" if ratio.times != 1 else ratio.of
    words += f" / {ratio.over}" if ratio.over is not None else ""
    value = of.value * ratio.times // (1 if over is None else over.value)
    return Sourced(value, f"{_default(row)}: {words}", defaulted=True)


def _two_thirds(config: ConfigFile, row: Architecture, rule: TwoThirds) -> Sourced[int] | None:
    of = size_of(config, row, rule.of)
    if of is None:
        return None
    factor, declared = number_of(config, row, rule.factor), number_of(config, row, rule.multiple_of)
    multiple = max(1, int(declared.value))
    grown = factor.value * int(2 * rule.times * of.value / 3)
    width = -(-int(grown) // multiple) * multiple if 1 <= grown < BEYOND else 0
    if not 1 <= width < BEYOND:
        raise DamagedCheckpoint(
            f"{factor.source} is {factor.value:g} and {declared.source} is {declared.value:g}, which make no width of "
            f"{rule.of} {of.value}",
            file=config.path.name,
            hint="Correct the config.",
        )
    words = f"{_default(row)}: 2/3 of {rule.of} x {rule.times}, times {factor.value:g}, up to a multiple of {multiple}"
    return Sourced(width, words, defaulted=True)


def number_of(config: ConfigFile | None, row: Architecture, setting: Setting[float]) -> Sourced[float]:
    """A finite number that a setting declares, or its default.

    Raises:
        DamagedCheckpoint: The config holds something else there.
    """
    return _setting(config, row, setting, as_number, "a finite number")


def optional_number_of(
    config: ConfigFile | None, row: Architecture, setting: Setting[float | None]
) -> Sourced[float] | None:
    """A finite number that a setting declares, or its default; None where a null is declared, or is the default.

    A null counts here: `sliding_window: null` is no window, whatever the family has where nothing is said.

    Raises:
        DamagedCheckpoint: The config holds something else there.
    """
    declared = None if config is None else find_or_null(config, row, setting.keys)
    if declared is not None and declared.value is None:
        return None
    if setting.default is None:
        return None if config is None else _declared(config, row, setting.keys, as_number, "a finite number or null")
    return number_of(config, row, Setting(setting.keys, setting.default))


def whole_of(config: ConfigFile | None, row: Architecture, setting: Setting[float]) -> Sourced[int]:
    """A whole number, not negative, that a setting declares, or its default.

    Raises:
        DamagedCheckpoint: The config holds something else there.
    """
    found = _setting(config, row, setting, _natural, "a whole number, not negative")
    return Sourced(int(found.value), found.source, found.defaulted)


def optional_whole_of(
    config: ConfigFile | None, row: Architecture, setting: Setting[float | None]
) -> Sourced[int] | None:
    """As `whole_of`; None where nothing is declared and nothing is the default.

    Raises:
        DamagedCheckpoint: The config holds something else there.
    """
    if setting.default is not None:
        return whole_of(config, row, Setting(setting.keys, setting.default))
    return None if config is None else _declared(config, row, setting.keys, _natural, "a whole number, not negative")


def blocks_of(config: ConfigFile | None, row: Architecture, setting: Setting[float] | None) -> Sourced[int]:
    """In how many blocks the rows of a fused tensor lie; one where the row does not speak of blocks.

    Raises:
        DamagedCheckpoint: The config holds something else there than a positive whole number.
    """
    if setting is None:
        return Sourced(1, _default(row), defaulted=True)
    found = _setting(config, row, setting, _positive_integer, "a positive whole number")
    return Sourced(int(found.value), found.source, found.defaulted)


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


def word_of(config: ConfigFile | None, row: Architecture, setting: Setting[str], words: type[E]) -> E:
    """The one of a closed set of words that a setting declares, or its default.

    Raises:
        DamagedCheckpoint: The config holds something else there.
    """
    found = text_of(config, row, setting)
    if found.value not in tuple(words):
        raise DamagedCheckpoint(
            f"{found.source} is {found.value!r:.80}, which the family {row.name} does not know",
            file=None if config is None else config.path.name,
            known=tuple(words),
            hint="Correct the config.",
        )
    return words(found.value)


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
    """The multiplier of the embedding, or the divisor of logits.

    Args:
        config: The config, where there is one.
        row: The family.
        scale: The row's `embedding_scale`, or its logits' `divisor`.
        hidden: Width of the embedding as stored.

    Raises:
        DamagedCheckpoint: The config holds no finite number there.
    """
    if isinstance(scale, SquareRoot):
        return Sourced(math.sqrt(hidden), f"family {row.name}: square root of {scale.of}")
    return number_of(config, row, scale)


def branch_scale_of(config: ConfigFile | None, row: Architecture, scale: Scale, layers: int) -> Sourced[float]:
    """The multiplier of a branch.

    Args:
        config: The config, where there is one.
        row: The family.
        scale: The row's `branch_scale`.
        layers: Number of layers that the tensors show, for a config that does not say.

    Raises:
        DamagedCheckpoint: The config holds no finite number there.
    """
    if isinstance(scale, Setting):
        return number_of(config, row, scale)
    depth = None if config is None else size_of(config, row, "layers")
    number = number_of(config, row, scale.of)
    value = number.value / math.sqrt((layers if depth is None else depth.value) / scale.over)
    return Sourced(value, f"{number.source}, over the square root of layers / {scale.over:g}", number.defaulted)


def config_faults(config: ConfigFile, row: Architecture) -> tuple[ConfigFault, ...]:
    """Every value that this family reads, in any of its layers, and that is of the wrong type."""
    changes = [variant.changes for variant in row.layer_variants]
    norms = [*row.norms, *(norm for change in changes for norm in change.get("norms", ()))]
    norms.extend([] if row.embedding_norm is None else [row.embedding_norm])
    numbers = [
        row.extra_layers,
        row.residual_scale,
        row.branch_scale.of if isinstance(row.branch_scale, OverRootDepth) else row.branch_scale,
    ]
    numbers.extend([row.embedding_scale] if isinstance(row.embedding_scale, Setting) else [])
    flags = [mixture.router_bias for mixture in row.mixtures]
    checks: list[Callable[[], object]] = [lambda: tied_of(config, row)]
    for network in row.networks:
        flags.extend(flag for flag in (network.bias, network.down_bias) if flag is not None)
        numbers.extend(network.gating_parameters.values())
        numbers.extend(scale for scale in (network.gate_scale, network.down_scale) if scale is not None)
        checks.append(lambda activation=network.activation: text_of(config, row, activation))
        if network.fused is not None:
            checks.append(lambda blocks=network.fused.blocks: blocks_of(config, row, blocks))
    checks.extend(lambda size=size: size_of(config, row, size) for size in row.sizes)
    checks.extend(lambda norm=norm: eps_of(config, row, norm.eps) for norm in norms)
    checks.extend(lambda flag=flag: flag_of(config, row, flag) for flag in flags)
    checks.extend(lambda setting=setting: number_of(config, row, setting) for setting in numbers)
    attentions = (row.attention, *(change.get("attention") for change in changes))
    checks.extend(
        lambda setting=setting: _read(config, row, setting)
        for part in (*attentions, row.logits, *row.routings)
        for setting in _settings_in(part)
    )
    faults: dict[str, ConfigFault] = {}
    for check in checks:
        try:
            check()
        except DamagedCheckpoint as error:
            fault = ConfigFault("value", config.path, error.message, error.hint or "", key=error.field)
            faults.setdefault(error.message, fault)
    return tuple(faults.values())


def _settings_in(part: object) -> Iterator[Setting[Any]]:
    """Every setting in a part of a row, however deep."""
    if isinstance(part, Setting):
        yield cast("Setting[Any]", part)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from _settings_in(getattr(part, field.name))


def _read(config: ConfigFile, row: Architecture, setting: Setting[Any]) -> object:
    """The value of a setting, read as what its default is."""
    if isinstance(setting.default, bool):
        return flag_of(config, row, setting)
    if isinstance(setting.default, str):
        return text_of(config, row, setting)
    return optional_number_of(config, row, setting)


def _setting(
    config: ConfigFile | None,
    row: Architecture,
    setting: Setting[V],
    convert: Callable[[object], V | None],
    wanted: str,
) -> Sourced[V]:
    def meant(value: object) -> V | None:
        if setting.meanings is not None and isinstance(value, str | bool) and value in setting.meanings:
            return setting.meanings[value]
        return convert(value)

    declared = None if config is None else _declared(config, row, setting.keys, meant, wanted)
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


def _whole_from(least: int, value: object) -> int | None:
    return value if type(value) is int and least <= value < BEYOND else None


def _positive_integer(value: object) -> int | None:
    return _whole_from(1, value)


def _natural(value: object) -> int | None:
    return _whole_from(0, value)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None
