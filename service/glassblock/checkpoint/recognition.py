"""Which family a checkpoint is of: what its config says, held against the names of its tensors."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from glassblock.checkpoint.architectures import ARCHITECTURES, BY_ARCHITECTURE, BY_MODEL_TYPE
from glassblock.checkpoint.config import ConfigFault, ConfigFile, find
from glassblock.checkpoint.family import Architecture, Size
from glassblock.checkpoint.name_fits import families_in_words, fitting_by_name
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import UnknownFamily

_KNOWN = tuple(sorted(BY_MODEL_TYPE))
_PARTS = ("text_config", "llm_config", "language_config")


def family_named(name: str) -> Architecture:
    """The family of that name.

    Raises:
        UnknownFamily: It is not in the table.
    """
    row = ARCHITECTURES.get(name)
    if row is None:
        raise UnknownFamily(
            f"there is no family {shown(name)} in the table",
            field="family",
            known=tuple(ARCHITECTURES),
            hint="Use one of the known names.",
        )
    return row


def by_params(params: ConfigFile | None) -> Architecture | None:
    """The family whose own config a params.json is, by the keys of width and depth that it must have."""
    if params is None:
        return None
    rows = (row for row in ARCHITECTURES.values() if row.config_file == "params.json")
    return next((row for row in rows if all(_declares(params, row, size) for size in ("hidden", "layers"))), None)


def _declares(config: ConfigFile, row: Architecture, size: Size) -> bool:
    return find(config, row, row.sizes[size].keys) is not None


def recognise(config: ConfigFile | None, directory: Path) -> tuple[Architecture | None, ConfigFault | None]:
    """The family that a config names; or why none is known.

    `model_type` decides, `architectures` where it is absent. Where both name a family and not the same one, neither
    is believed. A params.json names none, and is told by its keys.
    """
    if config is not None and config.path.name == "params.json":
        return by_params(config), None
    file = directory / "config.json"

    def unknown(message: str, hint: str) -> tuple[None, ConfigFault]:
        return None, ConfigFault("unknown-family", file, message, hint, known=_KNOWN)

    if config is None:
        hint = "Add the config, or name the family with --family."
        return unknown("the family is unknown: there is no config.json", hint)
    model_type, architecture = config.values.get("model_type"), _first_text(config.values.get("architectures"))
    by_type = BY_MODEL_TYPE.get(model_type) if isinstance(model_type, str) else None
    by_architecture = BY_ARCHITECTURE.get(architecture or "")
    if model_type is None and by_architecture is None:
        return unknown(
            "config.json has no model_type, and its architectures name no known family",
            "Add model_type, or name the family with --family.",
        )
    if model_type is not None and by_type is None:
        return unknown(
            f"config.json: model_type is {_quoted(model_type)}, which is no known family",
            f"{_of_the_part_within(config)}If it is built as a known family is, name that with --family; else describe "
            "it with --family-file.",
        )
    if by_type and by_architecture and architecture not in by_type.architectures:
        return unknown(
            f"config.json contradicts itself: model_type {_quoted(model_type)} is the family {by_type.name}, "
            f"architectures {_quoted(architecture)} is the family {by_architecture.name}",
            "Correct the config, or name the family with --family.",
        )
    return by_type or by_architecture, None


@dataclass(frozen=True)
class PartWithin:
    """The language model inside a larger one that no row describes.

    Attributes:
        key: Where the config holds the part's own.
        model_type: What that says.
        row: The family of that name.
    """

    key: str
    model_type: str
    row: Architecture


def part_within(config: ConfigFile | None) -> PartWithin | None:
    """The language model that a config of images and text declares, where its own model_type is no known family."""
    if config is None or _names_a_family(config):
        return None
    for key in _PARTS:
        part = config.values.get(key)
        inner = cast("Mapping[str, object]", part).get("model_type") if isinstance(part, dict) else None
        row = BY_MODEL_TYPE.get(inner) if isinstance(inner, str) else None
        if row is not None and isinstance(inner, str) and _read_under(config, row) == key:
            return PartWithin(key, inner, row)
    return None


def _names_a_family(config: ConfigFile) -> bool:
    """Whether the config itself, and not a part of it, names a known family."""
    model_type, architecture = config.values.get("model_type"), _first_text(config.values.get("architectures"))
    if model_type is None:
        return architecture in BY_ARCHITECTURE
    return isinstance(model_type, str) and model_type in BY_MODEL_TYPE


def _read_under(config: ConfigFile, row: Architecture) -> str | None:
    """The key of the nested config that the family's settings are read in."""
    return next((key for key in row.nested if isinstance(config.values.get(key), dict)), None)


def _of_the_part_within(config: ConfigFile) -> str:
    """What a config of images and text says of its language model, whose names the tensors do not have."""
    part = part_within(config)
    if part is None:
        return ""
    return f"Its {part.key} says model_type {_quoted(part.model_type)}: --family {part.row.name} reads that part. "


def with_fitting(fault: ConfigFault, names: Collection[str]) -> ConfigFault:
    """The fault of an unknown family, with the families whose names fit the tensors."""
    fitting = fitting_by_name(names)
    if not fitting:
        return fault
    return replace(fault, hint=f"The names fit: {families_in_words(fitting)}. {fault.hint}")


def no_trunk(row: Architecture, names: Mapping[str, object], directory: Path, *, asked: bool = False) -> ConfigFault:
    """The fault of a checkpoint none of whose names the family knows.

    Args:
        row: The family.
        names: The tensors by name.
        directory: Where the config lies.
        asked: Whether the family was asked for rather than read from the config.
    """
    example = row.trunks[0].prefix + row.layer.format(i=0) + row.network.down.weight.replace("{j}", "0")
    found = next(iter(sorted(names)), None)
    has = "it has no tensors" if found is None else f"its first is {shown(found)}"
    said = f"the family {row.name} was asked for" if asked else f"{row.config_file} says {row.name}"
    fitting = fitting_by_name(names)
    others = f"they are those of {families_in_words(fitting)}" if fitting else "they are those of no known family"
    hint = "Correct model_type, or name the family with --family."
    if ARCHITECTURES.get(row.name) is None:
        hint = "Look at trunks, layer and the names in the row that was given (family_row, --family-file)."
    return ConfigFault(
        "unknown-family",
        directory / row.config_file,
        f"the tensors do not have the names of the family {row.name}, such as {example}: {has}; {said}, and {others}",
        hint,
        tensor=found,
        known=tuple(ARCHITECTURES),
    )


def _first_text(value: object) -> str | None:
    texts = cast("list[object]", value) if isinstance(value, list) else []
    return next((text for text in texts if isinstance(text, str)), None)


def _quoted(value: object) -> str:
    return shown(value) if isinstance(value, str) else repr(value)[:80]
