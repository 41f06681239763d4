"""Which family a checkpoint is of: what its config says, held against the names of its tensors."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from glassblock.checkpoint.architectures import ARCHITECTURES, BY_ARCHITECTURE, BY_MODEL_TYPE
from glassblock.checkpoint.config import ConfigFault, ConfigFile
from glassblock.checkpoint.family import Architecture, Trunk
from glassblock.checkpoint.strict_json import shown
from glassblock.errors import UnknownFamily

_KNOWN = tuple(sorted(BY_MODEL_TYPE))


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


def recognise(config: ConfigFile | None, directory: Path) -> tuple[Architecture | None, ConfigFault | None]:
    """The family that a config names; or why none is known.

    `model_type` decides, `architectures` where it is absent. Where both name a family and not the same one, neither
    is believed.
    """
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
            "If the model is built as a known family is, name that with --family.",
        )
    if by_type and by_architecture and by_type is not by_architecture:
        return unknown(
            f"config.json contradicts itself: model_type {_quoted(model_type)} is the family {by_type.name}, "
            f"architectures {_quoted(architecture)} is the family {by_architecture.name}",
            "Correct the config, or name the family with --family.",
        )
    return by_type or by_architecture, None


def find_trunk(row: Architecture, names: Iterable[str]) -> tuple[Trunk | None, tuple[int, ...]]:
    """How a file prefixes the family's names, and the layers that its names show, in order.

    The first of the row's trunks under which any layer has a name that the row knows.
    """
    known = frozenset(row.layer_names())
    all_names = tuple(names)
    for trunk in row.trunks:
        before, after = (re.escape(part) for part in f"{trunk.prefix}{row.layer}".split("{i}"))
        pattern = re.compile(f"{before}(0|[1-9][0-9]{{0,8}}){after}(.*)", re.DOTALL)
        matches = (pattern.fullmatch(name) for name in all_names)
        layers = {int(match[1]) for match in matches if match and match[2] in known}
        if layers:
            return trunk, tuple(sorted(layers))
    return None, ()


def no_trunk(row: Architecture, names: Mapping[str, object], directory: Path) -> ConfigFault:
    """The fault of a checkpoint none of whose names the family knows."""
    example = row.trunks[0].prefix + row.layer.format(i=0) + row.feed_forward.down.weight
    found = next(iter(sorted(names)), None)
    has = "it has no tensors" if found is None else f"its first is {shown(found)}"
    return ConfigFault(
        "unknown-family",
        directory / "config.json",
        f"the tensors do not have the names of the family {row.name}, such as {example}: {has}",
        "Correct model_type, or name the family with --family.",
        tensor=found,
        known=tuple(ARCHITECTURES),
    )


def _first_text(value: object) -> str | None:
    texts = cast("list[object]", value) if isinstance(value, list) else []
    return next((text for text in texts if isinstance(text, str)), None)


def _quoted(value: object) -> str:
    return shown(value) if isinstance(value, str) else repr(value)[:80]
