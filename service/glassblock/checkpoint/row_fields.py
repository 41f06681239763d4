"""Which field of a row names a tensor: told where a row of somebody's own asks for one that is not there."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import cast

from glassblock.checkpoint.architectures import ARCHITECTURES
from glassblock.checkpoint.family import Architecture, NormRow

_NUMBER = "(?:0|[1-9][0-9]{0,8})"


def is_given(row: Architecture | None) -> bool:
    """Whether a row is somebody's own, and not one of the table."""
    return row is not None and ARCHITECTURES.get(row.name) is not row


def field_naming(row: Architecture, name: str) -> str | None:
    """The path of the field that gives a tensor its name, such as `feed_forward.gate.weight`; None where none does.

    Args:
        row: The row as it was given.
        name: The tensor's name as it is in files, with the trunk's prefix and the layer's number.
    """
    for path, template in _names(row, ""):
        for before in ("", *(f"{trunk.prefix}{row.layer}" for trunk in row.trunks), *_prefixes(row)):
            pattern = re.sub(r"\\\{[ijh]\\\}", _NUMBER, re.escape(before + template))
            if template and re.fullmatch(pattern, name):
                return path
    return None


def _prefixes(row: Architecture) -> tuple[str, ...]:
    return tuple(trunk.prefix for trunk in row.trunks)


def _names(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Every text in a row, with the path of its field."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, NormRow):
        yield f"{path}.template", value.gain
        yield f"{path}.template", value.bias
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from _names(getattr(value, item.name), f"{path}.{item.name}" if path else item.name)
    elif isinstance(value, Mapping):
        for key, part in cast("Mapping[object, object]", value).items():
            yield from _names(part, f"{path}.{key}")
    elif isinstance(value, tuple):
        for place, part in enumerate(cast("tuple[object, ...]", value)):
            yield from _names(part, f"{path}[{place}]")
